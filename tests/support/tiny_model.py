"""A terminal for tests: commands that run in this process, a small text, and a model that was trained on it."""

import json
import random
import sys

import pytest

from gbattn.lab.command_line import main

PROGRAM = [sys.executable, "-P", "-c", "import sys; from gbattn.lab.command_line import main; sys.exit(main())"]


WORDS = "the a cat dog sees likes big small red house and runs to with under tree".split()


SMALL = "--vocab-size 300 --d-model 16 --n-layers 1 --n-heads 2 --max-length 16 --batch-size 4".split()


SHORT = [*SMALL, *"--steps 20 --prompt cat --sample-tokens 5".split()]


DIVERGING = "--learning-rate 1e30 --clip None --log-every 1".split()


def sentences(n, seed):
    draw = random.Random(seed)
    return "\n".join(" ".join(draw.choice(WORDS) for _ in range(8)) + "." for _ in range(n))


@pytest.fixture(scope="module")
def own_places(tmp_path_factory):
    """Nothing here reads or writes the caches of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GBATTN_CACHE", "GBATTN_RUNS"):
            patch.setenv(name, str(tmp_path_factory.mktemp("cache")))
        patch.delenv("GBATTN_RESULTS", raising=False)
        patch.delenv("GBATTN_CORPORA", raising=False)
        patch.setenv("COLUMNS", "100")
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory, own_places):
    folder = tmp_path_factory.mktemp("texts") / "tiny"
    folder.mkdir()
    for split, n, seed in (("train", 1500, 1), ("valid", 150, 2), ("test", 150, 3)):
        (folder / f"{split}.txt").write_text(sentences(n, seed))
    return str(folder)


@pytest.fixture
def call(capsys):
    """Run a command in this process: its exit code, what it wrote, what it told."""

    def run(*words):
        capsys.readouterr()
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def result(call):
    """Run a command that succeeds; its JSON, which is all that it may write."""

    def run(*words):
        code, out, err = call(*words, "--json")
        assert code == 0, err
        (line,) = out.splitlines()
        return json.loads(line, parse_constant=pytest.fail)

    return run


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "trained"
    assert main(["train", text, "--folder", str(folder), *SHORT]) == 0
    return folder


def copy_files(source, target):
    for path in source.iterdir():
        if path.is_file():
            (target / path.name).write_bytes(path.read_bytes())


def denied(outcome, code, *parts):
    """The exit code, nothing on standard output, and one line that says why."""
    got, out, err = outcome
    assert (got, out) == (code, ""), (got, out, err)
    last = err.strip().splitlines()[-1]
    assert last.startswith("gbattn") and "Traceback" not in err, err
    assert all(part in last for part in parts), last
