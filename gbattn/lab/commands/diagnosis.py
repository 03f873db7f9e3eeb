"""`gbattn diagnose`: what the corrections of a trained model do."""

import tempfile
from dataclasses import replace
from pathlib import Path

from gbattn.ground.arguments import require
from gbattn.ground.files import check_folder, write_atomic
from gbattn.ground.records import CHAPTERS
from gbattn.lab.commands.options import aligned, check_options, folder_of_records, tell
from gbattn.lab.commands.text import text_of


def run_of_the_queue(name: str, results: Path, corpora: Path | None, work: Path | None) -> tuple:
    """Return the trained model of a run by its id, which is trained again where its weights are not at hand, its
    corpus, and what its record says."""
    from gbattn.conventions import read_records
    from gbattn.lab.queue import run_experiment, work_folder
    from gbattn.lab.records import Plan
    from gbattn.language_model import LanguageModel

    found = [*results.glob(f"*/*-{name}.json"), *sorted(results.glob(f"{CHAPTERS}/*/*-{name}.json"))]
    want = f"a folder that gbattn train wrote, or the id of a run with a record in {results}"
    require(bool(found), "run", repr(name), want)
    (record,) = read_records(found[0])
    plan = Plan(record.experiment, results, corpora)
    one = next((one for one in plan.runs if one.id == name), None)
    want = "the id of a run that its experiment still has"
    require(one is not None, "run", f"{name} of {plan.experiment.name}", want)
    model = work_folder(work) / name / "model"
    if not model.is_dir():
        tell(f"its weights are not in {work_folder(work)}: it is trained again")
        grid = {key: (value,) for key, value in one.varied.items()}
        alone = replace(plan.tuned, arms=(one.arm,), seeds=(one.seed,), grid=grid)
        with tempfile.TemporaryDirectory() as place:
            run_experiment(alone, folder=place, work=work, corpora=corpora)
    about = {key: record.settings[key] for key in ("id", "arm", "label", "seed")}
    return LanguageModel.from_pretrained(model), plan.text, about | {"of": record.experiment}


def _run_of_a_folder(run: str, cache: Path | None) -> tuple:
    """The model of a folder that gbattn train wrote, its corpus, and what is said of it."""
    from gbattn.lab.run_folder import RunFolder

    settings, (model, _) = RunFolder(run).read(), RunFolder(run).open("cpu")
    return model, text_of(settings, None, cache), {"folder": run, "seed": settings["training"]["seed"]}


def diagnose_model(
    run: str = "gbattn-model",
    *,
    split: str = "test",
    tokens: int = 200_000,
    sample: int = 8_192,
    batch_size: int = 16,
    untrained: bool = False,
    report: Path = Path("diagnosis.html"),
    results: Path | None = None,
    corpora: Path | None = None,
    work: Path | None = None,
    cache: Path | None = None,
) -> dict:
    """Show what the corrections of a trained model do, on a page.

    The page and its JSON say whether corrections go down the loss, which way a second
    round reads the first, what heads attend to, and which tokens are helped. In a layer
    of one round the second half of the heads stands for a correction.

    Parameters
    ----------
    run : str
        A folder that gbattn train wrote, or the id of a run of an experiment, twelve
        hex digits as in its record; where its weights are not at hand, it is
        trained again.
    split : {"test", "valid", "train"}
        Which part of its corpus.
    tokens : int
        How many of its first tokens at most.
    sample : int
        About how many of these are used for what takes many passes.
    batch_size : int
        Windows at once.
    untrained : bool
        Whether to diagnose the model as it was before its training.
    report : Path
        The page to write; the JSON, a record, goes beside it.
    results : Path, optional
        The folder of records: by default GBATTN_RESULTS, the book's folder if this
        is a checkout of it, or results here.
    corpora : Path, optional
        The folder that holds the folders of text; GBATTN_CORPORA by default.
    work : Path, optional
        Where trained models are; GBATTN_RUNS by default, else ~/.cache/gbattn/runs.
    cache : Path, optional
        Where tokenized texts are kept; GBATTN_CACHE by default, else
        ~/.cache/gbattn.
    """

    import numpy as np

    from gbattn.conventions import Record
    from gbattn.lab.diagnosis import diagnose
    from gbattn.lab.diagnosis_page import report_page
    from gbattn.language_model import LanguageModel

    check_options(run=run, tokens=tokens, sample=sample, untrained=untrained, report=report)
    check_options(split=split)
    require(batch_size != 1, "batch_size", batch_size, "2 or more")
    check_options(batch_size=batch_size)
    report = Path(report)
    check_folder("report", report.parent)
    if Path(run).is_dir():
        model, text, about = _run_of_a_folder(run, cache)
    else:
        model, text, about = run_of_the_queue(run, folder_of_records(results), corpora, work)
    if untrained:
        model = LanguageModel(model.config, seed=about["seed"])
    chosen = getattr(text, split)[: tokens + 1]
    counts = np.bincount(text.train, minlength=model.config.vocab_size)
    options = dict(batch_size=batch_size, sample=sample, counts=counts)
    found = diagnose(model, chosen, decode=text.decode, **options)
    about |= dict(untrained=untrained, split=split, corpus=text.name)
    about |= dict(fingerprint=text.fingerprint)
    record = Record("diagnosis", about, found)
    data = report.with_suffix(".json")
    report.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(data, record.to_json().encode())
    title = f"{run}, untrained" if untrained else run
    write_atomic(report, report_page(found, title).encode())
    layers = [layer["descent1"] for layer in found["layers"]]
    return {
        "run": run,
        "report": str(report),
        "json": str(data),
        "tokens": found["tokens"],
        "halves": found["halves"],
        "loss": found["loss"][0],
        "gain": found["whole"]["stopped"][0],
        "helped": found["whole"]["helped"][0],
        "cosine": [layer["cosine"][0] for layer in layers],
        "change": [layer["change"][0] for layer in layers],
    }


def say_diagnosed(result: dict) -> str:
    """What a terminal shows of the result of `diagnose_model`."""
    from gbattn.lab.diagnosis_page import say_halves

    table = [["layer", "cosine", "change of the loss"]]
    for i, (cosine, change) in enumerate(zip(result["cosine"], result["change"])):
        table.append([str(i), f"{cosine:+.3f}", f"{change:+.4f}"])
    lines = [
        f"{result['tokens']:,} tokens, {result['loss']:.3f} nats; without corrections "
        f"{result['gain']:+.3f}; they help {result['helped']:.0%} of the tokens." + say_halves(result),
        *aligned(table),
        "cosine: of the correction with the direction in which the loss falls fastest",
        "change: what the correction of this layer does to the loss, in nats a token",
        f"more in {result['report']} and {result['json']}",
    ]
    return "\n".join(lines)
