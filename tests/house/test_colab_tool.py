"""What stands for Colab is Colab's: tools/try_colab.py, with a book of two notebooks and without an installation."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_notebook
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import try_colab
from try_colab import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = [Requirement(line) for line in try_colab.PINS.read_text().splitlines() if line and line[0] != "#"]


def needed(extras):
    """What the library needs with these extras, and what these extras need."""
    found = [*map(Requirement, PROJECT["dependencies"])]
    while extras:
        lines = map(Requirement, PROJECT["optional-dependencies"][extras.pop()])
        for need in lines:
            extras |= need.extras if need.name == "gbattn" else set()
            found += [need] * (need.name != "gbattn")
    return found


def test_what_colab_ships_is_allowed_so_that_installing_the_book_changes_none_of_it():
    shipped = {canonicalize_name(pin.name): str(pin.specifier) for pin in PINS}
    assert all(version.startswith("==") for version in shipped.values())
    needs = needed({"cli", "estimators", "pretrained"})
    assert {need.name for need in needs if canonicalize_name(need.name) not in shipped} == {"tyro"}  # as the file says
    for need in needs:
        version = shipped.get(canonicalize_name(need.name), "==0").removeprefix("==")
        assert need.name == "tyro" or need.specifier.contains(version), f"{need}, and Colab has {version}"


def test_pip_takes_the_wheel_with_the_extras_of_the_first_cell_and_keeps_the_versions(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nfor word; do echo "$word"; done >"{tmp_path}/words"\n')
    python.chmod(0o755)
    words = lambda: (tmp_path / "words").read_text().splitlines()
    programs = try_colab.pip_of_the_wheel(python, tmp_path / "a b.whl", tmp_path / "programs")
    before = words()
    assert before[-1] == f"{tmp_path}/a b.whl[cli,estimators,pretrained]"
    assert str(try_colab.PINS) == before[before.index("--constraint") + 1]
    subprocess.run([programs / "pip", "install", "-q", "/content/gbattn-book[cli]"], check=True)
    assert words()[-1] == f"{tmp_path}/a b.whl[cli]" and words()[:-1] == before[:-1]


@pytest.fixture
def book(tmp_path):
    """A folder with two notebooks, one of which ends in an error, and a file that git is to leave out."""
    tree = tmp_path / "a tree"
    (tree / "nbs").mkdir(parents=True)
    (tree / "results").mkdir()
    (tree / "results" / "reported.json").write_text("[]")
    (tree / ".gitignore").write_text("*.log\n")
    (tree / "some.log").touch()
    first = try_colab.first_cell(ROOT / "nbs" / "index.ipynb")
    for name, code in (("good", "pass"), ("bad", "print('so far')\nraise KeyError('lost')")):
        look = "import pathlib; here = pathlib.Path.cwd(); home = pathlib.Path.home()\n"
        look += "assert here.name == 'nbs' and here.parents[1].name == 'content' and home == here.parents[2], here\n"
        look += "assert not (here.parent / 'some.log').exists() and len([*home.glob('content/*')]) == 2"
        notebook = new_notebook(cells=[new_code_cell(source) for source in (first, look, code)])
        (tree / "nbs" / f"{name}.ipynb").write_text(json.dumps(notebook))
    return tree


def test_a_notebook_runs_alone_in_a_clone_of_this_tree_and_its_first_error_is_told(book, tmp_path, monkeypatch):
    monkeypatch.setenv("GBATTN_RESULTS", "elsewhere")
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "pip").write_text("#!/bin/sh\n")
    (tmp_path / "programs" / "pip").chmod(0o755)
    there = try_colab.committed(book, tmp_path / "book.git")
    ends = {}
    for name in ("good", "bad"):
        folder = tmp_path / name
        environment = try_colab.variables(folder, (tmp_path / "programs", Path(sys.executable).parent), there)
        assert "GBATTN_RESULTS" in os.environ and "GBATTN_RESULTS" not in environment
        seconds, ends[name] = try_colab.tried(book / "nbs" / f"{name}.ipynb", folder, environment)
        assert seconds > 0
    assert ends["good"] == ""
    assert ends["bad"].rstrip().endswith("KeyError: 'lost'") and "so far" in ends["bad"]
