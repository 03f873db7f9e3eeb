"""Run the notebooks of the book, as many at once as there are cores, into the cache from which its pages take them.

A notebook that the cache has, with the same code, does not run again. The first one that fails ends it.
"""

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import nbformat
import yaml
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from jupyter_cache.executors.utils import single_nb_execution

sys.path.insert(0, "_ext")
from nbdev_pages import page_of, test_flags


def missing(cache):
    """The notebooks that the cache lacks, as the pages have them, the largest first: it tends to take longest."""
    found = {}
    for path in sorted(Path("nbs").glob("*.ipynb"), key=lambda path: -path.stat().st_size):
        page, _ = page_of(json.loads(path.read_text("utf-8")), test_flags(Path.cwd()))
        notebook = nbformat.reads(json.dumps(page), as_version=4)
        try:
            cache.match_cache_notebook(notebook)
        except KeyError:
            found[path] = notebook
    return found


def run(folder):
    cache = get_cache(folder)
    notebooks = missing(cache)
    cores = os.cpu_count() or 1
    # Two notebooks that share two cores are faster with one thread each than with two.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // max(1, len(notebooks)))))
    # A kernel would look for its modules in the folder of the notebooks first.
    os.environ["PYTHONSAFEPATH"] = "1"
    options = dict(
        cwd=str(Path("nbs").absolute()),
        timeout=yaml.safe_load(Path("_config.yml").read_text("utf-8"))["execute"]["timeout"],
        allow_errors=False,
        extra_arguments=[
            "--log-level=ERROR",  # else each kernel warns that nothing is encrypted
            # For `support`, after all that is installed, and without a name in the notebook.
            "--IPKernelApp.exec_lines=__import__('sys').path.append(__import__('os').getcwd())",
        ],
    )
    with ThreadPoolExecutor(cores) as pool:  # each kernel is a process of its own
        runs = {pool.submit(single_nb_execution, notebook, **options): path for path, notebook in notebooks.items()}
        for done in as_completed(runs):
            path, result = runs[done], done.result()
            if result.err is not None:
                pool.shutdown(cancel_futures=True)
                sys.exit(f"{path}: {result.err}")
            print(f"{path}: {result.time:.0f} s", flush=True)
            bundle = CacheBundleIn(result.nb, str(path.absolute()), data={"execution_seconds": result.time})
            cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cache", help="the folder of the cache, made if it is not there")
    run(parser.parse_args().cache)
