"""Number a chapter by its file: 10_cost is chapter 10, whether or not there is a 9.

Sphinx counts the pages of a table of contents from 1.  The book's files carry
their numbers, from 0 on, and keep them while chapters before them are unwritten.
"""

import re
from functools import wraps

from docutils import nodes
from sphinx.environment.collectors.toctree import TocTreeCollector

CHAPTER = re.compile(r"(?:.*/)?0?(\d+[a-z]?)_[^/]*$")


def renumber(env, docname, chapter):
    """Put the chapter's number in the place of the first number of all its sections."""
    numbers = env.toc_secnumbers[docname]
    for anchor, number in numbers.items():
        if number:
            numbers[anchor] = (chapter, *number[1:])
    for node in [*env.tocs[docname].findall(nodes.reference), env.titles[docname]]:
        if node.get("secnumber"):
            node["secnumber"] = [chapter, *node["secnumber"][1:]]


def by_file_name(assign):
    @wraps(assign)
    def assign_section_numbers(self, env):
        before = env.toc_secnumbers
        assign(self, env)
        for docname in env.toc_secnumbers:
            if found := CHAPTER.match(docname):
                renumber(env, docname, found[1])
        return [docname for docname, numbers in env.toc_secnumbers.items() if numbers != before.get(docname)]

    return assign_section_numbers


def number_by_file_name(app):
    # Late, as Jupyter Book puts a collector of its own in the place of Sphinx's.
    collector = (TocTreeCollector.__subclasses__() or [TocTreeCollector])[-1]
    collector.assign_section_numbers = by_file_name(collector.assign_section_numbers)


def setup(app):
    app.connect("builder-inited", number_by_file_name)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
