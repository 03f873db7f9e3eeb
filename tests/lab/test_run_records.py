"""The records of an experiment: damaged ones and those of another run are refused; what can be compared."""

import json
import math
import shutil
from dataclasses import replace

import pytest
from refusals import refused

from gbattn.conventions import Record
from gbattn.lab.records import Plan, comparable, records_of
from gbattn.lab.status import least_seconds, status_of
from tiny_experiment import BOOSTED, STANDARD, TINY, UNRATED, go, made, swept


def test_a_record_of_a_run_that_is_no_more_does_not_count(finished):
    """As when a sweep has found a better rate since."""
    place, records = finished
    faster = replace(STANDARD, train={"learning_rate": 2e-3})
    assert records_of(replace(TINY, arms=(faster, BOOSTED)), place / "results") == records[1::2]


def test_a_changed_default_is_found_out(finished, corpora):
    place, records = finished
    path = next((place / "results" / "tiny").glob("standard-seed1*"))
    kept = path.read_text()
    changed = json.loads(kept)
    changed["settings"]["train"]["final_fraction"] = 0.5
    path.write_text(json.dumps(changed))
    with refused(path, got="train.final_fraction"):
        go(corpora, place)
    path.write_text(kept)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found | {"settings": []},
        lambda found: found | {"settings": found["settings"] | {"text": "tiny"}},
        lambda found: found | {"settings": {k: v for k, v in found["settings"].items() if k != "model"}},
        lambda found: found | {"settings": {k: v for k, v in found["settings"].items() if k != "label"}},
        lambda found: found | {"measured": {k: v for k, v in found["measured"].items() if k != "diverged"}},
        lambda found: found | {"measured": {k: v for k, v in found["measured"].items() if k != "test_loss"}},
        lambda found: found | {"settings": found["settings"] | {"text": {"name": "tiny"}}},
        lambda found: found | {"measured": None},
        lambda found: found | {"measured": found["measured"] | {"diverged": "no"}},
        lambda found: found | {"measured": found["measured"] | {"valid_loss": "3.5"}},
        lambda found: found | {"measured": found["measured"] | {"test_loss": math.nan}},
        lambda found: found | {"measured": found["measured"] | {"parameters": -1}},
        lambda found: found | {"measured": found["measured"] | {"seconds": None}},
        lambda found: found | {"measured": found["measured"] | {"train_step": [0, True]}},
        lambda found: found | {"settings": found["settings"] | {"learning_rate": "fast"}},
    ],
)
def test_a_record_that_is_not_whole_is_damaged(finished, tmp_path, change):
    place, records = finished
    shutil.copytree(place / "results" / "tiny", tmp_path / "tiny")
    path = tmp_path / "tiny" / f"{TINY.runs()[0].name}.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with refused(path, want="delete it"):
        records_of(TINY, tmp_path)


@pytest.mark.parametrize(
    "change", [{"experiment": "other"}, {"settings": {"arm": "boosted_residual"}}, {"settings": {"seed": 7}}]
)
def test_a_record_under_the_name_of_another_is_refused(finished, tmp_path, change):
    place, records = finished
    shutil.copytree(place / "results" / "tiny", tmp_path / "tiny")
    path = tmp_path / "tiny" / f"{TINY.runs()[0].name}.json"
    found = json.loads(path.read_text())
    settings = found["settings"] | change.get("settings", {})
    path.write_text(json.dumps(found | change | {"settings": settings}))
    with refused(path, want="delete the record"):
        records_of(TINY, tmp_path)


def test_a_file_with_two_records_is_none_of_a_run(finished, tmp_path):
    place, records = finished
    shutil.copytree(place / "results" / "tiny", tmp_path / "tiny")
    path = tmp_path / "tiny" / f"{TINY.runs()[0].name}.json"
    path.write_text(json.dumps(2 * [json.loads(path.read_text())]))
    with refused(path):
        records_of(TINY, tmp_path)


def test_without_the_whole_sweep_no_run_is_known(tmp_path):
    """Its grid was extended, or a record is missing: the best rate may be another."""
    losses = {(arm.name, rate): abs(rate - 2) for arm in TINY.arms for rate in (1, 2, 3)}
    after = replace(UNRATED, name="after", rates_from=swept(losses, tmp_path))
    for one in Plan(after, tmp_path).runs:
        Record("after", one.settings, made(one).measured).save(one.name, tmp_path)
    assert len(records_of(after, tmp_path)) == 4
    wider = replace(after, rates_from=replace(after.rates_from, grid={"learning_rate": (1, 2, 3, 4)}))
    for use in (lambda of: of.tuned, Plan.untuned):
        with refused("rates_from", want="run sweep", got="12 of the 16"):
            use(Plan(wider, tmp_path))
    assert records_of(wider, tmp_path) == []
    next((tmp_path / "sweep").glob("*")).unlink()
    with refused("rates_from", want="run sweep", got="11 of the 12"):
        Plan(after, tmp_path).untuned()
    assert records_of(after, tmp_path) == []


def test_what_can_be_compared(finished, tmp_path):
    """All records of a comparison; of a sweep those of the best rates, with the arms that are not tuned."""
    place, records = finished
    found = comparable(TINY, place / "results")
    assert found == (TINY, records_of(TINY, place / "results"), set(), 4)
    losses = {("standard", rate): -rate for rate in (1, 2, 3)}
    losses |= {("boosted_residual", rate): abs(rate - 2) for rate in (1, 2, 3)}
    sweep = swept(losses, tmp_path)
    found = comparable(sweep, tmp_path)
    rates = {(r.settings["arm"], r.settings["learning_rate"]) for r in found.records}
    assert rates == {("standard", 3), ("boosted_residual", 2)} and len(found.records) == 4
    assert (found.untuned, found.done) == ({"standard"}, 12)
    after = replace(UNRATED, name="after", rates_from=sweep)
    for one in Plan(after, tmp_path).runs:
        Record("after", one.settings, made(one).measured).save(one.name, tmp_path)
    assert comparable(after, tmp_path)[2:] == ({"standard"}, 4)


@pytest.mark.parametrize(
    "use, wrong, argument",
    [
        (comparable, dict(experiment="none"), "experiment"),
        (comparable, dict(experiment="quick", folder=3), "folder"),
        (comparable, dict(experiment="quick"), "experiment"),
        (comparable, dict(experiment=replace(TINY, grid={"n_layers": (1, 2)})), "experiment"),
        (status_of, dict(experiment=["quick"]), "experiment"),
        (status_of, dict(experiment="quick", folder=""), "folder"),
        (least_seconds, dict(experiment=3), "experiment"),
    ],
)
def test_what_is_no_experiment_or_folder_is_refused(tmp_path, use, wrong, argument):
    folder = {} if use is least_seconds else dict(folder=tmp_path)
    with refused(argument):
        use(**folder | wrong)
