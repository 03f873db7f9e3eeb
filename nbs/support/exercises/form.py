"""Fields for the answers to a chapter's exercises that are words or a few numbers, checked in the reader's browser."""

import html
import json
from pathlib import Path

from support.exercises.table import EXERCISES, Exercise, are_whole, as_numbers

SCRIPT = (Path(__file__).parent / "form.js").read_text()
STYLE = """
form.answer {align-items: baseline; display: flex; flex-wrap: wrap; gap: .2rem .6rem; margin: .3rem 0 .6rem}
.answer label {flex: 1 0 100%}
.answer input {font: inherit; max-width: 100%; padding: .1rem .4rem; width: 14rem}
.answer button {background: var(--pst-color-surface, #eee); border: 1px solid var(--pst-color-border, #999);
  border-radius: .4rem; color: inherit; padding: .1rem .7rem}
p.answer {margin: .4rem 0}
@media (pointer: coarse), (max-width: 576px) {.answer :is(input, button) {min-height: 44px}}
@media print {.answer :is(input, button, output) {display: none}}
"""


def _flat(answer: object) -> list[float | None]:
    """Return its numbers; None for a NaN, which stands for any."""
    flat = as_numbers(answer).flatten().tolist()
    return [None if x != x else x for x in flat]


def in_browser(exercise: Exercise) -> dict | None:
    """Return what a browser needs to check the exercise; None if it takes Python."""
    right, wrong = exercise.solved
    said = {"then": exercise.then, "wants": exercise.wants}
    if exercise.form or callable(right):
        return None
    if isinstance(right, str):
        return said | {"right": right, "wrong": wrong}
    if as_numbers(right).numel() > 4:
        return None
    size = as_numbers(right).shape
    wrong = [(_flat(one), hint) for one, hint in wrong if as_numbers(one).shape == size]
    tolerance = exercise.tolerance or (1e-9 if are_whole(right) else 0.01)
    return said | {"right": _flat(right), "wrong": wrong, "tolerance": tolerance}


def fields(numbers: list[str], marks: str) -> str:
    """Return the exercises as HTML, and what their dots mean."""
    checked = {number: in_browser(EXERCISES[number]) for number in numbers}
    lines = []
    for number, found in checked.items():
        said = f"<b>{number.removeprefix('0')}</b> {html.escape(EXERCISES[number].wants)}"
        answer = (
            f'<form class="answer" data-number="{number}"><label for="answer-{number}">{said}</label>'
            f'<input id="answer-{number}" autocomplete="off"> <button>check</button> '
            '<output aria-live="polite"></output></form>'
        )
        alone = f'<p class="answer" data-number="{number}">{said} (in the notebook)</p>'
        lines.append(answer if found else alone)
    known = {number: found for number, found in checked.items() if found}
    data = json.dumps(known, ensure_ascii=False).replace("</", "<\\/")
    return (
        f'<div class="answers"><style>{STYLE}</style>{"".join(lines)}'
        f"<p>{marks}</p><script>{SCRIPT.strip()}({data})</script></div>"
    )
