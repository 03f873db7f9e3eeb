"""Say how the book stands, from what its build has anyway: ``{status-of-the-book}``.

Three tables: each page with the time that its notebook took and the verdicts that it
shows; the claims that did not hold, or are open, or wait for runs, each as a sentence of
nbs/support/claims.toml that links to its section; and the experiments of the catalogue
whose runs are not all in.  The first two begin with the pages of the short route.  The
pages are read as Sphinx has stored them.

A verdict is what `gbattn.conventions.put_to_test` prints, a badge, or what a cell of a
table says, as `support.verdicts.verdict` does for chapter 18 and the lab notebook.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import tomllib
from collections import Counter
from datetime import date
from html import escape
from importlib.metadata import version
from pathlib import Path

from claim_boxes import capital
from docutils import nodes
from myst_nb.sphinx_ import NbMetadataCollector
from short_route import ROUTE
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective

VERDICTS = ("held", "did not hold", "open", "proved, checked", "seen", "not known yet")
HEADS = ("held", "did not hold (in a box)", "open (in a box)", *VERDICTS[3:])
PRINTED = re.compile(r"^prediction +(.*?)^statistic .*?^verdict +(" + "|".join(VERDICTS[:4]) + ")$", re.M | re.S)
WAITING = re.compile(r"^(\S.*)\n +(not known yet|open): ", re.M)  # what chapter 18 prints in its place
WORD = re.compile(r"(held|did not hold|open|seen)( after Holm|, not planned)?")
DECIDED = re.compile(r"(?:.*<br>)?(better|worse), planned")  # the last line of a cell
GROUPS = ("The short route", "Chapters of the library", "Companion: one paper a chapter", "Appendices and reference")
PACKAGES = ("torch", "numpy", "scikit-learn", "matplotlib", "transformers")


class status_tables(nodes.General, nodes.Element):
    """The place where the tables go."""


class Status(SphinxDirective):
    def run(self):
        self.env.metadata[self.env.docname]["is_status"] = True
        return [status_tables()]


def claims_in(document):
    """The claims that a page puts to the test, each with its verdict and the section where it stands."""
    claims = []
    for block in document.findall(nodes.literal_block):
        text = block.astext()
        place = block.parent
        while place is not None and not isinstance(place, nodes.section):
            place = place.parent
        found = [*PRINTED.findall(text), *WAITING.findall(text)]
        claims += [(" ".join(claim.split()), verdict, place) for claim, verdict in found]
    return claims


def sentences():
    """The sentence of each claim that the status page names."""
    return tomllib.loads((Path(__file__).parents[1] / "nbs" / "support" / "claims.toml").read_text("utf-8"))


def is_shown(text):
    """Whether a text stands in a badge or in a cell of a table; the first of a row names what the others explain."""
    badge = any(name.startswith("sd-b") for name in text.parent["classes"])
    above = text.parent.parent, text.parent.parent.parent
    return badge or any(isinstance(cell, nodes.entry) and cell.parent.index(cell) for cell in above)


def verdicts_in(document):
    """How often a page gives each verdict: on a claim, in a badge or in a table."""
    texts = [text for text in document.findall(nodes.Text) if is_shown(text)]
    shown = [WORD.fullmatch(" ".join(text.astext().split())) for text in texts]
    cells = [" ".join(cell.astext().split()) for cell in document.findall(nodes.entry)]
    planned = {"better": "held", "worse": "did not hold"}
    found = [verdict for _, verdict, _ in claims_in(document)]
    found += [word[1] for word in shown if word]
    return Counter(found + [planned[word[1]] for word in map(DECIDED.fullmatch, cells) if word])


def counted(verdict, all_of_it, in_a_box):
    """How often a page gives a verdict, and for those of the second table how often in a box."""
    if not all_of_it or verdict not in ("did not hold", "open"):
        return str(all_of_it or "")
    return f"{all_of_it} ({in_a_box})"


def missing_runs(report):
    """The experiments whose runs are not all in: name, question, runs that are in and that are planned."""
    counted = [(name, one.question, len(report.records(name)), one.planned) for name, one in report.experiments.items()]
    return [row for row in counted if row[2] < row[3]]


def machine():
    """What the build ran on, in a sentence."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.M) if info.exists() else []
    processor = names[0] if names else platform.processor() or platform.machine()
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    profile = os.environ.get("GBATTN_PROFILE", "quick")
    return (
        f"Built on {date.today()} with the profile {profile}, on {os.cpu_count()} cores of {processor}, "
        f"with Python {platform.python_version()}, {packages}."
    )


def group_of(docname):
    """The group of a page, one of `GROUPS`."""
    name = docname.rpartition("/")[2]
    if name in (*ROUTE, "index"):
        return GROUPS[0]
    number = re.match(r"(\d+)[a-z]?_", name)
    if number is None:
        return GROUPS[3]
    return GROUPS[2] if 22 <= int(number[1]) <= 29 else GROUPS[1]


def table(head, groups):
    """A table in HTML, of rows of cells that are HTML, by the titles of their groups; none has the title ""."""
    row = lambda kind, cells: "<tr>" + "".join(f"<{kind}>{one}</{kind}>" for one in cells) + "</tr>"
    body = ""
    for title, rows in groups.items():
        above = f'<tr><th colspan="{len(head)}" scope="rowgroup">{title}</th></tr>' if title and rows else ""
        body += f"<tbody>{above}{''.join(row('td', cells) for cells in rows)}</tbody>"
    inside = f'<table class="table"><thead>{row("th", head)}</thead>{body}</table>'
    return f'<div class="pst-scrollable-table-container">{inside}</div>'


class WriteStatus(SphinxPostTransform):
    default_priority = 1

    def run(self, **options):
        for place in list(self.document.findall(status_tables)):
            place.replace_self([nodes.paragraph(text=machine()), *self.tables()])

    def tables(self):
        env, here = self.env, self.env.docname
        pages, claims, words = {group: [] for group in GROUPS}, {group: [] for group in GROUPS}, sentences()
        for there in env.collect_relations():
            document, ran = env.get_doctree(there), NbMetadataCollector.get_exec_data(env, there)
            found, tested = verdicts_in(document), claims_in(document)
            boxes = Counter(verdict for _, verdict, _ in tested)
            if there == here or not (ran or found.total()):
                continue
            number = ".".join(map(str, env.toc_secnumbers.get(there, {}).get("", ())[:1]))
            title = f"{number} {env.titles[there].astext()}".strip()
            address = self.app.builder.get_relative_uri(here, there)
            link = f'<a href="{address}">{escape(title)}</a>'
            seconds = f"{ran['runtime']:.0f}" if ran and ran["runtime"] else ""
            pages[group_of(there)].append([link, seconds, *(counted(v, found[v], boxes[v]) for v in VERDICTS)])
            for claim, verdict, place in tested:
                if verdict not in ("held", "proved, checked"):
                    anchor = f"#{place['ids'][0]}" if place else ""
                    inside = f'<a href="{address}{anchor}">{escape(words.get(claim, capital(claim)))}</a>'
                    chapter = number or escape(env.titles[there].astext())
                    claims[group_of(there)].append([inside, verdict, chapter])
        sys.path.append(str(Path(self.app.srcdir) / "nbs"))
        from support.reports import Report

        runs = [[f"<code>{name}</code>", escape(why), *numbers] for name, why, *numbers in missing_runs(Report())]
        yield from self.titled("Pages", table(["page", "seconds to run", *HEADS], pages))
        yield from self.titled(
            "Claims that did not hold or are open, where a page puts them to the test",
            table(["claim", "verdict", "chapter"], claims),
        )
        yield from self.titled("Runs that are missing", table(["experiment", "question", "in", "of"], {"": runs}))

    @staticmethod
    def titled(title, html):
        return nodes.rubric(text=title), nodes.raw("", html, format="html")


def page_of_status(app, env):
    """Any page may have changed, so this one is always written anew."""
    return [docname for docname, about in env.metadata.items() if about.get("is_status")]


def setup(app):
    app.add_node(status_tables)
    app.add_directive("status-of-the-book", Status)
    app.add_post_transform(WriteStatus)
    app.connect("env-updated", page_of_status)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
