"""Text that goes to a terminal."""

import sys

import pytest

from gbattn.ground.arguments import ArgumentError, require
from gbattn.ground.terminal import printable, with_progress


def test_a_progress_bar_shows_the_steps_and_is_not_needed(monkeypatch, capsys):
    steps = [3, 1, 2]
    assert with_progress(steps, False, "blocks") is steps
    assert list(with_progress(steps, True, "blocks")) == steps and "blocks" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert with_progress(steps, True, "blocks") is steps


def test_control_characters_of_a_name_do_not_reach_the_terminal():
    name = "a\x1b[2J\x07\x9b\r\u202eb"
    assert printable(name) == r"a\x1b[2J\x07\x9b\r\u202eb" and printable("tab\tand\nline é") == "tab\tand\nline é"
    with pytest.raises(ArgumentError) as caught:
        require(False, "folder", name, "another")
    assert not {*"\x1b\x07\x9b\r\u202e"} & {*str(caught.value)}
