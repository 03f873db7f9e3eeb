"""A bad argument is tested by its rule: the error names it. Its words are free."""

from contextlib import contextmanager

import pytest

from gbattn.ground.arguments import ArgumentError


@contextmanager
def refused(argument, want="", got=""):
    """Inside, an `ArgumentError` about this argument is raised; `want` and `got` are parts of its fields that a user
    cannot do without, such as a way out or the name of what differs."""
    with pytest.raises(ArgumentError) as caught:
        yield caught
    error = caught.value
    assert error.argument == str(argument) and want in str(error.want) and got in str(error.got), str(error)
