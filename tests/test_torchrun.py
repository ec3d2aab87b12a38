"""The same program under torchrun: launch joins the world that is there instead of making one.

One run of torchrun does everything, since it takes seconds to start; its two processes write what
they saw. A launch that started processes of its own there would show in their numbers.
"""

import json
import os
import socket
import subprocess
import sys

import pytest
from processes import ROOT

PROGRAM = """
import json, os, sys
import psutil, torch
from s2s_lib import Cluster, Link, Mesh, all_gather, all_reduce, launch

seen = {"rank": int(os.environ["RANK"])}

def attempt(name, call):
    try:
        seen[name] = call()
    except Exception as error:
        seen[name] = f"{type(error).__name__}: {error}"

def work(world, scale=1):
    total = all_reduce(torch.tensor([scale * 10.0 ** world.rank]), world)
    return [world.rank, world.size, list(world.ranks), total.item(), os.getpid()]

def backwards(world):
    group = world.subgroup([1, 0])
    mesh = Mesh(world, dp=1, tp=2)
    return all_gather(torch.tensor([world.rank]), group).tolist(), mesh["tp"].ranks

def disagree(world):
    return all_reduce(torch.ones(2 + world.rank), world)

attempt("values", lambda: launch(work, ranks=2))
attempt("again", lambda: launch(work, 3))
attempt("groups", lambda: launch(backwards, ranks=2))
attempt("framework", lambda: launch(
    lambda world: all_reduce(torch.ones(2), world, algorithm="torch").tolist(), ranks=2))
attempt("slowed", lambda: launch(work, ranks=2, cluster=Cluster(2, 1, inter=Link(1)))[0][3])
attempt("checked", lambda: launch(disagree, ranks=2, check=True))
attempt("three", lambda: launch(work, ranks=3))
attempt("cluster", lambda: launch(work, ranks=2, cluster=Cluster(1, 4)))
attempt("not a function", lambda: launch("work", ranks=2))
seen["pid"] = os.getpid()
seen["children"] = len(psutil.Process().children())
os.write(1, b"printed by %d\\n" % seen["rank"])  # Whole lines: both write to one pipe.
with open(os.path.join(sys.argv[1], os.environ["RANK"]), "w") as file:
    json.dump(seen, file)
"""


def torchrun(folder, program, *args):
    script = folder / "program.py"
    script.write_text(program)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port), str(script), *args]
    environ = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each of the two processes saw, by rank."""
    folder = tmp_path_factory.mktemp("torchrun")
    done = torchrun(folder, PROGRAM, str(folder))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["printed by 0", "printed by 1"]
    return [json.loads((folder / rank).read_text()) for rank in "01"]


def test_every_process_is_a_rank_and_gets_the_values_of_all(seen):
    pids = [each["pid"] for each in seen]
    for each in seen:
        assert each["values"] == [[rank, 2, [0, 1], 11.0, pids[rank]] for rank in range(2)]
        assert each["children"] == 0


def test_a_second_launch_joins_the_same_world_and_may_leave_ranks_out(seen):
    for each in seen:
        assert [value[3] for value in each["again"]] == [33.0, 33.0]


def test_groups_meshes_and_torchs_own_collectives_work_there(seen):
    for each in seen:
        assert each["groups"] == [[[1, 0], [0, 1]]] * 2
        assert each["framework"] == [[2.0, 2.0]] * 2


def test_links_are_slowed_and_mismatches_checked_there_too(seen):
    for each in seen:
        assert each["slowed"] == 11.0
        assert each["checked"].startswith("ValueError: the ranks of group [0, 1] disagree:\n")
        assert "(2,) float32" in each["checked"] and "(3,) float32" in each["checked"]


def test_another_number_of_ranks_than_torchrun_started_is_refused_with_both(seen):
    for each in seen:
        assert each["three"] == (
            "ValueError: launch asks for 3 ranks, torchrun started 2: "
            "start it with 3 processes, or leave `ranks` out"
        )
        assert each["cluster"] == "ValueError: 2 ranks on a cluster of 4 GPUs: make them equal"
        assert each["not a function"].startswith("TypeError: launch needs a function")


def test_an_error_of_one_rank_ends_both(tmp_path):
    done = torchrun(
        tmp_path,
        "from s2s_lib import launch, recv\nimport torch\n"
        "def work(world):\n"
        "    assert world.rank == 0, 'rank 1 gives up'\n"
        "    recv(torch.ones(1), 1, world)\n"
        "launch(work)\n",
    )
    assert done.returncode != 0 and "AssertionError: rank 1 gives up" in done.stderr
