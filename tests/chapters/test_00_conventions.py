"""Chapter 0: the claim, the errors, seeds, profiles, records and quotes."""

import json
import math
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from claims import claim
from gbattn import conventions
from gbattn.conventions import (
    SYMBOLS,
    Record,
    check_tensors,
    colour_of,
    load_records,
    profile,
    quote,
    seed_everything,
)
from gbattn.ground import arguments, files, records
from gbattn.ground.arguments import divisor_of, require
from gbattn.ground.tensors import FLOATING, INDEX, INTEGRAL, check_tensor
from gbattn.ground.terminal import printable, with_progress

values_and_start = st.tuples(
    st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=200).map(np.array), st.floats(-1e3, 1e3)
)


def running_mean(values, start, extra=0):
    F = start
    for t, y in enumerate(values, start=1):
        F = F + (y - F) / (t + extra)
    return np.float64(F)


@claim(values_and_start, tolerance=1e-12, mutant=lambda drawn: (running_mean(*drawn, extra=1), drawn[0].mean()))
def test_prop_running_mean(drawn):
    """Moving by 1/t of the residual gives the mean, whatever the start."""
    return running_mean(*drawn), drawn[0].mean()


def test_every_size_in_a_shape_is_a_symbol_with_a_meaning():
    for name, symbol in SYMBOLS.items():
        assert symbol.latex and symbol.meaning
        assert all(letter in SYMBOLS and not SYMBOLS[letter].shape for letter in symbol.shape), name


def test_require_says_what_who_and_wanted():
    require(True, "x", 1, "anything")
    with pytest.raises(ValueError, match=r"^depth: got -1; want a positive integer$"):
        require(False, "depth", -1, "a positive integer")


@pytest.mark.parametrize(
    ("x", "number", "integer", "count"),
    [
        (3, True, True, True),
        (np.int32(3), True, True, True),
        (0, True, True, False),
        (-2, True, True, False),
        (2.0, True, False, False),
        (np.float32(0.5), True, False, False),
        (math.inf, False, False, False),
        (10**400, False, True, True),
        (math.nan, False, False, False),
        (True, False, False, False),
        (np.True_, False, False, False),
        ("3", False, False, False),
        (None, False, False, False),
        (1j, False, False, False),
    ],
    ids=repr,
)
def test_what_counts_as_a_number(x, number, integer, count):
    assert arguments.is_number(x) is number
    assert arguments.is_integer(x) is integer
    assert arguments.is_count(x) is count


def test_check_tensors_returns_the_sizes():
    sizes = check_tensors(X=torch.ones(2, 5, 3), Y=torch.ones(2, 5, 1), finite=True)
    assert sizes == {"n": 5, "d": 3, "c": 1}


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"X": np.ones((3, 2))}, r"X: got ndarray; want a torch.Tensor of shape \(n, d\)"),
        ({"X": torch.ones(3, 2, dtype=torch.int64)}, r"X: got dtype torch.int64; want a floating-point dtype"),
        ({"X": torch.ones(3)}, r"X: got shape \(3,\); want \(n, d\) = \(rows of the context, features\)"),
        ({"X": torch.ones(0, 2)}, r"X: got shape \(0, 2\), which is empty"),
        ({"X": torch.ones(3, 2), "Y": torch.ones(4, 1)}, r"Y: got n = 4 rows of the context; want n = 3, as in X"),
        (
            {"X": torch.ones(3, 2), "Y": torch.ones(3, 1).double()},
            r"Y: got dtype torch.float64; want torch.float32, as in X",
        ),
        ({"X": torch.ones(5, 3, 2), "Y": torch.ones(3, 1)}, r"Y: got batch dimensions \(\); want \(5,\), as in X"),
        ({"X": torch.ones(3, 2), "Y": torch.ones(3, 1, device="meta")}, r"Y: got device meta; want cpu, as in X"),
        (
            {"X": torch.tensor([[1.0, 2.0], [np.nan, np.inf]])},
            r"X: got 2 NaN or infinite entries, the first at \(1, 0\); want finite",
        ),
    ],
)
def test_check_tensors_names_the_argument(tensors, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_tensors(finite=True, **tensors)


@pytest.mark.parametrize("value", ["False", "yes", None, 0, 1, np.bool_(True), torch.tensor(True)], ids=repr)
def test_a_flag_is_true_or_false(value):
    for flag in (True, False):
        arguments.check_flag("causal", flag)
    with pytest.raises(ValueError, match=r"^causal: got .*; want True or False$"):
        arguments.check_flag("causal", value)
    with pytest.raises(ValueError, match=r"^finite: got .*; want True or False$"):
        check_tensors(finite=value, X=torch.ones(3, 2))


def test_a_sum_that_overflows_is_not_taken_for_infinity():
    check_tensors(X=torch.full((2, 2), 3e38), finite=True)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("no folder")
    for path in (tmp_path, tmp_path / "new" / "deep", Path("new"), Path(".")):
        files.check_folder("cache", path)
    for path in (tmp_path / "a.txt", tmp_path / "a.txt" / "sub" / "deep"):
        with pytest.raises(ValueError, match=r"cache: got .*a\.txt, a file; want a folder"):
            files.check_folder("cache", path)


def test_seeds_repeat_every_generator():
    def draw(seed):
        generator = seed_everything(seed)
        return random.random(), np.random.rand(), torch.rand(()).item(), torch.rand((), generator=generator).item()

    for once, again, other in zip(draw(7), draw(7), draw(8)):  # one of them could hide that the others stay
        assert once == again != other
    seed_everything(np.int64(3))
    for bad in (-1, 1.5, "0", 2**32, True):
        with pytest.raises(ValueError, match="seed: got"):
            seed_everything(bad)


def test_profile_chooses_and_complains(monkeypatch):
    monkeypatch.delenv("GBATTN_PROFILE", raising=False)
    assert profile() == "quick" and profile(quick=1, full=2) == 1
    monkeypatch.setenv("GBATTN_PROFILE", "full")
    assert profile(quick=1, full=2) == 2
    with pytest.raises(ValueError, match="choices: got"):
        profile(quick=1)
    monkeypatch.setenv("GBATTN_PROFILE", "fast")
    with pytest.raises(ValueError, match="GBATTN_PROFILE: got 'fast'"):
        profile()


def test_colours_are_distinct_and_named():
    assert len(set(conventions.COLOURS.values())) == len(conventions.COLOURS)
    with pytest.raises(ValueError, match="method: got 'magic'; want one of theory, "):
        colour_of("magic")


def test_records_survive_the_disk_in_order(tmp_path):
    for name, number in (("b", 2.5), ("a", 1.5)):
        Record("trial", {"seed": 0}, {"number": number}).save(name, tmp_path)
    loaded = load_records("trial", tmp_path)
    assert [record.measured["number"] for record in loaded] == [1.5, 2.5]
    assert loaded[0].provenance["torch"] == torch.__version__
    assert not list(tmp_path.rglob("*.draft*"))
    with pytest.raises(ValueError, match="experiment: got 'missing'; want one of trial"):
        load_records("missing", tmp_path)


def test_a_list_of_numbers_takes_one_line_of_a_record(tmp_path):
    measured = {"curve": [1, -2.5e-3, None], "table": [[1.0, 2.0], [3.0, 4.0]]}
    measured |= {"words": ["a  b"], "text": "[\n 1,  2\n ]"}
    path = Record("trial", {}, measured).save("a", tmp_path)
    assert load_records("trial", tmp_path)[0].measured == measured
    lines = path.read_text("utf-8").splitlines()
    assert '  "curve": [1, -0.0025, null],' in lines and "   [3.0, 4.0]" in lines


def test_records_are_found_in_a_chapter_and_below_a_folder_of_ones_own(tmp_path):
    record = Record("trial", {}, {"error": 0.5})
    assert record.save("first", tmp_path / "04_hopfield") == tmp_path / "04_hopfield" / "trial" / "first.json"
    assert record.save("second", tmp_path) == tmp_path / "04_hopfield" / "trial" / "second.json"
    assert load_records("trial", tmp_path) == [record, record]
    other = Record("other", {}, {"error": 1.0})
    assert other.save("first", tmp_path) == tmp_path / "other" / "first.json"
    (tmp_path / "elsewhere" / "third").mkdir(parents=True)  # no chapter
    assert records.experiment_folder("third", tmp_path) == tmp_path / "third"
    with pytest.raises(ValueError, match="experiment: got '04_hopfield'; want one of elsewhere, other, trial$"):
        load_records("04_hopfield", tmp_path)


def test_results_are_found_from_below_and_missed_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.delenv("GBATTN_RESULTS", raising=False)
    below = tmp_path / "nbs" / "deep"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    with pytest.raises(ValueError, match="GBATTN_RESULTS: got nothing"):
        records.results_folder()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "reported.json").write_text("[]")
    assert records.results_folder() == tmp_path / "results"
    monkeypatch.setenv("GBATTN_RESULTS", str(tmp_path))
    assert records.results_folder() == tmp_path


def test_quote_formats_and_complains():
    record = Record("trial", {"rows": 1200}, {"error": 0.12345})
    assert quote(record, "error", ".2f") == "0.12"
    assert quote(record, "rows", ",d") == "1,200"
    assert "torch" in quote(record, "provenance")
    with pytest.raises(ValueError, match="record: got 'trial'; want a Record"):
        quote("trial", "error")
    with pytest.raises(ValueError, match="field: got 'eror'"):
        quote(record, "eror")


def test_committed_records_have_their_origin():
    folder = records.results_folder()
    for record in load_records("reported", folder):
        assert record.provenance["source"], record
    assert (paths := list(folder.glob("*/*/*.json")))
    for path in paths:
        assert {"date", "python", "device", "profile"} <= json.loads(path.read_text())["provenance"].keys(), path


def test_quote_glues_under_experiment_and_field(monkeypatch):
    glued = {}
    monkeypatch.setattr("myst_nb.glue", lambda key, value, display: glued.update({key: value}))
    quote(Record("trial", {"error": "a setting"}, {"error": 0.5}), "error", ".1f")
    assert glued == {"trial.error": "0.5"}


def test_a_record_that_is_no_json_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(ValueError):
        Record("trial", {}, {"error": float("nan")}).save("bad", tmp_path)
    assert not list(tmp_path.rglob("*.json"))
    Record("trial", {}, {"error": np.float32(0.5)}).save("good", tmp_path)
    assert load_records("trial", tmp_path)[0].measured["error"] == 0.5


def test_numbers_of_numpy_and_torch_keep_their_kind(tmp_path):
    numbers = [np.int64(1200), np.bool_(True), np.float32(0.5), torch.tensor(3), torch.tensor(False)]
    path = Record("trial", {}, {"numbers": numbers}).save("kinds", tmp_path)
    assert repr(json.loads(path.read_text())["measured"]["numbers"]) == "[1200, True, 0.5, 3, False]"


def test_drafts_are_found_by_the_file_they_were_to_become(tmp_path):
    ours = {tmp_path / f"{name}.draft-0123abcd" for name in ("a.json", "b[1].json")}
    for path in (*ours, tmp_path / "a.json.draft-2", tmp_path / "a.json.draft-0123abcd.txt", tmp_path / "a.json"):
        path.write_text("")
    assert {*files.left_drafts(tmp_path)} == ours
    assert files.left_drafts(tmp_path, "b[1].json") == [tmp_path / "b[1].json.draft-0123abcd"]
    assert files.left_drafts(tmp_path, "b1.json") == files.left_drafts(tmp_path / "none") == []


def test_every_save_has_a_draft_of_its_own_and_removes_it(tmp_path, monkeypatch):
    drafts, write = [], Path.write_bytes

    def overtaken(draft, content):  # another process saves the same record meanwhile
        drafts.append(draft)
        if len(drafts) == 1:
            record.save("same", tmp_path)
        return write(draft, content)

    def full(draft, content):
        write(draft, content[:9])
        raise OSError(28, "No space left on device")

    record = Record("trial", {}, {"error": 0.5})
    monkeypatch.setattr(Path, "write_bytes", overtaken)
    path = record.save("same", tmp_path)
    assert len(set(drafts)) == 2 and load_records("trial", tmp_path) == [record]
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        record.save("same", tmp_path)
    assert caught.value.filename == str(path)  # which the system does not say
    assert list(path.parent.iterdir()) == [path] and load_records("trial", tmp_path) == [record]


NO_JSON = ["", "{", "\udcff", "[" * 100_000]
NO_RECORDS = ["[]", "[1]", "3"]
DAMAGED = ['{"experiment": "x"}', '{"experiment": "x", "settings": {}, "measured": {}}'] + [
    json.dumps(dict(experiment="x", settings={}, measured={}, provenance={}) | wrong)
    for wrong in (
        {"experiment": 1},
        {"experiment": "../../x"},
        {"settings": [1]},
        {"measured": 3},
        {"provenance": None},
        {"seed": 0},
    )
]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [(text, r"\w+Error: .*; want a record: mend the file or delete it") for text in NO_JSON]
    + [(text, "no record; want a record: mend the file or delete it") for text in NO_RECORDS]
    + [(text, "a damaged record; want a whole one: delete it or mend the file") for text in DAMAGED],
    ids=repr,
)
def test_a_file_that_holds_no_record_is_named(text, sentence, tmp_path):
    (tmp_path / "trial").mkdir()
    (tmp_path / "trial" / "bad.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=rf"bad\.json: got {sentence}$"):
        load_records("trial", tmp_path)


@pytest.mark.parametrize(("holds", "verdict"), [(True, "holds"), (False, "DOES NOT HOLD"), (None, "undecided")])
def test_a_claim_put_to_the_test_may_fail(holds, verdict, capsys):
    said = dict(prediction="p " * 60, statistic="s", threshold="t", observed="o\n1")
    assert conventions.put_to_test(**said, holds=holds) is holds
    margin = " " * 12
    assert capsys.readouterr().out.splitlines() == [
        "prediction  " + " ".join("p" * 38),
        margin + " ".join("p" * 22),
        "statistic   s",
        "threshold   t",
        "observed    o",
        margin + "1",
        f"verdict     {verdict}",
        "",
    ]


def test_a_verdict_is_a_truth_value_or_open():
    said = dict(prediction="p", statistic="s", threshold="t", observed="o")
    for true in (np.True_, np.array(True), torch.tensor(True), torch.tensor([True])):
        assert conventions.put_to_test(**said, holds=true) is True
    for neither in (math.nan, np.float64("nan"), 1, np.int8(1), "True", torch.tensor(1.0), np.array([True, False])):
        with pytest.raises(ValueError, match=r"^holds: got .*; want True, False or None$"):
            conventions.put_to_test(**said, holds=neither)
    with pytest.raises(ValueError, match="^observed: got 0.5; want a string$"):
        conventions.put_to_test(**(said | {"observed": 0.5}), holds=True)


def test_an_unknown_name_is_no_array():
    with pytest.raises(ValueError, match="tensors: got the name 'foo'; want an array of SYMBOLS"):
        check_tensors(foo=torch.ones(2))


PATHS = ["../x", "a/b", "a\\b", "/x", "..", ".", "", "a\0b", 3, None]


@pytest.mark.parametrize("name", PATHS, ids=repr)
def test_no_record_is_written_or_read_outside_its_folder(name, tmp_path):
    outside, inside = tmp_path / "x", tmp_path / "results"
    outside.mkdir()
    inside.mkdir()
    Record("x", {}, {}).save("one", tmp_path)
    before = set(tmp_path.rglob("*"))
    for call, argument in (
        (lambda: Record(name, {}, {}), "experiment"),
        (lambda: Record("x", {}, {}).save(name, inside), "name"),
        (lambda: load_records(name, inside), "experiment"),
    ):
        with pytest.raises(ValueError, match=f"^{argument}: got .*; want a name, and no path$"):
            call()
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["settings", "measured", "provenance"])
def test_a_record_is_of_dictionaries(name):
    with pytest.raises(ValueError, match=rf"^{name}: got \[1\]; want a dictionary$"):
        Record("x", **{"settings": {}, "measured": {}} | {name: [1]})


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (arguments.NUMBER, [0, -1.5, np.float32(2)], [True, None, "1", math.inf, math.nan]),
        (arguments.POSITIVE, [1, 0.5], [0, -1, math.inf, torch.ones(2)]),
        (arguments.NOT_NEGATIVE, [0, 0.5], [-1e-9, math.nan]),
        (arguments.FRACTION, [0, 1, 0.5], [1.01, -0.01, "half"]),
        (arguments.PROBABILITY, [0, 0.99], [1, -0.1]),
        (arguments.COUNT, [1, np.int64(3)], [0, 1.0, True, None]),
        (arguments.up_to(3), [1, np.int64(3)], [0, 4, 10**400, 1.0, True]),
        (arguments.LENGTH, [0, 2], [-1, 0.0, False]),
        (arguments.SEED, [0, 2**32 - 1], [2**32, -1]),
        (arguments.FLAG, [True, False], [0, 1, "False", None]),
        (arguments.one_of("a", "b", None), ["a", "b", None], ["c", ["a"], False]),
        (arguments.one_of(False, True), [False, True], [0, 1, None, "True"]),
        (arguments.optional(arguments.COUNT), [None, 3], [0, "3"]),
        (arguments.list_of(arguments.COUNT), [[], [1, 2]], [None, (1,), [1, 0]]),
    ],
)
def test_a_rule_is_a_test_and_its_words(rule, good, bad):
    for value in good:
        arguments.check(size=(value, rule))
    for value in bad:
        with pytest.raises(ValueError, match=f"^size: got .*; want {re.escape(rule[1])}$"):
            arguments.check(size=(value, rule))


def test_checks_name_the_first_argument_that_breaks_its_rule():
    with pytest.raises(ValueError, match=r"^b: got shape \(2, 2\), torch.float32; want a positive integer$"):
        arguments.check(a=(1, arguments.COUNT), b=(torch.ones(2, 2), arguments.COUNT), c=(0, arguments.COUNT))
    config = SimpleNamespace(a=1, b="x")
    with pytest.raises(ValueError, match="^b: got 'x'; want one of 'y', 'z'$"):
        arguments.check_fields(config, {"a": arguments.COUNT, "b": arguments.one_of("y", "z")})
    rules = {"a.b": arguments.COUNT}
    arguments.check_entries("file", {"a": {"b": 1}}, rules, "copy it")
    for found in ({}, [], {"a": 1}, {"a": {}}):
        with pytest.raises(ValueError, match="^file, a.b: got nothing; want a positive integer: copy it$"):
            arguments.check_entries("file", found, rules, "copy it")


def test_a_compiler_traces_checks_of_sizes_that_change():
    def half(x, p):
        arguments.check(size=(x.shape[0], arguments.COUNT), p=(p, arguments.PROBABILITY))
        return x / 2

    compiled = torch.compile(half, fullgraph=True, dynamic=True, backend="eager")
    for n in (2, 3, 5):
        assert torch.equal(compiled(torch.ones(n), 0.5), torch.ones(n) / 2)


@pytest.mark.parametrize(
    ("x", "shape", "options", "sentence"),
    [
        ([1.0], "B T", {}, "x: got list; want (B, T)"),
        (torch.ones(2), "B T", {"T": 3}, "x: got shape (2,); want (B, T) with T = 3"),
        (torch.ones(2, 4), "B T", {"T": 3, "of": "y"}, "x: got shape (2, 4); want (B, T) with T = 3, as y"),
        (torch.ones(0, 4), "B T", {"positive": "B T"}, "x: got shape (0, 4); want (B, T) with B ≥ 1, T ≥ 1"),
        (torch.ones(()), "… D", {}, "x: got shape (); want (…, D)"),
        (torch.ones(2, 3, 5), "… D", {"D": 4}, "x: got shape (2, 3, 5); want (…, D) with D = 4"),
        (torch.ones(2, 2), "n", {}, "x: got shape (2, 2); want (n,)"),
        ("x", "…", {}, "x: got str; want a tensor"),
        (torch.ones(2).long(), "n", {"dtype": FLOATING}, "x: got dtype torch.int64; want a floating dtype"),
        (torch.ones(2) > 0, "n", {"dtype": INTEGRAL}, "x: got dtype torch.bool; want an integer dtype"),
        (torch.ones(2).short(), "n", {"dtype": INDEX}, "x: got dtype torch.int16; want torch.int64 or torch.int32"),
        (torch.ones(2), "n", {"dtype": torch.half, "of": "y"}, "x: got dtype torch.float32; want torch.float16, as y"),
        (torch.ones(2, device="meta"), "n", {"device": torch.device("cpu")}, "x: got device meta; want cpu"),
    ],
)
def test_a_tensor_that_breaks_its_rule_is_described(x, shape, options, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        check_tensor("x", x, shape, **options)


def test_a_tensor_that_obeys_its_rule_passes():
    x = torch.ones(2, 0, 4)
    for shape in ("B T D", "… T D", "… D", "…"):
        check_tensor("x", x, shape, dtype=FLOATING, device=x.device, positive="D", D=4)
    check_tensor("x", x, "B T D", B=2, T=0, D=4, dtype=torch.float32)
    compiled = torch.compile(lambda x: (check_tensor("x", x, "B T", T=3), x + 1)[1], fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(2, 3)), torch.full((2, 3), 2.0))


def test_a_divisor_is_a_positive_integer_that_divides():
    holds, want = divisor_of("D", 8)
    assert [n for n in (-2, 0, 1, 2, 2.0, True, 3, 8, 16) if holds(n)] == [1, 2, 8] and want() == "a divisor of D = 8"


def test_a_progress_bar_shows_the_steps_and_is_not_needed(monkeypatch, capsys):
    steps = [3, 1, 2]
    assert with_progress(steps, False, "blocks") is steps
    assert list(with_progress(steps, True, "blocks")) == steps and "blocks" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert with_progress(steps, True, "blocks") is steps


def test_control_characters_of_a_name_do_not_reach_the_terminal():
    name = "a\x1b[2J\x07\x9b\r\u202eb"
    assert printable(name) == r"a\x1b[2J\x07\x9b\r\u202eb" and printable("tab\tand\nline é") == "tab\tand\nline é"
    with pytest.raises(ValueError, match="^folder: got ") as caught:
        require(False, "folder", name, "another")
    assert not {*"\x1b\x07\x9b\r\u202e"} & {*str(caught.value)}
