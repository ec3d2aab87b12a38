"""The public names: importable from s2s_lib itself, documented, loaded only when used."""

import inspect
import pathlib
import re
import subprocess
import sys

import pytest

import s2s_lib


@pytest.mark.parametrize("name", s2s_lib.__all__)
def test_a_public_name_is_there_and_says_what_it_is(name):
    thing = getattr(s2s_lib, name)
    if not callable(thing):
        # A constant: what it is stands above it in its file.
        return
    doc = inspect.getdoc(thing) or ""
    assert len(doc) > 30 and (doc[0].isupper() or doc[0] in "`'"), f"{name}: {doc[:60]!r}"
    assert inspect.getmodule(thing).__name__.startswith("s2s_lib")


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="all_redcue"):
        s2s_lib.all_redcue  # noqa: B018


def test_the_package_and_its_cluster_do_not_load_torch():
    program = (
        "import sys, s2s_lib; s2s_lib.Cluster, s2s_lib.preset; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_every_public_name_is_used_in_a_test():
    tests = pathlib.Path(__file__).parent
    text = "\n".join(p.read_text() for p in tests.glob("test_*.py") if p.name != "test_public.py")
    used = re.compile(r"\b(\w+)(?:\(| as |\))")
    assert not {*s2s_lib.__all__} - {*used.findall(text)}
