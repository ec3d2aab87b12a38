"""Functions, arguments and values as bytes, by cloudpickle; and who is to blame if it fails."""

import contextlib
import functools
import io
import types

import cloudpickle

from s2s_lib.ranks.failure import RankError


class Pickler(cloudpickle.Pickler):
    """cloudpickle, but code keeps the name of its file, so that a traceback can show its lines."""


def _code_with_file(code):
    make, parts = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return make, tuple(code.co_filename if part == "<dynamic-code>" else part for part in parts)


Pickler.dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(
    {types.CodeType: _code_with_file}
)


def pickled(fn, args) -> bytes:
    """`fn` and `args` as bytes; TypeError naming the object that cannot travel."""
    file = io.BytesIO()
    try:
        Pickler(file).dump((fn, args))
    except Exception as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"cannot send {name!r} to the ranks: {culprit(fn, args)} cannot be pickled ({error}); "
            "make it inside the function instead"
        ) from None
    return file.getvalue()


def unpickled(answer: bytes, rank: int):
    """The value that a rank returned."""
    try:
        return cloudpickle.loads(answer)
    except Exception as error:
        how = f"cannot be unpickled here: {type(error).__name__}: {error}"
        raise RankError(rank, f"the result of rank {rank} {how}") from error


def culprit(fn, args) -> str:
    """Which argument of a call, or which thing that travels with `fn`, does not pickle."""
    parts = {f"argument {i}": arg for i, arg in enumerate(args)} | luggage(fn)
    for name, value in parts.items():
        try:
            Pickler(io.BytesIO()).dump(value)
        except Exception:
            return f"{name} (a {type(value).__name__})"
    return f"the function itself (a {type(fn).__name__})"


def luggage(fn) -> dict[str, object]:
    """What travels with a function, a method, a partial or a callable object."""
    if isinstance(fn, functools.partial):
        bound = dict(enumerate(fn.args)) | fn.keywords
        return {f"its argument {name!r}": arg for name, arg in bound.items()} | luggage(fn.func)
    owner = getattr(fn, "__self__", fn)
    parts = {f"its attribute {k!r}": v for k, v in getattr(owner, "__dict__", {}).items()}
    code = getattr(fn, "__code__", None)
    if code is None:
        return parts
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            parts[f"its variable {name!r}"] = cell.cell_contents
    for name in names_in(code) & fn.__globals__.keys():
        parts[f"the global {name!r}"] = fn.__globals__[name]
    defaults = dict(enumerate(fn.__defaults__ or ())) | (fn.__kwdefaults__ or {})
    return parts | {f"its default {name!r}": value for name, value in defaults.items()}


def names_in(code) -> set[str]:
    """The global names that a code object uses, and those of the functions inside it."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*map(names_in, inner))
