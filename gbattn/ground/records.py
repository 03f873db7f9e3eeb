"""Where records of runs lie."""

import os
from pathlib import Path

from gbattn.ground.arguments import ArgumentError

# Records are not part of the package.
FETCH_RECORDS = "git clone https://github.com/gbattn/gbattn, then GBATTN_RESULTS=gbattn/results"


def results_folder() -> Path:
    """Return the folder of records: ``GBATTN_RESULTS`` if set, else the nearest
    ``results`` at or above the current folder."""
    if "GBATTN_RESULTS" in os.environ:
        return Path(os.environ["GBATTN_RESULTS"])
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "results" / "reported.json").is_file():
            return folder / "results"
    got = f"nothing, and no folder results at or above {here}"
    raise ArgumentError(
        "GBATTN_RESULTS",
        got,
        f"the folder of the book's records: {FETCH_RECORDS}",
    )


# What a chapter's folder is called, in the folder of records.
CHAPTERS = "[0-9A-Z]*_*"


def experiment_folder(experiment: str, folder: Path | None = None) -> Path:
    """Return the folder of an experiment's records: in the book it lies in a chapter's
    folder, as in ``results/04_hopfield/hopfield-phase``; in a reader's own folder of
    records (`results_folder` by default) it lies directly below. If it does not exist
    yet, the latter path is returned."""
    folder = Path(folder or results_folder())
    places = (folder, *sorted(folder.glob(CHAPTERS)))
    found = (place / experiment for place in places)
    return next(filter(Path.is_dir, found), folder / experiment)
