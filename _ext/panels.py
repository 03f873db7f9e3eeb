"""On a phone the panels of a figure stand below each other.

Matplotlib draws them side by side, and a phone has room for one.  So a wide figure is cut between its panels where
nothing is drawn, and the page has each piece once more, as a window on the same file; _static/book.css shows either
the whole or the windows, each under the word for its side if the caption names the sides.  Where no cut is clean, where
the panels share the numbers of an axis, or where something belongs to all of them, the figure stays whole and scrolls.
"""

from __future__ import annotations

import re
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.osutil import relative_uri

SIDES = {2: ("left", "right"), 3: ("left", "middle", "right")}
FITS = 400  # points: a figure up to this width is read on a phone as it is
BAR = 40  # points: axes narrower than this are a colour bar, part of the panel before
GROUP, TEXT = "{http://www.w3.org/2000/svg}g", re.compile(r"translate\(([-\d.]+) [-\d.]+\)( rotate)?.*scale\(([\d.]+)")
SHIFT, CORNER = re.compile(r"translate\(([-\d.]+)"), re.compile(r"[ML] ([-\d.]+) ")


class Panel(NamedTuple):
    """Where axes stand across a figure, and where they begin and end with all that is written at them."""

    left: float
    right: float
    begins: float
    ends: float


def span_of(text: ElementTree.Element) -> tuple[float, float]:
    """Where a text begins and ends; the last letter is taken to be as wide as a wide one."""
    inner = text.find(GROUP)
    found = TEXT.match(inner.get("transform", "") if inner is not None else "")
    if not found:
        return float("nan"), float("nan")
    x, scale = float(found[1]), float(found[3])
    if found[2]:  # from below to above
        return x - 80 * scale, x + 25 * scale
    letters = [SHIFT.match(one.get("transform", "")) for one in inner.iter()]
    return x, x + scale * (60 + max((float(shift[1]) for shift in letters[1:] if shift), default=0))


def panel_of(axes: ElementTree.Element) -> Panel | None:
    """The panel that axes are."""
    edge = axes.find(f"{GROUP}/*[@d]")
    corners = [float(x) for x in CORNER.findall(edge.get("d"))] if edge is not None else []
    if not corners:
        return None
    texts = (span_of(one) for one in axes.iter(GROUP) if one.get("id", "").startswith("text_"))
    begins, ends = zip((min(corners), max(corners)), *(span for span in texts if span[0] == span[0]))
    return Panel(min(corners), max(corners), min(begins), max(ends))


def merged(panels: list[Panel]) -> list[Panel]:
    """Panels from left to right; those above each other are one, and so are a panel and its colour bar."""
    found: list[Panel] = []
    for one in sorted(panels):
        if found and (one.left < found[-1].right or one.right - one.left < BAR):
            last = found.pop()
            one = Panel(last.left, max(last.right, one.right), min(last[2], one[2]), max(last[3], one[3]))
        found.append(one)
    return found


def cuts(svg: str) -> tuple[float, float, list[float]] | None:
    """The width and the height of a figure, and the edges of its pieces; None if it has to stay whole."""
    root = ElementTree.fromstring(svg)
    width, height = map(float, root.get("viewBox", "0 0 0 0").split()[2:])
    figure = root.find(GROUP)
    if figure is None or width <= FITS:
        return None
    parts = [one for one in figure if one.tag == GROUP and one.get("id") != "patch_1"]
    panels = [panel_of(one) for one in parts if one.get("id", "").startswith("axes_")]
    if len(panels) < len(parts) or None in panels:
        return None
    panels = merged(panels)
    has_numbers = {one.begins < one.left - 5 for one in panels}
    is_clean = all(one.ends <= other.begins + 1 for one, other in pairwise(panels))
    if len(panels) not in SIDES or len(has_numbers) > 1 or not is_clean:
        return None
    return width, height, [0, *((one.ends + other.begins) / 2 for one, other in pairwise(panels)), width]


def windows(address: str, alt: str, caption: str, width: float, height: float, edges: list[float]) -> str:
    """The pieces of a figure in HTML, each a window on it, named by its side where the caption does so."""
    pieces, is_named = [], {"left", "right"} <= {*re.findall(r"\w+", caption.lower())}
    for side, (left, right) in zip(SIDES[len(edges) - 1], pairwise(edges)):
        share = (right - left) / width
        window = (
            f"width:{(right - left) * 4 / 3:.0f}px;aspect-ratio:{right - left:.1f}/{height:.1f};"
            f"background:url({address}) {100 * left / (width - right + left):.2f}% 0/{100 / share:.2f}% 100% no-repeat"
        )
        name = f"<small>{side}</small>" if is_named else ""
        pieces.append(f'<span>{name}<i style="{window}"></i></span>')
    return f'<div class="panels" role="img" aria-label="{escape(alt)}">{"".join(pieces)}</div>'


class StackPanels(SphinxPostTransform):
    default_priority = 250
    formats = ("html",)

    def run(self, **options):
        for image in list(self.document.findall(nodes.image)):
            file = Path(self.app.srcdir, image["uri"].lstrip("/"))
            if not isinstance(image.parent, nodes.figure) or file.suffix != ".svg" or not file.is_file():
                continue
            found = cuts(file.read_text("utf-8"))
            name = self.env.images.get(image["uri"])
            if found and name:
                page = self.app.builder.get_target_uri(self.env.docname)
                address = f"{relative_uri(page, '_images')}/{name[1]}"
                caption = " ".join(one.astext() for one in image.parent.findall(nodes.caption))
                html = windows(address, image.get("alt", ""), caption, *found)
                image.parent.insert(0, nodes.raw("", html, format="html"))
                image["classes"].append("whole")


def setup(app):
    app.add_post_transform(StackPanels)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
