"""Attention as regression, boosting inside a layer: the library of the book."""

__version__ = "0.1.0"
