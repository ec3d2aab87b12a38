"""Two hosts that are two network namespaces with one cable (a veth pair) between them, and
torchrun on each: what a reader does with two machines.

A world that needs the host's name, or listens where only its own host hears it, does not come up
here. A run that counts ranks within a host where it means the world deals the wrong data and tells
another loss. A message that waits without end hangs when the cable is cut, and a run that leaves
its checkpoints to one host cannot go on. Needs Linux, root and iproute2.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
from processes import alive, wait_until
from training_runs import course, start, write_config

from s2s_lib import launch
from s2s_lib.training.config import load_config
from s2s_lib.training.train import train

PORT = 29400
CABLE = "cable"
RETRIES = "/proc/sys/net/ipv4/tcp_retries2"
# Of a message, where the cable is cut.
TIMEOUT = 5
KEYS = {
    "data_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "steps": 10,
    "checkpoint": {"every": 2},
    # Slow enough to be cut in the midst of a step.
    "cluster": {"nodes": 2, "gpus_per_node": 2, "inter": {"gbit_s": 1, "latency_us": 20_000}},
}


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


def missing() -> str:
    """What is not there for network namespaces, or nothing."""
    if not sys.platform.startswith("linux"):
        return "Linux"
    if os.geteuid():
        return "root"
    if not (shutil.which("ip") and shutil.which("unshare")):
        return "the commands ip (iproute2) and unshare (util-linux)"
    name = f"s2s-{os.getpid()}-try"
    made = ip("netns", "add", name)
    joined = ip("netns", "exec", name, "true")
    ip("netns", "del", name)
    return (
        ""
        if (made.returncode, joined.returncode) == (0, 0)
        else (f"the right to make network namespaces ({(made.stderr + joined.stderr).strip()})")
    )


class Hosts:
    """Two namespaces, 10.77.0.1 and 10.77.0.2 at the ends of a cable; a context removes them."""

    def __enter__(self):
        self.names = [f"s2s-{os.getpid()}-{number}" for number in (1, 2)]
        self.processes = []
        try:
            for name in self.names:
                self.do("netns", "add", name)
            end = ["name", CABLE, "netns"]
            self.do("link", "add", *end, self.names[0], "type", "veth", "peer", *end, self.names[1])
            for number, name in enumerate(self.names, 1):
                self.do("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", CABLE)
                self.do("-n", name, "link", "set", "lo", "up")
                # torchrun reads its store without a timeout of its own, so on the host without the
                # store it goes on until the kernel gives the connection up: here after 13 s, and
                # after 15 minutes as systems are set up.
                self.do("netns", "exec", name, "sh", "-c", f"echo 5 > {RETRIES}")
            self.mend()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in self.names:
            for pid in ip("netns", "pids", name).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            ip("netns", "del", name)
        for process in self.processes:
            process.communicate()

    def do(self, *arguments):
        done = ip(*arguments)
        assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"

    def cut(self):
        self.do("-n", self.names[0], "link", "set", CABLE, "down")

    def mend(self):
        for name in self.names:
            self.do("-n", name, "link", "set", CABLE, "up")

    def torchrun(self, folder, *arguments, restarts=0, timeout=60):
        """torchrun with two processes on each host: two Popen. No host's name can be resolved."""
        started = []
        for number, name in enumerate(self.names, 1):
            rename = f'hostname nowhere-{number}; exec "$@"'
            started.append(
                start(
                    folder,
                    *("--nnodes", 2, "--nproc-per-node", 2, "--max-restarts", restarts),
                    *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"10.77.0.1:{PORT}"),
                    *("--rdzv-conf", f"is_host={int(number == 1)},read_timeout={timeout}"),
                    *("--local-addr", f"10.77.0.{number}"),
                    *("-m", "s2s_lib", "train", *arguments, "--timeout", timeout),
                    program=("-m", "torch.distributed.run"),
                    wrapper=(
                        "ip",
                        "netns",
                        "exec",
                        name,
                        "unshare",
                        "--uts",
                        "sh",
                        "-c",
                        rename,
                        "sh",
                    ),
                    GLOO_SOCKET_IFNAME=CABLE,
                    OMP_NUM_THREADS="1",
                    # Else the ranks of a second world find the addresses of the first in the store.
                    TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
                )
            )
        self.processes += started
        return started


@pytest.fixture(scope="module")
def hosts():
    if without := missing():
        pytest.skip(f"two hosts on one need {without}")
    with Hosts() as hosts:
        yield hosts


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The course of the same training in one process."""
    folder = tmp_path_factory.mktemp("alone")
    path = write_config(folder, steps=KEYS["steps"])
    places = [f"output={folder / 'run'}", f"data.path={folder / 'text.txt'}"]
    launch(train, load_config(path, places), ranks=1)
    return course(folder / "run")


def ended(processes, within):
    """Exit code, stdout and stderr of each."""
    said = [process.communicate(timeout=within) for process in processes]
    return [(process.returncode, *each) for process, each in zip(processes, said, strict=True)]


def workers(processes) -> dict[int, psutil.Process]:
    """What torchrun has started on the hosts, by rank."""
    below = [c for p in processes for c in psutil.Process(p.pid).children(recursive=True)]
    return {int(c.environ()["RANK"]): c for c in below if "RANK" in c.environ()}


def logged(folder) -> int:
    return len(course(folder))


def assert_same(one, other):
    assert [entry[0] for entry in one] == [entry[0] for entry in other]
    for a, b in zip(one, other, strict=True):
        assert a == pytest.approx(b, rel=1e-9)


def test_two_hosts_train_as_one_process_does(hosts, alone, tmp_path):
    write_config(tmp_path, **KEYS)
    (code, out, err), (other_code, other_out, other_err) = ended(
        hosts.torchrun(tmp_path, "run.yaml"), within=200
    )
    assert (code, other_code) == (0, 0), f"{err}\n{other_err}"
    assert_same(course(tmp_path / "runs/run"), alone)
    said = out + other_out
    # One of the four processes tells how it ended.
    assert said.count("runs/run: begins") == said.count("report: ") == 1
    assert (tmp_path / "runs/run/report.html").read_text().count("<td>rank ") == 4
    assert "Traceback" not in err + other_err


def test_a_cut_cable_ends_both_hosts_in_time_and_a_restart_ends_the_same(hosts, alone, tmp_path):
    write_config(tmp_path, **KEYS)
    folder = tmp_path / "runs/run"
    processes = hosts.torchrun(tmp_path, "run.yaml", timeout=TIMEOUT)
    wait_until(lambda: logged(folder) >= 3, 200)
    ranks = workers(processes)
    hosts.cut()
    try:
        wait_until(lambda: not any(alive(rank.pid) for rank in ranks.values()), 8 * TIMEOUT)
        first, second = ended(processes, within=100)
    finally:
        hosts.mend()
    assert (len(ranks), first[0], second[0]) == (4, 1, 1)
    for _, _, err in (first, second):
        assert f"did not complete in {TIMEOUT} s" in err
    before = logged(folder)
    assert 3 <= before < 9

    # Once more, with --resume; now a process is killed, and torchrun makes the world anew.
    processes = hosts.torchrun(tmp_path, "run.yaml", "--resume", restarts=1)
    wait_until(lambda: logged(folder) > before, 200)
    workers(processes)[3].kill()
    (code, out, err), (other_code, other_out, other_err) = ended(processes, within=200)
    assert (code, other_code) == (0, 0), f"{err}\n{other_err}"
    gone_on = re.findall("goes on after step ([0-9]+)", out + other_out)
    assert len(gone_on) == 2 and 0 < int(gone_on[0]) <= int(gone_on[1])
    assert_same(course(folder), alone)
