"""What is wrong with a configuration, in words: which line, which key, what it says, what it takes.

    configs/mine.yaml:7: optimizer.lr: given the text 'abc'; wanted a number from 0 to 100

pydantic finds it and has its own words; here only its findings are used. What a key takes is the
`description` in its type, and the names that there are come from the types too.
"""

import difflib
from typing import get_args

from pydantic import BaseModel, ValidationError

from s2s_lib.training.yaml_lines import Document, Problem, dotted, kind, shown

MOST_TOLD = 20


def explain(error: ValidationError, top: type[BaseModel], document: Document) -> list[Problem]:
    """A problem for each key that is wrong by itself, but for those that the document has."""
    problems = {}
    for each in error.errors(include_url=False, include_context=False):
        path = each["loc"]
        if path[0] == "cluster":
            # Behind it stands which of two types it was taken for.
            path = path[:1] + path[2:]
        # An item of a list is told as the list.
        path = tuple(part for part in path if isinstance(part, str))
        value, place = document.find(path)
        if place is None:
            # A default that follows from the file's name.
            value = each["input"]
        meant = []
        if each["type"] == "extra_forbidden":
            meant, message = unknown(top, path)
        elif each["type"] == "missing":
            message = f"missing; wanted {wanted(top, path)}"
        else:
            message = f"given {given(value, place)}; {asked(top, path, value)}"
        problems.setdefault(path, Problem((dotted(path), *meant), message, place))
    # A key that is missing where another was probably meant to be it.
    meant = {key for problem in problems.values() for key in problem.keys[1:]}
    found = [problem for problem in problems.values() if problem.keys[0] not in meant]
    return unless_told(found, document.problems)


def unknown(top, path) -> tuple[list[str], str]:
    """For a key that does not exist the one that was probably meant, in a list, and the words."""
    *around, name = path
    names = section(top, around).model_fields
    inside = [] if around else [key for key in names if section(top, [key])]
    elsewhere = [f"{key}.{name}" for key in inside if name in section(top, [key]).model_fields]
    near = difflib.get_close_matches(name, names, n=1)
    meant = [dotted([*around, *near])] if near else elsewhere[:1]
    hint = f"did you mean {meant[0]}? " if meant else ""
    if "." in name:
        first, _, rest = name.partition(".")
        hint = f"a dot is for --set; here write {rest}: indented below {first}: . "
    return meant, f"no such key; {hint}There are {', '.join(names)}"


def given(value, place) -> str:
    """What stands there, as written where that is short."""
    if isinstance(value, str):
        return f"the text {shown(value)!r}"
    return place and place.text or kind(value)


def asked(top, path, value) -> str:
    """What a key takes, and before it, for one of several names, the nearest."""
    names = [leaf for leaf in leaves(field(top, path).annotation) if isinstance(leaf, str)]
    near = difflib.get_close_matches(value.lower(), names, n=1) if isinstance(value, str) else []
    return (f"did you mean {near[0]}? W" if near else "w") + f"anted {wanted(top, path)}"


def wanted(top, path) -> str:
    words = field(top, path).description
    return words or f"keys of its own: {', '.join(section(top, path).model_fields)}"


def field(top, path):
    return section(top, path[:-1]).model_fields[path[-1]]


def section(top: type[BaseModel], path) -> type[BaseModel] | None:
    """The class of the keys inside a key, None for one that has none."""
    for name in path:
        known = top.model_fields.get(name) if top else None
        kinds = leaves(known.annotation) if known else []
        top = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
    return top


def leaves(annotation) -> list:
    """The types and values that an annotation is made of."""
    inside = get_args(annotation)
    return [leaf for part in inside for leaf in leaves(part)] if inside else [annotation]


def unless_told(problems, told) -> list[Problem]:
    """Those that concern no key that already has a problem, nor one inside or around it."""
    keys = [key for problem in told for key in problem.keys]
    return [p for p in problems if not any(touch(a, b) for a in p.keys for b in keys)]


def touch(a: str, b: str) -> bool:
    return f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")


def lines_of(problems, document: Document, path) -> list[str]:
    """A line for each problem, at the first of its keys that was given, in the file's order."""
    lines = []
    for keys, message, place in problems:
        name = keys[0]
        for key in keys if place is None else ():
            if place := document.place_of(key.split(".")):
                name = key
                break
        where, order = (place.where, place.order) if place else (path, 0)
        lines.append((order, f"{where}: {name}: {message}" if name else f"{where}: {message}"))
    lines = [line for _, line in sorted(lines, key=lambda pair: pair[0])]
    more = len(lines) - MOST_TOLD
    return lines if more <= 0 else [*lines[:MOST_TOLD], f"{path}: and {more} problems more"]
