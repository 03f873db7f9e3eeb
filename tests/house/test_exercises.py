"""The exercises: right answers are right, typical wrong ones get a hint of their own, and pages and checks agree."""

import math
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
import yaml
from test_browser import browser, tab  # noqa: F401

from house import ROUTE, directives, notebooks, pages
from support import exercises
from support.exercises.form import in_browser
from support.exercises.table import EXERCISES, Exercise, as_numbers, general_hint

ROOT = Path(__file__).parents[2]
GENERAL = re.compile(
    r"Wanted is|Its shape is|Its size is right|It holds what|It is (off by|one over|nearly|too|right but)"
    r"|The numbers are right|Right so far|None of its|The function raises"
)
# In each of these a reader can check two answers or more.
CHECKED = [*(f"{n:02}" for n in range(1, 14)), *"03a 05a 05b 06a 08a 06b 06c 16 18 24 25 27 28 Z".split()]


@pytest.fixture(scope="module")
def asked():
    """Number of each exercise on a page: its label, its effort, and the code of its solution."""
    found = {}
    for path, cells in pages(ROOT).items():
        chapter, n, number = path.name.partition("_")[0], 0, None
        for cell in cells:
            if cell.kind == "code" and number:
                found[number][2].append(cell.source)
            for d in directives(cell) if cell.kind == "markdown" else ():
                if d.name == "exercise":
                    n += 1
                    number = None
                    found[f"{chapter}.{n}"] = d.options["label"], d.argument.count("●"), []
                elif d.name == "solution-start":
                    number = next(key for key, (label, *_) in found.items() if label == d.argument)
                elif d.name == "solution-end":
                    number = None
    return found


def completed(wrong, right):
    """The wrong answer, with a right number where it leaves any."""
    if callable(wrong) or isinstance(wrong, str):
        return wrong
    numbers = as_numbers(wrong)
    return torch.where(numbers.isnan(), as_numbers(right), numbers) if numbers.isnan().any() else wrong


@pytest.mark.parametrize("number", sorted(EXERCISES))
def test_an_exercise_knows_right_from_wrong(number):
    right, wrong = EXERCISES[number].solved
    if not EXERCISES[number].form:
        assert exercises.check(number, right), exercises.check(number, right)
    assert wrong
    for answer, hint in wrong:
        verdict = exercises.check(number, completed(answer, right))
        assert not verdict and verdict.words == f"Not yet. {hint}"
        assert not GENERAL.match(hint)


@pytest.mark.parametrize("number", sorted(EXERCISES))
def test_a_hint_does_not_give_the_answer(number):
    right, wrong = EXERCISES[number].solved
    if isinstance(right, (int, float)) and right not in (0, 1, 2, 3, 4):
        said = {float(n) for _, hint in wrong for n in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]\d)", hint)}
        assert not any(math.isclose(n, right, rel_tol=0.01) for n in said)


@pytest.mark.parametrize("number", sorted(EXERCISES))
def test_another_kind_of_answer_meets_what_is_wanted(number):
    exercise = EXERCISES[number]
    other = "no answer" if not isinstance(exercise.solved[0], str) else 7.25
    verdict = exercises.check(number, other)
    assert not verdict and verdict.words == f"Not yet. Wanted is {exercise.wants}."


@pytest.fixture(scope="module")
def answers(browser, tmp_path_factory):  # noqa: F811
    """The fields of all chapters on a page in a browser: an answer typed, what the page says."""
    chapters = sorted({number.partition(".")[0] for number in EXERCISES})
    shown = "".join(exercises.check(chapter)._repr_html_() for chapter in chapters)
    path = tmp_path_factory.mktemp("answers") / "all.html"
    path.write_text(f"<!DOCTYPE html><meta charset=utf-8>{shown}")
    with tab(browser) as (page, requests, errors):
        page.goto(path.as_uri())

        def said(number, answer):
            form = page.locator(f'form[data-number="{number}"]')
            form.locator("input").fill(answer)
            form.locator("button").click()
            return form.locator("output").inner_text()

        yield said
        assert not requests and not errors


IN_BROWSER = [number for number in sorted(EXERCISES) if in_browser(EXERCISES[number])]


def typed(answer):
    """An answer as a reader types it."""
    if isinstance(answer, str):
        return answer
    return ", ".join(f"{x:.12g}" for x in as_numbers(answer).flatten().tolist()).replace("-", "−")


def test_most_answers_can_be_checked_on_the_page():
    assert len(IN_BROWSER) > 0.75 * len(EXERCISES)


@pytest.mark.parametrize("number", IN_BROWSER)
def test_the_page_says_of_an_answer_what_the_library_says(answers, number):
    exercise = EXERCISES[number]
    right, wrong = exercise.solved
    assert answers(number, typed(right)) == f"Right. {exercise.then}".strip()
    for answer, hint in wrong:
        answer = completed(answer, right)
        if isinstance(answer, str) or as_numbers(answer).shape == as_numbers(right).shape:
            assert answers(number, typed(answer)) == f"Not yet. {hint}"
    assert answers(number, "no answer") == f"Not yet. Wanted is {exercise.wants}."


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        ("18.1", "-0.105 to -0.0431"),
        ("18.1", "−0.105 to −0.0431"),
        ("18.1", "(−0.105) and (−0.0431)"),
        ("18.1", "−0.105 – −0.0431"),
        ("18.1", "[–0.105, –0.0431]"),
        ("06a.2", "0.54–0.84"),
        ("06a.2", "54 % – 84 %"),
        ("06a.2", "54 to 84 %"),
        ("17a.4", "54 %"),
        ("17a.4", "0.53"),
        ("17a.2", "−18.1 %"),
        ("17a.2", "-18.1"),
        ("18.2", "2.64 %"),
    ],
)
def test_an_interval_and_per_cent_are_read_as_the_book_prints_them(answers, number, answer):
    assert answers(number, answer) == f"Right. {EXERCISES[number].then}"


AFTER = "That aims at the token after. The key is turned less than the query, so it must start ahead."


@pytest.mark.parametrize(
    ("number", "answer", "hint"),
    [
        ("18.1", "0.105 to 0.0431", "Its size is right, its sign is not."),
        ("18.1", "-0.105 to", f"Wanted is {EXERCISES['18.1'].wants}."),
        ("06a.2", "0.54, –0.84", AFTER),
        ("06a.2", "0.54 –0.84", AFTER),
        ("17a.4", "8 %", "That is their share of the tokens."),
        ("17a.4", "60 %", "It is too large."),
        ("17a.2", "-20 %", "That is nearly right for small changes only: a loss stands in an exponent."),
        ("17a.2", "-1810 %", "It is too small."),
    ],
)
def test_an_interval_and_per_cent_get_their_hints(answers, number, answer, hint):
    assert answers(number, answer) == f"Not yet. {hint}"


def test_each_check_is_of_an_exercise_whose_solution_passes_it(asked):
    for number in EXERCISES:
        assert number in asked, f"{number} is on no page"
        assert re.search(rf'assert .*exercises\.check\("{number}", ', "\n".join(asked[number][2])), number
    used = {n for *_, codes in asked.values() for n in re.findall(r'exercises\.check\("([\w.]+)", ', "\n".join(codes))}
    assert used == set(EXERCISES)


def test_a_page_says_how_to_check_before_its_first_exercise():
    for path in notebooks(ROOT):
        chapter = path.name.partition("_")[0]
        if any(number.startswith(f"{chapter}.") for number in EXERCISES):
            cells = nbformat.read(path, as_version=4).cells
            first = next(i for i, c in enumerate(cells) if "```{exercise}" in c.source)
            assert f'exercises.check("{chapter}")' in cells[first - 1].source, path.name


@pytest.mark.parametrize("chapter", CHECKED)
def test_a_chapter_has_two_exercises_that_can_be_checked(chapter):
    assert sum(number.startswith(f"{chapter}.") for number in EXERCISES) >= 2


@pytest.mark.parametrize("chapter", CHECKED)
def test_the_first_exercise_is_done_by_hand(asked, chapter):
    efforts = [effort for number, (_, effort, _) in asked.items() if number.startswith(f"{chapter}.")]
    assert efforts[0] == 1 and efforts == sorted(efforts)


def test_a_question_before_a_central_run_opens_its_answer():
    for start in (*ROUTE, "07", "09", "12_", "18"):
        (path,) = (p for p in notebooks(ROOT) if p.name.startswith(start))
        texts = [c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "markdown"]
        boxes = [b for t in texts for b in re.findall(r"````\{admonition\} Before you run it\n(.*?)\n````", t, re.S)]
        assert boxes, path.name
        if start in ROUTE:  # there no other box asks
            assert len(boxes) == sum(t.count(":class: prediction") for t in texts), path.name
        for box in boxes:
            assert "```{admonition} Answer\n:class: dropdown\n" in box
            assert len(box.split()) <= 70  # sixty words, and what the boxes are written with


def test_every_question_before_a_run_has_the_same_title():
    """Two boxes are no such question: a figure that is dragged, and what chapter 19 predicts."""
    texts = [(path.name, path.read_text()) for path in sorted((ROOT / "nbs").glob("*.ipynb"))]
    boxes = re.compile(r'admonition\} ([^"\\]*)\\n",\s*":class: prediction')
    titles = {(name, title) for name, text in texts for title in boxes.findall(text)}
    others = {("04_hopfield.ipynb", "Before you drag"), ("19_diagnosis.ipynb", "Predictions")}
    assert len(titles) > 20 and {title for _, title in titles - others} == {"Before you run it"}, titles


@pytest.fixture
def line(monkeypatch):
    """An exercise on the page of this test."""

    def put(right, *wrong, **options):
        monkeypatch.setitem(EXERCISES, "77.1", Exercise("77.1", "it", "So.", lambda: iter((right, *wrong)), **options))
        return lambda answer: exercises.check("77.1", answer).words

    return put


def test_a_field_stands_below_its_question_where_the_page_has_it(browser, tmp_path):  # noqa: F811
    ask = '<div class="exercise"><p><span class="caption-number">Exercise 3.2 </span>Noise</p></div>'
    path = tmp_path / "page.html"
    path.write_text(f"<!DOCTYPE html><meta charset=utf-8>{exercises.check('03')._repr_html_()}{ask}")
    with tab(browser) as (page, requests, errors):
        page.goto(path.as_uri())
        form = page.locator(".exercise > form")
        assert form.get_attribute("data-number") == "03.2"
        left = page.locator(".answers > .answer").evaluate_all("all => all.map(e => e.dataset.number)")
        assert left == ["03.1", "03.3"]
        form.locator("input").fill("1")
        form.locator("button").click()
        assert form.locator("output").inner_text() == "Not yet. Variances add with the squares of the weights."
        assert not requests and not errors


@pytest.mark.parametrize(
    ("right", "answer", "words"),
    [
        (3, 3, "Right. So."),
        (3, torch.tensor([3]), "Right. So."),
        (3, 3.01, "Not yet. It is too large."),
        (0.5, "1/2", "Not yet. Wanted is a number: it."),
        (0.5, np.float32(0.502), "Right. So."),
        (0.5, -0.5, "Not yet. Its size is right, its sign is not."),
        (0.5, 50, "Not yet. It is off by a factor of 100: a share, or per cent?"),
        (0.5, 2, "Not yet. It is one over the answer."),
        (0.5, 0.47, "Not yet. It is nearly right. Compute it to three digits."),
        (0.5, math.inf, "Not yet. It holds what is no finite number."),
        ([1.0, 2.0, 4.0], [4, 2, 1], "Not yet. The numbers are right, their order is reversed."),
        ([1.0, 2.0, 4.0], [2, 4, 8], "Not yet. It is right but for one factor, the same in all entries."),
        ([1.0, 2.0, 4.0], [2, 3, 5], "Not yet. It is right but for one number that is added to all entries."),
        ([1.0, 2.0, 4.0], [1, 2, 9], "Not yet. Right so far: 2 of 3."),
        ([1.0, 2.0, 4.0], [[1, 2, 4]], "Not yet. Its shape is (1, 3). Wanted is 3 numbers: it."),
        ("yes", True, "Right. So."),
        ("yes", " Yes ", "Right. So."),
    ],
)
def test_a_verdict_says_what_is_right_and_what_is_not(line, right, answer, words):
    assert line(right)(answer) == words


def test_a_function_is_compared_on_its_arguments(line):
    said = line(lambda x: x + 1, (lambda x: x, "Add one."), on=lambda: [(torch.ones(2),), (torch.zeros(3),)])
    assert said(lambda x: 1 + x) == "Right. So."
    assert said(lambda x: x) == "Not yet. Add one."
    assert said(lambda x: -x - 1) == "Not yet. Its size is right, its sign is not."
    assert said(lambda x: x[7]).startswith("Not yet. The function raises IndexError")
    assert said(lambda: 1).startswith("Not yet. The function raises TypeError")
    assert said(3) == "Not yet. Wanted is a function of x: it."


def test_an_unknown_number_names_the_nearest():
    for number, nearest in (("7.9", "07.1"), ("07.9", "07.1"), ("77.1", "07")):
        verdict = exercises.check(number, 1)
        assert not verdict and "There is no check" in verdict.words and nearest in verdict.words


def test_a_chapter_lists_what_its_exercises_want():
    *listed, marks = exercises.check("3").words.splitlines()
    assert [row.split()[0] for row in listed] == sorted(n for n in EXERCISES if n.startswith("03."))
    assert exercises.check("3.1").words == listed[0]
    shown = repr(exercises.check("3")).splitlines()
    start = next(i for i, line in enumerate(shown) if line.startswith("●"))
    assert max(map(len, shown)) <= 80 and all(line[:6].strip() in ("", *EXERCISES) for line in shown[:start])
    assert " ".join(shown[start:]) == marks


def test_a_chapter_says_what_its_dots_mean_and_where_the_checks_run(asked):
    marks = exercises.check("05").words.splitlines()[-1]
    meant = re.findall(r"(●+) an? ", marks)
    assert meant == ["●" * n for n in sorted({effort for _, effort, _ in asked.values()})]
    assert "notebook" in marks and "rocket" in marks
    assert "colab_url" in yaml.safe_load((ROOT / "_config.yml").read_text())["launch_buttons"]


def test_a_check_leaves_the_page_as_it_was():
    torch.set_default_dtype(torch.float32)
    state = torch.get_rng_state()
    exercises.check("03.3", lambda k: -k.square().sum(-1) / 2)
    assert torch.get_default_dtype() == torch.float32 and torch.equal(torch.get_rng_state(), state)


def test_no_hint_for_nothing_in_common():
    assert general_hint(torch.tensor([9.0, 1.0]), torch.tensor([2.0, 5.0]), 0.01) == "None of its numbers is right."
