"""Fixtures that several files share."""

import pytest
from processes import ranks_alive

from s2s_lib.training.command import main


@pytest.fixture
def nothing_is_left():
    """After the test all ranks that it started are gone."""
    yield
    assert ranks_alive() == []


@pytest.fixture
def s2s(tmp_path, monkeypatch, capfd):
    """Calls the command in a temporary folder: its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        code = main([str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    call.folder = tmp_path
    return call
