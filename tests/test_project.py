"""What the project says of itself is true: its pins, its floors, the state of its files.

A package added to only one of pyproject.toml, constraints.txt and environment.yml, an import that
goes up a floor, a folder of somebody's machine in a file: each fails here, naming what to change.
"""

import ast
import re
import subprocess
from pathlib import Path

import pytest

try:
    import tomllib
except ImportError:  # Python 3.10; pytest brings it there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "s2s_lib"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ASKED = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]

# Each room, and the rooms it may import from.
FLOORS = ["draw", "cluster", "ranks", "collectives", "meters", "strategies", "training", "plan"]
BELOW = {room: set(FLOORS[:floor]) for floor, room in enumerate(FLOORS)}
# Beside the floors; what checks an exercise compares it with the strategy itself.
BELOW["course"] = {"draw", "ranks", "collectives", "meters", "strategies"}
BELOW["training"] |= {"course"}
BELOW["plan"] |= {"course"}
STRATEGIES = {"ddp", "zero", "tensor", "pipeline", "diloco"}
WITHOUT_TORCH = [
    "draw.py",
    "cluster.py",
    "plan/*.py",
    *(
        f"strategies/pipeline/{name}.py"
        for name in ("order", "actions", "schedule", "simulate", "program", "picture")
    ),
]

MACHINE = r"(?<![\w.])/(?:home|Users|root|work|tmp)/\w"
REGISTRY = r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|npmjs\.org|anaconda\.(?:org|com)"


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement).group().lower().replace("_", "-")


def pins() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def conda() -> list[str]:
    lines = (ROOT / "environment.yml").read_text().splitlines()
    return [line.strip()[2:] for line in lines if line.strip().startswith("- ")]


def test_environment_yml_asks_for_what_pyproject_asks_for_and_for_nothing_else():
    entries = conda()
    through_pip = entries[entries.index("pip:") + 1 :]
    assert sorted(through_pip) == sorted(ASKED + ["-c constraints.txt", "-e ."])


def test_environment_yml_takes_the_pythons_that_pyproject_takes():
    [python] = [entry for entry in conda() if entry.startswith("python")]
    assert python.startswith("python" + PROJECT["requires-python"])


def test_every_package_that_is_asked_for_is_pinned_to_one_version_a_platform():
    unpinned = {name_of(package) for package in ASKED} - {name_of(pin) for pin in pins()}
    assert not unpinned, f"run `make pins`: constraints.txt lacks {unpinned}"
    assert all(re.match(r"[\w.-]+==[\w.]+( ; .+)?$", pin) for pin in pins())


def test_torch_is_pinned_to_2_13_0():
    assert "torch==2.13.0" in PROJECT["dependencies"]
    assert "torch==2.13.0" in pins()


def python_files(*patterns: str) -> list[Path]:
    return sorted(file for pattern in patterns for file in LIBRARY.glob(pattern))


def imports(file: Path) -> list[str]:
    """The modules that a file imports, relative ones spelled out: `s2s_lib.ranks.wire.send`."""
    package = file.relative_to(ROOT).parent.parts
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join([*start, *filter(None, [node.module])])
            found += [f"{base}.{alias.name}" for alias in node.names]
    return found


def room(file: Path) -> str:
    return file.relative_to(LIBRARY).with_suffix("").parts[0]


@pytest.mark.parametrize(
    "file",
    python_files("draw.py", "cluster.py", "*/**/*.py"),
    ids=lambda file: str(file.relative_to(LIBRARY)),
)
def test_a_file_imports_only_from_floors_below_its_own(file):
    for name in imports(file):
        package, *rest = name.split(".")
        if package == "s2s_lib" and rest:
            assert rest[0] in BELOW[room(file)] | {room(file)}, f"{file.name} imports {name}"


@pytest.mark.parametrize(
    "file", python_files("strategies/**/*.py"), ids=lambda file: str(file.relative_to(LIBRARY))
)
def test_no_strategy_imports_its_neighbour(file):
    own = file.relative_to(LIBRARY).with_suffix("").parts[1]
    for name in imports(file):
        if name.startswith("s2s_lib.strategies."):
            assert name.split(".")[2] not in STRATEGIES - {own}, f"{file.name} imports {name}"


def test_hardware_schedules_and_planner_do_not_load_torch():
    for file in python_files(*WITHOUT_TORCH):
        assert not [name for name in imports(file) if name.split(".")[0] == "torch"], file


def tracked() -> list[Path]:
    """The files that git holds or would take in."""
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
    try:
        answer = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this copy of the project is not a git repository")
    return [ROOT / name for name in answer.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_a_folder_of_one_machine_or_a_package_registry():
    told = re.compile(f"{MACHINE}|{REGISTRY}|{re.escape(str(ROOT))}/")
    for file in tracked():
        lines = file.read_bytes().decode("utf-8", "ignore").splitlines()
        for number, line in enumerate(lines, 1):
            found = told.search(line)
            assert not found, f"{file.relative_to(ROOT)}:{number} holds {found.group()}"
