"""YAML as plain values that know the line each of them stands on.

PyYAML composes a text into nodes with marks; here they become maps, tuples and scalars, those
that `yaml.safe_load` makes, except that

* a `Map` also keeps the `Place` of each key: file and line, and what is written there;
* a key is its text, so `no: 1` has the key "no";
* `1e-3` is the number it looks like (YAML 1.1 wants a dot), and numbers of other bases are refused
  (YAML 1.1 reads 010 as 8 and 1:30 as 90);
* keys that are there twice and tags that ask for objects are problems, each with its line. All of
  a text are collected; what had one is None.

A node that several aliases name is read once, so a text whose aliases multiply costs no more than
its length.
"""

import re
from typing import NamedTuple

import yaml

from s2s_lib.training.yaml_text import ConfigError, compose, read_text, shown

TAG = "tag:yaml.org,2002:"
SCALARS = {TAG + kind for kind in "null bool int float str timestamp value merge".split()}
WITHOUT_DOT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$")
# What escapes can make, and arguments in another encoding, and UTF-8 cannot hold.
HALF = re.compile("[\ud800-\udfff]")
# The keys need five.
MOST_DEEP = 20
DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]*)")


class Place(NamedTuple):
    """Where a value stands, for people; `order` sorts places, `text` is the value as written."""

    where: str
    order: int
    text: str


class Problem(NamedTuple):
    """`keys` are the dotted keys concerned; without a `place` it belongs to the first of them."""

    keys: tuple[str, ...]
    message: str
    place: Place | None = None


class Map(dict):
    """Keys and values; `places` has a Place for each key."""

    def __init__(self, values=(), places=()):
        super().__init__(values)
        self.places = dict(places)

    def put(self, key, value, place):
        self[key], self.places[key] = value, place

    def copy(self):
        return Map(self, self.places)


class Document:
    """`values`, a Map, and the `problems` found while reading them."""

    def __init__(self, values: Map, problems: list[Problem]):
        self.values, self.problems = values, problems

    def find(self, path) -> tuple[object, Place | None]:
        """The value at a path and its place; below what is not there, of the last that is."""
        value, place = self.values, None
        for key in path:
            if not (isinstance(value, Map) and key in value):
                break
            value, place = value[key], value.places[key]
        return value, place

    def place_of(self, path) -> Place | None:
        """The place of what is at a path, None if there is nothing."""
        owner = self.find(path[:-1])[0] if path[:-1] else self.values
        inside = len(path) == 1 or self.place_of(path[:-1])
        return owner.places.get(path[-1]) if inside and isinstance(owner, Map) else None

    def override(self, text: str, order: int):
        """Put the value of `section.key=value`, in YAML, in the place of what is there."""
        where = f"--set {shown(text)}"
        name, equals, value = text.partition("=")
        path = [part.strip() for part in name.split(".")]
        if not equals or not all(path):
            raise ConfigError(f"{where}: give KEY=VALUE, as in --set optimizer.lr=0.01")
        if HALF.search(name):
            raise ConfigError(f"{where}: half a character where a key belongs; write it in UTF-8")
        node = compose(value, lambda line: where)
        reader = Reader(lambda line: where, order)
        new = reader.read(node, tuple(path)) if node else None
        self.problems += reader.problems
        place = Place(where, order, shown(value))
        owner = self.values
        for depth, key in enumerate(path[:-1], 1):
            inside = owner.get(key)
            if not isinstance(inside, Map | None):
                message = f"has no keys inside, it is {kind(inside)}: set it as a whole"
                self.problems.append(Problem((dotted(path[:depth]),), message, place))
                return
            # A copy: other aliases of the same map are not meant.
            inside = Map() if inside is None else inside.copy()
            owner.put(key, inside, owner.places.get(key, place))
            owner = inside
        owner.put(path[-1], new, place)


def read_file(path) -> Document:
    """The YAML of a file; ConfigError where there is none, or none with keys at the top."""
    text = read_text(path)
    node = compose(text, lambda line: f"{path}:{line}" if line else f"{path}")
    if node is None:
        raise ConfigError(f"{path}: empty; give at least one key, as in `data_parallel_size: 2`")
    if not isinstance(node, yaml.MappingNode):
        what = "a list" if isinstance(node, yaml.SequenceNode) else "one value"
        raise ConfigError(
            f"{path}:{node.start_mark.line + 1}: {what} where keys belong; a configuration is "
            "lines as `data_parallel_size: 2`"
        )
    reader = Reader(lambda line: f"{path}:{line}")
    # A file that is one tagged map has no values.
    return Document(reader.read(node, ()) or Map(), reader.problems)


class Writer(yaml.SafeDumper):
    """Puts text in quotes that `Reader` takes for a number, and YAML 1.1 does not."""


Writer.add_implicit_resolver(TAG + "float", WITHOUT_DOT, [*"-+0123456789"])


def as_yaml(values: dict) -> str:
    """Plain values as a text that `read_file` reads as the same, in the same order."""
    return yaml.dump(values, Dumper=Writer, sort_keys=False)


class Reader:
    """Turns nodes into values. `where(line)` says where a line is, `problems` collects."""

    def __init__(self, where, order=None):
        self.where, self.order = where, order
        self.problems, self.seen, self.open = [], {}, set()
        self.scalars = yaml.SafeLoader("")

    def place(self, mark, node) -> Place:
        line = mark.line + 1
        return Place(self.where(line), self.order or line, as_written(node))

    def problem(self, path, node, message):
        place = self.place(node.start_mark, node)
        self.problems.append(Problem((dotted(path),), message, place))

    def read(self, node, path):
        """The value of a node; None after a problem."""
        if id(node) in self.open:
            self.problem(path, node, "an alias inside what it stands for, which has no end")
            return None
        if len(self.open) > MOST_DEEP:
            self.problem(path, node, f"lists and maps nested more than {MOST_DEEP} deep")
            return None
        if id(node) not in self.seen:
            self.open.add(id(node))
            self.seen[id(node)] = self.value(node, path)
            self.open.discard(id(node))
        return self.seen[id(node)]

    def value(self, node, path):
        ways = {
            yaml.MappingNode: ({TAG + "map"}, self.map),
            yaml.SequenceNode: ({TAG + "seq"}, self.row),
            yaml.ScalarNode: (SCALARS, self.scalar),
        }
        tags, read = ways[type(node)]
        if node.tag in tags:
            return read(node, path)
        tag = shown(node.tag.replace(TAG, "!!"))
        self.problem(
            path,
            node,
            f"the tag {tag} asks for more than numbers, text, lists and maps, and nothing of it "
            "was made or run; remove it",
        )
        return None

    def scalar(self, node, path):
        text, kind = node.value, node.tag.removeprefix(TAG)
        if HALF.search(text):
            self.problem(path, node, f"{shown(text)} has half a character; write it as it is")
            return None
        if kind in ("str", "timestamp", "value", "merge"):
            plain = node.style is None and kind == "str"
            return float(text) if plain and WITHOUT_DOT.fullmatch(text) else text
        try:
            value = self.scalars.construct_object(node)
        except (ValueError, LookupError, OverflowError):
            self.problem(path, node, f"{shown(text)} cannot be read as YAML's {kind}")
            return None
        if (kind == "int" and not DECIMAL.fullmatch(text)) or (kind == "float" and ":" in text):
            self.problem(
                path, node, f"{shown(text)} has another base to YAML; write it in decimal digits"
            )
            return None
        return value

    def row(self, node, path):
        return tuple(self.read(item, path) for item in node.value)

    def map(self, node, path):
        result, merged = Map(), []
        for key, value in node.value:
            if key.tag == TAG + "merge":
                merged.append((key, value))
                continue
            if not isinstance(key, yaml.ScalarNode) or HALF.search(key.value):
                self.problem(path, key, "a list, a map or half a character where a key belongs")
                continue
            here = (*path, key.value)
            if key.value in result:
                first = result.places[key.value].where
                self.problem(here, key, f"given twice, here and at {first}; keep one")
                continue
            result.put(key.value, self.read(value, here), self.place(key.start_mark, value))
        for key, value in merged:
            self.merge(result, key, value, path)
        return result

    def merge(self, result, key, value, path):
        """`<<: *other`: the keys of another map, or of several, that are not here already."""
        several = isinstance(value, yaml.SequenceNode)
        for node in value.value if several else [value]:
            other = self.read(node, path)
            if not isinstance(other, Map):
                self.problem(path, key, "<< takes a map, or a list of maps")
                continue
            for name in other:
                if name not in result:
                    result.put(name, other[name], other.places[name])


def dotted(path) -> str:
    return ".".join(shown(str(part)) for part in path)


def as_written(node) -> str:
    """A scalar or a short list of them in one line, else nothing."""
    if isinstance(node, yaml.ScalarNode):
        return shown(node.value)
    items = node.value if isinstance(node, yaml.SequenceNode) and len(node.value) < 10 else [None]
    if not all(isinstance(item, yaml.ScalarNode) for item in items):
        return ""
    return shown(f"[{', '.join(item.value for item in items)}]")


def kind(value) -> str:
    """What a value is, in words."""
    if isinstance(value, Map):
        return "a map" + (f" of {', '.join(map(shown, list(value)[:5]))}" if value else "")
    if isinstance(value, tuple):
        return f"a list of {len(value)}"
    words = {type(None): "null", bool: "true or false", int: "a whole number", float: "a number"}
    return words.get(type(value), "text")
