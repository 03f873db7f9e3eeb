"""`make book` knows when to build, what to keep and what to say: tried in a folder with a space in its name."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_notebook

ROOT = Path(__file__).parents[2]

# Stands for the program that runs the notebooks: notes whether it found a cache, and fails where the page says so.
RUN_NOTEBOOKS = """
import sys
from pathlib import Path

cache = Path(sys.argv[1])
with open("calls", "a") as calls:
    print("cached" if (cache / "one").exists() else "anew", file=calls)
cache.mkdir(parents=True, exist_ok=True)
(cache / "one").touch()
if "wrong" in Path("nbs/index.md").read_text():
    sys.exit("nbs/index.md: 1 / 0")
"""

JUPYTER_BOOK = """
from pathlib import Path

Path("_build/html").mkdir(parents=True, exist_ok=True)
Path("_build/html/index.html").touch()
"""


class Checkout:
    """A checkout with an environment in which only Jupyter Book is there, and is not real."""

    def __init__(self, root):
        self.root = root
        shutil.copy(ROOT / "Makefile", root)
        shutil.copytree(ROOT / "tools", root / "tools", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "constraints.txt", "_config.yml", "gbattn/first.py", "nbs/index.md"):
            self.write(name, "")
        self.write("tools/run_notebooks.py", RUN_NOTEBOOKS)
        venv.create(root / ".venv", symlinks=True)
        self.program(".venv/bin/jupyter-book", JUPYTER_BOOK)
        self.write(".venv/.installed", "")

    def write(self, name, text):
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def program(self, name, text):
        """Write a Python program; a shell starts it because `#!` cannot name a path with a space."""
        self.write(f"{name}.py", text)
        self.write(name, f'#!/bin/sh\nexec "{sys.executable}" "{self.root / name}.py" "$@"\n')
        (self.root / name).chmod(0o755)

    def make(self, *arguments):
        clean = {key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key != "PYTHON"}
        return subprocess.run(["make", *arguments], cwd=self.root, env=clean, capture_output=True, text=True)

    def book(self):
        """Make the book; return how Jupyter Book was called, if it was."""
        calls = self.root / "calls"
        calls.unlink(missing_ok=True)
        result = self.make("book")
        assert result.returncode == 0, result.stdout + result.stderr
        assert result.stdout.splitlines()[-1] == f"Open {(self.root / '_build/html/index.html').as_uri()}"
        return calls.read_text().split() if calls.exists() else []


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "a folder"
    root.mkdir()
    return Checkout(root)


def test_it_builds_when_something_changed(checkout):
    assert checkout.book() == ["anew"]
    assert checkout.book() == []

    checkout.write("nbs/index.md", "A page changed.")
    assert checkout.book() == ["cached"]
    checkout.write("gbattn/first.py", "changed = True")
    assert checkout.book() == ["anew"]
    checkout.write("results/record.json", "{}")
    assert checkout.book() == ["anew"]
    (checkout.root / "results/record.json").unlink()
    assert checkout.book() == ["anew"]
    shutil.rmtree(checkout.root / "_build" / "html")
    assert checkout.book() == ["cached"]


def test_an_export_that_changes_nothing_builds_nothing(checkout):
    checkout.write("gbattn/first.py", "x = 1")
    checkout.book()
    checkout.write("gbattn/first.py", "x = 1")
    assert checkout.book() == []


def test_a_zip_has_the_site_in_one_folder(checkout):
    result = checkout.make("zip")
    assert result.returncode == 0, result.stdout + result.stderr
    shutil.unpack_archive(checkout.root / "_build/gbattn-book.zip", checkout.root / "unpacked")
    assert (checkout.root / "unpacked/html/index.html").exists()


def test_a_page_that_is_gone_is_gone_from_the_book(checkout):
    checkout.book()
    checkout.write("_build/html/old.html", "")
    checkout.write("nbs/index.md", "changed")
    checkout.book()
    assert not (checkout.root / "_build/html/old.html").exists()


def test_a_book_that_failed_fails_until_it_is_mended(checkout):
    checkout.write("nbs/index.md", "wrong")
    for _ in range(2):
        result = checkout.make("book")
        assert result.returncode != 0
        assert "index.md: 1 / 0" in result.stderr
        assert "The book was not built" in result.stderr
        assert "Open file:" not in result.stdout
    checkout.write("nbs/index.md", "mended")
    assert checkout.book() == ["cached"]


@pytest.mark.parametrize(
    "what, sentence",
    [
        (None, 'there is no "./python" here'),
        ("sys.version_info = (3, 10, 0)", "is Python 3.10"),
        ("sys.modules['ensurepip'] = None", "-venv`"),
    ],
    ids=["missing", "too old", "without venv"],
)
def test_a_python_that_will_not_do_is_refused_in_a_sentence(checkout, what, sentence):
    (checkout.root / ".venv/.installed").unlink()
    if what:
        checkout.program("python", f"import sys\n{what}\nexec(open(sys.argv[1]).read())")
    result = checkout.make("book", "PYTHON=./python")
    assert result.returncode != 0
    assert not (checkout.root / ".venv/.installed").exists()
    said = [line for line in result.stderr.splitlines() if not line.startswith("make")]
    assert len(said) == 1 and sentence in said[0], result.stderr


def test_help_is_the_default(checkout):
    result = checkout.make()
    assert result.returncode == 0
    for name in ("book", "pdf", "zip", "test", "lab", "bench", "clean", "lint", "export"):
        assert f"  make {name} " in result.stdout


def test_a_kernel_takes_no_module_from_the_folder_of_the_notebooks(tmp_path):
    for name in ("_ext", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "settings.ini", tmp_path)
    shutil.copy(ROOT / "_config.yml", tmp_path)
    (tmp_path / "nbs").mkdir()
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}, "language_info": {"name": "python"}}
    notebook = new_notebook(cells=[new_code_cell("import json, numpy, beside")], metadata=kernel)
    (tmp_path / "nbs" / "page.ipynb").write_text(json.dumps(notebook))
    (tmp_path / "nbs" / "beside.py").touch()  # such as the book's support
    here = {name for name in sys.stdlib_module_names if importlib.util.find_spec(name)}
    for name in {*here, "numpy", "ipykernel", "IPython", "tornado", "zmq"}:
        (tmp_path / "nbs" / f"{name}.py").write_text(f"open('executed', 'a').write('{name} '); raise SystemExit")
    command = [sys.executable, "-P", "tools/run_notebooks.py", "cache"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert not (tmp_path / "nbs" / "executed").exists(), (tmp_path / "nbs" / "executed").read_text()
    assert done.returncode == 0 and "nbs/page.ipynb: " in done.stdout, done.stderr
