"""Panels side by side become panels below each other: where a figure is cut, and where it must not be."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

sys.path.insert(0, str(Path(__file__).parents[2] / "_ext"))
import panels

import pages
from gbattn.conventions import figure_style


def drawn(figure):
    """The figure as matplotlib writes it for a page: without the room around it."""
    with io.StringIO() as file:
        figure.savefig(file, format="svg", bbox_inches="tight")
        plt.close(figure)
        return file.getvalue()


@pytest.fixture(autouse=True)
def style():
    with plt.rc_context():
        figure_style()
        yield


def row(n, **options):
    figure, axes = plt.subplots(1, n, figsize=(8.4, 2.8), squeeze=False, **options)
    for ax in axes[0]:
        ax.plot([0, 1], [0, 1000])
        ax.set(xlabel="a label", ylabel="another", title="a title")
    return figure, axes[0]


def ink(figure):
    """Where the axes of a figure begin and end with all that is written at them, in points from its left edge."""
    figure.canvas.draw()
    whole = figure.get_tightbbox().padded(plt.rcParams["savefig.pad_inches"])
    boxes = [ax.get_tightbbox() for ax in figure.axes]
    return [(box.x0 * 72 / figure.dpi - 72 * whole.x0, box.x1 * 72 / figure.dpi - 72 * whole.x0) for box in boxes]


@pytest.mark.parametrize("n", [2, 3])
def test_a_cut_goes_between_two_panels_and_through_nothing_that_is_drawn(n):
    figure, _ = row(n, width_ratios=[1, 2, 1][:n])
    boxes = ink(figure)
    width, height, edges = panels.cuts(drawn(figure))
    assert (edges[0], edges[-1]) == (0, width) and len(edges) == n + 1 and 150 < height < 250
    for cut, (_, left), (right, _) in zip(edges[1:-1], boxes, boxes[1:]):
        assert left < cut < right


def whole_for_its_numbers():
    figure, axes = row(2, sharey=True)
    axes[1].label_outer()
    return figure


def whole_for_its_size():
    figure, _ = row(2)
    figure.set_size_inches(4, 2)
    return figure


def whole_for_a_title_that_both_share():
    figure, _ = row(2)
    figure.suptitle("of both")
    return figure


def whole_for_a_long_title():
    figure, axes = row(2)
    axes[0].set_title("a title that goes on over the panel beside it and further")
    return figure


def whole_for_its_number_of_panels():
    return row(4)[0]


def whole_alone():
    return row(1)[0]


@pytest.mark.parametrize(
    "figure",
    [
        whole_for_its_numbers,
        whole_for_its_size,
        whole_for_a_title_that_both_share,
        whole_for_a_long_title,
        whole_for_its_number_of_panels,
        whole_alone,
    ],
    ids=lambda figure: figure.__name__,
)
def test_a_figure_stays_whole(figure):
    assert panels.cuts(drawn(figure())) is None


def test_a_colour_bar_and_what_stands_below_belong_to_their_panel():
    figure, (left, right) = row(2)
    figure.colorbar(left.imshow([[0, 1], [2, 3]]), ax=left)
    assert len(panels.cuts(drawn(figure))[2]) == 3
    figure, axes = plt.subplots(2, 2, figsize=(8.4, 5))
    assert len(panels.cuts(drawn(figure))[2]) == 3


def test_the_windows_cover_the_figure_and_name_the_sides_that_the_caption_names():
    sizes = 600, 200, [0, 240, 600]
    html = panels.windows("../_images/x.svg", 'Two "panels"', "Left: one. Right: the other.", *sizes)
    assert html.count("url(../_images/x.svg)") == 2 and 'aria-label="Two &quot;panels&quot;"' in html
    assert "<small>left</small>" in html and "<small>right</small>" in html
    assert "<small>" not in panels.windows("x.svg", "Two panels", "Left of zero is better.", *sizes)
    assert "width:320px;aspect-ratio:240.0/200.0" in html and "0.00% 0/250.00% 100%" in html
    assert "width:480px;aspect-ratio:360.0/200.0" in html and "100.00% 0/166.67% 100%" in html


CONF = """
import sys
sys.path.insert(0, {folder!r})
extensions = ["myst_nb", "nbdev_pages", "panels"]
nb_execution_mode = "off"
html_theme = "basic"
"""
CELL = "#| label: fig-{name}\n#| fig-cap: 'A caption'\n#| fig-alt: Panels & <lines>\nplot()"


def test_a_page_has_a_wide_figure_whole_and_in_pieces_and_another_as_it_is(tmp_path):
    cells = [
        new_code_cell(
            CELL.format(name=name),
            outputs=[new_output("display_data", {"image/svg+xml": drawn(row(n)[0])})],
        )
        for name, n in (("wide", 2), ("single", 1))
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}, "language_info": {"name": "python"}}
    (tmp_path / "nbs").mkdir()
    notebook = new_notebook(cells=[new_markdown_cell("# A page"), *cells], metadata=kernel)
    (tmp_path / "nbs" / "page.ipynb").write_text(json.dumps(notebook))
    (tmp_path / "index.md").write_text("# Book\n\n```{toctree}\nnbs/page\n```\n")
    (tmp_path / "conf.py").write_text(CONF.format(folder=str(Path(panels.__file__).parent)))
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", ".", "_build"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == ""
    page = tmp_path / "_build" / "nbs" / "page.html"
    wide, single = pages.soup(page).find_all("figure")
    assert wide.img["class"] == ["whole"] and wide.img["alt"] == wide.div["aria-label"] == "Panels & <lines>"
    found = {re.search(r"url\((.*?)\)", one["style"])[1] for one in wide.select(".panels i")}
    assert found == {wide.img["src"]} and (page.parent / wide.img["src"]).is_file()
    assert not single.select(".panels") and "class" not in single.img.attrs
