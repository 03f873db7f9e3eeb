"""The experiments of the book by name: one TOML file each in this folder, with the arms that they share in _index.toml.

To list them takes no torch: what an experiment is (`gbattn.experiments`) is loaded with the first that is read.
"""

import os
import tomllib
from collections import UserDict
from pathlib import Path
from typing import TYPE_CHECKING

from gbattn.ground.arguments import ArgumentError

if TYPE_CHECKING:
    from gbattn.experiments import Experiment

CATALOGUE = Path(__file__).parent


def read_settings(name: str) -> dict:
    """Return what the TOML file of a name says, and no more than that."""
    return tomllib.loads((CATALOGUE / f"{name}.toml").read_text("utf-8"))


class Catalogue(UserDict):
    """Experiments by name, from the files of a folder; a file is read when its name is first asked for."""

    folder = CATALOGUE

    def __getitem__(self, name: str) -> "Experiment":
        if isinstance(self.data[name], Path):
            self.data[name] = self.read(self.data[name])
        return self.data[name]

    def read(self, path: Path) -> "Experiment":
        """Return the experiment of a file, which may refer to these experiments and arms by name."""
        import gbattn.lab.trial_layers  # noqa: F401  # registers the layers of `stability`
        from gbattn.experiments import Experiment

        return Experiment.from_toml(path, self)


EXPERIMENTS = Catalogue({name: CATALOGUE / f"{name}.toml" for name in read_settings("_index")["experiments"]})


def find_experiment(experiment: "Experiment | str | os.PathLike") -> "Experiment":
    """Return an experiment of the book by its name in `EXPERIMENTS`, or that of a TOML file by a path that ends in
    ``.toml`` (`gbattn.experiments.Experiment.from_toml`, with the arms and the experiments of the book to refer to);
    an `Experiment` is returned as it is.

    A file, or one that it takes its rates from, may not have the name of another experiment of the book, whose
    records it would mix with its own.
    """
    from gbattn.experiments import Experiment

    if isinstance(experiment, Experiment):
        return experiment
    if isinstance(experiment, str | os.PathLike) and str(experiment).endswith(".toml"):
        found = EXPERIMENTS.read(Path(experiment))
        for one in filter(None, (found, found.rates_from)):
            if EXPERIMENTS.get(one.name, one) != one:
                want = f"a file name that is not that of an experiment of the book, as {one.name} is"
                raise ArgumentError("experiment", str(experiment), want)
        return found
    if not (isinstance(experiment, str) and experiment in EXPERIMENTS):
        want = f"one of {', '.join(EXPERIMENTS)}, or a path that ends in .toml"
        raise ArgumentError("experiment", repr(experiment), want)
    return EXPERIMENTS[experiment]
