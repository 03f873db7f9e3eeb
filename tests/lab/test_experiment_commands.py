"""The commands run, compare, diagnose and bench, from end to end on a small text, and their faults."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gbattn.comparison import compare
from gbattn.experiments import Arm, CorpusSpec, Experiment
from gbattn.ground.records import results_folder
from gbattn.lab import records, status
from gbattn.lab import texts as texts_of
from gbattn.lab.catalogue import EXPERIMENTS
from gbattn.lab.commands.experiments import say_compared, say_status
from gbattn.lab.commands.options import MODEL, folder_of_records
from gbattn.lab.records import records_of
from gbattn.lab.status import status_of
from gbattn.language_model import ModelConfig, parameter_count
from tiny_model import PROGRAM, SMALL, copy_files, denied

pytestmark = pytest.mark.usefixtures("own_places")


@pytest.fixture
def experiment(monkeypatch, text):
    made = Experiment(
        name="tiny",
        question="does it run?",
        corpus=CorpusSpec(name="tiny", vocab_size=300),
        model=dict(max_length=16, d_model=8, n_layers=1, n_heads=2),
        train=dict(steps=6, batch_size=4),
        arms=(Arm(name="standard"), Arm(name="twicing", model={"attention": "twicing"})),
        seeds=(1, 2),
    )
    monkeypatch.setitem(EXPERIMENTS, "tiny", made)
    monkeypatch.setenv("GBATTN_CORPORA", str(Path(text).parent))
    return made


OWN = """question = "mine?"
arms = ["standard", "twicing"]
seeds = [1, 2]
corpus = { name = "tiny", vocab_size = 300 }
model = { max_length = 16, d_model = 8, n_layers = 1, n_heads = 2 }
train = { steps = 6, batch_size = 4 }
[arm.twicing]
model = { attention = "twicing" }
"""


def test_an_experiment_of_ones_own(text, tmp_path, call, result, monkeypatch):
    """Run and compared by its file, its records beside those of others under the name of the file."""
    monkeypatch.setenv("GBATTN_CORPORA", str(Path(text).parent))
    path, place = tmp_path / "own.toml", ["--results", tmp_path / "results"]
    path.write_text(OWN)
    found = result("run", path, *place, "--work", tmp_path / "work")["experiments"][0]
    assert (found["name"], found["done"], found["runs"]) == ("own", 4, 4)
    assert len(list((tmp_path / "results" / "own").glob("*.json"))) == 4
    rows = result("compare", path, *place)["rows"]
    assert sorted((row["arm"], row["n"]) for row in rows) == [("standard", 2), ("twicing", 2)]
    path.write_text(OWN.replace("question", "qestion"))
    denied(call("run", path, *place), 1, str(path), "qestion")
    denied(call("compare", tmp_path / "none.toml", *place), 2, "none.toml; want a TOML file")


LAYER = """from gbattn.layers import MultiHeadAttention, register
from gbattn.cost import COUNTS, counts

@register("doubled")
class Doubled(MultiHeadAttention):
    def attend_heads(self, inputs, q, k, v):
        F, A = super().attend_heads(inputs, q, k, v)
        return 2 * F, A

counts(Doubled)(COUNTS[MultiHeadAttention])
"""


@pytest.mark.parametrize("name", ["..x", ".x", "x.", "a b", "x/y", "my_lair.x", "json.x", "statistics"])
def test_a_module_that_cannot_be_imported_is_named(call, tmp_path, monkeypatch, name):
    """Also one whose file is here, but which Python finds elsewhere under that name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "statistics.py").write_text("raise SystemExit")
    denied(call("run", "--imports", name), 2, f"--imports: got {name!r}; want a module in this folder or installed")


def test_a_layer_of_ones_own(text, tmp_path):
    """In a module here: it is known to the workers, too, and another source is another run."""
    words = ["run", "own.toml", "--results", "results", "--work", "work", "--workers", "2"]
    environment = os.environ | {"GBATTN_CORPORA": str(Path(text).parent)}

    def gbattn(*words):
        options = dict(cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        return subprocess.run([*PROGRAM, *words], **options)

    (tmp_path / "own.toml").write_text(OWN.replace("twicing", "doubled"))
    (tmp_path / "my_layer.py").write_text(LAYER)
    # Files that are called like modules of Python and of packages are none of ours.
    here = {name for name in sys.stdlib_module_names if importlib.util.find_spec(name)}  # not winreg, for one
    for name in {*here, "numpy", "torch", "tokenizers", "accelerate", "filelock", "gbattn", "tyro"}:
        (tmp_path / f"{name}.py").write_text(f"open('executed', 'a').write('{name} '); raise SystemExit('{name}')")
    done = gbattn(*words)
    assert done.returncode == 1 and "got 'doubled'; want one of 'multi_head'" in done.stderr
    assert "a layer registers when its module is imported" in done.stderr
    done = gbattn(*words, "--imports", "my_lair")
    assert done.returncode == 2 and "--imports: got 'my_lair'; want a module in this folder" in done.stderr
    done = gbattn(*words, "--imports", "my_layer")
    assert done.returncode == 0 and "4 of   4 runs" in done.stdout, done.stderr
    assert not (tmp_path / "executed").exists(), (tmp_path / "executed").read_text()
    records = {path.name: json.loads(path.read_text()) for path in (tmp_path / "results" / "own").iterdir()}
    assert len(records) == 4
    assert all(one["provenance"]["command"] == "gbattn run own.toml" for one in records.values())
    (tmp_path / "own_copy.toml").write_text((tmp_path / "own.toml").read_text())
    done = gbattn("run", "own_copy.toml", *words[2:], "--imports", "my_layer")
    assert done.returncode == 0 and done.stderr.count(": has run for own\n") == 4, done.stderr
    (tmp_path / "my_layer.py").write_text(LAYER.replace("2 * F", "3 * F"))
    done = gbattn("compare", "own.toml", *words[2:4], "--imports", "my_layer")
    assert "2 of 4 runs are in" in done.stdout, done.stdout
    (tmp_path / "my_layer.py").write_text(LAYER.replace("2 * F", "4 * F").partition("counts(Doubled)")[0])
    done = gbattn("run", "own.toml", *words[2:], "--imports", "my_layer")
    assert done.returncode == 1 and "want a layer whose count is registered" in done.stderr
    assert ": starts" not in done.stderr


def test_run_and_compare(experiment, tmp_path, call, result, monkeypatch):
    place = ["--results", tmp_path / "results", "--work", tmp_path / "work"]
    half = result("run", "tiny", *place, "--shard", "1/2")["experiments"][0]
    denied(call("compare", "tiny", *place[:2], "--confidence", "2"), 2, "--confidence: got 2.0; want a number between")
    assert (half["done"], half["left"]) == (2, "about") and half["hours_left"] >= 0
    code, out, err = call("compare", "tiny", *place[:2])
    assert code == 0 and out.endswith("\n2 of 4 runs are in, so no ordering is decided\n")
    done = result("run", "tiny", *place)["experiments"][0]
    assert (done["done"], done["hours_left"]) == (4, 0)

    records = records_of("tiny", tmp_path / "results")
    rows = result("compare", "tiny", *place[:2])["rows"]
    assert rows == [row._asdict() for row in compare(records)]
    code, out, err = call("compare", "tiny", *place[:2], "--metric", "test_perplexity")
    assert code == 0 and "test_perplexity" in out and "paired by seed" in out
    assert re.search(r"^standard +2 +\d+\.\d{4} +\d+\.\d{4} +– +– +[\d,]+ +[1-9][\d,]*\.\d$", out, re.M)
    assert "diverged" not in out
    denied(call("compare", "tiny", *place[:2], "--metric", "beauty"), 2, "--metric: got 'beauty'")
    monkeypatch.setattr(status, "product_rate", lambda: pytest.fail("a speed that nobody asked for"))
    code, out, err = call("run", "tiny", *place)
    assert code == 0 and "4 of   4 runs" in out and "empty" not in err
    code, out, err = call("run", "tiny", *place, "--shard", "3/8")
    assert code == 0 and "part 3/8 of tiny is empty: there is nothing to run here" in err


def test_a_run_of_an_experiment_reads_its_text_and_its_sweep_once(experiment, tmp_path, call, monkeypatch):
    sweep = replace(experiment, name="tiny-sweep", seeds=(3,), grid={"learning_rate": (1e-3, 2e-3)})
    monkeypatch.setitem(EXPERIMENTS, "tiny-sweep", sweep)
    monkeypatch.setitem(EXPERIMENTS, "tiny", replace(experiment, rates_from=sweep))
    place = ["--results", tmp_path / "results", "--work", tmp_path / "work"]
    assert call("run", "tiny-sweep", *place)[0] == 0
    texts, files = [], []
    load, read = texts_of.load_corpus, records.read_records
    monkeypatch.setattr(texts_of, "load_corpus", lambda *of, **how: texts.append(of) or load(*of, **how))
    monkeypatch.setattr(records, "read_records", lambda path: files.append(path.parent.name) or read(path))
    code, out, err = call("run", "tiny", *place)
    assert code == 0 and "4 of   4 runs" in out
    assert len(texts) == 1 and files.count("tiny-sweep") == sweep.planned


def test_diagnose_a_folder(trained, tmp_path, call, result, monkeypatch):
    page = tmp_path / "new" / "page.html"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gbattn-model").mkdir()
    copy_files(trained, tmp_path / "gbattn-model")
    words = ["diagnose", "--report", page, "--batch-size", 4, "--sample", 128]
    assert result(*words)["run"] == "gbattn-model"
    words.insert(1, trained)
    found = result(*words)
    record = json.loads(page.with_suffix(".json").read_text())
    assert record["settings"]["split"] == "test" and not record["settings"]["untrained"]
    assert found["cosine"] == [layer["descent1"]["cosine"][0] for layer in record["measured"]["layers"]]
    text = page.read_text()
    assert text.count("<svg") == 3 and str(trained) in text
    assert ("stands for a correction" in text) == bool(found["halves"])
    assert not re.search(r"""(?:src|href)=["']?http""", text)  # nothing outside of it
    assert "gradient of the loss" in text
    code, out, err = call(*words, "--untrained", "--split", "valid", "--tokens", 400)
    assert code == 0 and re.search(r"^0 +[+-]0\.\d{3} +[+-]\d\.\d{4}$", out, re.M) and "as it is" in err
    record = json.loads(page.with_suffix(".json").read_text())
    assert record["settings"]["untrained"] and record["measured"]["tokens"] <= 400


def test_diagnose_a_run_of_the_queue_which_is_trained_again(experiment, tmp_path, call, result):
    """Another folder of runs is that of a machine that has the records alone."""
    place = ["--results", tmp_path / "results"]
    result("run", "tiny", *place, "--work", tmp_path / "work")
    one = records_of("tiny", tmp_path / "results")[1].settings
    words = [one["id"], *place, "--report", tmp_path / "page.html", "--batch-size", 4, "--sample", 64]
    found = result("diagnose", *words, "--work", tmp_path / "work")
    code, out, err = call("diagnose", *words, "--work", tmp_path / "other", "--json")
    assert code == 0 and "it is trained again" in err and json.loads(out) == found
    settings_ = json.loads((tmp_path / "page.json").read_text())["settings"]
    assert (settings_["arm"], settings_["seed"], settings_["of"]) == (one["arm"], one["seed"], "tiny")
    assert len(records_of("tiny", tmp_path / "results")) == 4
    denied(call("diagnose", "0" * 12, *place), 2, "RUN: got '000000000000'; want a folder that gbattn train wrote")


def test_compare_takes_each_arm_of_a_sweep_at_its_best(experiment, tmp_path, call, result, monkeypatch):
    sweep = replace(experiment, name="tiny-sweep", seeds=(1,), grid={"learning_rate": (1e-3, 3e-2)})
    monkeypatch.setitem(EXPERIMENTS, "tiny-sweep", sweep)
    result("run", "tiny-sweep", "--results", tmp_path / "results", "--work", tmp_path / "work")
    rows = result("compare", "tiny-sweep", "--results", tmp_path / "results", "--metric", "valid_loss")["rows"]
    losses = {}
    for record in records_of("tiny-sweep", tmp_path / "results"):
        losses.setdefault(record.settings["arm"], []).append(record.measured["valid_loss"])
    assert {row["arm"]: row["mean"] for row in rows} == {arm: min(of) for arm, of in losses.items()}
    place = "--results", tmp_path / "results"
    assert result("compare", "tiny-sweep", *place)["untuned"] == ["standard", "twicing"]  # of two rates, both are edges
    code, out, err = call("compare", "tiny-sweep", *place)
    assert code == 0 and out.endswith("so no ordering is decided: standard, twicing\n")

    monkeypatch.setitem(EXPERIMENTS, "tiny", replace(experiment, rates_from=sweep))
    result("run", "tiny", *place, "--work", tmp_path / "work")
    assert result("compare", "tiny", *place)["untuned"] == ["standard", "twicing"]
    shutil.rmtree(tmp_path / "results" / "tiny-sweep")
    unfinished = "got 0 of the 4 runs of tiny-sweep; want all of them: run tiny-sweep first"
    denied(call("compare", "tiny", *place), 1, f"compare: tiny: {unfinished}")
    denied(call("run", "tiny", *place), 1, f"run: tiny: {unfinished}")
    grid = {"norm": ("pre", "post"), "learning_rate": (1e-3,)}
    monkeypatch.setitem(EXPERIMENTS, "tiny-grid", replace(experiment, name="tiny-grid", seeds=(1,), grid=grid))
    result("run", "tiny-grid", *place, "--work", tmp_path / "work")
    denied(call("compare", "tiny-grid", *place), 2, "'tiny-grid', which varies norm in each arm")


def test_compare_sets_experiments_beside_each_other(experiment, tmp_path, call, result, monkeypatch):
    """And takes the first arm where none is called standard."""
    place = ["--results", tmp_path / "results"]
    arms = (Arm(name="calm", label="with dropout", train={"weight_decay": 0.5}),)
    more = replace(experiment, name="tiny-more", arms=arms)
    monkeypatch.setitem(EXPERIMENTS, "tiny-more", more)
    for name in ("tiny", "tiny-more"):
        result("run", name, *place, "--work", tmp_path / "work")
    alone = result("compare", "tiny-more", *place)
    assert alone["reference"] == "calm" and [row["arm"] for row in alone["rows"]] == ["calm"]
    both = result("compare", "tiny-more", "--beside", "tiny", *place)
    assert both["reference"] == "standard" and (both["done"], both["planned"]) == (6, 6)
    records = records_of("tiny-more", tmp_path / "results") + records_of("tiny", tmp_path / "results")
    assert both["rows"] == [row._asdict() for row in compare(records)]
    code, out, err = call("compare", "tiny-more", "--beside", "tiny", *place)
    assert code == 0 and re.search(r"^with dropout \(calm\) +2 ", out, re.M)
    denied(call("compare", "tiny", "--beside", "nothing", *place), 2, "--beside: got 'nothing'; want one of")
    denied(call("compare", "tiny", "--beside", "tiny", *place), 1, "records: got two of arm standard and seed 1")


def test_what_diverged_is_counted(experiment, tmp_path, call, result):
    """A run that diverged is in no mean, and in the table all the same."""
    place = ["--results", tmp_path / "results", "--work", tmp_path / "work"]
    result("run", "tiny", *place)
    paths = sorted((tmp_path / "results" / "tiny").glob("twicing-*.json"))
    for gone, path in enumerate(paths, 1):
        record = json.loads(path.read_text())
        record["measured"]["diverged"] = True
        path.write_text(json.dumps(record))
        code, out, err = call("compare", "tiny", *place[:2])
        assert code == 0 and re.search(rf"^diverged, left out: twicing {gone}$", out, re.M)
        assert re.search(rf"^twicing +{2 - gone} ", out, re.M) and "inf" not in out
    rows = {row["arm"]: row for row in result("compare", "tiny", *place[:2])["rows"]}
    assert rows["twicing"]["mean"] is None and rows["twicing"]["diverged"] == 2


RECORDS = Path(__file__).parents[2] / "results" / "18_perplexity"


def test_the_list_of_experiments_counts_as_the_queue_does(tmp_path, result):
    """Sweeps, what is tuned by them, other grids; unfinished, half finished, finished; here and in the book."""
    names = ["mini-sweep", "mini", "mini-high", "paper-wikipedia", "quick", "blocks-postln"]
    for name in names:
        if (RECORDS / name).is_dir():
            shutil.copytree(RECORDS / name, tmp_path / name)
    for path in sorted((tmp_path / "mini-sweep").glob("*.json"))[::3]:
        path.unlink()
    listed = result("run", "--results", tmp_path)["experiments"]
    assert [one["name"] for one in listed] == list(EXPERIMENTS)
    listed = {one["name"]: one for one in listed}
    for name in set(names) - {"mini"}:  # which cannot be run before its sweep is finished again
        wanted = status_of(name, tmp_path)
        assert (listed[name]["done"], listed[name]["runs"]) == (wanted.done, wanted.runs), name
        if wanted.left == "about":
            assert listed[name] == wanted._asdict()
    assert listed["mini-sweep"]["hours_left"] > 0 and listed["mini"]["done"] == 30
    assert result("run", "--results", RECORDS.parent)["experiments"] != [*listed.values()]


def test_the_list_of_experiments_goes_on_past_a_damaged_record(tmp_path, call, result):
    shutil.copytree(RECORDS / "mini-sweep", tmp_path / "mini-sweep")
    shutil.copytree(RECORDS / "mini-warm", tmp_path / "mini-warm")
    first = min((tmp_path / "mini-sweep").glob("*.json"))
    for damaged in ('{"experiment": "mini", "settings": {}, "measured": {}}', "[1]", "\0", ""):
        first.write_text(damaged)
        listed = {one["name"]: one for one in result("run", "--results", tmp_path)["experiments"]}
        assert listed["mini-sweep"]["done"] is None and str(first) in listed["mini-sweep"]["why"]
        assert listed["mini-warm"]["done"] == 15
    code, out, err = call("run", "--results", tmp_path)
    assert code == 0 and str(first) in out and re.search(r"^mini-sweep +\? of +30 runs", out, re.M)


@pytest.mark.parametrize("words", [["--workers", 2], ["--shard", "1/2"], ["--corpora", "."], ["--capture"]])
def test_the_list_of_experiments_drops_no_option(call, tmp_path, words):
    denied(call("run", "--results", tmp_path, *words), 2, "NAME: got None")


def test_a_damaged_record_is_said_where_it_is(experiment, tmp_path, call, result):
    """A queue does what else it can."""
    place = ["--results", tmp_path / "results", "--work", tmp_path / "work"]
    result("run", "tiny", *place)
    first, second, *_ = sorted((tmp_path / "results" / "tiny").glob("*.json"))
    first.write_text('{"experiment": "tiny", "settings": {}, "measured": {}}')
    second.unlink()
    denied(call("run", "tiny", *place), 1, f"gbattn run: {first}: got a damaged record; want a whole one")
    assert second.is_file()


def test_a_table_has_room():
    """Columns as wide as what is in them; pairs are shown where some are missing."""
    row = dict(label="a", n=3, mean=1.0, sd=None, difference=None, low=None, high=None, parameters=1, diverged=0)
    row["training_flops"] = 3e12
    rows = [row | dict(arm="a", pairs=0, training_flops=None)]  # each of its runs diverged
    rows += [row | dict(arm="b", pairs=3, difference=-12345.678, low=-123456.7, high=-1234.5, mean=98765.4)]
    table = dict(rows=rows, metric="validation_bits_per_byte", reference="a", done=1, planned=1, untuned=())
    head, *lines = say_compared(table).splitlines()[:3]
    assert head.split() == ["runs", "validation_bits_per_byte", "sd", "difference", "interval", "parameters", "TFLOPs"]
    assert len({len(line) for line in (head, *lines)}) == 1
    cells = re.split(r" {2,}", lines[1])
    assert cells[1:] == ["3", "98765.4000", "–", "-12345.6780", "-123456.7000 … -1234.5000", "1", "3.0"]
    rows[1] |= dict(pairs=2)
    head, *lines = say_compared(table).splitlines()[:3]
    assert head.split()[4] == "pairs" and re.split(r" {2,}", lines[1])[5] == "2"


def test_an_estimate_is_said_from_a_minute_on():
    one = dict(name="s", question="?", runs=9, done=1, left="at least")
    said = lambda hours: say_status(one | {"hours_left": hours}).splitlines()[0]
    assert said(0.01).endswith("1 of   9 runs")
    assert said(0.5).endswith("runs, at least 30 minutes to go")
    assert said(1760.7).endswith("runs, at least 73 days to go")
    assert said(1.25).endswith("runs, at least 1.2 hours to go")
    assert said(None).endswith("1 of   9 runs")


@pytest.mark.parametrize("flops", [2e6, 3.4e10, 5e13, 1.2e18])
def test_compare_prints_a_size_and_no_zero(flops):
    row = dict(label="a", n=3, mean=1.0, sd=None, difference=None, low=None, high=None, parameters=1, diverged=0)
    rows = [row | dict(arm=arm, pairs=3, training_flops=times * flops) for arm, times in (("a", 1), ("b", 20))]
    table = dict(rows=rows, metric="test_loss", reference="a", done=1, planned=1, untuned=())
    head, *lines = say_compared(table).splitlines()[:3]
    scale = {"M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}[head.split()[-1].removesuffix("FLOPs")]
    said = [float(line.split()[-1].replace(",", "")) * scale for line in lines]
    assert said == pytest.approx([flops, 20 * flops], rel=0.05)


def test_where_records_are(tmp_path, monkeypatch):
    assert folder_of_records(None) == results_folder()  # of the book
    monkeypatch.chdir(tmp_path)
    assert folder_of_records(None) == Path("results")
    assert folder_of_records(Path("there")) == Path("there")
    monkeypatch.setenv("GBATTN_RESULTS", "elsewhere")
    assert folder_of_records(None) == Path("elsewhere")


def test_ctrl_c_in_a_queue(experiment, tmp_path, call, monkeypatch):
    def press(*words, **how):
        raise KeyboardInterrupt

    monkeypatch.setattr("gbattn.lab.queue.run_experiment", press)
    code, out, err = call("run", "tiny", "--results", tmp_path)
    assert (code, out) == (130, "") and "what is finished is in" in err and "the same command goes on" in err


def test_bench(call, result):
    words = ["bench", "multi_head", "boosted", *SMALL, "--rounds", 1, "--new-tokens", 3]
    found = result(*words)
    assert [row["arm"] for row in found["arms"]] == ["multi_head", "boosted"]
    sizes = dict(vocab_size=300, d_model=16, n_layers=1, n_heads=2, max_length=16, positions="rotary")
    sizes["attention_options"] = MODEL["attention_options"]
    for row in found["arms"]:
        config = ModelConfig(attention=row["arm"], **sizes)
        assert row["parameters"] == parameter_count(config).total
        assert row["training_tokens_per_second"] == pytest.approx(4 * 16 / row["step_seconds"])
        assert row["of_product_rate"] > 0 and row["written_tokens_per_second"] > 0
    assert found["machine"]["flops"] > 0
    code, out, err = call(*words)
    assert code == 0 and "GFLOP/s" in out and re.search(r"^boosted +[\d,]+ ", out, re.M)


def test_bench_takes_options_of_its_arms(call, result):
    """The options of an attention go to the arms that are measured, and to no other."""
    rounds = ["--attention-options", '{"rounds": 3}']
    words = [*SMALL, "--rounds", 1, "--new-tokens", 2, *rounds]
    (row,) = result("bench", "boosted", *words)["arms"]
    sizes = dict(vocab_size=300, d_model=16, n_layers=1, n_heads=2, max_length=16, positions="rotary")
    config = ModelConfig(attention="boosted", attention_options={"rounds": 3}, **sizes)
    assert row["parameters"] == parameter_count(config).total
    for arms in (["multi_head"], ["boosted", "multi_head"]):
        denied(call("bench", *arms, *words), 2, "--attention-options: got", "'rounds'", "'multi_head' takes")
