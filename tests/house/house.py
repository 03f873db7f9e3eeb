"""The laws of the house, read from its sources.

A law takes the root folder and returns the sentences of what breaks it: none if
the house is in order.  Each sentence names the place and says what to do.
"""

import ast
import io
import keyword
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import nbformat

sys.path.insert(0, str(Path(__file__).parents[2] / "_ext"))
from nbdev_pages import split_cell, tags_of, test_flags, with_short_docstrings

MODEL = "00_conventions.ipynb"  # the notebook whose first cell all others repeat
SHORT = tuple(f"{name}.ipynb" for name in ("05b_heads", "08a_correct", "17a_models", "18_perplexity"))  # export nothing
CLAIMS = ("prf:theorem", "prf:proposition", "prf:lemma", "prf:corollary")
MOST_WORDS = 3500  # of a chapter
ROUTE = ("01_least_squares", "03_smoothers", "05_boosting", "08_boosted")  # with the short pages, what everybody reads
SHORTER = {f"{name}.ipynb": 3000 for name in ROUTE} | dict.fromkeys(SHORT, 1500)
WORDS_A_MINUTE = 180
MOST_LINES = 30  # of a cell that the page shows
MOST_LINES_ON_A_CLICK = 40  # of one in a solution, which opens on a click
NOT_EXPORTED = ("__init__.py", "__main__.py")  # written by hand, but for the version
GROUND = "ground"  # written by hand, under the book: whoever wants may import it, and it imports no chapter
LAB = "lab"  # written by hand, above the book: it may import all of it, and no chapter imports it
BY_HAND = (GROUND, LAB)
# Private words of this project, and what the field says instead.
WORDS_OF_THE_FIELD = {
    "look looks": "round (of boosting), attention (what attend computes) or pass (forward, backward)",
    "narrow": "what has this width, such as kv_dim",
    "made seen kept taken wanted given mine theirs ours": "what it holds, such as factory_kwargs or output",
    "asks hears says": "queries, depends on, outputs",
    "news": "innovation",
    "squash squashes squashing": "pointwise nonlinearity",
    "rival": "baseline",
    "rung rungs ladder": "width, scaling series",
    "worth": "loss increase",
    "twin": "mutant",
    "demand refuse": "check",
    "remember remembered": "append_kv, cache_shapes",
}
# The same for the prose of chapters; plain English verbs ("it looks away") are free.
PROSE_OF_THE_FIELD = {
    r"(?:two|three|many|more|all|number of|these|those) looks": "rounds",
    "attention maps?": "attention weights",
    "rivals?": "baseline",
    "rungs?|ladders?": "width, scaling series",
    r"squash\w*": "pointwise nonlinearity",
}


# ---- Reading the book ----


class Cell(NamedTuple):
    place: str  # "nbs/01_least_squares.ipynb, cell 4"
    kind: str  # "code" or "markdown"
    source: str


class Directive(NamedTuple):
    place: str
    name: str
    argument: str
    options: dict[str, str]


def notebooks(root):
    """The notebooks in the book's order, which is that of their file names."""
    return sorted((root / "nbs").glob("*.ipynb"))


def read(path):
    return nbformat.read(path, as_version=4)


def cells_of(path):
    if path.suffix == ".md":
        return [Cell(f"nbs/{path.name}", "markdown", path.read_text())]
    return [Cell(f"nbs/{path.name}, cell {i}", c.cell_type, c.source) for i, c in enumerate(read(path).cells, 1)]


def pages(root):
    """The cells of each page: notebooks first, then Markdown pages, which have one cell each."""
    return {path: cells_of(path) for path in [*notebooks(root), *sorted((root / "nbs").glob("*.md"))]}


FENCE = re.compile(r"\s*(?P<fence>`{3,}|~{3,}|:{3,})\s*(\{(?P<name>[\w:-]+)\})?(?P<rest>.*)$")
OPTION = re.compile(r"\s*:(?P<key>[\w-]+):\s*(?P<value>.*?)\s*$")


def directives(cell):
    """The MyST directives of a Markdown cell, in order; those quoted in a code block are none."""
    quoted = None
    lines = cell.source.splitlines()
    for number, line in enumerate(lines):
        found = FENCE.match(line)
        if quoted:
            if found and found["fence"].startswith(quoted) and not found["rest"].strip():
                quoted = None
        elif found and found["name"]:
            options = {}
            for below in lines[number + 1 :]:
                if not (option := OPTION.match(below)):
                    break
                options[option["key"]] = option["value"]
            yield Directive(cell.place, found["name"], found["rest"].strip(), options)
        elif found and found["rest"].strip() and found["fence"][0] != ":":
            quoted = found["fence"]


def all_directives(root):
    return [d for cells in pages(root).values() for cell in cells if cell.kind == "markdown" for d in directives(cell)]


def is_chapter(path):
    return bool(re.match(r"(\d\d[a-z]?|[A-Z])_", path.name))


def module_of(path):
    """The module that a notebook writes, or, as a lettered one may, adds to; or None."""
    heads = [split_cell(c.source)[0] for c in cells_of(path) if c.kind == "code"]
    return next((head[key] for key in ("default_exp", "export") for head in heads if head.get(key)), None)


# ---- The laws ----


def chapters_export_a_module(root):
    return [
        f"nbs/{path.name} has no '#| default_exp' cell: every chapter writes one module of gbattn; name it there."
        for path in notebooks(root)
        if re.match(r"\d\d[a-z]?_", path.name) and path.name not in SHORT and module_of(path) is None
    ]


def imports_of(source, modules):
    """The modules of gbattn that Python source imports, lazy imports included: (line, name)."""

    def below_the_package(node):
        if isinstance(node, ast.Import):
            return [alias.name.removeprefix("gbattn.") for alias in node.names if alias.name.startswith("gbattn.")]
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "gbattn"):
            module = (node.module or "") if node.level else node.module.removeprefix("gbattn").lstrip(".")
            return [module] if module else [alias.name for alias in node.names if alias.name in modules]
        return []

    nodes = ast.walk(ast.parse(source))
    return sorted((node.lineno, name) for node in nodes for name in below_the_package(node))


def imports_point_backwards(root):
    """The book's order is the import order."""
    chapters = notebooks(root)
    number = {module_of(path): i for i, path in enumerate(chapters)}
    files = {path.stem: path for path in sorted((root / "gbattn").glob("*.py"))}
    found = []
    for module, path in files.items():
        known = {*number, *files, *BY_HAND}
        for line, name in imports_of(path.read_text(), known) if module in number else ():
            at = f"gbattn/{path.name}, line {line}, imports gbattn.{name}, which "
            if name.split(".")[0] == GROUND:
                continue
            if name.split(".")[0] == LAB:
                found.append(
                    f"{at}lies above the book: export what the chapter argues, or move what needs the "
                    f"laboratory to gbattn/{LAB}."
                )
            elif name not in number:
                found.append(f"{at}no chapter writes: import what an earlier chapter exports.")
            elif number[name] > number[module]:
                later = chapters[number[name]].name
                found.append(
                    f"{at}the later chapter nbs/{later} writes: a module imports only from earlier "
                    "chapters, so move what both need into the earlier one."
                )
    for path in sorted((root / "gbattn" / GROUND).glob("*.py")):
        found += [
            f"gbattn/{GROUND}/{path.name}, line {line}, imports gbattn.{name}: "
            "what lies under the book imports none of it."
            for line, name in imports_of(path.read_text(), {*number, *files})
            if name.split(".")[0] != GROUND
        ]
    return found


def modules(root):
    """The files of the library's modules, those written by hand included."""
    folders = [root / "gbattn", *(root / "gbattn" / name for name in BY_HAND)]
    return [path for folder in folders for path in sorted(folder.glob("*.py"))]


def imports_are_public(root):
    """What a module takes from another has a public name."""
    found = []
    for path in modules(root):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("gbattn")):
                origin = (node.module or "").removeprefix("gbattn").lstrip(".")
                found += [
                    f"{path.relative_to(root)}, line {node.lineno}, imports {origin}.{alias.name}, which is private: "
                    "give it a public name there."
                    for alias in node.names
                    if alias.name.startswith("_") and not alias.name.startswith("__")
                ]
    return found


def identifiers_are_words_of_the_field(root):
    """A reader of the code must not have to learn a private language first."""
    instead = {word: cure for words, cure in WORDS_OF_THE_FIELD.items() for word in words.split()}
    found = []
    for path in modules(root):
        if path.stem == "_modidx":
            continue
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
                words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", token.string)
                found += [
                    f"{path.relative_to(root)}, line {token.start[0]}: the name {token.string!r} has the word "
                    f"{word!r}; the field's is {instead[word]}."
                    for word in map(str.lower, words)
                    if word in instead
                ]
    return found


def records_are_in_the_room_of_their_chapter(root):
    """An experiment is found by its name alone, so no two have the same."""
    chapters = {path.stem for path in notebooks(root) if is_chapter(path)}
    found, room_of = [], {}
    for path in sorted((root / "results").rglob("*.json")):
        chapter, *below = path.relative_to(root / "results").parts
        if not below and path.name == "reported.json":
            continue
        if chapter not in chapters or len(below) != 2:
            found.append(f"{path.relative_to(root)} is not in results/NN_chapter/experiment/: move it there.")
        elif room_of.setdefault(below[0], chapter) != chapter:
            found.append(
                f"results/{chapter}/{below[0]} has the name of one in {room_of[below[0]]}: rename one of them."
            )
    return list(dict.fromkeys(found))


QUOTED = re.compile(r"\{[\w:-]+\}`[^`]*`|`[^`\n]*`|^:\w+:.*$|^```\{solution.*$", re.M)


def prose_of(cell):
    """What a reader reads of a cell: the text, or captions and alt texts; no labels, names or code."""
    if cell.kind == "markdown":
        return QUOTED.sub("", cell.source)
    head = split_cell(cell.source)[0]
    return QUOTED.sub("", "\n".join(head.get(name, "") for name in ("fig-cap", "fig-alt")))


def prose_is_in_words_of_the_field(root):
    """Nor must a reader of the pages."""
    return [
        f"{cell.place}: {found[0]!r} is a private word; the field's is {instead}."
        for path in notebooks(root)
        if is_chapter(path)
        for cell in cells_of(path)
        for word, instead in PROSE_OF_THE_FIELD.items()
        for found in re.finditer(rf"\b(?:{word})\b", prose_of(cell), re.I)
    ]


class ExportError(Exception):
    """nbdev could not write the library."""


def exported(root, folder):
    """What the notebooks export today: the text of each file of the library."""
    shutil.copytree(root / "nbs", folder / "nbs")
    shutil.copy(root / "settings.ini", folder)
    (folder / "gbattn").mkdir()
    for name in BY_HAND:  # nbdev lists every module that it finds
        if (root / "gbattn" / name).is_dir():
            shutil.copytree(root / "gbattn" / name, folder / "gbattn" / name)
    command = [Path(sys.executable).with_name("nbdev_export")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise ExportError(done.stderr.strip().splitlines()[-1])
    return library(folder)


def library(root):
    folder = root / "gbattn"
    return {path.relative_to(root).as_posix(): path.read_text() for path in sorted(folder.rglob("*.py"))}


def library_is_what_the_notebooks_export(root):
    cure = "run 'make export', and commit notebooks and library together (it drops what was edited in gbattn/)."
    with tempfile.TemporaryDirectory() as folder:
        try:
            fresh = exported(root, Path(folder))
        except ExportError as error:
            return [f"nbdev_export cannot write the library into an empty folder: {error}"]
    here = library(root)
    found = [f"{name} is not what the notebooks export: {cure}" for name in fresh if name not in here]
    for name, text in here.items():
        if Path(name).name in NOT_EXPORTED or Path(name).parts[1] in BY_HAND:
            continue
        if name not in fresh:
            found.append(f"{name} is written by no notebook: {cure}")
        elif text != fresh[name]:
            found.append(f"{name} is not what the notebooks export: {cure}")
    return found


def notebooks_carry_no_outputs(root):
    return [
        f"nbs/{path.name}, cell {i}, is saved with what it printed: run 'make export', which strips it. "
        "The book runs every notebook itself."
        for path in notebooks(root)
        for i, cell in enumerate(read(path).cells, 1)
        if cell.cell_type == "code" and (cell.outputs or cell.execution_count is not None)
    ]


def notebooks_start_with_the_colab_cell(root):
    def first(path):
        return next(iter(read(path).cells), {}).get("source")

    model = first(root / "nbs" / MODEL)
    return [
        f"nbs/{path.name} does not start with the cell that sets up Colab: "
        f"copy the first cell of nbs/{MODEL}, unchanged."
        for path in notebooks(root)
        if first(path) != model
    ]


def notebooks_say_their_precision(root):
    """Several notebooks run in one process when they are tested, and one leaves its precision to the next."""
    return [
        f"nbs/{path.name} uses torch and takes the default dtype that a notebook before it left: "
        "set it at the start with torch.set_default_dtype(…)."
        for path in notebooks(root)
        for code in ["\n".join(c.source for c in read(path).cells if c.cell_type == "code")]
        if is_chapter(path) and re.search(r"^import torch$", code, re.M) and "torch.set_default_dtype(" not in code
    ]


def count_words(text):
    """The words of a Markdown text, formulas included: the bars of a table and dashes are none."""
    return sum(any(map(str.isalnum, word)) for word in text.split())


def chapters_are_short(root):
    """The words are those of all Markdown cells, solutions included."""
    counts = {
        path: count_words(" ".join(cell.source for cell in cells_of(path) if cell.kind == "markdown"))
        for path in notebooks(root)
        if re.match(r"\d\d[a-z]?_", path.name)
    }
    return [
        f"nbs/{path.name} has {words:,} words, more than {most:,}: "
        "cut what a reader does not need for the argument, or move it to an exercise or the lab notebook."
        for path, words in counts.items()
        if words > (most := SHORTER.get(path.name, MOST_WORDS))
    ]


STATEMENT = re.compile(r"^```\{prf:.*?^```$", re.S | re.M)
ON_A_CLICK = re.compile(r"^```\{\w+\}[^\n]*\n:class: dropdown.*?^```$", re.S | re.M)
RESULTS_TABLE = re.compile(r"^\w+_tables?\(", re.M)
PRINTED = re.compile(r"\*\*Time\*\* about (\d+) minutes to read")


def reading_minutes(cells):
    """As long as a reader takes, by the rule in CONTRIBUTING.md."""
    words = minutes = 0
    for _, kind, source in cells:
        if kind == "code":
            head, body = split_cell(source)
            is_open = not {"remove-cell", "remove-input", "hide-input"} & set(tags_of(head))
            minutes += "label" in head or bool(is_open and body.strip())
            minutes += 4 * len(RESULTS_TABLE.findall(body))
            continue
        text, *exercises = re.split(r"^## Exercises$", source, maxsplit=1, flags=re.M)
        text = ON_A_CLICK.sub("", text)
        formulas = re.findall(r"\$\$(.*?)\$\$", " ".join(STATEMENT.findall(text)), re.S)
        minutes += sum(len(re.split(r"\\\\\s*\n", formula)) for formula in formulas)
        words += count_words(text)
        if exercises:
            break
    return minutes + words / WORDS_A_MINUTE


def reading_times_are_those_of_a_reader(root):
    """The minutes in a chapter's box are within 30 % of the rule."""
    found = []
    for path in notebooks(root):
        cells = cells_of(path)
        printed = PRINTED.search("\n".join(cell.source for cell in cells if cell.kind == "markdown"))
        minutes = reading_minutes(cells)
        if printed and abs(int(printed[1]) / minutes - 1) > 0.3:
            found.append(f"nbs/{path.name} says {printed[1]} minutes to read: a reader takes {5 * round(minutes / 5)}.")
    return found


def cells_on_a_page_are_short(root):
    """Lines of code as the page shows them, without directives and with docstrings cut to a summary; a hidden or
    folded cell may have any number."""
    found = []
    for path in filter(is_chapter, notebooks(root)):
        most = MOST_LINES
        for cell in cells_of(path):
            if cell.kind == "markdown":
                for d in directives(cell):
                    most = {"solution-start": MOST_LINES_ON_A_CLICK, "solution-end": MOST_LINES}.get(d.name, most)
                continue
            head, body = split_cell(cell.source)
            shown = with_short_docstrings(body) if "export" in head else body
            lines = len(shown.strip().splitlines())
            if lines > most and not {"remove-cell", "remove-input", "hide-input"} & set(tags_of(head)):
                found.append(
                    f"{cell.place} shows {lines} lines, more than {most}: "
                    "split it, or fold it with '#| code-fold: true'."
                )
    return found


WRITES = {"text", "annotate", "set_title", "suptitle", "set_xlabel", "set_ylabel"}


def letters_are_legible(root):
    """Letters in a figure take text_colour_of, not the colour of a line: as an argument, or by a name of the cell."""
    found = []
    for path in notebooks(root):
        for cell in cells_of(path):
            if cell.kind == "markdown" or "colour_of" not in cell.source:
                continue
            tree = ast.parse(split_cell(cell.source)[1])
            of_lines = lambda node: any(getattr(n, "id", "") == "colour_of" for n in ast.walk(node))
            sets = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and of_lines(n.value)]
            lines = {n.id for one in sets for t in one.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            sets = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and "text_colour_of" in ast.dump(n.value)]
            lines -= {n.id for one in sets for t in one.targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            for call in ast.walk(tree):
                if isinstance(call, ast.Call) and getattr(call.func, "attr", "") in WRITES:
                    colours = [k.value for k in call.keywords if k.arg in ("color", "c")]
                    if any(of_lines(c) or getattr(c, "id", "") in lines for c in colours):
                        found.append(f"{cell.place} writes in the colour of a line: use text_colour_of.")
    return found


def claim_tests(root):
    """The tests that `claim` makes: (file, name)."""
    for path in sorted((root / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            match getattr(node, "decorator_list", ()):  # another decorator, such as a skip, would switch it off
                case [ast.Call(func=ast.Name("claim") | ast.Attribute(attr="claim"))]:
                    yield path.relative_to(root).as_posix(), node.name


def every_claim_has_a_check_and_a_mutant(root):
    stated = [d for d in all_directives(root) if d.name in CLAIMS]
    found = [
        f"{d.place}: the {d.name[4:]} '{d.argument}' has no ':label:', so no test can be named after it; add one."
        for d in stated
        if not d.options.get("label")
    ]
    label_of = {f"test_{d.options['label'].replace('-', '_')}": d for d in stated if d.options.get("label")}
    tests = list(claim_tests(root))
    times = Counter(name for _, name in tests)
    for name, d in label_of.items():
        label = d.options["label"]
        if times[name] == 0:
            found.append(
                f"{d.place}: '{label}' is claimed and not checked; write {name} in tests/, "
                "decorated with claim(…, tolerance=…, mutant=…)."
            )
        elif times[name] > 1:
            found.append(f"'{label}' has {times[name]} tests called {name}; one claim, one test.")
    return found + [
        f"{file}: {name} checks a claim that no page of the book states; is its label spelled so?"
        for file, name in tests
        if name not in label_of
    ]


def exercises_have_solutions_that_run(root):
    found = []
    flags = test_flags(root)
    for cells in pages(root).values():
        exercises, solved, target = [], {}, None
        for cell in cells:
            if cell.kind == "code" and target:
                head, code = split_cell(cell.source)
                runs = "skip-execution" not in tags_of(head, flags)
                solved[target] = solved[target] or (runs and bool(re.search(r"^\s*assert\b", code, re.M)))
            for d in directives(cell) if cell.kind == "markdown" else ():
                if d.name in ("exercise", "exercise-start"):
                    exercises.append(d)
                elif d.name == "solution-start":
                    target = d.argument
                    solved[target] = False
                    if "dropdown" not in d.options.get("class", "").split():
                        found.append(
                            f"{d.place}: the solution of '{target}' lies open; give it ':class: dropdown', "
                            "so that a reader can try first."
                        )
                elif d.name == "solution-end":
                    target = None
        if target:
            found.append(f"the solution of '{target}' is never closed; add a {{solution-end}} after its last cell.")
        for d in exercises:
            label = d.options.get("label")
            if not label:
                found.append(f"{d.place}: the exercise '{d.argument}' has no ':label:'; add one.")
            elif label not in solved:
                found.append(
                    f"{d.place}: '{label}' has no solution; write one from {{solution-start}} to {{solution-end}}."
                )
            elif not solved[label]:
                found.append(f"{d.place}: the solution of '{label}' runs no assert; check its answer in a code cell.")
    return found


LAWS = [
    chapters_export_a_module,
    imports_point_backwards,
    imports_are_public,
    identifiers_are_words_of_the_field,
    records_are_in_the_room_of_their_chapter,
    prose_is_in_words_of_the_field,
    library_is_what_the_notebooks_export,
    notebooks_carry_no_outputs,
    notebooks_start_with_the_colab_cell,
    notebooks_say_their_precision,
    chapters_are_short,
    reading_times_are_those_of_a_reader,
    cells_on_a_page_are_short,
    letters_are_legible,
    every_claim_has_a_check_and_a_mutant,
    exercises_have_solutions_that_run,
]
