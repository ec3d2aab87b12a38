"""launch when something goes wrong: who is blamed, how soon, and that nothing is left running.

Each test leaves no rank alive (the fixture looks). A launcher that waits for the others before it
raises, that reports the lost connection of a bystander, or that ends ranks by SIGTERM alone fails
here; so does a rank that outlives the process which launched it.
"""

import contextlib
import ctypes
import os
import random
import signal
import sys
import threading
import time

import cloudpickle
import psutil
import pytest
import torch
from processes import alive, pids_in, ranks_alive, start_script, wait_until

from s2s_lib import RankError, launch
from s2s_lib.ranks import job

# The ranks need not import this file, and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture(scope="module", autouse=True)
def warm_fork_server():
    launch(lambda world: None, ranks=1)


@contextlib.contextmanager
def fails(*texts, within=2.0, after=0.0):
    """A launch that raises a RankError which says all of `texts`, in time, and leaves no rank."""
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        yield caught
    took = time.monotonic() - began
    assert ranks_alive() == []
    for text in texts:
        assert text in str(caught.value)
    assert str(caught.value).startswith(caught.value.summary)
    assert "\n" not in caught.value.summary
    assert after <= took < after + within, f"took {took:.2f} s"


def meet(world, times=1):
    from s2s_lib import all_reduce

    for _ in range(times):
        all_reduce(torch.ones(5), world)


# A rank that raises.


def test_the_traceback_of_the_rank_that_raised_is_what_is_raised():
    def deep(x):
        return {"there": 1}[x]  # this very line

    def work(world):
        if world.rank == 2:
            deep("missing")
        meet(world)

    with fails("Traceback of the rank", "in work", "in deep", "# this very line") as caught:
        launch(work, ranks=4)
    assert caught.value.rank == 2
    assert caught.value.summary == "rank 2 of 4 raised KeyError: 'missing'"
    assert f'File "{__file__}", line {deep.__code__.co_firstlineno + 1}, in deep' in str(
        caught.value
    )
    assert "worker.py" not in str(caught.value)


def test_causes_and_contexts_are_told():
    def work(world):
        try:
            try:
                divmod(1, 0)
            except ZeroDivisionError:
                int("x")
        except ValueError as error:
            raise RuntimeError("outer\nsecond line") from error

    with fails("RuntimeError: outer\nsecond line", "ValueError: invalid", "modulo by zero") as e:
        launch(work, ranks=1)
    assert e.value.summary == "rank 0 of 1 raised RuntimeError: outer"
    assert "The error above was raised from this one:" in str(e.value)
    assert "It came up while handling this one:" in str(e.value)


def test_the_first_to_raise_is_named_and_of_several_alike_the_lowest():
    def one_after_the_other(world):
        meet(world)
        if world.rank != 1:
            time.sleep(0.2)
        raise ValueError(f"from rank {world.rank}")

    def all_alike(world):
        meet(world)
        raise ValueError("alike")

    with fails() as caught:
        launch(one_after_the_other, ranks=3)
    assert caught.value.summary == "rank 1 of 3 raised ValueError: from rank 1"
    with fails() as caught:
        launch(all_alike, ranks=3)
    assert caught.value.summary == "rank 0 of 3 raised ValueError: alike (and so did ranks 1, 2)"


@pytest.mark.parametrize(
    "attempt, summary",
    [
        (lambda: sys.exit(3), "raised SystemExit: 3"),
        (lambda: sys.exit(), "raised SystemExit"),
        (lambda: exec("f("), "raised SyntaxError: '(' was never closed"),
        (lambda: input(), "raised EOFError: EOF when reading a line"),
        (lambda: (_ for _ in ()).throw(KeyboardInterrupt), "raised KeyboardInterrupt"),
        (lambda: torch.ones(2) @ torch.ones(3), "raised RuntimeError: inconsistent tensor size"),
    ],
)
def test_whatever_is_raised_is_told(attempt, summary):
    def work(world):
        if world.rank == 1:
            attempt()

    with fails() as caught:
        launch(work, ranks=2)
    assert caught.value.summary.startswith(f"rank 1 of 2 {summary}")


def test_an_exception_that_cannot_be_shown_or_pickled_is_still_told():
    class Awkward(Exception):
        def __init__(self, lock):
            self.lock = lock

        def __str__(self):
            raise ValueError

        def __reduce__(self):
            raise TypeError

    def work(world):
        import threading

        raise Awkward(threading.Lock())

    with fails("Awkward") as caught:
        launch(work, ranks=2)
    assert caught.value.rank == 0


def test_an_error_in_a_thread_of_communication_is_that_of_its_rank():
    def work(world):
        from s2s_lib import all_reduce, background

        background(all_reduce, [1] if world.rank else torch.ones(1), world).wait()

    with fails("expected a tensor, got [1]") as caught:
        launch(work, ranks=2)
    assert caught.value.rank == 1


def test_a_rank_that_ignores_sigterm_is_ended_too():
    def work(world):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if world.rank == 1:
            raise ValueError("stop")
        meet(world)

    with fails("rank 1 of 3 raised ValueError: stop"):
        launch(work, ranks=3)


def test_the_processes_that_a_rank_has_started_end_with_it(tmp_path):
    """Data-loader workers of the rank that fails, of one that waits, and of one that returns."""

    class Reporting(torch.utils.data.Dataset):
        def __len__(self):
            return 1000

        def __getitem__(self, index):
            (tmp_path / str(os.getpid())).write_text(f"{os.getpid()}\n")
            return index

    def work(world, fail):
        loader = torch.utils.data.DataLoader(Reporting(), num_workers=1, persistent_workers=True)
        next(iter(loader))
        started = os.fork()
        if started == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(100)
        (tmp_path / str(started)).write_text(f"{started}\n")
        meet(world)
        if fail and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while fail:
            time.sleep(1)
        return loader.dataset[0]

    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
        launch(work, True, ranks=2)
    pids = pids_in(tmp_path, 4)
    wait_until(lambda: not any(map(alive, pids)), 2)
    for file in tmp_path.iterdir():
        file.unlink()
    launch(work, False, ranks=1)
    wait_until(lambda: not any(map(alive, pids_in(tmp_path, 3))), 2)


# A rank that dies.


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    "end, how",
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL (by someone, or by"),
        (lambda: ctypes.string_at(0), "was killed by SIGSEGV"),
        (os.abort, "was killed by SIGABRT"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "was killed by SIGTERM"),
        (lambda: os._exit(3), "exited with status 3 before its function returned"),
        (lambda: os._exit(0), "exited with status 0 before its function returned"),
    ],
)
def test_a_rank_that_dies_is_named_with_how(end, how, victim):
    def work(world):
        meet(world)
        if world.rank == victim:
            end()
        meet(world)

    with fails(how) as caught:
        launch(work, ranks=3)
    assert caught.value.rank == victim
    assert caught.value.summary.startswith(f"rank {victim} of 3 {how}")


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="no real-time signals here")
def test_a_signal_without_a_name_is_told_by_its_number():
    number = signal.SIGRTMIN + 1
    with fails(f"rank 0 of 1 was killed by signal {number:d}"):
        launch(lambda world: os.kill(os.getpid(), number), ranks=1)


def test_what_a_rank_printed_before_it_died_is_shown_and_its_last_words_are_told(capfd):
    def work(world):
        print("line of", world.rank)
        print("half a line", end="")
        print("last words", file=sys.stderr, end="")
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with fails("the end of its stderr:\nlast words"):
        launch(work, ranks=3)
    out, err = capfd.readouterr()
    assert out == "".join(f"line of {rank}\nhalf a line" for rank in range(3))
    assert err == "last words" * 3


def test_a_rank_killed_at_any_moment_of_a_collective_is_named_30_times(tmp_path):
    def work(world, victim, delay, name):
        import threading

        from s2s_lib import all_gather, all_reduce, barrier, broadcast

        x = torch.ones(20_000)
        call = {
            "all_reduce": lambda: all_reduce(x, world),
            "ring": lambda: all_reduce(x, world, algorithm="ring"),
            "broadcast": lambda: broadcast(x, world, root=1),
            "all_gather": lambda: all_gather(x, world),
            "barrier": lambda: barrier(world),
            "torch": lambda: all_reduce(x, world, algorithm="torch"),
        }[name]

        def end():
            (tmp_path / "killed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        if world.rank == victim:
            threading.Timer(delay, end).start()
        while True:
            call()

    names = ["all_reduce", "ring", "broadcast", "all_gather", "barrier", "torch"]
    chance = random.Random(0)
    for number in range(30):
        ranks = chance.choice([2, 3, 4])
        victim, name = chance.randrange(ranks), names[number % 6]
        with pytest.raises(RankError) as caught:
            launch(work, victim, chance.uniform(0, 0.05), name, ranks=ranks)
        took = time.monotonic() - float((tmp_path / "killed").read_text())
        assert ranks_alive() == []
        assert caught.value.rank == victim, (number, name, str(caught.value))
        assert caught.value.summary.startswith(f"rank {victim} of {ranks} was killed by SIGKILL")
        assert took < 2, (number, name, took)


def test_a_bystander_that_raises_its_own_error_over_a_lost_connection_is_not_blamed():
    def work(world):
        from s2s_lib import all_reduce

        if world.rank == 1:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            all_reduce(torch.ones(2), world)
        except Exception as error:
            raise KeyError("my own") from error

    with fails() as caught:
        launch(work, ranks=3)
    assert caught.value.summary.startswith("rank 1 of 3 was killed by SIGKILL")


def test_a_lost_connection_is_known_as_one_whoever_reports_it():
    """So that the launcher waits for the death behind it, which the system may report later."""
    from s2s_lib.ranks.wire import ConnectionLost, WaitTimeout
    from s2s_lib.ranks.worker import describe

    def kind(error, cause=None):
        error.__cause__ = cause
        return describe(error)["kind"]

    gloos = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:41614"
    assert kind(ConnectionLost()) == kind(KeyError(), ConnectionLost()) == "lost"
    assert kind(RuntimeError(gloos)) == "lost"
    assert kind(KeyError(), WaitTimeout()) == "timeout"
    assert kind(RuntimeError("the door is closed")) == kind(ValueError(gloos)) == "error"


def test_a_rank_that_dies_after_its_value_has_come_spoils_nothing(tmp_path):
    def work(world):
        if world.rank == 0:
            import threading

            threading.Timer(0.2, os._exit, [9]).start()
            return "done"
        time.sleep(0.6)
        return "done later"

    assert launch(work, ranks=2) == ["done", "done later"]


def test_after_every_kind_of_failure_the_next_launch_is_clean():
    def work(world, how):
        meet_again = torch.ones(3)
        from s2s_lib import all_reduce

        if how and world.rank == 0:
            how()
        return all_reduce(meet_again, world)[0].item()

    for how in (lambda: 1 / 0, lambda: os._exit(1), os.abort):
        with fails():
            launch(work, how, ranks=3)
        assert launch(work, None, ranks=3) == [3.0] * 3


# Ranks that wait in vain.


def table_of(error) -> dict[str, list[str]]:
    """Rank -> the columns after it, of the table in a RankError."""
    _, table, *_ = str(error).split("\n\n")
    header, *rows = [line.split("  ") for line in table.splitlines()]
    assert [cell.strip() for cell in header if cell] == ["rank", "waits for", "group", "since"]
    return {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}


def assert_waits(row, what, group, timeout):
    assert row[0].startswith(what) and row[1] == group, row
    assert row[2].endswith(" s") and float(row[2][:-2]) >= timeout * 0.9


@pytest.fixture
def mismatched():
    """Launches three ranks that do different things, and gives the table that comes of it."""

    def run(*calls, timeout=0.5, ranks=None):
        def work(world):
            from s2s_lib import all_reduce

            all_reduce(torch.ones(1), world)
            return calls[world.rank](world)

        with fails(f"ranks waited for each other longer than {timeout:g} s", within=4) as caught:
            launch(work, ranks=len(calls), timeout=timeout)
        assert caught.value.rank is None
        return table_of(caught.value)

    return run


def test_different_operations_are_shown_side_by_side(mismatched):
    from s2s_lib import all_reduce, barrier, broadcast

    x = torch.ones(2, 3)
    table = mismatched(
        lambda world: all_reduce(x, world, algorithm="ring"),
        lambda world: broadcast(x, world),
        lambda world: barrier(world),
    )
    assert_waits(table["0"], "all_reduce number 2, (2, 3) float32, sum, ring", "[0, 1, 2]", 0.5)
    assert_waits(table["1"], "broadcast number 2, (2, 3) float32, 0, tree", "[0, 1, 2]", 0.5)
    assert_waits(table["2"], "barrier number 2: ", "[0, 1, 2]", 0.5)


def test_different_shapes_and_dtypes_are_shown_even_with_as_many_bytes(mismatched):
    from s2s_lib import all_gather

    table = mismatched(
        lambda world: all_gather(torch.ones(2, 3), world),
        lambda world: all_gather(torch.ones(3, 2), world),
        lambda world: all_gather(torch.ones(2, 3, dtype=torch.int32), world),
    )
    assert "(2, 3) float32" in table["0"][0]
    assert "(3, 2) float32" in table["1"][0]
    assert "(2, 3) int32" in table["2"][0]


def test_nobody_sends_and_nobody_receives(mismatched):
    from s2s_lib import recv, send

    table = mismatched(
        lambda world: recv(torch.empty(4), 2, world),
        lambda world: send(torch.empty(4), 2, world),
        lambda world: recv(torch.empty(4), 0, world),
    )
    assert_waits(table["0"], "recv, (4,) float32: receive from rank 2", "[0, 1, 2]", 0.5)
    assert_waits(table["1"], "send, (4,) float32: send to rank 2", "[0, 1, 2]", 0.5)
    assert_waits(table["2"], "recv, (4,) float32: receive from rank 0", "[0, 1, 2]", 0.5)


def test_a_rank_that_returned_early_and_one_that_computes_are_shown_as_that(mismatched):
    from s2s_lib import all_reduce

    def compute(world):
        time.sleep(30)

    table = mismatched(
        lambda world: all_reduce(torch.ones(2), world), lambda world: None, compute, ranks=3
    )
    assert_waits(table["0"], "all_reduce number 2, (2,) float32", "[0, 1, 2]", 0.5)
    assert table["1"] == ["nothing: its function has returned"]
    line = compute.__code__.co_firstlineno + 1
    assert table["2"] == [f"nothing: it is running test_failures.py:{line} in compute"]


def test_a_stopped_rank_is_shown_and_ended(mismatched):
    from s2s_lib import all_reduce

    table = mismatched(
        lambda world: all_reduce(torch.ones(2), world),
        lambda world: os.kill(os.getpid(), signal.SIGSTOP),
    )
    assert table["1"] == ["no answer: it is stopped, or in a long computation"]


def test_the_ranks_of_a_subgroup_and_of_a_background_lane_are_shown(mismatched):
    from s2s_lib import all_reduce, background

    def behind(world):
        task = background(all_reduce, torch.ones(7), world)
        all_reduce(torch.ones(2), world.subgroup([1, 0]))
        task.wait()

    table = mismatched(behind, behind, lambda world: time.sleep(30))
    for rank in "01":
        assert_waits(table[rank], "all_reduce number 1, (7,) float32", "[0, 1, 2]", 0.5)
    table = mismatched(
        lambda world: all_reduce(torch.ones(2), world.subgroup([2, 0])),
        lambda world: None,
        lambda world: time.sleep(30),
    )
    assert_waits(table["0"], "all_reduce number 1, (2,) float32", "[2, 0]", 0.5)
    assert "rank 0" in table["0"][0], "places in the group"


def test_a_wait_in_vain_behind_an_error_of_the_users_own_still_gives_the_table(mismatched):
    from s2s_lib import recv

    def work(world):
        try:
            recv(torch.empty(2), 1, world)
        except RuntimeError as error:
            raise KeyError("my own") from error

    table = mismatched(work, lambda world: None)
    assert_waits(table["0"], "recv, (2,) float32: receive from rank 1", "[0, 1]", 0.5)


def test_an_error_beats_a_wait_in_vain():
    def work(world):
        if world.rank == 1:
            time.sleep(0.3)
            raise ValueError("the cause")
        meet(world)

    with fails("rank 1 of 3 raised ValueError: the cause"):
        launch(work, ranks=3, timeout=1)


def test_the_wait_for_a_late_but_living_rank_is_no_failure():
    def work(world):
        if world.rank == 1:
            time.sleep(0.6)
        meet(world)
        return "met"

    assert launch(work, ranks=2, timeout=5) == ["met"] * 2


def test_with_check_an_early_return_ends_at_the_timeout_with_the_table():
    def work(world):
        if world.rank:
            meet(world)

    with fails("all_reduce number 1, (5,) float32, sum", "its function has returned", within=4):
        launch(work, ranks=2, timeout=0.5, check=True)


def test_with_check_a_mismatch_is_raised_long_before_the_timeout():
    def work(world):
        from s2s_lib import all_reduce

        all_reduce(torch.ones(2 + world.rank), world)

    with fails("(2,) float32", "(3,) float32") as caught:
        launch(work, ranks=2, timeout=60, check=True)
    assert caught.value.summary == (
        "rank 0 of 2 raised ValueError: the ranks of group [0, 1] disagree (and so did rank 1)"
    )


# What becomes of the ranks when the launching process, or the fork server, is gone.

BUSY = """
import os, sys, time
import torch
from s2s_lib import all_reduce, launch
from s2s_lib.ranks import job

def work(world, folder):
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(os.path.join(folder, str(world.rank)), "w") as file:
        file.write(f"{os.getpid()}\\n")
    while True:
        all_reduce(torch.ones(1000), world)

def run(folder):
    os.makedirs(folder, exist_ok=True)
    launch(work, folder, ranks=3)

"""


def start_busy(tmp_path, text):
    """A script whose three ranks are busy; gives it, their pids and its fork server's."""
    folder = tmp_path / "pids"
    folder.mkdir()
    process = start_script(tmp_path / "script.py", BUSY + text, folder)
    return process, *busy_in(folder)


def busy_in(folder):
    pids = pids_in(folder, 3)
    return pids, psutil.Process(pids[0]).ppid()


def test_an_interrupt_ends_the_ranks_and_so_does_the_death_of_the_launching_process(tmp_path):
    process, pids, server = start_busy(
        tmp_path,
        """
try:
    run(sys.argv[1])
except KeyboardInterrupt:
    print(launch(lambda world: world.rank, ranks=2), flush=True)
run(sys.argv[1] + "/again")
""",
    )
    process.send_signal(signal.SIGINT)
    wait_until(lambda: not any(map(alive, pids)), 2)
    for file in (tmp_path / "pids").iterdir():
        file.unlink()
    (tmp_path / "pids" / "again").mkdir()
    pids, same_server = busy_in(tmp_path / "pids" / "again")
    assert same_server == server
    process.kill()
    wait_until(lambda: not any(map(alive, [server, *pids])), 2)
    assert process.communicate(timeout=30) == ("[0, 1]\n", "")


def test_a_forked_process_that_outlives_the_launching_one_does_not_keep_the_ranks(tmp_path):
    """It holds copies of the sockets by whose closing the fork server knows."""
    process, pids, server = start_busy(
        tmp_path,
        """
import threading

def fork():
    while len(os.listdir(sys.argv[1])) < 3:
        time.sleep(0.01)
    if os.fork() == 0:
        os.close(1)
        os.close(2)
        time.sleep(5)
        os._exit(0)
    os.kill(os.getpid(), 9)

launch(lambda world: None, ranks=1)
threading.Thread(target=fork).start()
run(sys.argv[1])
""",
    )
    process.wait(30)
    wait_until(lambda: not any(map(alive, [server, *pids])), 2)
    process.communicate()


def test_when_the_fork_server_is_killed_the_error_says_so_and_the_next_launch_works(tmp_path):
    def work(world):
        (tmp_path / str(world.rank)).write_text(f"{os.getpid()}\n")
        time.sleep(60)

    def kill_server():
        pids_in(tmp_path, 2)
        os.kill(job._server.process.pid, signal.SIGKILL)

    threading.Thread(target=kill_server).start()
    with fails("the fork server ended, and the ranks with it; launch again"):
        launch(work, ranks=2)
    wait_until(lambda: not any(map(alive, pids_in(tmp_path, 2))), 2)
    assert launch(lambda world: world.rank, ranks=2) == [0, 1]
    # Between two launches: noticed at once, or by the one launch that comes too soon.
    os.kill(job._server.process.pid, signal.SIGKILL)
    try:
        assert launch(lambda world: world.rank, ranks=2) == [0, 1]
    except RankError as error:
        assert "the fork server ended" in str(error)
        assert launch(lambda world: world.rank, ranks=2) == [0, 1]


def test_ranks_that_print_without_end_do_not_keep_an_error_from_being_raised(capsys):
    def work(world):
        if world.rank == 1:
            time.sleep(0.2)
            raise ValueError("enough")
        while True:
            os.write(1, b"x" * 60_000)

    with fails("rank 1 of 2 raised ValueError: enough"):
        launch(work, ranks=2)
    capsys.readouterr()
