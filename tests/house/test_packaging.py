"""What a user installs is what the repository says, and all its files say the same."""

import ast
import configparser
import email
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from refusals import refused

import gbattn

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / "settings.ini")
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
REPOSITORY = PROJECT["urls"]["Repository"]
NOTEBOOKS = sorted((ROOT / "nbs").glob("*.ipynb"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def named(path):
    return path.name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy because setuptools leaves folders behind."""
    folder = tmp_path_factory.mktemp("a folder")
    copy = folder / "gbattn"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "_build", "build", "*.egg-info", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, copy]
    result = subprocess.run(pip, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (file,) = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        yield archive


def metadata(wheel, name):
    (path,) = (n for n in wheel.namelist() if n.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def test_the_wheel_holds_the_library_and_nothing_else(wheel):
    folder = ROOT / "gbattn"
    patterns = ("*.py*", "ground/*.py", "lab/**/*.py", "lab/catalogue/*.toml")
    files = [path for pattern in patterns for path in folder.glob(pattern)]
    library = {path.relative_to(ROOT).as_posix() for path in files if path.is_file()} | {"gbattn/py.typed"}
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == library, f"missing: {sorted(library - held)}; not the library: {sorted(held - library)}"


@pytest.fixture
def installed(wheel, tmp_path):
    """Run the program of the wheel far from any checkout: its exit code and what it told."""
    wheel.extractall(tmp_path / "site")
    (tmp_path / "here").mkdir()
    environment = {name: x for name, x in os.environ.items() if not name.startswith("GBATTN_")}
    environment |= {"PYTHONPATH": str(tmp_path / "site"), "GBATTN_CACHE": str(tmp_path / "cache")}

    def run(*words, **places):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "gbattn", *words],
            capture_output=True,
            text=True,
            cwd=tmp_path / "here",
            env=environment | places,
        )
        return done.returncode, done.stdout, done.stderr

    return run


def test_the_program_works_where_the_book_is_not(installed, tmp_path):
    """What is no part of the package is asked for by the command that fetches it."""
    fetch = f"git clone {REPOSITORY}, then GBATTN_RESULTS=gbattn/results"
    code, out, err = installed("run")
    assert (code, err) == (0, "") and "quick" in out and "mini" in out
    code, out, err = installed("compare", "mini")
    assert (code, out) == (2, "") and "NAME: got 'mini', of which results has no run" in err and fetch in err
    code, out, err = installed("run", "mini")
    assert (code, out) == (1, "") and "run mini-sweep first" in err.splitlines()[-1] and fetch in err.splitlines()[-1]
    code, out, err = installed("run", "mini-sweep")
    assert (code, out) == (2, "") and "--corpora: got nothing; want a folder that holds wikipedia-en-2019" in err
    assert list((tmp_path / "here").iterdir()) == []
    records = str(ROOT / "results")  # what the command fetches
    code, out, err = installed("compare", "mini", GBATTN_RESULTS=records)
    assert (code, err) == (0, "") and "paired by seed" in out
    assert installed("compare", "mini", "--results", records) == (code, out, err)
    code, out, err = installed("run", "mini", GBATTN_RESULTS=records)  # where nothing is left to do
    assert code == 0 and "30 of  30 runs" in out


def test_an_export_leaves_the_catalogue_alone():
    """`make export` clears the library's modules first, and no more."""
    printed = subprocess.run(["make", "-n", "export"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line for line in printed.splitlines() if "gbattn/" in line] == ["rm -f gbattn/[!_]*.py"]


def test_the_wheel_says_what_it_is(wheel):
    about = email.message_from_string(metadata(wheel, "METADATA"))
    assert about["Name"] == "gbattn"
    assert about["Version"] == SETTINGS["DEFAULT"]["version"]
    assert about["Requires-Python"] == ">=3.11"
    assert about["License-Expression"] == "Apache-2.0"
    assert about.get_all("Provides-Extra") == [*PROJECT["optional-dependencies"]]
    always = {Requirement(r).name for r in about.get_all("Requires-Dist") if "extra ==" not in r}
    assert always == {"torch", "numpy"}
    entry_points = configparser.ConfigParser(delimiters="=")
    entry_points.read_string(metadata(wheel, "entry_points.txt"))
    assert entry_points["nbdev"]["gbattn"] == "gbattn._modidx:d"
    assert entry_points["console_scripts"]["gbattn"] == "gbattn.lab.command_line:main"


def test_modules_load_torch_and_numpy_only():
    """Torch itself may load what it finds, so it goes first. `gbattn.pretrained` derives from transformers."""
    program = """
import importlib, pkgutil, sys, numpy, torch
before = set(sys.modules)
import gbattn
for module in pkgutil.iter_modules(gbattn.__path__, "gbattn."):
    if not module.name.endswith(("_modidx", "pretrained")):
        importlib.import_module(module.name)
from gbattn.least_squares import OLSAttention
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
known = {"gbattn", "torch", "numpy", *sys.stdlib_module_names}
print(*sorted(name for name in loaded - known if not name.startswith("_")))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not result.stdout.split(), (
        f"importing gbattn's modules also loads {result.stdout.strip()}: import it in the function that needs it."
    )


FRONT_DOOR = """
import rlcompleter, sys, numpy, torch
before = set(sys.modules)
import gbattn
assert not [name for name in sys.modules if name.startswith("gbattn.")]
found = [rlcompleter.Completer({"gbattn": gbattn}).complete(f"gbattn.{name}"[:-1], 0) for name in gbattn.__all__]
assert all(found) and set(gbattn.__all__) <= set(dir(gbattn))
from gbattn import *
loaded = {name.partition(".")[0] for name in set(sys.modules) - before} - {"gbattn", "torch", "numpy"}
assert not [name for name in loaded - set(sys.stdlib_module_names) if not name.startswith("_")], loaded
layers = [gbattn.make_attention(name, 8, 2) for name in ("multi_head", "linear", "twicing", "boosted")]
assert isinstance(layers[-1], GradientBoostedAttention)
LanguageModel(ModelConfig(vocab_size=8, d_model=8, n_layers=1, n_heads=2))
try:
    gbattn.Boosted
except AttributeError as error:
    print(error)
"""


def test_the_front_door():
    """The first names of the library come from gbattn itself, with torch and NumPy only, and editors see them."""
    result = subprocess.run([sys.executable, "-c", FRONT_DOOR], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "module 'gbattn' has no attribute 'Boosted'\n"), result.stderr
    stub = ast.parse((ROOT / "gbattn" / "__init__.pyi").read_text())
    named = {
        alias.asname: part.module for part in stub.body if isinstance(part, ast.ImportFrom) for alias in part.names
    }
    assert named == {name: f"gbattn.{module}" for name, module in gbattn._MODULE_OF.items()}


def test_without_scikit_learn_only_the_estimators_are_missing():
    program = """
import importlib, pkgutil, sys
sys.modules.update(sklearn=None, scipy=None)  # as where neither is installed
import gbattn
for module in pkgutil.iter_modules(gbattn.__path__, "gbattn."):
    loaded = importlib.import_module(module.name)
    for name in getattr(loaded, "__all__", ()):
        try:
            getattr(loaded, name)
        except ValueError as error:
            print(name, error)
import torch
from gbattn.layers import make_attention
for name in ("multi_head", "linear", "twicing", "boosted"):
    make_attention(name, 8, 2)(torch.ones(1, 3, 8))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    cure = "sklearn: got a Python that cannot import it; want pip install 'gbattn[estimators] @ git+https://github.com/gbattn/gbattn'"
    estimators = ("GradientBoosting", "GradientBoostingClassifier", "LeastSquares")
    assert sorted(result.stdout.splitlines()) == [f"{name} {cure}" for name in estimators]


def test_one_version():
    said = {
        "settings.ini": SETTINGS["DEFAULT"]["version"],
        "CITATION.cff": str(CITATION["version"]),
        "gbattn/__init__.py": gbattn.__version__,
    }
    assert len(set(said.values())) == 1, f"the files name different versions: {said}"


def test_the_changelog_knows_the_version():
    version = SETTINGS["DEFAULT"]["version"]
    assert re.search(rf"^## \[?{re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M), (
        f"CHANGELOG.md has no section for version {version}"
    )


def test_one_licence():
    assert PROJECT["license"] == CITATION["license"] == "Apache-2.0"
    assert (ROOT / "LICENSE").read_text().split()[:2] == ["Apache", "License"]


def test_one_repository():
    book = yaml.safe_load((ROOT / "_config.yml").read_text())
    said = {
        "settings.ini": SETTINGS["DEFAULT"]["git_url"],
        "CITATION.cff": CITATION["repository-code"],
        "_config.yml": book["repository"]["url"],
    }
    wrong = {file: url for file, url in said.items() if url != REPOSITORY}
    assert not wrong, f"pyproject.toml says that the repository is {REPOSITORY}, but: {wrong}"


@pytest.mark.parametrize("file", [ROOT / "README.md", *NOTEBOOKS], ids=named)
def test_readers_are_sent_to_the_repository(file):
    if file.suffix == ".ipynb":
        cells = json.loads(file.read_text())["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    else:
        text = file.read_text()
    sent_to = set(re.findall(r"https://github\.com/[\w.-]+/gbattn\b", text))
    assert sent_to == {REPOSITORY}, f"{file.name} names {sorted(sent_to)}, and the repository is {REPOSITORY}"


# ---- The first cell of every notebook ----

FIRST_CELL = "".join(json.loads((ROOT / "nbs" / "00_conventions.ipynb").read_text())["cells"][0]["source"])
RUN = """
import os, sys
from IPython.core.interactiveshell import InteractiveShell
sys.modules.update(dict.fromkeys(sys.argv[2:]))
error = InteractiveShell().run_cell(sys.argv[1]).error_in_exec
print("\\nEND", os.getcwd(), type(error).__name__, error, sep="|")
"""


@pytest.fixture
def first_cell(tmp_path):
    """Run the first cell in an empty folder, without some packages: the folder where it ends, its error and what it
    printed. On Colab, git and pip only take notes and end with these codes."""
    content, programs, alone = (tmp_path / name for name in ("content", "programs", "alone"))
    programs.mkdir()
    alone.mkdir()
    environment = {name: x for name, x in os.environ.items() if not name.startswith("GBATTN_")}
    environment |= {"PYTHONPATH": str(ROOT), "PATH": f"{programs}:{os.environ['PATH']}"}

    def run(*without, colab=False, git=0, pip=0):
        content.mkdir(exist_ok=True) if colab else None
        clone = f"mkdir -p {content}/gbattn-book/nbs {content}/gbattn-book/results\n"
        clone += f"touch {content}/gbattn-book/results/reported.json\n"
        for name, code, work in (("git", git, clone), ("pip", pip, "")):
            note = f'#!/bin/sh\necho {name} "$@" >>{tmp_path}/notes\n'
            (programs / name).write_text(note + (f"exit {code}\n" if code else work))
            (programs / name).chmod(0o755)
        source = FIRST_CELL.replace("/content", str(content))
        command = [sys.executable, "-P", "-c", RUN, source, *without]
        done = subprocess.run(command, cwd=alone, env=environment, capture_output=True, text=True)
        printed, end = done.stdout.rsplit("END|", 1)
        return *end.strip().split("|", 2), printed

    run.notes = lambda: (tmp_path / "notes").read_text().splitlines()
    run.content, run.alone = content, alone
    return run


def test_the_first_cell_stops_where_the_library_or_a_package_of_a_page_is_missing(first_cell):
    for name in ("gbattn", "scipy"):
        folder, kind, error, _ = first_cell(name)
        assert (folder, kind) == (str(first_cell.alone), "SystemExit") and "make lab" in error
        assert f"no {name}:" in error and f"{REPOSITORY}'" in error and "\n" not in error


def test_the_first_cell_mentions_missing_records_and_goes_on(first_cell):
    folder, kind, _, printed = first_cell()
    assert kind == "NoneType" and "records" in printed and "GBATTN_RESULTS" in printed
    (first_cell.alone / "results").mkdir()
    (first_cell.alone / "results" / "reported.json").touch()
    assert first_cell()[1::2] == ("NoneType", "\n")


@pytest.mark.parametrize("codes", [{"git": 128}, {"pip": 1}], ids=str)
def test_the_first_cell_stops_on_colab_where_the_book_cannot_be_had(first_cell, codes):
    _, kind, error, _ = first_cell("gbattn", colab=True, **codes)
    assert kind == "SystemExit" and error and "\n" not in error


def test_the_first_cell_fetches_the_book_once_on_colab_with_what_its_pages_use(first_cell):
    for _ in range(2):
        assert first_cell(colab=True)[:2] == (f"{first_cell.content}/gbattn-book/nbs", "NoneType")
    clone, install = first_cell.notes()
    assert clone.startswith("git clone") and install.startswith("pip install")
    installed = set(re.search(r"gbattn-book\[([\w,]+)\]", install)[1].split(","))
    needed = {canonicalize_name(name) for name in re.search(r'packages = "gbattn (.*)"', FIRST_CELL)[1].split()}
    found = set()
    while installed:
        for line in PROJECT["optional-dependencies"][installed.pop()]:
            requirement = Requirement(line)
            found.add(canonicalize_name(requirement.name))
            installed |= requirement.extras
    assert needed - {"sklearn"} | {"scikit-learn"} <= found | {"gbattn"}


def test_the_first_cell_asks_for_every_package_that_a_page_imports():
    asked = {*re.search(r'packages = "(.*)"', FIRST_CELL)[1].split(), *sys.stdlib_module_names}
    asked |= {
        "torch",
        "numpy",
        "IPython",
        "filelock",
        "tqdm",
        "docstring_parser",
        "huggingface_hub",
        "matplotlib_inline",
    }  # come along
    asked |= {"babel", "myst_nb", "submitit", "timm", "torchvision"}  # a page does without
    asked |= {"support"}  # beside the notebooks
    imported = set()
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text())["cells"][1:]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code" and not re.search(r"^[!%]", source, re.M):
                for node in ast.walk(ast.parse(source)):
                    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                    imported |= {name.split(".")[0] for name in names}
                    if isinstance(node, ast.ImportFrom):
                        imported.add(node.module.split(".")[0])
    assert "scipy" in imported and imported <= asked


@pytest.mark.parametrize("file", WORKFLOWS, ids=named)
def test_a_workflow_calls_commands_that_exist(file):
    workflow = yaml.safe_load(file.read_text())
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    called = {target for step in steps for target in re.findall(r"\bmake ([a-z]+)", step.get("run", ""))}
    assert called, f"{file.name} calls no make command"
    unknown = sorted(called - targets)
    assert not unknown, f"{file.name} calls `make {' '.join(unknown)}`, which the Makefile does not have"


def test_workflows_ask_for_no_more_than_reading_and_publishing():
    for file in WORKFLOWS:
        workflow = yaml.safe_load(file.read_text())
        assert workflow["permissions"] == {"contents": "read"}, file.name
        asked = {name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job}
        assert asked in ({}, {"publish": {"pages": "write", "id-token": "write"}}), file.name


def bounds(name):
    """The releases of a package that pyproject.toml allows, as (operator, version)."""
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    (need,) = (need for needs in lists for need in map(Requirement, needs) if need.name == name)
    return {bound.operator: bound.version for bound in need.specifier}


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_the_oldest_release_that_is_tested_is_the_oldest_that_is_allowed(package):
    """The version is said in pyproject.toml, and nowhere else."""
    printed = subprocess.run(["make", "-n", "oldest"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"{package}=={bounds(package)['>=']}" in printed.split()


def test_the_chapter_wants_the_releases_of_transformers_that_are_allowed(monkeypatch):
    """No extra protects a reader whose machine comes with another release."""
    pytest.importorskip("transformers")
    allowed = bounds("transformers")
    for other in ("4.57.1", "5.14.9", f"{allowed['<']}.0.dev0", f"{allowed['<']}.0", "6.0.0"):
        monkeypatch.setattr("gbattn.ground.packages.version", lambda package, it=other: it)
        monkeypatch.delitem(sys.modules, "gbattn.pretrained", raising=False)
        with refused("transformers", f">={allowed['>=']},<{allowed['<']}: pip install", got=other):
            importlib.import_module("gbattn.pretrained")
        assert "gbattn.pretrained" not in sys.modules


def test_every_dependency_is_pinned():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    loose = [str(pin) for pin in pins if not re.fullmatch(r"==[^*+,]+", str(pin.specifier))]
    assert not loose, f"constraints.txt must name one public version each: {loose}"

    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    wanted = [*PROJECT["dependencies"], *(r for extra in PROJECT["optional-dependencies"].values() for r in extra)]
    for need in map(Requirement, wanted):
        name = canonicalize_name(need.name)
        if name == "gbattn":
            continue
        assert name in versions, f"constraints.txt does not pin {name}, which pyproject.toml asks for"
        assert need.specifier.contains(versions[name]), f"constraints.txt pins {name} outside `{need}`"
