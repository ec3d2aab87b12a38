"""Make .venv hold what pyproject.toml and constraints.txt ask for; under a second when it does.

    python tools/setup.py           .venv keeps the interpreter it has; this one makes a new .venv
    python tools/setup.py --mine    .venv must be of this interpreter (make PYTHON=python3.12 ...)

Whether .venv can be trusted is looked up: its interpreter must start, and every file that pip
recorded must be there in full length; if not, it is made anew. The stamp, written last, is a hash
of both files and of the installed packages' names: a changed pin, a set-up that stopped half-way
and a package removed by hand lead back to pip, and nothing else does.
"""

import csv
import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "setup-stamp"
VERSION = "{}.{}".format(*sys.version_info)
BASE = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
WORKS = "import sys; sys.exit(sys.prefix == sys.base_prefix or sys.version_info < (3, 10))"

CHOOSE = "\nAnother interpreter is chosen with, for example, `PYTHON=python3.12 make test`."
NO_VENV = f"""{BASE} lacks what makes virtual environments (venv, ensurepip).
On Debian or Ubuntu `sudo apt install python{VERSION}-venv` brings it.{CHOOSE}"""
NO_PACKAGES = f"""pip could not install the packages; its own words are above.
Without a network: connect and give the same command again; what was downloaded is kept.
With one: torch 2.13.0 exists for Linux (x86-64, ARM) and for macOS 14 on Apple silicon.{CHOOSE}"""
SIZE = """on Linux pip takes torch's CUDA build, gigabytes. The CPU build is enough: stop (Ctrl-C),
set PIP_EXTRA_INDEX_URL to the CPU index named on PyTorch's install page, and call again."""


def stop(text):
    sys.exit("[set-up] stopped: " + text)


def fault(mine=False):
    """Why .venv must be made anew, or None."""
    python = str(VENV / "bin" / "python")
    try:
        if subprocess.call([python, "-I", "-c", WORKS], stderr=subprocess.DEVNULL):
            return "its interpreter does not work or is older than Python 3.10"
        if mine and os.path.realpath(python) != BASE:
            return "the present one belongs to " + os.path.realpath(python)
        return next(losses(), None)
    except OSError as error:
        return f"{error.filename} is missing" if VENV.exists() else "there is none yet"


def packages():
    return sorted(VENV.glob("lib/python3*/site-packages/*.dist-info"))


def losses():
    """What pip promised and is not there in full length; OSError for what is not there at all."""
    if str(VENV / "bin") not in (VENV / "bin" / "pip").read_text()[:1000]:
        yield "it was made in another folder"
    for leftover in VENV.glob("lib/python3*/site-packages/~*"):
        yield f"pip was stopped while it replaced {leftover.name}"
    for folder in packages():
        os.stat(str(folder / "INSTALLER"))
        for name, _, size in csv.reader((folder / "RECORD").read_text("utf-8").splitlines()):
            path = os.path.join(str(folder.parent), name)
            if not name.endswith(".pyc") and os.stat(path).st_size < int(size or 0):
                yield f"{path} is cut short"


def contents():
    """A hash of what is asked for and of the packages that are there."""
    asked = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    return hashlib.sha256(b"\0".join(asked + [p.name.encode() for p in packages()])).hexdigest()


def run(lock, *command):
    """The child holds the lock too: if we are killed, nobody touches .venv before it has ended."""
    return subprocess.call([str(part) for part in command], pass_fds=[lock.fileno()])


def make(lock, reason):
    if sys.version_info < (3, 10):
        stop(f"Python 3.10 or newer is needed, and {BASE} is {VERSION}.{CHOOSE}")
    if subprocess.call([BASE, "-c", "import venv, ensurepip"], stderr=subprocess.DEVNULL):
        stop(NO_VENV)
    print(f"[set-up] making .venv with {BASE}: {reason}", flush=True)
    if STAMP.exists():
        STAMP.unlink()
    if run(lock, BASE, "-m", "venv", "--clear", VENV):
        stop("the virtual environment could not be made; the words above say why." + CHOOSE)
    if sys.platform == "linux" and not os.environ.get("PIP_EXTRA_INDEX_URL"):
        print("[set-up]", SIZE, flush=True)


def install(lock):
    pip = [VENV / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install"]
    if run(lock, *pip, "-c", ROOT / "constraints.txt", "-e", f"{ROOT}[test]") or fault():
        stop(NO_PACKAGES)
    STAMP.with_suffix(".draft").write_text(contents())
    STAMP.with_suffix(".draft").replace(STAMP)
    print("[set-up] .venv is ready", flush=True)


def main():
    with open(str(ROOT / ".setup.lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("[set-up] another set-up is at work; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        reason = fault(mine="--mine" in sys.argv)
        if reason:
            make(lock, reason)
        if reason or not STAMP.exists() or STAMP.read_text() != contents():
            install(lock)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        stop("interrupted; the same command takes it up again")
