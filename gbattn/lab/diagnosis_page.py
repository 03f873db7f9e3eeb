"""A diagnosis as figures and as a page of HTML."""

from collections.abc import Callable
from html import escape

import numpy as np

from gbattn.conventions import colour_of
from gbattn.diagnostics import PATHS, SOURCES

_CONTROLS = {"": "correction", "shuffled_": "of other tokens", "random_": "random",
             "twicing_": "twicing's"}  # fmt: skip


_MARKERS = {"": "o", "shuffled_": "s", "random_": "^", "twicing_": "D"}


def _dots(ax, places, pairs: list, **style) -> None:
    """Means with their intervals."""
    means, halves = zip(*((m, h or 0) for m, h in pairs))
    ax.errorbar(places, means, yerr=halves, ls="", capsize=0, **style)


def draw_descent(axes, results: list[dict], colour: str, label: str = "") -> None:
    """Draw, for each layer, the mean cosine of its correction and of the controls with
    −u (first of two axes), and by how much they change the loss (second): one mark
    for each of several diagnoses."""
    for entry, ax in zip(("cosine", "change"), axes):
        for j, (prefix, name) in enumerate(_CONTROLS.items()):
            for r, one in enumerate(results):
                layers = [layer["descent1"] for layer in one["layers"]]
                known = [i for i, d in enumerate(layers) if f"{prefix}{entry}" in d]
                pairs = [layers[i][f"{prefix}{entry}"] for i in known]
                if not pairs:
                    continue
                places = [i + 0.16 * (j - 1.5) + 0.03 * r for i in known]
                own = dict(color=colour if not prefix else "#777777")
                own |= dict(mfc=own["color"] if prefix == "" else "none", ms=4.5)
                text = name if r == 0 else None
                _dots(ax, places, pairs, marker=_MARKERS[prefix], label=text, **own)
        ax.axhline(0, lw=0.8, color="#999999")
        n = len(results[0]["layers"])
        ax.set(xticks=range(n), xticklabels=range(n), xlabel="layer")
    axes[0].set(title=label, ylabel="cosine with −u")
    axes[1].set(ylabel="change of the loss (nats)")


def draw_paths(ax, result: dict, colour: str) -> None:
    """Draw by how much the loss rises when round 0 is hidden everywhere from parts of
    round 1, for each replacement, and when round 1 is switched off."""
    names = (*PATHS, "all three")
    styles = dict(zip(SOURCES, (1.0, 0.55, 0.25)))
    words = {
        "other": "another window",
        "mean": "mean at the position",
        "zero": "zero",
    }
    for j, (source, alpha) in enumerate(styles.items()):
        pairs = [result["whole"]["paths"][source][name] for name in names]
        means, halves = zip(*pairs)
        places = [i + 0.27 * (j - 1) for i in range(len(names))]
        style = dict(color=colour, alpha=alpha, label=words[source])
        ax.bar(places, means, 0.25, yerr=halves, ecolor="#555555", **style)
    closed = result["whole"]["stopped"][0]
    ax.axhline(closed, ls="--", lw=1, color="#555555")
    # The legend has room above.
    ax.set_ylim(top=1.5 * max(closed, ax.get_ylim()[1]))
    ax.set(
        xticks=range(len(names)),
        xticklabels=names,
        ylabel="rise of the loss (nats)",
    )


def draw_where(axes, result: dict, colour: str) -> None:
    """Draw what the corrections of all layers gain for groups of targets, three axes."""
    for ax, (kind, groups) in zip(axes, result["where"].items()):
        pairs = [group["gain"] for group in groups.values()]
        _dots(ax, range(len(pairs)), pairs, marker="o", color=colour)
        label = kind if kind == "novelty" else f"{kind}, from"
        ax.set(xticks=range(len(groups)), xlabel=label)
        ax.set_xticklabels(groups, rotation=45 if len(groups) > 3 else 0, fontsize=8)
        ax.axhline(0, lw=0.8, color="#999999")
    axes[0].set(ylabel="gain (nats)")


def _figure(draw: Callable, columns: int, *arguments) -> str:
    """What a function draws on axes in a row, as SVG."""
    import io

    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, columns)
    draw(axes, *arguments)
    first = axes if columns == 1 else axes[0]
    if first.get_legend_handles_labels()[1]:
        first.legend(frameon=False, fontsize=8)
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return "<svg" + file.getvalue().partition("<svg")[2]


def _table(head: list[str], rows: list[list]) -> str:
    cell = lambda x: f"{x:.3f}" if isinstance(x, float) else escape(str(x))
    line = lambda row, tag: "".join(f"<{tag}>{cell(x)}</{tag}>" for x in row)
    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f"<table><tr>{line(head, 'th')}</tr>{body}</table>"


def _layer_row(i: int, layer: dict) -> list:
    """What the table of layers has on one."""
    d, first, last = (
        layer["descent1"],
        layer.get("round0", {}),
        layer.get("round1", {}),
    )
    mean = lambda x: "–" if not x or x[0] is None else float(np.mean(x[0]))
    best = lambda x: "–" if not x else float(np.max(x))
    gate = layer.get("gate1", {}).get("mean", "–")
    row = [i, mean(d["cosine"]), mean(d["first_order"]), mean(d["change"])]
    row += [mean(d["helped"]), mean(d["residual_falls"]), gate]
    row += [mean(first.get("entropy")), mean(last.get("entropy"))]
    row += [mean(layer.get("divergence"))]
    return row + [best(first.get("induction")), best(last.get("induction"))]


def say_halves(result: dict) -> str:
    """Return a sentence on the layers of a diagnosis that have one round."""
    layers = ", ".join(map(str, result["halves"]))
    half = "the second half of the heads stands for a correction"
    return f" Where there is one round (layer {layers}), {half}." * bool(layers)


def report_page(result: dict, title: str) -> str:
    """Return a self-contained page of HTML that shows a diagnosis.

    Parameters
    ----------
    result : dict
        As `diagnose` returns it.
    title : str
        Of the page.
    """
    whole, colour = result["whole"], colour_of("boosted attention")
    gain, half = whole["stopped"]
    parts = [
        f"<p>{result['parameters']:,} parameters, {result['tokens']:,} tokens in windows "
        f"of {result['length']}; what takes many passes on {result['sampled']:,}. Loss "
        f"{result['loss'][0]:.4f} nats. Without the corrections of all layers it rises by "
        f"{gain:+.4f} ± {half:.4f}; they help {whole['helped'][0]:.1%} of the tokens."
        f"{say_halves(result)}</p>",
        "<h2>Does a correction go down the loss?</h2>",
        _figure(draw_descent, 2, [result], colour),
        _table(
            ["layer", "cosine with −u", "first order", "change", "helped", "‖r‖ falls",
             "gate", "entropy 0", "entropy 1", "JS distance", "induction 0",
             "induction 1"],
            [_layer_row(i, layer) for i, layer in enumerate(result["layers"])],
        ),
        "<p>u is the gradient of the loss by the estimate that is corrected, so the loss "
        "falls fastest along −u; change is that of the loss by the correction, in nats.</p>",
    ]  # fmt: skip
    if "paths" in whole:
        parts += [
            "<h2>Which way does round 1 read round 0?</h2>",
            _figure(draw_paths, 1, result, colour),
            "<p>Dashed: round 1 switched off.</p>",
        ]
    parts += [
        "<h2>Where does it help?</h2>",
        _figure(draw_where, 3, result, colour),
    ]
    for name, entries in result["examples"].items():
        rows = [[e["gain"], e["before"], e["target"]] for e in entries]
        parts += [
            f"<h3>Most {name}</h3>",
            _table(["gain", "before", "target"], rows),
        ]
    style = (
        "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;"
        "padding:0 1rem}svg{max-width:100%;height:auto}table{border-collapse:collapse;"
        "font-size:13px;display:block;overflow-x:auto}td,th{padding:.2rem .6rem;"
        "border-bottom:1px solid #ddd;text-align:left}"
    )
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{style}</style>"
    )
    body = f"<h1>{escape(title)}</h1>{''.join(parts)}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'
