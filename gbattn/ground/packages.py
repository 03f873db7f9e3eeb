"""Packages that only some of the library needs."""

import importlib
import re
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType

from gbattn.ground.arguments import require


def check_packages(
    extra: str,
    *packages: str,
    releases: tuple[str, str] | None = None,
    also: str = "",
) -> None:
    """Check that packages of an extra of gbattn are installed and, given two
    `releases`, that theirs is the first or later, and before the second."""
    for package in packages:
        found = find_spec(package) is not None
        home = "git+https://github.com/gbattn/gbattn"
        cure = f"pip install 'gbattn[{extra}] @ {home}'{also}"
        require(found, package, "a Python that cannot import it", cure)
        if releases is not None:
            number = lambda text: [int(n) for n in re.findall(r"\d+", text)[:3]]
            got = version(package)  # importing it might fail first
            first, end = map(number, releases)
            want = ">={},<{}: {}".format(*releases, cure)
            require(first <= number(got) < end, package, got, want)


def load_package(extra: str, package: str, also: str = "") -> ModuleType:
    """Import a package of an extra of gbattn where it is used."""
    check_packages(extra, package, also=also)
    return importlib.import_module(package)
