"""Try the library as a user installs it: the wheel in a fresh environment, once for each extra, with nothing else.

    python tools/try_extras.py [EXTRA ...]

`library` is the wheel without an extra. The extras `book` and `dev` are what `make book` and `make test` use.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Every module loads, and every name in it is there or says which extra has it.
NAMES = """
import importlib, pkgutil, sys
import gbattn
missing = set()
for module in pkgutil.iter_modules(gbattn.__path__, "gbattn."):
    if module.name in ("gbattn._modidx", "gbattn.__main__"):
        continue
    try:
        loaded = importlib.import_module(module.name)
        for name in getattr(loaded, "__all__", ()):
            try:
                getattr(loaded, name)
            except ValueError as error:
                missing.add(str(error).partition("gbattn[")[2].partition("]")[0])
    except ValueError as error:
        missing.add(str(error).partition("gbattn[")[2].partition("]")[0])
missing = sorted(missing - {""}) if "" not in missing else sorted(missing)
assert missing == sorted({"estimators", "pretrained"} - set(sys.argv[1:])), missing
"""

LIBRARY = """
import torch
import gbattn
from gbattn.layers import register
from gbattn.conventions import COLOURS, seed_everything
for name in gbattn.__all__:
    getattr(gbattn, name)
for attention in ("multi_head", "linear", "twicing", "boosted"):
    layer = gbattn.make_attention(attention, 8, 2)
    x = torch.randn(2, 5, 8)
    assert torch.allclose(layer(x, causal=True), layer.explain(x, causal=True).output, atol=1e-5)
    config = gbattn.ModelConfig(vocab_size=8, d_model=8, n_layers=1, n_heads=2, attention=attention)
    model = gbattn.LanguageModel(config)
    model(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long)).backward()
    model.generate(torch.zeros(1, 1, dtype=torch.long), 3)
try:
    model.save_pretrained("model")
except ValueError as error:
    assert "pip install 'gbattn[train]" in str(error)
else:
    raise AssertionError("safetensors is there")
"""

ESTIMATORS = """
import numpy as np
from gbattn.boosting import GradientBoosting, GradientBoostingClassifier
from gbattn.least_squares import LeastSquares
X = np.random.default_rng(0).standard_normal((40, 3))
y = X @ [1.0, 2.0, 3.0]
assert LeastSquares().fit(X, y).score(X, y) > 0.99
assert GradientBoosting().fit(X, y).score(X, y) > 0.5
assert GradientBoostingClassifier().fit(X, y > 0).score(X, y > 0) > 0.8
"""

DATA = """
from gbattn.corpora import TokenStream
from gbattn.lab.token_cache import load_corpus
corpus = load_corpus("python-docs", vocab_size=300, max_train_tokens=2000, cache="cache")
assert corpus.decode(corpus.encode("A list is")) == "A list is"
TokenStream(corpus.train, 16, 2, seed=0).batch(0)
"""

TRAIN = """
from types import SimpleNamespace
import numpy as np
from gbattn import LanguageModel, ModelConfig
from gbattn.comparison import compare, equivalent, holm
from gbattn.training import TrainConfig, evaluate
from gbattn.lab.checkpoints import checkpoints, load_weights
from gbattn.lab.training import train
text = np.arange(2000) % 7
corpus = SimpleNamespace(train=text[:1500], valid=text[1500:])
model = LanguageModel(ModelConfig(vocab_size=7, max_length=16, d_model=8, n_layers=1, n_heads=2))
config = TrainConfig(steps=20, batch_size=8, learning_rate=0.01, evaluate_every=10)
train(model, corpus, config, folder="run", tensorboard=True)
evaluate(model, text)
load_weights(model, checkpoints("run")[20])
model.save_pretrained("model")
LanguageModel.from_pretrained("model")
holm([0.01, 0.2])
"""

PRETRAINED = """
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from gbattn.pretrained import GbattnConfig, GbattnForCausalLM, GbattnModel, boost, unboost
sizes = dict(n_embd=32, n_layer=2, n_head=4, n_positions=16, vocab_size=50, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
ids = torch.randint(50, (2, 7))
before = model(ids).logits
assert torch.equal(boost(model)(ids).logits, before)
model.save_pretrained("boosted")
unboost(model)
config = GbattnConfig(vocab_size=50, d_model=16, n_layers=1, n_heads=2, attention="boosted")
model = GbattnForCausalLM(config)
model.save_pretrained("model")
again = AutoModelForCausalLM.from_pretrained("model")
assert torch.equal(again.eval()(ids).logits, model.eval()(ids).logits)
rows = [dict(input_ids=row, labels=row) for row in ids]
Trainer(model, TrainingArguments("run", max_steps=2, report_to=[], use_cpu=True), train_dataset=rows).train()
model.generate(ids[:1], max_new_tokens=3, do_sample=False)
"""

CLI = """
import subprocess, sys
from pathlib import Path
program = Path(sys.executable).with_name("gbattn")
small = "--vocab-size 300 --d-model 16 --n-layers 1 --n-heads 2 --max-length 32"
for words in (
    "--version",
    "--help",
    "run",
    "tokenize --vocab-size 300 --max-train-tokens 5000",
    f"train --folder model {small} --max-train-tokens 5000 --steps 20 --evaluate-every 10 --tensorboard",
    "evaluate --folder model --split valid",
    "generate --folder model",
    "diagnose model --tokens 2000 --sample 256",
    f"bench --rounds 1 {small}",
    "run quick --results records",
    "compare quick --results records",
):
    done = subprocess.run([program, *words.split()], capture_output=True, text=True)
    print(words, done.returncode, *done.stderr.splitlines()[-1:])
    assert done.returncode == 0, done.stderr
"""

CLUSTER = """
from gbattn.lab.queue import run_experiment
from gbattn.lab.catalogue import EXPERIMENTS
from dataclasses import replace
small = replace(EXPERIMENTS["quick"], name="small", seeds=(1,))
records = run_experiment(small, folder="records", work="work", cluster={"cluster": "local", "timeout_min": 20})
assert len(records) == 3
"""

# A name is that of a notebook all of whose cells run with the extra.
TRIES = {
    "library": [LIBRARY],
    "estimators": [ESTIMATORS],
    "data": [DATA],
    "train": [TRAIN],
    "cli": [CLI],
    "cluster": [CLUSTER],
    "pretrained": [PRETRAINED, "W_your_model"],
}


def code_of(name):
    """The code cells of a notebook as a script, without the one that only Colab runs."""
    cells = json.loads((ROOT / "nbs" / f"{name}.ipynb").read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return "\n".join(source for source in code if "#| eval: false" not in source)


def five_lines():
    """The snippets of the first page."""
    return "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S))


def built(folder):
    """The wheel, from a copy, because setuptools leaves folders behind."""
    ignored = shutil.ignore_patterns(".*", "_build", "build", "results", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "copy", ignore=ignored)
    pip = [sys.executable, "-P", "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", folder, folder / "copy"], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def fresh_python(folder, of=sys.executable):
    """The Python of a new environment, and the command that installs there."""
    python = folder / "venv" / "bin" / "python"
    subprocess.run([of, "-P", "-m", "venv", folder / "venv"], check=True)
    uv = shutil.which("uv")
    pip = [python, "-P", "-m", "pip", "install", "--no-compile"]
    return python, [*([uv, "pip", "install", "--python", python] if uv else pip), "--quiet"]


def bare():
    """The variables of this process without those that speak to Python or to gbattn, and one thread."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("GBATTN_", "PYTHON"))}
    return kept | {"OMP_NUM_THREADS": "1"}


def tried(extra, wheel, folder):
    """Install the wheel with one extra and run what belongs to it; return what failed."""
    python, install = fresh_python(folder)
    what = str(wheel) + ("" if extra == "library" else f"[{extra}]")
    subprocess.run([*install, "-c", ROOT / "constraints.txt", what], check=True)
    environment = bare() | {"GBATTN_CACHE": str(folder / "cache"), "PYTHONSAFEPATH": "1"}
    failed = []
    scripts = [NAMES, five_lines(), *(x if "\n" in x else code_of(x) for x in TRIES[extra])]
    for number, script in enumerate(scripts):
        place = folder / f"{number}"
        place.mkdir()
        (place / "script.py").write_text(script, "utf-8")
        done = subprocess.run([python, "script.py", extra], cwd=place, env=environment, capture_output=True, text=True)
        if done.returncode:
            failed.append(f"script {number} of {extra}:\n{script.strip()[:200]} …\n{done.stderr[-3000:]}")
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=f"some of {', '.join(TRIES)}; all by default")
    extras = parser.parse_args().extras or [*TRIES]
    if unknown := sorted(set(extras) - set(TRIES)):
        parser.error(f"no extra {', '.join(unknown)}; there are {', '.join(TRIES)}")
    failed = []
    with tempfile.TemporaryDirectory(prefix="gbattn-extras-") as place:
        wheel = built(Path(place))
        for extra in extras:
            begun, folder = time.monotonic(), Path(place) / extra
            folder.mkdir()
            found = tried(extra, wheel, folder)
            shutil.rmtree(folder)
            took = f"{time.monotonic() - begun:.0f} s"
            print(f"{extra}: {'failed' if found else 'ok'}, {took}", *found, sep="\n", flush=True)
            failed += found
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
