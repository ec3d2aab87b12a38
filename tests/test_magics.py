"""Cells on ranks. What would break which test:

values or prints out of rank order, a missing header: the exact texts of the first tests; variables
lost by an error or an interrupt: every test ends by using them; a rank left blocked when another
has failed: the two-second limits; connections not made anew: the collective after each failure.
"""

import os
import re
import signal
import sys
import threading
import time
from types import SimpleNamespace

import nbformat
import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from processes import ROOT, alive, run_script, wait_until
from traitlets.config import Config

import s2s_lib
from s2s_lib import Cluster, Link, RankError
from s2s_lib.ranks.magics import parse_ranks


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """An IPython shell in this process, with the magics loaded."""
    main = sys.modules["__main__"]
    config = Config(InteractiveShell={"ipython_dir": str(tmp_path_factory.mktemp("ipython"))})
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config, colors="nocolor")
    shell.run_line_magic("load_ext", "s2s_lib")
    yield shell
    shell.run_line_magic("unload_ext", "s2s_lib")
    InteractiveShell.clear_instance()
    sys.modules["__main__"] = main


@pytest.fixture
def run(shell):
    """Run a cell: its `out`, `err`, the `error` it raised or None, and the seconds it took."""

    def run_cell(source):
        began = time.monotonic()
        with capture_output() as captured:
            try:
                result = shell.run_cell(source, store_history=True)
                error = result.error_before_exec or result.error_in_exec
            except KeyboardInterrupt as interrupt:
                error = interrupt
        took = time.monotonic() - began
        return SimpleNamespace(out=captured.stdout, err=captured.stderr, error=error, took=took)

    return run_cell


@pytest.fixture
def four(run):
    """`run`, with four ranks that hold x = their rank; started unless they are there already."""
    if "4 ranks, no message may take over 20 s" not in run("%dist_status").out:
        assert run("%dist_init -n 4 --timeout 20").error is None
    assert run("%%distributed\nx = torch.ones(2) * rank").error is None
    return run


def still_usable(run):
    """The ranks are there, with their variables, and reach each other."""
    sums = run("%%distributed\nall_reduce(x, world)[0].item()")
    assert sums.out == "".join(f"rank {r}:\n6.0\n" for r in range(4)), (sums.error, sums.err)


def test_prints_and_last_values_show_rank_by_rank(four):
    cell = four("%%distributed\nprint('I am', rank)\nprint('of', world_size, end='')\nrank * 1.5")
    assert cell.out == "".join(f"rank {r}:\nI am {r}\nof 4\n{r * 1.5}\n" for r in range(4))
    assert (cell.err, cell.error) == ("", None)
    cell = four("%%distributed\nimport sys\nif rank % 2: print('odd', file=sys.stderr)\nrank;")
    assert (cell.out, cell.err) == ("", "rank 1:\nodd\nrank 3:\nodd\n")
    assert four("%%distributed\nNone").out == ""
    assert four("%%distributed\n").out == ""
    assert four("%%rank 2\n'text'").out == "rank 2:\n'text'\n"


@pytest.mark.parametrize(
    "asked, ranks",
    [
        ("0", [0]),
        ("3", [3]),
        ("0,2", [0, 2]),
        ("[2, 0]", [0, 2]),
        ("[1-3]", [1, 2, 3]),
        ("0 3", [0, 3]),
    ],
)
def test_rank_runs_a_cell_on_the_ranks_named(four, asked, ranks):
    cell = four(f"%%rank {asked}\nrank")
    assert cell.out == "".join(f"rank {r}:\n{r}\n" for r in ranks)


@pytest.mark.parametrize(
    "asked, said",
    [
        ("[7]", "%%rank [7]: there are 4 ranks, 0..3"),
        ("0-4", "%%rank 0-4: there are 4 ranks, 0..3"),
        ("two", "no ranks in 'two'"),
        ("3-1", "no ranks in '3-1'"),
        ("[]", "no ranks in ''"),
        ("1.5", "no ranks in '1.5'"),
    ],
)
def test_ranks_that_do_not_exist_are_refused(asked, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        parse_ranks(asked, 4)


def test_ranks_know_the_public_names_and_what_cells_defined(four):
    names = ", ".join(s2s_lib.__all__)
    cell = four(f"%%rank 1\nrank, world_size, world.ranks, torch.__name__, len([{names}])")
    assert cell.out == f"rank 1:\n(1, 4, (0, 1, 2, 3), 'torch', {len(s2s_lib.__all__)})\n"
    four("%%distributed\ndef choose(y):\n    return y + len(str(x))\nbarrier = 5")
    assert (
        four("%%rank 3\nchoose(1), barrier").out == f"rank 3:\n({1 + len('tensor([3., 3.])')}, 5)\n"
    )
    assert four("%%distributed\ndel choose, barrier").error is None


def test_functions_and_classes_of_cells_behave_as_in_a_module(four):
    source = """%%rank 0
from __future__ import annotations
import dataclasses, inspect, io, pickle
@dataclasses.dataclass
class Point:
    x: float
    def norm(self):
        return abs(self.x)
torch.save(Point(-2.0), file := io.BytesIO())
file.seek(0)
copies = pickle.loads(pickle.dumps(Point(-1.0))), torch.load(file, weights_only=False)
[c.norm() for c in copies], inspect.getsource(Point.norm).strip().splitlines()[0]
"""
    assert four(source).out == "rank 0:\n([1.0, 2.0], 'def norm(self):')\n"


def test_an_error_on_one_rank_stops_the_others_and_is_told_with_its_lines(four):
    cell = four("""%%distributed
print('before', rank)
def fail(y):
    raise ValueError(f'bad {y}')
if rank == 2:
    fail(rank)
all_reduce(x, world)
print('after', rank)
""")
    assert isinstance(cell.error, RankError) and cell.error.rank == 2
    assert cell.error.summary == "rank 2 of 4 raised ValueError: bad 2"
    for line in ("line 6, in <module>\n    fail(rank)", "raise ValueError(f'bad {y}')"):
        assert line in cell.error.details
    assert re.search(
        r"\b3: stopped; it waited for all_reduce number 1, .* rank 2", cell.error.details
    )
    assert "cells.py" not in cell.error.details and "worker.py" not in cell.error.details
    # The shell shows the same, without the frames that led here.
    assert "rank 2: Traceback" in cell.out and "run_cell_magic" not in cell.out
    assert cell.out.startswith("".join(f"rank {r}:\nbefore {r}\n" for r in range(4)))
    assert "after" not in cell.out
    assert cell.took < 2
    still_usable(four)


def test_an_error_of_all_ranks_is_told_once(four):
    error = four("%%distributed\nx.nothing").error
    assert error.summary.endswith("no attribute 'nothing' (and so did ranks 1, 2, 3)")
    assert error.details.count("Traceback") == 1 and "ranks 0, 1, 2, 3: Traceback" in error.details
    error = four("%%distributed\n[x, x][rank]").error
    assert (
        error.summary
        == "rank 2 of 4 raised IndexError: list index out of range (and so did rank 3)"
    )
    still_usable(four)


@pytest.mark.parametrize(
    "wait",
    [
        "recv(torch.ones(4), {0: 2, 2: 3, 3: 0}[rank], world)",
        "send(torch.ones(1 << 20), {0: 2, 2: 3, 3: 0}[rank], world)",
        "background(barrier, world).wait()",
        "while True: all_reduce(torch.ones(8), world.subgroup([0, 2, 3]))",
        "while True: pass",
        "import time; time.sleep(60)",
    ],
)
def test_whatever_the_others_do_an_error_ends_the_cell_within_two_seconds(four, wait):
    cell = four(f"%%distributed\nif rank == 1:\n    1 / 0\n{wait}")
    assert cell.error.summary == "rank 1 of 4 raised ZeroDivisionError: division by zero"
    assert cell.took < 2
    still_usable(four)


def test_a_syntax_error_reaches_no_rank(four):
    cell = four("%%distributed\nx = 5\ny = (")
    assert isinstance(cell.error, SyntaxError)
    still_usable(four)


def test_waiting_in_vain_ends_with_a_table(run):
    run("%dist_init -n 3 --timeout 1")
    error = run("%%rank [0,2]\nbarrier(world)").error
    assert error.summary == "ranks waited for each other longer than 1 s"
    table = error.details.splitlines()[:4]
    assert [line.split("  ")[0] for line in table] == ["rank", "0", "1", "2"]
    assert "barrier number 1" in table[1] and "finished" in table[2]
    assert run("%%distributed\nall_reduce(torch.ones(1), world)").out.count("tensor([3.])") == 3


def interrupted(run, source, after=0.4):
    """Run a cell and interrupt this process as a notebook's stop button would."""
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    cell = run(source)
    timer.join()
    return cell


@pytest.mark.parametrize(
    "endless",
    [
        "while True: all_reduce(torch.ones(1 << 18), world)",
        "if rank: barrier(world)\nelse:\n    while True: pass",
        "if rank == 3: print('busy')\nimport time; time.sleep(60)",
    ],
)
def test_an_interrupt_stops_all_ranks_and_keeps_their_variables(four, endless):
    cell = interrupted(four, f"%%distributed\n{endless}")
    assert isinstance(cell.error, KeyboardInterrupt)
    assert cell.took < 0.4 + 2
    assert [line[:15] for line in cell.err.splitlines()] == [f"rank {r}: stopped" for r in range(4)]
    assert ("rank 3:\nbusy\n" in cell.out) == ("busy" in endless)
    still_usable(four)


def pids_of(run):
    pids = [
        int(line) for line in run("%%distributed\nimport os\nos.getpid()").out.split("\n")[1::2]
    ]
    assert pids and all(map(alive, pids))
    return pids


def gone(pids):
    return not any(map(alive, pids))


def test_ranks_that_cannot_be_stopped_end_with_the_session(run):
    run("%dist_init -n 2")
    pids = pids_of(run)
    stubborn = "import time\nwhile rank:\n    try: time.sleep(9)\n    except BaseException: pass"
    cell = interrupted(run, f"%%distributed\n{stubborn}")
    assert cell.error.summary.startswith(
        "rank 1 of 2 did not stop within 3 s; the session has ended"
    )
    assert gone(pids)
    assert "no ranks are running" in str(run("%%distributed\n1").error)


@pytest.mark.parametrize("when", ["in a cell", "between cells"])
def test_a_killed_rank_ends_the_session_and_is_named(run, when):
    run("%dist_init -n 3")
    pids = pids_of(run)
    if when == "in a cell":
        cell = run("%%distributed\nif rank == 1: os.kill(os.getpid(), 9)\nbarrier(world)")
    else:
        os.kill(pids[1], signal.SIGKILL)
        wait_until(lambda: not alive(pids[1]), 2)
        cell = run("%%distributed\nbarrier(world)")
    assert cell.error.rank == 1 and cell.took < 2
    assert "rank 1 of 3 was killed by SIGKILL" in cell.error.summary
    assert cell.error.summary.endswith("%dist_init starts another")
    assert gone(pids)
    assert "start some first: %dist_init -n 4" in str(run("%%rank 0\n1").error)
    assert "no ranks are running" in run("%dist_status").out
    assert run("%dist_init -n 2").error is None
    assert run("%%distributed\nrank").out == "rank 0:\n0\nrank 1:\n1\n"


def test_without_ranks_every_magic_says_how_to_start_some(run):
    run("%dist_shutdown")
    for cell in ("%%distributed\n1", "%%rank 0\n1", "%dist_pull x", "%dist_push run"):
        error = run(cell).error
        assert isinstance(error, UsageError) and "%dist_init -n 4" in str(error)
    assert "%dist_init -n 4" in run("%dist_status").out
    assert run("%dist_shutdown").out == ""


def test_a_second_init_starts_afresh_and_says_so(run):
    run("%dist_shutdown")
    assert run("%dist_init -n 2").out.startswith("2 ranks are ready")
    run("%%distributed\nleft = 1")
    pids = pids_of(run)
    again = run("%dist_init -n 3")
    assert again.out.startswith("ended 2 ranks and their variables\n3 ranks are ready")
    assert gone(pids)
    assert "NameError" in run("%%distributed\nleft").error.summary
    # What is wrong with a call is seen before the ranks are given up.
    kept = pids_of(run)
    for wrong, said in {
        "": "how many ranks",
        "-n 0": "from 1 to 256",
        "-n 2 --timeout 0": "timeout is a number of seconds above 0",
        "--cluster 4x409": "did you mean '4x4090'",
        "-n 2 --cluster 4x4090": "2 ranks on a cluster of 4 GPUs",
    }.items():
        error = run(f"%dist_init {wrong}").error
        assert isinstance(error, UsageError) and said in str(error)
    assert not gone(kept)


def test_a_cluster_slows_the_ranks(run, shell):
    shell.user_ns["box"] = Cluster(2, 1, inter=Link(gbit_s=1, latency_us=200_000))
    assert run("%dist_init --cluster box").out.splitlines()[-1].startswith("2 ranks are ready")
    source = "import time\nbegan = time.monotonic()\nbarrier(world)\ntime.monotonic() - began > 0.1"
    assert run(f"%%distributed\n{source}").out == "rank 0:\nTrue\nrank 1:\nTrue\n"


def test_values_go_to_the_ranks_and_come_back(four, shell):
    shell.user_ns["scale"] = {"by": 10}
    assert four("%dist_push scale").error is None
    four("%%distributed\nscaled = x * scale['by']")
    assert four("%dist_pull scaled rank").error is None
    assert [t.tolist() for t in shell.user_ns["scaled"]] == [[10.0 * r] * 2 for r in range(4)]
    assert shell.user_ns["rank"] == [0, 1, 2, 3]
    assert four("%dist_status").out.splitlines()[1].startswith("rank 0: ")
    assert "scale, scaled" in four("%dist_status").out
    error = four("%dist_pull absent").error
    assert error.summary.startswith("rank 0 of 4 raised NameError: rank 0 has no variable 'absent'")
    assert "no variable 'absent' to push" in str(four("%dist_push absent").error)
    shell.user_ns["lock"] = threading.Lock()
    assert "cannot push lock" in str(four("%dist_push lock").error)
    still_usable(four)


def test_a_notebook_does_all_this_in_a_real_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cells = [
        "%load_ext s2s_lib\n%dist_init -n 2",
        "%%distributed\nprint('pid', __import__('os').getpid())",
        "%%distributed\nprint('sum of', rank + 1.0)\nall_reduce(torch.ones(1) * (rank + 1), world)",
        "%%distributed\nif rank == 1: raise KeyError('lost')\nbarrier(world)",
        "%%rank 0\nclass Drawn:\n    def _repr_html_(self): return '<b>drawn</b>'\nDrawn()",
        "%%distributed\nimport time\ntime.sleep(60)",
        "%%distributed\nall_reduce(torch.ones(1), world).item()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    client = NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}})
    with client.setup_kernel():
        outputs, kernel = [], client.km.provisioner.process.pid
        for index, cell in enumerate(notebook.cells):
            timer = threading.Timer(1, os.killpg, (os.getpgid(kernel), signal.SIGINT))
            if "sleep" in cell.source:
                timer.start()
            try:
                client.execute_cell(cell, index)
            except CellExecutionError:
                assert index in (3, 5)
            outputs.append(cell.outputs)
        pids = [int(pid) for pid in re.findall(r"pid (\d+)", text_of(outputs[1]))]
        assert len(pids) == 2 and all(map(alive, pids))
        os.kill(kernel, signal.SIGKILL)
        wait_until(lambda: gone(pids), 2)
    assert (
        text_of(outputs[2])
        == "rank 0:\nsum of 1.0\ntensor([3.])\nrank 1:\nsum of 2.0\ntensor([3.])\n"
    )
    assert outputs[3][-1].ename == "RankError"
    assert outputs[3][-1].evalue == "rank 1 of 2 raised KeyError: 'lost'"
    assert outputs[3][-1].traceback[0] == "RankError: rank 1 of 2 raised KeyError: 'lost'"
    assert outputs[4][-1].data["text/html"] == "<b>drawn</b>"
    assert outputs[5][-1].ename == "KeyboardInterrupt"
    assert text_of(outputs[6]) == "rank 0:\n2.0\nrank 1:\n2.0\n"


def text_of(outputs):
    return "".join(output.text for output in outputs if output.output_type == "stream")


def test_loading_the_magics_loads_no_torch(tmp_path):
    script = """
import sys
import s2s_lib
from IPython.core.interactiveshell import InteractiveShell
s2s_lib.load_ipython_extension(InteractiveShell())
print("torch" in sys.modules)
"""
    environ = {"IPYTHONDIR": str(tmp_path / "ipython")}
    assert run_script(tmp_path / "load.py", script, environ=environ) == "False\n"
