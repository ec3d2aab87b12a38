"""What a rank does with a notebook cell: run it where the cells before it ran.

These functions are called in the ranks (by `Worker.do_cell`). A rank keeps its variables in a
`__main__` module of its own, so functions and classes of its cells can be pickled there. They
start as `rank`, `world_size`, `world` and `torch`; the public names of s2s_lib are put in when a
cell first reads one that is not there, so that no cell waits for the import of what it never uses.
"""

import ast
import linecache
import sys
import types

# How objects draw themselves in a notebook.
DRAWN_BY = {
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "text/latex": "_repr_latex_",
    "image/svg+xml": "_repr_svg_",
}
GIVEN = {"rank", "world_size", "world", "torch"}

_main = types.ModuleType("__main__")


def variables(world) -> dict:
    """The variables of this rank, by name."""
    if sys.modules["__main__"] is not _main:
        import torch

        sys.modules["__main__"] = _main
        given = {"rank": world.rank, "world_size": world.size, "world": world, "torch": torch}
        vars(_main).update(given)
    return vars(_main)


def remember(name, source):
    """Let tracebacks and `inspect` find the lines of a cell under this file name."""
    # Without a time of change, linecache never looks for such a file.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)


def run(world, name, source) -> dict[str, str] | None:
    """Run a cell; returns how the value of its last line shows, by mime type, or None.

    As in Jupyter, a last line that is no expression, that gives None or that ends in `;` shows
    nothing. `name` stands as the file in tracebacks.
    """
    names = variables(world)
    remember(name, source)
    tree = ast.parse(source, name)
    names.update(public_names(tree, names))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), names)
    if last is None:
        return None
    value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), names)
    return None if value is None or source.rstrip().endswith(";") else shown(value)


def public_names(tree, names) -> dict:
    """The public names of s2s_lib that a cell reads and that the rank does not have."""
    import s2s_lib

    read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    return {name: getattr(s2s_lib, name) for name in read & {*s2s_lib.__all__} - names.keys()}


def shown(value) -> dict[str, str]:
    """Mime type -> text: the value's repr, and how else it draws itself."""
    bundle = {"text/plain": repr(value)}
    for mime, method in DRAWN_BY.items():
        draw = getattr(type(value), method, None)
        picture = draw(value) if draw else None
        if isinstance(picture, str):
            bundle[mime] = picture
    return bundle


def defined(world) -> list[str]:
    """The names that the cells have defined on this rank, without modules, sorted."""
    import s2s_lib

    mine = {n: v for n, v in variables(world).items() if not isinstance(v, types.ModuleType)}
    ours = {n for n, v in mine.items() if n in s2s_lib.__all__ and v is getattr(s2s_lib, n)}
    return sorted(n for n in mine.keys() - GIVEN - ours if not n.startswith("_"))


def push(world, values: bytes):
    """Take in variables: a pickled dict of them."""
    import cloudpickle

    variables(world).update(cloudpickle.loads(values))


def pull(world, names) -> bytes:
    """The values of these variables as a pickled list."""
    import cloudpickle

    mine = variables(world)
    missing = [name for name in names if name not in mine]
    if missing:
        raise NameError(f"rank {world.rank} has no variable {missing[0]!r}")
    return cloudpickle.dumps([mine[name] for name in names])
