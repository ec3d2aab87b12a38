"""A file to YAML nodes, and the errors of what is no file, no text or no YAML."""

import difflib
from collections.abc import Callable
from pathlib import Path

import yaml

# Read by a pure Python parser, some 100 kB a second.
MOST_BYTES = 100_000


class ConfigError(ValueError):
    """A configuration that cannot be used. A line for each problem: where, which key, what."""


def read_text(path) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except IsADirectoryError:
        raise ConfigError(f"{path}: a folder; give a YAML file in it") from None
    except FileNotFoundError:
        names = [file.name for file in Path(path).parent.glob("*")]
        near = difflib.get_close_matches(Path(path).name, names, n=1)
        hint = f"; did you mean {Path(path).parent / near[0]}?" if near else ""
        raise ConfigError(f"{path}: no such file (looked from {Path.cwd()}){hint}") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{shown(str(path))}: cannot be read: {why}") from None
    if len(data) > MOST_BYTES:
        raise ConfigError(f"{path}: more than {MOST_BYTES} bytes; a configuration is one page")
    if b"\0" in data:
        raise ConfigError(f"{path}: binary, not text; give a YAML file in UTF-8")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}:{line}: not UTF-8 (byte 0x{data[error.start]:02x}); save the file as UTF-8"
        ) from None


def compose(text: str, where: Callable[[int], str]):
    """The root node of a text, None if it has none; ConfigError where it is no YAML."""
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(not_yaml(error, text, where)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{where(line)}: the character U+{error.character:04X} has no place in YAML; remove it"
        ) from None
    except RecursionError:
        raise ConfigError(f"{where(0)}: lists and maps nested too deep to be read") from None
    except (ValueError, OverflowError):
        # From chr(), which PyYAML does not guard.
        raise ConfigError(
            f"{where(0)}: an escape in double quotes, \\U and eight digits, that is no character"
        ) from None


def not_yaml(error, text, where):
    mark, began = error.problem_mark or error.context_mark, error.context_mark
    if error.context == "while scanning a simple key":
        # Noticed on the next line only.
        mark = began
    lines = text.split("\n")
    line = lines[mark.line].strip() if mark.line < len(lines) else ""
    words = f"{where(mark.line + 1)}: this is no YAML: {error.problem or error.context}"
    if error.problem == "mapping values are not allowed here":
        words = (
            f"{where(mark.line + 1)}: a colon too many, one missing in the line before, or spaces "
            "too many at its beginning"
        )
    elif "'\\t'" in words:
        words += "; indent with spaces, not with tabs"
    elif "expected a single document" in str(error.context):
        words += "; a file has one document, so remove the line ---"
    elif began and began.line != mark.line:
        words += f", in what began on line {began.line + 1}"
    return words + (f"; the line is {line[:60]!r}" if line else "")


def shown(text: str) -> str:
    """A text in one line of at most 60 characters."""
    text = text.encode("unicode_escape").decode() if not text.isprintable() else text
    return text if len(text) <= 60 else f"{text[:57]}..."
