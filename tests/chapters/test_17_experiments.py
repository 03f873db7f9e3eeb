"""Chapter 17: names of runs, equal sizes, rates from a sweep, files and what they are refused for."""

from dataclasses import replace

import pytest
from refusals import refused

from gbattn.comparison import MEASURES
from gbattn.experiments import Arm, CorpusSpec, Experiment, tuned
from gbattn.ground.arguments import ArgumentError
from gbattn.lab.catalogue import EXPERIMENTS, find_experiment
from gbattn.lab.records import Plan
from gbattn.language_model import LanguageModel
from tiny_experiment import BOOSTED, OWN, STANDARD, TINY, UNRATED, WIDER, swept


def test_what_is_to_be_equal_is_so_at_each_size_of_a_grid():
    grid = {"d_model": (16, 32), "norm": ("pre", "post")}
    made = {}
    for one in replace(TINY, arms=(STANDARD, BOOSTED, WIDER), seeds=(1,), grid=grid).runs():
        made.setdefault((one.model.norm, one.varied["d_model"]), {})[one.arm.name] = one.model
    assert len(made) == 4
    for (norm, width), of in made.items():
        assert of["standard"].d_model == of["boosted_residual"].d_model == width <= of["wider"].d_model
        size = {name: MEASURES["parameters"](config) for name, config in of.items()}
        assert size["wider"] == pytest.approx(size["boosted_residual"], rel=0.01)
        assert all(config.norm == norm for config in of.values())


def test_wider_is_equal_to_boosted():
    config = TINY.model_of(WIDER)
    assert abs(MEASURES["parameters"](config) / MEASURES["parameters"](TINY.model_of(BOOSTED)) - 1) < 0.05


def test_a_wider_arm_shares_no_weight():
    """What the chapter says of pairs of different width."""
    one, two = (LanguageModel(EXPERIMENTS["mini"].model_of(arm), seed=1).state_dict() for arm in (WIDER, BOOSTED))
    shared = set(one) & set(two)
    assert len(shared) == len(one) and not any(one[name].shape == two[name].shape for name in shared)


def test_arms_of_a_seed_start_from_the_same_weights_by_name():
    runs = [one for one in EXPERIMENTS["quick"].runs() if one.arm.name in ("standard", "boosted_residual")]
    for seed in (1, 2):
        one, two = (LanguageModel(r.model, seed=r.seed).state_dict() for r in runs if r.seed == seed)
        shared = [name for name in one if name in two]
        assert len(shared) == len(one) and all((one[name] == two[name]).all() for name in shared)


def test_ids_are_those_of_the_committed_records():
    """A changed id would orphan hours of runs."""
    first = EXPERIMENTS["mini-sweep"].runs()[0]
    assert first.name == f"standard-lr0.001-seed0-{first.id}"
    assert first.id == "3b6ce67907d7"
    assert EXPERIMENTS["blocks-postln"].runs()[-1].id == "c65f476e0833"


def test_everything_that_decides_is_in_the_id_and_nothing_else():
    one = EXPERIMENTS["mini-sweep"].runs()[0]
    same = [
        replace(one, arm=replace(one.arm, name="other", label="other")),
        replace(one, experiment="other"),
        replace(one, planned=7, varied={}),
    ]
    assert {other.id for other in same} == {one.id}
    other_model = dict(d_model=72, n_layers=3, d_ffn=100, norm="post", dropout=0.2, attention="boosted", init_std=0.1)
    other_train = dict(seed=9, learning_rate=1e-4, clip=None, warmup_steps=3, epochs=2, betas=(0.8, 0.9), compile=True)
    other_text = dict(
        name="x", vocab_size=2049, max_train_tokens=5, max_valid_tokens=6, fingerprint="0", tokenizer="published"
    )
    changed = [replace(one, model=replace(one.model, **{k: v})) for k, v in other_model.items()]
    changed += [replace(one, train=replace(one.train, **{k: v})) for k, v in other_train.items()]
    changed += [replace(one, corpus=replace(one.corpus, **{k: v})) for k, v in other_text.items()]
    ids = [one.id, *(other.id for other in changed)]
    assert len(set(ids)) == len(ids)


def test_a_default_may_be_stated():
    one = EXPERIMENTS["mini-sweep"].runs()[0]
    assert replace(one, train=replace(one.train, schedule="cosine")).id == one.id


def test_a_file_that_is_not_toml_is_named(tmp_path):
    path = tmp_path / "torn.toml"
    path.write_text("arms = = 2")
    with refused(str(path), want="a TOML file"):
        Experiment.from_toml(path)


def test_rates_from_a_sweep_of_ones_own(tmp_path):
    sweep = OWN.replace("learning_rate = 0.001\n", "") + "[grid]\nlearning_rate = [0.001, 0.002]\n"
    (tmp_path / "sweep.toml").write_text(sweep)
    (tmp_path / "after.toml").write_text(
        'question = ""\nextends = "sweep.toml"\nrates_from = "sweep.toml"\nseeds = [7]\n'
    )
    after = Experiment.from_toml(tmp_path / "after.toml", EXPERIMENTS)
    assert after.rates_from == Experiment.from_toml(tmp_path / "sweep.toml", EXPERIMENTS) and after.grid == {}
    # Neither is inherited, and without a word the rate would be the default.
    for extended in ("sweep", "after"):
        (tmp_path / "unrated.toml").write_text(f'question = ""\nextends = "{extended}.toml"\n')
        with refused(f"{tmp_path / 'unrated.toml'}: rates_from"):
            Experiment.from_toml(tmp_path / "unrated.toml", EXPERIMENTS)
        for rated in ('rates_from = "sweep.toml"', "train.learning_rate = 0.1", "grid.learning_rate = [0.1, 0.2]"):
            (tmp_path / "rated.toml").write_text(f'question = ""\nextends = "{extended}.toml"\n{rated}\n')
            assert Experiment.from_toml(tmp_path / "rated.toml", EXPERIMENTS).name == "rated"


@pytest.mark.parametrize(
    "old, new, argument",
    [
        ("seeds =", "seed =", "seed"),
        ("[1, 2]", "3", "seeds"),
        ("[1, 2]", "[-1]", "seeds"),
        ('"a test"', "true", "question"),
        ("seeds = [1, 2]", "", "seeds"),
        ('"gated"]', '"gates"]', "arms"),
        ('"gated"]', "3]", "arms"),
        ("vocab_size", "vocab", "corpus.vocab"),
        ('name = "tiny"', "", "corpus: name"),
        ("260", '"many"', "corpus: vocab_size"),
        ("d_model", "width", "model"),
        ("d_model = 8", 'd_model = "8"', "arm.standard: d_model"),
        ("steps = 8", "steps = 0.5", "arm.standard: steps"),
        ("batch_size = 4", "batch_size = 9_000_000_000_000", "arm.standard: batch_size"),
        ("n_layers = 1", "n_layers = 1_000_000_000", "arm.standard: n_layers"),
        ("[arm.gated]", f"[grid]\ninit_std = {[*range(1, 4000)]}\n[arm.gated]", "arms, seeds, grid"),
        ('gate = "head"', 'gate = "x"', "arm.gated"),
        ("[arm.gated]", "[arm.gated]\ncolour = 3", "arm.gated.colour"),
        ("[arm.gated]", "[arm.gated]\nequal_in = 3", "arm.gated: equal_in"),
        ("[arm.gated]", '[arm.gated]\nequal_to = "gated"', ""),
        ("[arm.gated]", "[arm]\ngated = 3\n[arm.x]", "arm.gated"),
        ("[arm.gated]", "[grid]\nd_model = [8, 0]\n[arm.gated]", "arm.standard: d_model"),
        ('question = "a test"', 'question = "a test"\nextends = "x.toml"', "extends: experiment"),
        ('question = "a test"', 'question = "a test"\nextends = "own.toml"', ""),
        ('question = "a test"', 'question = "a test"\nextends = "x"', "experiment"),
        ('question = "a test"', 'question = "a test"\nrates_from = "x"', "experiment"),
    ],
)
def test_a_file_is_refused_by_its_name_and_the_key(tmp_path, old, new, argument):
    path = tmp_path / "own.toml"
    assert OWN.count(old) == 1
    path.write_text(OWN.replace(old, new))
    with pytest.raises(ArgumentError) as caught:
        find_experiment(str(path))
    assert caught.value.argument.startswith(f"{path}: {argument}" if argument else str(path))


def test_a_file_that_is_no_toml_is_refused_by_its_name(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN.replace("[corpus]", "[corpus"))
    with pytest.raises(ValueError, match="own.toml"):
        find_experiment(str(path))


def test_rates_come_from_the_sweep(tmp_path):
    losses = {("standard", 1e-3): 2.0, ("standard", 2e-3): 1.0}
    losses |= {("boosted_residual", 1e-3): 1.0, ("boosted_residual", 2e-3): None}
    sweep = swept(losses, tmp_path)
    after = replace(UNRATED, name="after", rates_from=sweep)
    rates = [one.train.learning_rate for one in Plan(after, tmp_path).runs[:2]]
    assert rates == [2e-3, 1e-3]
    unswept = replace(after, arms=(STANDARD, BOOSTED, Arm(name="y")))
    with refused("arms"):
        tuned(unswept, Plan(after, tmp_path).sweep)
    rates = [one.train.learning_rate for one in Plan(replace(unswept, rate_of="standard"), tmp_path).runs[:3]]
    assert rates == [2e-3] * 3


def test_an_untuned_arm_is_named_wherever_its_rate_is_used(tmp_path):
    losses = {("standard", rate): -rate for rate in (1, 2, 3)}
    losses |= {("boosted_residual", rate): abs(rate - 2) for rate in (1, 2, 3)}
    after = replace(UNRATED, rates_from=swept(losses, tmp_path))
    assert Plan(after, tmp_path).untuned() == {"standard"}
    assert Plan(replace(after, rate_of="standard"), tmp_path).untuned() == {"standard", "boosted_residual"}
    assert Plan(replace(after, rate_of="boosted_residual"), tmp_path).untuned() == set()
    assert Plan(TINY, tmp_path).untuned() == set()


def test_the_width_of_equal_time_comes_from_the_sweep(tmp_path):
    pace = lambda seconds: dict(train_step=[10, 20], train_seconds=[0.0, 10 * seconds])
    arms = STANDARD, Arm(name="wide", model={"d_model": 16}), BOOSTED
    timed = {"standard": pace(1.0), "wide": pace(2.0), "boosted_residual": pace(2.0)}
    sweep = swept({(arm.name, 1e-3): 1.0 for arm in arms}, tmp_path, arms, **timed)
    arm = Arm(name="slow", equal_to=BOOSTED, equal_in="time")
    experiment = replace(UNRATED, rates_from=sweep, arms=(arm,), rate_of="wide")
    found = Plan(experiment, tmp_path).runs[0].model
    assert (found.d_model, found.d_ffn) == (16, 64)
    with refused("arm slow"):
        experiment.runs()


@pytest.mark.parametrize(
    "call, argument",
    [
        (lambda: CorpusSpec(name=""), "name"),
        (lambda: CorpusSpec(name="a", fingerprint=3), "fingerprint"),
        (lambda: CorpusSpec(name="a", vocab_size=None), "vocab_size"),
        (lambda: CorpusSpec(name="a", max_train_tokens=0), "max_train_tokens"),
        (lambda: CorpusSpec(name="a", max_valid_tokens=-5), "max_valid_tokens"),
        (lambda: CorpusSpec(name="a", tokenizer="x"), "tokenizer"),
        (lambda: Arm(name="a", method="x"), "method"),
        (lambda: Arm(name="a", equal_in="x"), "equal_in"),
        (lambda: Arm(name="a", change="x"), "change"),
        (lambda: Arm(name="a", equal_to="boosted"), "equal_to"),
        (lambda: Arm(name="a", model="twicing"), "model"),
        (lambda: replace(TINY, corpus="tiny"), "corpus"),
        (lambda: replace(TINY, arms=("standard",)), "arms"),
        (lambda: replace(TINY, arms=STANDARD), "arms"),
        (lambda: replace(TINY, seeds=3), "seeds"),
        (lambda: replace(TINY, seeds=(1, -1)), "seeds"),
        (lambda: replace(TINY, grid=[1]), "grid"),
        (lambda: replace(TINY, grid={"steps": 8}), "grid steps"),
        (lambda: replace(UNRATED, rates_from="sweep"), "rates_from"),
        (lambda: replace(UNRATED, rates_from=TINY), "rates_from"),
        (
            lambda: replace(UNRATED, rates_from=replace(TINY, grid={"learning_rate": (1.0,), "norm": ("pre",)})),
            "rates_from",
        ),
        (lambda: Arm(name=".."), "name"),
        (lambda: replace(TINY, name="../up"), "name"),
        (lambda: replace(TINY, name=".."), "name"),
        (lambda: replace(TINY, rates_from=TINY), "train"),
        (lambda: replace(UNRATED, arms=(Arm(name="a", train={"learning_rate": 1.0}),), rates_from=TINY), "arm a"),
        (lambda: Arm(name="a-b"), "name"),
        (lambda: replace(TINY, seeds=(1, 1)), "seeds"),
        (lambda: replace(TINY, arms=()), "arms"),
        (lambda: replace(TINY, model=dict(width=3)), "model"),
        (lambda: replace(TINY, train=dict(seed=3)), "train"),
        (lambda: replace(TINY, arms=(Arm(name="a", train={"x": 1}),)), "arm a"),
        (lambda: replace(TINY, grid={"x": (1,)}), "grid"),
        (lambda: replace(TINY, grid={"steps": ()}), "grid steps"),
        (lambda: replace(TINY, grid={"steps": (8, 9, 8)}), "grid steps"),
        (lambda: replace(TINY, arms=(WIDER,), grid={"attention": ("twicing",)}), "grid"),
        (lambda: replace(UNRATED, rates_from=TINY, grid={"learning_rate": (1.0,)}), "grid"),
        (lambda: replace(TINY, rate_of="x"), "rate_of"),
        (lambda: replace(UNRATED, rates_from=TINY, rate_of="x"), "rate_of"),
        (lambda: Arm(name="a", label=3), "label"),
        (lambda: replace(TINY, question=3), "question"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_its_name(call, argument):
    with refused(argument):
        call()
