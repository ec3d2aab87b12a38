"""launch when all goes well: what travels there and back, what is printed, what a rank sees.

The functions stand inside the tests, so that they travel by value as those of a notebook cell do.
"""

import collections
import contextlib
import ctypes
import functools
import io
import os
import socket
import sys
import threading
import time
import types

import numpy
import psutil
import pytest
import torch
from processes import alive, run_script, wait_until

from s2s_lib import Cluster, Group, Link, RankError, launch
from s2s_lib.ranks import job

LOCK = threading.Lock()

pytestmark = pytest.mark.usefixtures("nothing_is_left")


# What travels.


def test_one_value_comes_back_for_each_rank_in_rank_order():
    def work(world, base, step):
        time.sleep(0.05 * (world.size - world.rank))
        return base + step * world.rank, world

    values = launch(work, 10, 5, ranks=3)
    assert values == [(10 + 5 * rank, Group((0, 1, 2), rank)) for rank in range(3)]


def test_values_of_every_kind_come_back_as_they_were():
    class Local:
        def __init__(self, value):
            self.value = value

        def __eq__(self, other):
            return type(other) is type(self) and other.value == self.value

    Pair = collections.namedtuple("Pair", "a b")
    plain = [
        None,
        True,
        3,
        2.5,
        1j,
        "naïve ∑ 🙂",
        b"\0\xff",
        [1, (2, {3, 4})],
        {"a": {"b": [None]}},
        float("inf"),
        10**40,
        range(5),
        ...,
        types.SimpleNamespace(a=1),
        Local({"x": 1}),
        Pair(1, [2]),
        Local,
        len,
        torch.float32,
        numpy.float32(2),
    ]
    base = torch.arange(12.0).view(3, 4)
    tensors = [
        base,
        base.t(),
        base[:, 1],
        base.bfloat16(),
        base.bool(),
        torch.empty(0, 3),
        torch.tensor(2.5),
        torch.complex(base, base + 1),
        torch.nn.Parameter(base.clone()),
    ]

    def echo(world, plain, tensors):
        graph = (tensors[-1] * 2).sum()
        return plain, tensors, graph, numpy.arange(6).reshape(2, 3), ValueError("kept")

    for values, same, graph, array, error in launch(echo, plain, tensors, ranks=2):
        assert values == plain
        for tensor, before in zip(same, tensors, strict=True):
            assert torch.equal(tensor, before) and tensor.dtype == before.dtype
        assert isinstance(same[-1], torch.nn.Parameter) and graph.item() == 132
        assert array.tolist() == [[0, 1, 2], [3, 4, 5]] and error.args == ("kept",)
    assert base.sum() == 66


def test_a_rank_changes_its_own_copy_of_an_argument():
    def spoil(world, numbers, tensor):
        numbers.append(world.rank)
        tensor += 1
        return numbers, tensor.tolist()

    numbers, tensor = [7], torch.zeros(2)
    assert launch(spoil, numbers, tensor, ranks=2) == [([7, 0], [1, 1]), ([7, 1], [1, 1])]
    assert numbers == [7] and tensor.tolist() == [0, 0]


def test_a_large_argument_and_a_large_value_travel():
    def double(world, x):
        return x * 2 if world.rank else x[:3].clone()

    x = torch.arange(12_500_000, dtype=torch.float32)
    small, large = launch(double, x, ranks=2)
    assert small.tolist() == [0, 1, 2] and torch.equal(large, x * 2)


def test_any_callable_will_do():
    class Scale:
        def __init__(self, by):
            self.by = by

        def __call__(self, world):
            return self.by * world.rank

        def method(self, world, more):
            return self.by * world.rank + more

    def recursive(world, n):
        return n if n == 0 else 1 + recursive(world, n - 1)

    def default(world, x=3, *, y=4):
        return x + y

    def two(world, a, b):
        return a, b, world.rank

    assert launch(lambda world: world.rank, ranks=2) == [0, 1]
    assert launch(Scale(3), ranks=2) == [0, 3]
    assert launch(Scale(3).method, 1, ranks=2) == [1, 4]
    assert launch(functools.partial(two, b="b"), "a", ranks=2) == [("a", "b", 0), ("a", "b", 1)]
    assert launch(recursive, 5, ranks=1) == [5]
    assert launch(default, ranks=1) == [7]
    assert launch(Group.subgroup, [1], ranks=2) == [None, Group((1,), 0)]


def test_a_function_of_a_module_is_imported_by_the_ranks_as_it_is_now(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "only_here.py"
    for value in (1, 22):
        module.write_text(f"def work(world):\n    return {value}\n")
        sys.modules.pop("only_here", None)
        sys.path_importer_cache.clear()
        import only_here

        assert launch(only_here.work, ranks=1) == [value]
    del sys.modules["only_here"]


SCRIPT = """
import functools, os, sys, threading
from s2s_lib import RankError, all_reduce, launch
from s2s_lib.ranks import job
import torch

scale = 10

def work(world, more=0):
    return scale * world.rank + helper(more)

def helper(x):
    return x + 1

class Box:
    def __init__(self, value):
        self.value = value

def boxed(world):
    return Box(world.rank)

def total(world):
    print("on rank", world.rank)
    return all_reduce(torch.ones(3), world, algorithm="torch")[0].item()

print("top level runs once")
torch.ones(300, 300) @ torch.ones(300, 300)
thread = threading.Thread(target=lambda: print(launch(work, ranks=3)))
thread.start()
thread.join()
print(launch(functools.partial(work, more=4), ranks=2))
print(launch(lambda world: helper(world.rank), ranks=2))
print([type(box) is Box and box.value for box in launch(boxed, ranks=2)])
print(launch(total, ranks=2))
print(launch(lambda world: (sys.argv[1:], __name__), ranks=1))
try:
    launch(lambda world: missing, ranks=2)
except RankError as error:
    print(error.summary, flush=True)
child = os.fork()
if child == 0:
    print("forked", launch(work, ranks=2), job._server.process.pid, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("forking", launch(work, ranks=2), job._server.process.pid)
"""


def test_a_script_without_a_guard_works_and_says_nothing_on_stderr(tmp_path):
    """Its first launch comes from a thread that ends, its last from a process that it forked.

    Each of the two processes has a fork server of its own, which ends with it.
    """
    *lines, forked, forking = run_script(tmp_path / "script.py", SCRIPT, "an arg").splitlines()
    assert lines == [
        "top level runs once",
        "[1, 11, 21]",
        "[5, 15]",
        "[1, 2]",
        "[0, 1]",
        "on rank 0",
        "on rank 1",
        "[2.0, 2.0]",
        "[(['an arg'], '__main__')]",
        "rank 0 of 2 raised NameError: name 'missing' is not defined (and so did rank 1)",
    ]
    assert forked.startswith("forked [1, 11] ") and forking.startswith("forking [1, 11] ")
    servers = {int(line.split()[-1]) for line in (forked, forking)}
    assert len(servers) == 2
    wait_until(lambda: not any(map(alive, servers)), 2)


# What is printed.


def test_prints_appear_in_rank_order_with_the_streams_kept_apart(capsys):
    def talk(world):
        time.sleep(0.1 * (2 - world.rank))
        for line in ("first", "second"):
            print(f"{line} of {world.rank}")
            print(f"warning of {world.rank}", file=sys.stderr)
            time.sleep(0.05)

    launch(talk, ranks=3)
    out, err = capsys.readouterr()
    assert out == "".join(f"first of {r}\nsecond of {r}\n" for r in range(3))
    assert err == "".join(f"warning of {r}\n" * 2 for r in range(3))


def test_what_rank_0_prints_appears_at_once():
    class Timed(io.StringIO):
        def write(self, text):
            times.append(time.monotonic())
            return super().write(text)

    def talk(world):
        print("early")
        time.sleep(0.7)
        return time.monotonic()

    times = []
    with contextlib.redirect_stdout(Timed()) as out:
        ended = launch(talk, ranks=2)
    assert out.getvalue() == "early\nearly\n"
    assert times[0] < ended[0] - 0.4 and times[-1] > ended[0]


def test_every_way_of_writing_is_shown(capsys):
    def talk(world):
        print("äöü ∑ 🙂", "\ud800", end="|")
        sys.stdout.write("written|")
        sys.stdout.buffer.write(b"bytes|")
        sys.stdout.buffer.flush()
        os.write(1, "öl|".encode()[:1])
        time.sleep(0.05)
        os.write(1, "öl|".encode()[1:])
        os.write(1, b"\xff|")
        ctypes.CDLL(None).printf(b"from C|")
        os.system("echo from a child")
        sys.__stdout__.write("|")
        print("no newline", end="")

    launch(talk, ranks=2)
    out, err = capsys.readouterr()
    half, rest = out[: len(out) // 2], out[len(out) // 2 :]
    assert half == rest and err == ""
    for text in ("äöü ∑ 🙂 ?|", "written|bytes|öl|\ufffd|", "from C|", "from a child\n"):
        assert half.count(text) == 1
    assert half.count("no newline") == 1


def test_ten_megabytes_of_output_arrive_whole(capsys):
    def talk(world):
        if world.rank == 1:
            sys.stdout.write(("x" * 99 + "\n") * 100_000)
            for number in range(1000):
                print(number)

    began = time.monotonic()
    launch(talk, ranks=2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 101_000 and set(lines[:100_000]) == {"x" * 99}
    assert lines[100_000:] == [str(number) for number in range(1000)]
    assert time.monotonic() - began < 20


def test_a_rank_that_closes_or_replaces_its_streams_harms_nobody(capsys):
    def close(world):
        print("before")
        if world.rank == 0:
            sys.stdout.close()
        else:
            sys.stdout = sys.stderr = None
        return world.rank

    assert launch(close, ranks=2) == [0, 1]
    assert capsys.readouterr().out == "before\nbefore\n"


# What a rank sees.


def test_a_rank_has_its_share_of_the_cores_and_does_not_take_over_the_callers_threads():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    mine = torch.get_num_threads()
    for ranks in (1, 2, 2 * cores):
        threads = launch(lambda world: torch.get_num_threads(), ranks=ranks)
        assert threads == [max(1, cores // ranks)] * ranks
    assert torch.get_num_threads() == mine


def test_parallel_operations_in_the_caller_and_in_the_ranks_do_not_hang():
    def multiply(world, x):
        torch.set_num_threads(4)
        return (x @ x).min().item()

    before, x = torch.get_num_threads(), torch.ones(700, 700)
    torch.set_num_threads(8)
    try:
        assert (x @ x).min() == 700
        began = time.monotonic()
        assert launch(multiply, x, ranks=2) == [700] * 2
        assert time.monotonic() - began < 30
    finally:
        torch.set_num_threads(before)


def test_a_rank_sees_the_callers_folder_path_and_environment_of_now(tmp_path, monkeypatch):
    def look(world):
        return os.getcwd(), sys.path, dict(os.environ), sys.argv

    monkeypatch.setenv("REMOVED_LATER", "1")
    launch(look, ranks=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADDED_LATER", "ä=b\nc")
    monkeypatch.delenv("REMOVED_LATER")
    monkeypatch.syspath_prepend(tmp_path / "somewhere")
    monkeypatch.setattr(sys, "argv", ["prog", "--flag"])
    ((folder, path, environ, argv),) = launch(look, ranks=1)
    assert folder == str(tmp_path) and path == sys.path and argv == ["prog", "--flag"]
    assert environ["ADDED_LATER"] == "ä=b\nc" and "REMOVED_LATER" not in environ
    own = {"GLOO_SOCKET_IFNAME"}
    assert {k: v for k, v in environ.items() if k not in own} == {
        k: v for k, v in os.environ.items() if k not in own
    }


def test_nothing_of_one_launch_reaches_the_next_or_the_caller(tmp_path):
    def spoil(world):
        os.environ["SPOILED"] = "yes"
        os.chdir("/")
        os.umask(0o777)
        sys.path.clear()
        sys.modules["spoiled"] = sys
        torch.set_num_threads(7)
        torch.manual_seed(5)
        torch.set_default_dtype(torch.float64)
        import s2s_lib

        s2s_lib.spoiled = True

    def look(world):
        import s2s_lib

        umask = os.umask(0)
        return (
            "SPOILED" in os.environ,
            os.getcwd(),
            len(sys.path),
            "spoiled" in sys.modules,
            torch.initial_seed(),
            torch.get_default_dtype(),
            hasattr(s2s_lib, "spoiled"),
            umask,
        )

    before = launch(look, ranks=2)
    launch(spoil, ranks=2)
    assert launch(look, ranks=2) == before
    assert "SPOILED" not in os.environ and os.getcwd() == before[0][1]


def test_ranks_draw_the_same_numbers_at_every_launch():
    def draw(world):
        return torch.rand(3).tolist()

    first = launch(draw, ranks=2)
    assert first[0] == first[1] and launch(draw, ranks=2) == first


def test_ranks_listen_on_loopback_only():
    def listening(world):
        mine = set()
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                mine.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        found = []
        for table in ("tcp", "tcp6"):
            with contextlib.suppress(FileNotFoundError), open(f"/proc/net/{table}") as lines:
                rows = [line.split() for line in lines][1:]
                found += [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
        return [address.split(":")[0] for address in found]

    if not os.path.exists("/proc/net/tcp"):
        pytest.skip("no /proc/net/tcp on this system")
    loopback = {"0100007F", "00000000000000000000000001000000"}
    addresses = launch(listening, ranks=2)
    assert all(addresses) and {a for found in addresses for a in found} <= loopback


def test_a_hostname_that_does_not_resolve_does_not_matter(tmp_path):
    in_new_uts = ["unshare", "--uts", "sh", "-c", 'hostname no.such.host.invalid && exec "$@"', "-"]
    text = """
import socket
from s2s_lib import all_gather, launch
import torch
try:
    socket.gethostbyname(socket.gethostname())
    print("resolves")
except OSError:
    pass
print(launch(lambda world: all_gather(torch.tensor([world.rank]), world).tolist(), ranks=3))
"""
    try:
        works = os.system("unshare --uts sh -c 'hostname x' 2>/dev/null") == 0
    except OSError:
        works = False
    if not works:
        pytest.skip("changing the hostname needs Linux, root and the unshare command")
    out = run_script(tmp_path / "script.py", text, wrapper=in_new_uts)
    assert out == f"{[[0, 1, 2]] * 3}\n"


# How often, from where, how many.


def test_twenty_launches_in_a_row_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    launch(lambda world: None, ranks=2)
    server = job._server.process.pid
    descriptors, threads = set(os.listdir("/dev/fd")), threading.active_count()
    open_in_server = psutil.Process(server).num_fds()
    for number in range(20):
        assert launch(lambda world, n: n + world.rank, number, ranks=2) == [number, number + 1]
    assert set(os.listdir("/dev/fd")) == descriptors
    assert threading.active_count() == threads
    assert job._server.process.pid == server
    assert psutil.Process(server).num_fds() == open_in_server
    assert list(tmp_path.iterdir()) == []


def test_four_launches_at_once_from_threads():
    def work(world, number):
        from s2s_lib import all_reduce

        for _ in range(20):
            total = all_reduce(torch.tensor([number * 10.0 + world.rank]), world)
        return total.item()

    def run(number):
        results[number] = launch(work, number, ranks=2)

    def fail():
        try:
            launch(lambda world: 1 / 0, ranks=2)
        except RankError as error:
            results["failed"] = error.summary

    results = {}
    threads = [threading.Thread(target=run, args=(n,)) for n in range(3)]
    threads.append(threading.Thread(target=fail))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {
        **{n: [n * 20.0 + 1] * 2 for n in range(3)},
        "failed": "rank 0 of 2 raised ZeroDivisionError: division by zero (and so did rank 1)",
    }


def test_a_rank_may_launch_ranks_of_its_own():
    def outer(world):
        from s2s_lib import launch

        return launch(lambda inner: (inner.size, inner.rank), ranks=2)

    assert launch(outer, ranks=1) == [[(2, 0), (2, 1)]]


def test_64_ranks_say_hello():
    def hello(world):
        from s2s_lib import all_reduce

        return all_reduce(torch.tensor([world.rank]), world).item()

    began = time.monotonic()
    assert launch(hello, ranks=64, timeout=120) == [64 * 63 // 2] * 64
    assert time.monotonic() - began < 60


# What is refused.


@pytest.mark.parametrize(
    "ranks", [0, -1, 257, 10**9, True, 2.0, "2", None, [2], float("nan"), torch.tensor(2)]
)
def test_a_number_of_ranks_that_makes_no_sense_is_refused(ranks):
    with pytest.raises(ValueError, match="give a whole number from 1 to 256") as error:
        launch(lambda world: None, ranks=ranks)
    assert f"ranks={ranks!r}" in str(error.value)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e10, "60", None, True])
def test_a_timeout_that_makes_no_sense_is_refused(timeout):
    with pytest.raises(ValueError, match="timeout is a number of seconds above 0") as error:
        launch(lambda world: None, ranks=2, timeout=timeout)
    assert repr(timeout) in str(error.value)


def test_a_cluster_must_be_one_and_of_as_many_gpus_as_ranks():
    with pytest.raises(ValueError, match="4 ranks on a cluster of 6 GPUs: make them equal"):
        launch(lambda world: None, ranks=4, cluster=Cluster(2, 3, inter=Link(1)))
    with pytest.raises(TypeError, match="cluster='10gbe' is no Cluster"):
        launch(lambda world: None, ranks=4, cluster="10gbe")


@pytest.mark.parametrize("fn", [3, None, "work", [len]])
def test_what_is_not_a_function_is_refused(fn):
    with pytest.raises(TypeError, match="needs a function to call on each rank") as error:
        launch(fn, ranks=2)
    assert repr(fn) in str(error.value)


def test_what_cannot_be_pickled_is_named():
    lock = threading.Lock()

    def captured(world):
        return lock

    def argument(world, x):
        return x

    def default(world, x=threading.Lock()):  # noqa: B008
        return x

    def attribute(world):
        return 0

    attribute.handle = socket.socket()

    class Holder:
        def __init__(self):
            self.lock = lock

        def __call__(self, world):
            return 0

        def method(self, world):
            return 0

    def inner_global(world):
        def inner():
            return LOCK

        return inner()

    attempts = {
        "its variable 'lock' (a lock)": (captured,),
        "argument 1 (a lock)": (argument, 1, lock),
        "argument 0 (a generator)": (argument, (i for i in range(3))),
        "its default 0 (a lock)": (default,),
        "its attribute 'handle' (a socket)": (attribute,),
        "its attribute 'lock' (a lock)": (Holder(),),
        "its attribute 'lock' (a lock) ": (Holder().method,),
        "its argument 'x' (a lock)": (functools.partial(argument, x=lock),),
        "the global 'LOCK' (a lock)": (inner_global,),
    }
    for named, (fn, *args) in attempts.items():
        with pytest.raises(TypeError, match="make it inside the function instead") as error:
            launch(fn, *args, ranks=2)
        said = str(error.value)
        assert said.startswith("cannot send ") and f": {named.strip()} cannot be pickled" in said


def test_a_value_that_cannot_be_pickled_is_named_with_its_rank():
    def work(world):
        return threading.Lock() if world.rank == 1 else 5

    with pytest.raises(RankError, match="the result of rank 1, a lock, cannot be pickled") as error:
        launch(work, ranks=3)
    assert error.value.rank == 1 and "return tensors, numbers and plain" in str(error.value)


def test_a_value_that_cannot_be_unpickled_is_named_with_its_rank():
    class Trap:
        def __reduce__(self):
            return eval, ("1 / 0",)

    def work(world):
        return Trap() if world.rank == 1 else 5

    with pytest.raises(RankError, match="the result of rank 1 cannot be unpickled here") as error:
        launch(work, ranks=2)
    assert error.value.rank == 1 and "ZeroDivisionError" in str(error.value)


def test_an_argument_that_cannot_be_unpickled_is_an_error_of_the_ranks():
    class Trap:
        def __reduce__(self):
            return eval, ("1 / 0",)

    with pytest.raises(RankError, match="rank 0 of 2 raised ZeroDivisionError"):
        launch(lambda world, x: x, Trap(), ranks=2)


def test_a_system_that_cannot_fork_is_told_what_to_use(monkeypatch):
    without_fork = types.SimpleNamespace(**{k: v for k, v in vars(os).items() if k != "fork"})
    monkeypatch.setattr(sys.modules["s2s_lib.ranks.launch"], "os", without_fork)
    with pytest.raises(OSError, match="cannot fork: on Windows .* Subsystem for Linux"):
        launch(lambda world: None, ranks=2)


def test_too_few_file_descriptors_are_reported_with_the_way_out_and_none_is_lost():
    import resource

    def open_now():
        return set(os.listdir("/dev/fd"))

    launch(lambda world: None, ranks=1)
    before, (soft, hard) = open_now(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + 25, hard))
    try:
        with pytest.raises(RuntimeError, match=r"could start only \d+ of 32 ranks: Too many open"):
            launch(lambda world: None, ranks=32)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_now() == before
    assert launch(lambda world: world.rank, ranks=2) == [0, 1]
