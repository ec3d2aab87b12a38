"""Cell-by-cell ranks in a notebook: `%load_ext s2s_lib`, then

    %dist_init -n 4       start four ranks
    %%distributed         run this cell on all of them
    %%rank [0,2]          run this cell on ranks 0 and 2
    %dist_pull loss       loss becomes a list here: its value on each rank
    %dist_push batch      batch becomes on each rank what it is here
    %dist_status          what is defined where
    %dist_shutdown        end the ranks

Each rank keeps its own variables from cell to cell, also after an error. It starts with `rank`,
`world_size`, `world` (the Group of all ranks), `torch` and the public names of s2s_lib. It knows
what was defined in such cells and by %dist_push, and nothing else of the notebook.
"""

import contextlib
import re

import cloudpickle
from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from s2s_lib.cluster import Cluster, preset
from s2s_lib.ranks import cells
from s2s_lib.ranks.failure import RankError
from s2s_lib.ranks.launch import check_cluster, check_ranks, check_timeout, settings_for
from s2s_lib.ranks.session import Session


@magics_class
class RankMagics(Magics):
    """The magics, and the session they talk to."""

    def __init__(self, shell):
        super().__init__(shell)
        self.session = None
        self.cells = 0

    @magic_arguments()
    @argument("-n", "--ranks", type=int, help="how many processes; by default the cluster's size")
    @argument("--timeout", type=float, default=60.0, help="seconds a message may take (60)")
    @argument("--cluster", help="a variable that holds a Cluster, or a preset: slows messages")
    @argument("--check", action="store_true", help="compare what ranks do before each collective")
    @line_magic
    def dist_init(self, line):
        """Start ranks for %%distributed and %%rank; ends those that were there before."""
        asked = parse_argstring(self.dist_init, line)
        with one_line_errors():
            cluster = self.cluster(asked.cluster)
            ranks = cluster.size if cluster and asked.ranks is None else asked.ranks
            if ranks is None:
                raise UsageError("how many ranks? Write %dist_init -n 4")
            check_ranks(ranks)
            check_cluster(ranks, cluster)
            check_timeout(asked.timeout)
        self.dist_shutdown()
        with plain_traceback():
            self.cells = 0
            self.session = Session(ranks, settings_for(ranks, cluster, asked.timeout, asked.check))
        print(f"{ranks} ranks are ready: %%distributed runs a cell on all, %%rank [0] on some")

    def cluster(self, name):
        value = self.shell.user_ns.get(name)
        return value if isinstance(value, Cluster) or name is None else preset(name)

    @cell_magic
    def distributed(self, line, cell):
        """Run this cell on every rank, in plain Python without magics.

        Each rank's prints and the value of its last line show under `rank 0:`, `rank 1:`, ...;
        those of rank 0 appear as they come. If a rank fails, the others are stopped, and
        RankError tells of each. The cell sees what earlier such cells defined on its rank and
        what %dist_push sent, not the notebook's own variables.
        """
        if line.strip():
            raise UsageError(f"%%distributed takes nothing on its line, got {line.strip()!r}")
        self.run(cell, range(self.running().size))

    @magic_arguments()
    @argument("ranks", nargs="+", help="which: 0 or 0,2 or [0,2] or [0-2]")
    @cell_magic
    def rank(self, line, cell):
        """Run this cell on some ranks only; otherwise as %%distributed."""
        asked = " ".join(parse_argstring(self.rank, line).ranks)
        self.run(cell, parse_ranks(asked, self.running().size))

    def run(self, cell, ranks):
        # Not the notebook's number: that depends on who runs it.
        self.cells += 1
        name = f"<cell {self.cells} of the ranks>"
        # Line 1 is the magic's own, so that line numbers are those of the notebook.
        source = "\n" + cell
        cells.remember(name, source)
        with plain_traceback():
            # An error that all ranks would make is better told here, once.
            compile(source, name, "exec", dont_inherit=True)
            self.session.run(name, source, ranks)

    @magic_arguments()
    @argument("names", nargs="+", help="variables of the ranks")
    @line_magic
    def dist_pull(self, line):
        """Bring variables here: each becomes a list of its values, one for each rank."""
        names, session = parse_argstring(self.dist_pull, line).names, self.running()
        with plain_traceback():
            answers = session.do(range(session.size), cells.pull, names)
        by_rank = [cloudpickle.loads(answers[rank]) for rank in range(session.size)]
        for name, *values in zip(names, *by_rank, strict=True):
            self.shell.user_ns[name] = values

    @magic_arguments()
    @argument("names", nargs="+", help="variables of the notebook")
    @line_magic
    def dist_push(self, line):
        """Give every rank a copy of these variables."""
        names, session = parse_argstring(self.dist_push, line).names, self.running()
        missing = [name for name in names if name not in self.shell.user_ns]
        if missing:
            raise UsageError(f"the notebook has no variable {missing[0]!r} to push")
        try:
            values = cloudpickle.dumps({name: self.shell.user_ns[name] for name in names})
        except Exception as error:
            raise UsageError(f"cannot push {', '.join(names)}: {error}") from None
        with plain_traceback():
            session.do(range(session.size), cells.push, values)

    @line_magic
    def dist_status(self, line=""):
        """Say which ranks there are, and what the cells have defined on each."""
        if not self.alive:
            print("no ranks are running; %dist_init -n 4 starts four")
            return
        with plain_traceback():
            names = self.session.do(range(self.session.size), cells.defined)
        print(f"{self.session.size} ranks, no message may take over {self.session.timeout:g} s")
        for rank, defined in sorted(names.items()):
            print(f"rank {rank}: {', '.join(defined) or 'nothing defined yet'}")

    @line_magic
    def dist_shutdown(self, line=""):
        """End the ranks; their variables go with them."""
        if self.alive:
            self.session.close()
            print(f"ended {self.session.size} ranks and their variables")
        self.session = None

    @property
    def alive(self):
        return self.session is not None and self.session.alive

    def running(self) -> Session:
        if not self.alive:
            raise UsageError("no ranks are running; start some first: %dist_init -n 4")
        return self.session


def parse_ranks(text, size) -> list[int]:
    """`0`, `0,2`, `[0, 2]`, `[0-2]` or a mix, as a sorted list of ranks below `size`."""
    ranks = set()
    for part in re.split(r"[,\s]+", text.strip("[] ")):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        span = range(int(found[1]), int(found[2] or found[1]) + 1) if found else ()
        if not span:
            raise UsageError(f"%%rank {text}: no ranks in {part!r}; write 0 or [0,2] or [0-2]")
        if span[-1] >= size:
            raise UsageError(f"%%rank {text}: there are {size} ranks, 0..{size - 1}")
        ranks.update(span)
    return sorted(ranks)


@contextlib.contextmanager
def one_line_errors():
    """What is wrong with a magic's arguments is told in a line."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from None


@contextlib.contextmanager
def plain_traceback():
    """These errors tell all by themselves; IPython need not show the way through here too."""
    try:
        yield
    except (RankError, KeyboardInterrupt) as error:
        error._render_traceback_ = f"{type(error).__name__}: {error}".splitlines
        if isinstance(error, RankError):
            # Tools that compare outputs get the line that is the same on every machine.
            error.args = (error.summary,)
        raise
