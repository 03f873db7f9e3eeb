"""A bad argument is tested by its rule: the error names it. Its words are free."""

from contextlib import contextmanager

import pytest

from gbattn.ground.arguments import ArgumentError


@contextmanager
def refused(argument):
    """Inside, an `ArgumentError` about this argument is raised."""
    with pytest.raises(ArgumentError) as caught:
        yield caught
    assert caught.value.argument == argument, str(caught.value)
