"""The law of the house: held by this house, and shown to reject a broken one."""

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell as code
from nbformat.v4 import new_markdown_cell as markdown
from nbformat.v4 import new_notebook

import house

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("law", house.LAWS, ids=lambda law: law.__name__)
def test_this_house_keeps(law):
    broken = law(ROOT)
    assert not broken, "\n\n" + "\n".join(broken)


# ---- A small house in order, and what happens when one thing in it is wrong ----

COLAB = "#| hide\n#| eval: false\n!pip install -q gbattn"
THEOREM = "```{prf:theorem} A title\n:label: thm-one\n\nOne is one.\n```"
EXERCISE = "```{exercise} Try\n:label: ex-one\nTry.\n```\n\n```{solution-start} ex-one\n:class: dropdown\n```"
FIGURE = "#| label: fig-line\n#| fig-alt: A line that rises from left to right.\nplot()"
CLAIM = '''
@claim(inputs, tolerance=1e-10, mutant=wrong)
def test_thm_one(x):
    """One is one."""
'''
SETTINGS = """[DEFAULT]
lib_name = gbattn
version = 0.1.0
user = gbattn
repo = gbattn
branch = main
description = a house
author = nobody
nbs_path = nbs
lib_path = gbattn
put_version_in_init = True
update_pyproject = False
tst_flags = slow gpu
"""


class House:
    """A house of two chapters that a test may spoil."""

    def __init__(self, root):
        self.root = root
        self.chapters = {
            "00_floor.ipynb": [code(COLAB), markdown("# Floor"), code("#| default_exp floor"),
                                code("#| export\ndef one():\n    return 1")],
            "01_first.ipynb": [code(COLAB), markdown("# First"), code("#| default_exp first"),
                               code("#| export\nfrom gbattn.floor import one"), markdown(THEOREM), code(FIGURE),
                               markdown(EXERCISE), code("assert True"), markdown("```{solution-end}\n```")],
        }  # fmt: skip
        self.files = {"settings.ini": SETTINGS, "tests/test_first.py": CLAIM}

    def built(self):
        for name, text in self.files.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text(text)
        (self.root / "nbs").mkdir(exist_ok=True)
        for name, cells in self.chapters.items():
            for i, cell in enumerate(cells):
                cell["id"] = f"cell-{i}"
            nbformat.write(new_notebook(cells=cells), self.root / "nbs" / name)
        return self.root

    def spoil(self, chapter, index, old, new):
        cell = self.chapters[chapter][index]
        assert old in cell.source
        cell.source = cell.source.replace(old, new)


@pytest.fixture
def small_house(tmp_path, monkeypatch):
    monkeypatch.setattr(house, "MODEL", "00_floor.ipynb")
    return House(tmp_path)


def only(sentences, *parts):
    """One sentence, that contains all these parts."""
    assert len(sentences) == 1, sentences
    assert all(part in sentences[0] for part in parts), sentences[0]


SOURCE_LAWS = [law for law in house.LAWS if law is not house.library_is_what_the_notebooks_export]


@pytest.mark.parametrize("law", SOURCE_LAWS, ids=lambda law: law.__name__)
def test_a_house_in_order_breaks_no_law(small_house, law):
    assert law(small_house.built()) == []


def test_a_chapter_without_a_module(small_house):
    small_house.chapters["01_first.ipynb"].pop(2)
    only(house.chapters_export_a_module(small_house.built()), "nbs/01_first.ipynb", "default_exp")


def test_a_lettered_page_may_add_to_the_module_of_its_chapter(small_house):
    small_house.chapters["00a_more.ipynb"] = [code(COLAB), markdown("# More"), code("#| export floor\ntwo = 2")]
    root = small_house.built()
    assert house.module_of(root / "nbs" / "00a_more.ipynb") == "floor" and house.chapters_export_a_module(root) == []


@pytest.mark.parametrize(
    "source",
    [
        "from gbattn.first import one",
        "from .first import one",
        "import gbattn.first",
        "from . import first",
        "from gbattn import first",
        "def lazy():\n    from gbattn.first import one",
    ],
)
def test_an_import_from_a_later_chapter(small_house, source):
    small_house.files["gbattn/floor.py"] = source
    broken = house.imports_point_backwards(small_house.built())
    only(broken, "gbattn/floor.py", "imports gbattn.first", "later chapter nbs/01_first.ipynb", "earlier chapters")


def test_what_lies_under_the_book_imports_none_of_it_and_is_imported_by_all(small_house):
    small_house.files["gbattn/floor.py"] = "from gbattn.ground.files import read"
    small_house.files["gbattn/ground/files.py"] = "import json\nfrom gbattn.ground import names"
    assert house.imports_point_backwards(small_house.built()) == []
    small_house.files["gbattn/ground/files.py"] = "from gbattn.first import one"
    only(house.imports_point_backwards(small_house.built()), "gbattn/ground/files.py", "imports gbattn.first")


@pytest.mark.parametrize(
    "source",
    [
        "from gbattn.lab.training import train",
        "import gbattn.lab.training",
        "from gbattn import lab",
        "from .lab.training import train",
        "def lazy():\n    from gbattn.lab import training",
    ],
)
def test_no_chapter_imports_the_laboratory_which_may_import_all(small_house, source):
    small_house.files["gbattn/lab/training.py"] = "from gbattn.first import one\nfrom gbattn.lab.files import two"
    assert house.imports_point_backwards(small_house.built()) == []
    small_house.files["gbattn/first.py"] = source
    only(house.imports_point_backwards(small_house.built()), "gbattn/first.py", "imports gbattn.lab", "above the book")


def test_the_laboratory_is_read_by_the_laws_of_names(small_house):
    small_house.files["gbattn/lab/training.py"] = "from gbattn.first import _one"
    only(house.imports_are_public(small_house.built()), "gbattn/lab/training.py, line 1", "first._one")
    small_house.files["gbattn/lab/training.py"] = "one_look = 1"
    only(house.identifiers_are_words_of_the_field(small_house.built()), "gbattn/lab/training.py, line 1", "'look'")


def test_an_import_from_an_earlier_chapter_or_from_outside_is_fine(small_house):
    small_house.files["gbattn/first.py"] = "import torch\nfrom .floor import one\nfrom gbattn import floor, __version__"
    assert house.imports_point_backwards(small_house.built()) == []


def test_an_import_of_a_module_that_no_chapter_writes(small_house):
    small_house.files["gbattn/first.py"] = "from .helpers import one"
    only(house.imports_point_backwards(small_house.built()), "gbattn.helpers", "no chapter writes")


def test_an_import_of_a_private_name(small_house):
    small_house.files["gbattn/first.py"] = "from .floor import _one, two\nfrom gbattn import __version__"
    only(house.imports_are_public(small_house.built()), "gbattn/first.py, line 1", "floor._one", "public name")


@pytest.mark.parametrize(
    ("source", "word"),
    [("one_look = 1", "look"), ("class SeenRows: pass", "seen"), ("x.narrow(1)", "narrow"), ("f(made=1)", "made")],
)
def test_a_name_that_is_no_word_of_the_field(small_house, source, word):
    small_house.files["gbattn/first.py"] = source
    only(house.identifiers_are_words_of_the_field(small_house.built()), "gbattn/first.py, line 1", f"{word!r}")


def test_a_sentence_and_longer_words_are_free(small_house):
    small_house.files["gbattn/first.py"] = "lookup = outlook = 'what was made and seen'  # and kept"
    assert house.identifiers_are_words_of_the_field(small_house.built()) == []


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("results/run/one.json", "results/run/one.json is not in results/NN_chapter/experiment/"),
        ("results/02_none/run/one.json", "results/02_none/run/one.json is not in"),
        ("results/01_first/one.json", "results/01_first/one.json is not in"),
        ("results/01_first/trial/one.json", "results/01_first/trial has the name of one in 00_floor"),
    ],
)
def test_a_record_in_no_room_or_under_a_name_that_is_taken(small_house, name, sentence):
    rooms = ("reported.json", "00_floor/trial/one.json", "00_floor/trial/two.json", "01_first/run/one.json")
    small_house.files |= {f"results/{room}": "{}" for room in rooms}
    assert house.records_are_in_the_room_of_their_chapter(small_house.built()) == []
    small_house.files[name] = "{}"
    only(house.records_are_in_the_room_of_their_chapter(small_house.built()), sentence)


@pytest.mark.parametrize("prose", ["After two looks it converges.", "An attention map", "Beside a rival", "A ladder"])
def test_prose_that_is_no_word_of_the_field(small_house, prose):
    small_house.chapters["01_first.ipynb"].append(markdown(prose))
    only(house.prose_is_in_words_of_the_field(small_house.built()), "nbs/01_first.ipynb", "the field's is")


def test_a_caption_that_is_no_word_of_the_field(small_house):
    small_house.spoil("01_first.ipynb", 5, "A line that rises", "Squashing that rises")
    only(house.prose_is_in_words_of_the_field(small_house.built()), "nbs/01_first.ipynb", "'Squashing'")


def test_verbs_labels_and_fields_are_free(small_house):
    prose = ":label: ex-two-looks\nA head looks away, at {glue:text}`hull.two looks`."
    small_house.chapters["01_first.ipynb"].append(markdown(prose))
    assert house.prose_is_in_words_of_the_field(small_house.built()) == []


def test_the_library_and_the_notebooks(small_house, tmp_path_factory):
    root = small_house.built()
    for floor in house.BY_HAND:
        (root / "gbattn" / floor / "inner").mkdir(parents=True)
        for name in ("__init__.py", "by_hand.py", "inner/__init__.py", "inner/by_hand.py"):
            (root / "gbattn" / floor / name).write_text("")
    fresh = house.exported(root, tmp_path_factory.mktemp("fresh"))
    for name, text in fresh.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert house.library_is_what_the_notebooks_export(root) == []
    assert before == {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}, "looking changed the tree"

    (root / "gbattn" / "first.py").write_text(fresh["gbattn/first.py"] + "\n# edited by hand\n")
    (root / "gbattn" / "left_over.py").write_text("")
    (root / "gbattn" / "floor.py").unlink()
    broken = house.library_is_what_the_notebooks_export(root)
    assert len(broken) == 3
    assert all("run 'make export', and commit notebooks and library together" in sentence for sentence in broken)
    assert any("gbattn/first.py is not what the notebooks export" in sentence for sentence in broken)
    assert any("gbattn/floor.py is not what the notebooks export" in sentence for sentence in broken)
    assert any("gbattn/left_over.py is written by no notebook" in sentence for sentence in broken)


def test_a_library_that_cannot_be_written_from_nothing(small_house):
    small_house.chapters["01_first.ipynb"].append(code("#| export nowhere\nx = 1"))
    broken = house.library_is_what_the_notebooks_export(small_house.built())
    only(broken, "nbdev_export cannot write", "nowhere.py does not exist")


@pytest.mark.parametrize("left", [{"execution_count": 3}, {"outputs": [nbformat.v4.new_output("stream", text="1")]}])
def test_an_output_left_in_a_notebook(small_house, left):
    small_house.chapters["01_first.ipynb"][7].update(left)
    only(house.notebooks_carry_no_outputs(small_house.built()), "nbs/01_first.ipynb, cell 8", "make export")


def test_a_notebook_with_another_colab_cell(small_house):
    small_house.spoil("01_first.ipynb", 0, "gbattn", "gbattn==0.1")
    only(house.notebooks_start_with_the_colab_cell(small_house.built()), "nbs/01_first.ipynb", "Colab", "first cell of")


def test_a_notebook_that_takes_the_precision_of_another(small_house):
    small_house.spoil("01_first.ipynb", 7, "assert True", "import torch")
    only(house.notebooks_say_their_precision(small_house.built()), "nbs/01_first.ipynb", "set_default_dtype")
    small_house.spoil("01_first.ipynb", 7, "import torch", "import torch\ntorch.set_default_dtype(torch.float64)")
    assert not house.notebooks_say_their_precision(small_house.built())


def test_a_chapter_that_is_long(small_house):
    chapter, most = small_house.chapters["01_first.ipynb"], house.MOST_WORDS
    words = sum(house.count_words(cell.source) for cell in chapter if cell.cell_type == "markdown")
    chapter[1].source += " word" * (most - words) + "\n\n| |\n|---|\n"  # bars are no words
    assert not house.chapters_are_short(small_house.built())
    chapter[6].source += "\nword"  # a solution counts, too
    only(house.chapters_are_short(small_house.built()), "nbs/01_first.ipynb", f"{most + 1:,} words")
    chapter[6].source = chapter[6].source.removesuffix("\nword")
    chapter[7].source += "\n# word"  # code does not
    small_house.chapters["Y_appendix.ipynb"] = [code(COLAB), markdown("word " * (most + 1))]  # nor does an appendix
    assert not house.chapters_are_short(small_house.built())


def test_a_reading_time_that_no_reader_keeps(small_house):
    law, chapter = house.reading_times_are_those_of_a_reader, small_house.chapters["01_first.ipynb"]
    box = "**Time** about {} minutes to read; seconds to run.\n"
    proof = "```{prf:proof}\n$$a = b \\\\\nb = c$$\n```\n"
    on_a_click = "```{admonition} Proof\n:class: dropdown\n" + "word " * 9000 + "\n```\n"
    chapter[1].source += "\n" + box.format(25) + proof + on_a_click + "word " * 1800  # 10, formulas 2, figure 1
    chapter.insert(2, code("open()"))  # 1
    chapter.insert(2, code("#| code-fold: true\nfolded()"))
    only(law(small_house.built()), "nbs/01_first.ipynb says 25 minutes to read: a reader takes 15.")
    chapter[1].source = chapter[1].source.replace("25 minutes", "15 minutes")
    assert not law(small_house.built())


def test_a_cell_on_the_page_that_is_long(small_house):
    cell, most = small_house.chapters["01_first.ipynb"][5], house.MOST_LINES
    cell.source = "#| eval: true\n" + "\n".join(["assert True"] * most)
    assert not house.cells_on_a_page_are_short(small_house.built())
    cell.source += "\nassert True"
    only(house.cells_on_a_page_are_short(small_house.built()), "nbs/01_first.ipynb, cell 6", f"{most + 1} lines")
    for flag in ("#| hide", "#| code-fold: true"):
        cell.source = "\n".join([flag, *["assert True"] * (most + 1)])
        assert not house.cells_on_a_page_are_short(small_house.built())
    documented = ["def one():", '    """Return one.', "", *["    Words."] * most, '    """', "    return 1"]
    cell.source = "\n".join(documented)
    only(house.cells_on_a_page_are_short(small_house.built()), "nbs/01_first.ipynb, cell 6")
    cell.source = "\n".join(["#| export", *documented])  # of which the page shows the summary
    assert not house.cells_on_a_page_are_short(small_house.built())


@pytest.mark.parametrize(
    "line",
    ["ax.text(0, 0, 'x', color=colour_of('ridge'))", "hue = colour_of('ridge')\nax.set_title('x', color=hue)"],
)
def test_letters_in_the_colour_of_a_line(small_house, line):
    cell = small_house.chapters["01_first.ipynb"][5]
    cell.source = "#| eval: false\n" + line
    only(house.letters_are_legible(small_house.built()), "nbs/01_first.ipynb, cell 6", "use text_colour_of")
    cell.source = cell.source.replace("colour_of", "text_colour_of")
    assert house.letters_are_legible(small_house.built()) == []


def test_a_cell_in_a_solution_may_be_longer(small_house):
    cells, most = small_house.chapters["01_first.ipynb"], house.MOST_LINES_ON_A_CLICK
    cells[7].source = "\n".join(["assert True"] * most)
    cells.append(code("\n".join(["assert True"] * house.MOST_LINES)))
    assert not house.cells_on_a_page_are_short(small_house.built())
    cells[9].source += "\nassert True"
    only(house.cells_on_a_page_are_short(small_house.built()), "nbs/01_first.ipynb, cell 10")
    cells[7].source += "\nassert True"
    assert len(house.cells_on_a_page_are_short(small_house.built())) == 2


@pytest.mark.parametrize("kind", ["theorem", "proposition", "lemma", "corollary"])
def test_a_claim_without_a_check(small_house, kind):
    small_house.spoil("01_first.ipynb", 4, "theorem", kind)
    small_house.spoil("01_first.ipynb", 4, "thm-one", "thm-two-is-two")
    broken = house.every_claim_has_a_check_and_a_mutant(small_house.built())
    assert len(broken) == 2
    assert "'thm-two-is-two' is claimed and not checked; write test_thm_two_is_two in tests/" in broken[0]
    assert "test_thm_one checks a claim that no page of the book states" in broken[1]


def test_a_claim_on_a_markdown_page(small_house):
    small_house.files["nbs/notation.md"] = ":::{prf:lemma}\n:label: lem-x\n:::"
    broken = house.every_claim_has_a_check_and_a_mutant(small_house.built())
    only(broken, "nbs/notation.md", "'lem-x' is claimed and not checked")


def test_a_claim_without_a_label(small_house):
    small_house.spoil("01_first.ipynb", 4, ":label: thm-one", "")
    broken = house.every_claim_has_a_check_and_a_mutant(small_house.built())
    assert "the theorem 'A title' has no ':label:'" in broken[0]


def test_a_claim_quoted_in_a_code_block_is_none(small_house):
    small_house.chapters["00_floor.ipynb"].append(markdown("````md\n```{prf:theorem}\n:label: thm-x\n```\n````"))
    assert house.every_claim_has_a_check_and_a_mutant(small_house.built()) == []


def test_a_claim_whose_check_is_switched_off(small_house):
    (place,) = (name for name, text in small_house.files.items() if text == CLAIM)
    small_house.files[place] = CLAIM.replace("@claim", "@pytest.mark.skip\n@claim")
    only(house.every_claim_has_a_check_and_a_mutant(small_house.built()), "'thm-one' is claimed and not checked")


def test_a_claim_checked_twice(small_house):
    small_house.files["tests/test_again.py"] = CLAIM
    only(house.every_claim_has_a_check_and_a_mutant(small_house.built()), "'thm-one' has 2 tests")


@pytest.mark.parametrize(
    "index, old, new, sentence",
    [
        (6, "exercise} Try\n:label: ex-one", "exercise} Try", "the exercise 'Try' has no ':label:'"),
        (6, "solution-start} ex-one", "solution-start} ex-two", "'ex-one' has no solution"),
        (6, ":class: dropdown", "", "the solution of 'ex-one' lies open"),
        (7, "assert True", "print(1)", "the solution of 'ex-one' runs no assert"),
        (7, "assert True", "#| eval: false\nassert True", "the solution of 'ex-one' runs no assert"),
        (7, "assert True", "#| gpu\nassert True", "the solution of 'ex-one' runs no assert"),
        (8, "```{solution-end}\n```", "the end", "the solution of 'ex-one' is never closed"),
    ],
)
def test_an_exercise_without_a_tested_hidden_solution(small_house, index, old, new, sentence):
    small_house.spoil("01_first.ipynb", index, old, new)
    only(house.exercises_have_solutions_that_run(small_house.built()), sentence)
