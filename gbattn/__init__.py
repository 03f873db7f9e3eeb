"""Attention as regression, boosting inside a layer: the library of the book.

The names below come from the modules of the chapters, each loaded when it is first asked for.
"""

__version__ = "0.1.0"

_MODULE_OF = {
    "attend": "attention",
    "KeyValueCache": "cache",
    "LinearAttention": "layers",
    "MultiHeadAttention": "layers",
    "TorchAttention": "interop",
    "make_attention": "layers",
    "TwicingAttention": "twicing",
    "GradientBoostedAttention": "boosted",
    "Block": "blocks",
    "LanguageModel": "language_model",
    "ModelConfig": "language_model",
}
__all__ = [*_MODULE_OF]


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'gbattn' has no attribute {name!r}")
    from importlib import import_module

    import_module("gbattn.blocks")  # whose imports register every layer of the book for make_attention
    found = globals()[name] = getattr(import_module(f"gbattn.{_MODULE_OF[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
