"""Tell works of one author and year apart, as the field does: 2025a, 2025b.

And label each work of the bibliography as the pages cite it.
"""

from collections import defaultdict

from pybtex.plugin import register_plugin
from pybtex.style.formatting.alpha import Style as Alpha
from pybtex.style.labels import BaseLabelStyle


def cited_authors(entry):
    """The names in a citation of the work."""
    names = [
        " ".join(str(part) for part in (*person.rich_prelast_names, *person.rich_last_names))
        for person in entry.persons.get("author") or entry.persons["editor"]
    ]
    return f"{names[0]} et al." if len(names) > 2 else " and ".join(names)


def citation(entry):
    return f"{cited_authors(entry)}, {entry.fields['year']}"


def tell_apart(entries):
    """Give works that would be cited alike a letter behind the year, in the order of their titles."""
    alike = defaultdict(list)
    for entry in entries:
        entry.fields["year"] = entry.fields["year"].rstrip("abcdefgh")  # of the last build
        alike[citation(entry)].append(entry)
    for works in alike.values():
        if len(works) > 1:
            works.sort(key=lambda entry: entry.fields["title"].replace("{", ""))
            for letter, entry in zip("abcdefgh", works, strict=False):
                entry.fields["year"] += letter


class AsCited(BaseLabelStyle):
    def format_labels(self, entries):
        return [citation(entry) for entry in entries]


class AuthorYear(Alpha):
    default_label_style = AsCited


def tell_works_apart(app):
    tell_apart(app.env.get_domain("cite").bibdata.data.entries.values())


def setup(app):
    register_plugin("pybtex.style.formatting", "author_year", AuthorYear)
    app.connect("builder-inited", tell_works_apart, priority=600)  # when they have been read
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
