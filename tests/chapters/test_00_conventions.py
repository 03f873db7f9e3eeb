"""Chapter 0: the claim, shape checks, seeds, profiles, records and quotes."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from refusals import refused

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
from gbattn.ground import records

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


def test_check_tensors_returns_the_sizes():
    sizes = check_tensors(X=torch.ones(2, 5, 3), Y=torch.ones(2, 5, 1), finite=True)
    assert sizes == {"n": 5, "d": 3, "c": 1}


@pytest.mark.parametrize(
    ("tensors", "argument"),
    [
        ({"X": np.ones((3, 2))}, "X"),
        ({"X": torch.ones(3, 2, dtype=torch.int64)}, "X"),
        ({"X": torch.ones(3)}, "X"),
        ({"X": torch.ones(0, 2)}, "X"),
        ({"X": torch.ones(3, 2), "Y": torch.ones(4, 1)}, "Y"),
        ({"X": torch.ones(3, 2), "Y": torch.ones(3, 1).double()}, "Y"),
        ({"X": torch.ones(5, 3, 2), "Y": torch.ones(3, 1)}, "Y"),
        ({"X": torch.ones(3, 2), "Y": torch.ones(3, 1, device="meta")}, "Y"),
        ({"X": torch.tensor([[1.0, 2.0], [np.nan, np.inf]])}, "X"),
    ],
)
def test_check_tensors_names_the_argument(tensors, argument):
    with refused(argument):
        check_tensors(finite=True, **tensors)


def test_check_tensors_speaks_in_the_words_of_the_notation():
    with refused("Y") as caught:
        check_tensors(X=torch.ones(3, 2), Y=torch.ones(4, 1))
    assert caught.value.got == f"n = 4 {SYMBOLS['n'].meaning}" and caught.value.want == "n = 3, as in X"
    with refused("X") as caught:
        check_tensors(X=torch.tensor([[1.0, 2.0], [np.nan, np.inf]]), finite=True)
    assert caught.value.got == "2 NaN or infinite entries, the first at (1, 0)"


def test_whether_to_read_the_data_is_said_by_true_or_false():
    with refused("finite"):
        check_tensors(finite="False", X=torch.ones(3, 2))


def test_a_sum_that_overflows_is_not_taken_for_infinity():
    check_tensors(X=torch.full((2, 2), 3e38), finite=True)


def test_seeds_repeat_every_generator():
    def draw(seed):
        generator = seed_everything(seed)
        return random.random(), np.random.rand(), torch.rand(()).item(), torch.rand((), generator=generator).item()

    for once, again, other in zip(draw(7), draw(7), draw(8)):  # one of them could hide that the others stay
        assert once == again != other
    seed_everything(np.int64(3))
    for bad in (-1, 1.5, "0", 2**32, True):
        with refused("seed"):
            seed_everything(bad)


def test_profile_chooses_and_names_what_is_none(monkeypatch):
    monkeypatch.delenv("GBATTN_PROFILE", raising=False)
    assert profile() == "quick" and profile(quick=1, full=2) == 1
    monkeypatch.setenv("GBATTN_PROFILE", "full")
    assert profile(quick=1, full=2) == 2
    with refused("choices"):
        profile(quick=1)
    monkeypatch.setenv("GBATTN_PROFILE", "fast")
    with refused("GBATTN_PROFILE"):
        profile()


def test_colours_are_distinct_and_named():
    assert len(set(conventions.COLOURS.values())) == len(conventions.COLOURS)
    with refused("method"):
        colour_of("magic")


def night(colour):
    """A colour as _static/book.css turns a figure at night: invert(0.9), then hue-rotate(180deg)."""
    red, green, blue = (0.9 - 0.8 * c for c in colour)
    grey = 2 * (0.213 * red + 0.715 * green + 0.072 * blue)
    return [min(max(grey - c, 0.0), 1.0) for c in (red, green, blue)]


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("method", [*conventions.COLOURS])
def test_letters_of_every_colour_are_legible_by_day_and_by_night(method):
    """A contrast of 4.5 with the page: white by day, and #14181e, the theme's, by night."""
    style = (Path(__file__).parents[2] / "_static" / "book.css").read_text()
    assert "filter: invert(0.9) hue-rotate(180deg)" in style
    of = lambda colour: [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    letters = of(conventions.text_colour_of(method))
    assert 1.05 / (luminance(letters) + 0.05) >= 4.5
    assert (luminance(night(letters)) + 0.05) / (luminance(of("#14181e")) + 0.05) >= 4.5
    hue = of(colour_of(method))
    assert max(letters) * min(hue) == pytest.approx(min(letters) * max(hue), abs=0.02), "darker, of the same hue"


def test_records_survive_the_disk_in_order(tmp_path):
    for name, number in (("b", 2.5), ("a", 1.5)):
        Record("trial", {"seed": 0}, {"number": number}).save(name, tmp_path)
    loaded = load_records("trial", tmp_path)
    assert [record.measured["number"] for record in loaded] == [1.5, 2.5]
    assert loaded[0].provenance["torch"] == torch.__version__
    assert not list(tmp_path.rglob("*.draft*"))
    with refused("experiment"):
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
    with refused("experiment"):
        load_records("04_hopfield", tmp_path)


def test_quote_formats_and_names_what_is_not_there():
    record = Record("trial", {"rows": 1200}, {"error": 0.12345})
    assert quote(record, "error", ".2f") == "0.12"
    assert quote(record, "rows", ",d") == "1,200"
    assert quote(Record("trial", {}, {"gain": -0.5}), "gain", ".1f") == "−0.5"
    assert "torch" in quote(record, "provenance")
    with refused("record"):
        quote("trial", "error")
    with refused("field"):
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
    with pytest.raises(OSError) as caught:
        record.save("same", tmp_path)
    assert (caught.value.errno, caught.value.filename) == (28, str(path))  # the second is not from the system
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


@pytest.mark.parametrize("text", [*NO_JSON, *NO_RECORDS, *DAMAGED], ids=repr)
def test_a_file_that_holds_no_record_is_named(text, tmp_path):
    path = tmp_path / "trial" / "bad.json"
    path.parent.mkdir()
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with refused(str(path)):
        load_records("trial", tmp_path)


@pytest.mark.parametrize(("holds", "verdict"), [(True, "held"), (False, "did not hold"), (None, "open")])
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


@pytest.mark.parametrize(("holds", "verdict"), [(True, "proved, checked"), (False, "did not hold"), (None, "open")])
def test_a_check_of_what_is_proved_has_a_verdict_of_its_own_only_if_it_holds(holds, verdict, capsys):
    said = dict(prediction="p", statistic="s", threshold="t", observed="o", proved=True)
    assert conventions.put_to_test(**said, holds=holds) is holds
    assert f"verdict     {verdict}\n" in capsys.readouterr().out
    with refused("proved"):
        conventions.put_to_test(**(said | {"proved": 1}), holds=True)


def test_a_verdict_is_a_truth_value_or_open():
    said = dict(prediction="p", statistic="s", threshold="t", observed="o")
    for true in (np.True_, np.array(True), torch.tensor(True), torch.tensor([True])):
        assert conventions.put_to_test(**said, holds=true) is True
    for neither in (math.nan, np.float64("nan"), 1, np.int8(1), "True", torch.tensor(1.0), np.array([True, False])):
        with refused("holds"):
            conventions.put_to_test(**said, holds=neither)
    with refused("observed"):
        conventions.put_to_test(**(said | {"observed": 0.5}), holds=True)


def test_an_unknown_name_is_no_array():
    with refused("tensors"):
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
        with refused(argument):
            call()
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["settings", "measured", "provenance"])
def test_a_record_is_of_dictionaries(name):
    with refused(name):
        Record("x", **{"settings": {}, "measured": {}} | {name: [1]})
