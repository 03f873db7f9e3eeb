"""Build the book into _build/html, or say in a moment that it is up to date.

Two fingerprints of the last good build are kept beside it. When a page changed, the pages are written anew and
the notebooks whose code is the same are taken from the cache. When the library, the results, the extension or an
installed package changed, every notebook runs again: the cache looks at the code cells and would not notice.
"""

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

PAGES = ["nbs", "_static", "_templates", "_config.yml", "_toc.yml", "references.bib", "settings.ini", "CITATION.cff"]
CODE = ["gbattn", "nbs/support", "results", "_ext", "constraints.txt"]


def files_under(name):
    """The file of that name, or every file in the folder of that name but caches and hidden ones."""
    path = Path(name)
    found = path.rglob("*") if path.is_dir() else [path]
    return sorted(f for f in found if f.is_file() and not any(p.startswith((".", "__pycache__")) for p in f.parts))


def fingerprint(names, *facts):
    """A hash of the names and contents of all these files: dates mean little, since an export rewrites every file."""
    digest = hashlib.sha256(repr(facts).encode())
    for file in (f for name in names for f in files_under(name)):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"\0{file.as_posix()}\0{content}".encode())
    return digest.hexdigest()


def fingerprints():
    installed = sorted({f"{d.name} {d.version}" for d in distributions()})
    profile = os.environ.get("GBATTN_PROFILE", "quick")
    return {"pages": fingerprint(PAGES), "code": fingerprint(CODE, platform.python_version(), installed, profile)}


def build(folder):
    build_folder = folder / "_build"
    page = build_folder / "html" / "index.html"
    record = build_folder / "built-from.json"
    now = fingerprints()
    last = json.loads(record.read_text()) if record.exists() else {}

    if now != last or not page.exists():
        # Always from clean pages: Sphinx repeats no warning about a page that it does not read again, and the page
        # of a notebook that is gone would stay.
        executed = build_folder / ".jupyter_cache" if last.get("code") == now["code"] else None
        for entry in build_folder.glob("*"):
            if entry != executed:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        build_folder.mkdir(parents=True, exist_ok=True)
        # Until the build has ended well, the record speaks for the cache alone.
        record.write_text(json.dumps({"code": now["code"]}))

        jupyter_book = Path(sys.executable).with_name("jupyter-book")
        commands = (
            [sys.executable, "tools/run_notebooks.py", build_folder / ".jupyter_cache"],
            [jupyter_book, "build", ".", "--path-output", folder, "-W", "-n", "--keep-going"],
        )
        # Somebody's MPLBACKEND would take the figures off the pages, and a file of this folder that is called like a
        # module the place of that module.
        environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
        for command in commands:
            if subprocess.run(command, env=environment | {"IN_TEST": "1", "PYTHONSAFEPATH": "1"}).returncode:
                sys.exit("The book was not built: the reason is above.")
        record.write_text(json.dumps(now))

    print(f"Open {page.absolute().as_uri()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("."), help="where _build/ is made (default: here)")
    build(parser.parse_args().folder)
