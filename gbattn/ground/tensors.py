"""What a tensor may be, the dtype of its sums, and models put into evaluation mode for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from gbattn.ground.arguments import ArgumentError, Rule, is_integer, require

FLOATING: Rule = (
    lambda x: isinstance(x, torch.dtype) and x.is_floating_point,
    "a floating dtype",
)
INTEGRAL: Rule = (
    lambda x: not (x.is_floating_point or x.is_complex or x == torch.bool),
    "an integer dtype",
)
INDEX: Rule = (
    lambda x: x in (torch.int32, torch.int64),
    "torch.int64 or torch.int32",
)


def check_tensor(
    name: str,
    x: object,
    shape: str,
    *,
    dtype: Rule | torch.dtype | None = None,
    device: torch.device | None = None,
    of: str = "",
    positive: str = "",
    **sizes: int,
) -> None:
    """Check the sizes, the dtype and the device of a tensor.

    Parameters
    ----------
    name : str
        The argument.
    x : torch.Tensor
        Its value.
    shape : str
        Letters of the notation, such as ``"B T D"``; a letter that comes twice stands for
        one size; a leading ``"…"`` stands for any dimensions.
    dtype, device : optional
        What they must be; a dtype or a rule for one.
    of : str
        Whose sizes, dtype and device these are, for the message.
    positive : str
        Letters of sizes that must not be 0.
    **sizes : int
        The known sizes, by letter.
    """
    letters, least, of = shape.split(), positive.split(), of and f", as {of}"
    known = letters[1:] if letters[0] == "…" else letters
    tensor = isinstance(x, torch.Tensor)
    fits = tensor and x.ndim >= len(known) and (x.ndim == len(known) or known != letters)
    if fits:
        bound = dict(sizes)
        for letter, n in zip(known, x.shape[x.ndim - len(known) :]):
            if n != bound.setdefault(letter, n) or (letter in least and n < 1):
                fits = False
                break
    if not fits:
        got = f"shape {tuple(x.shape)}" if tensor else type(x).__name__
        bounds = [
            f"{letter} = {sizes[letter]}" if letter in sizes else f"{letter} ≥ 1"
            for letter in known
            if letter in sizes or letter in least
        ]
        bounds = f" with {', '.join(bounds)}" if bounds else ""
        comma = "," if len(letters) == 1 else ""
        want = "a tensor" if letters == ["…"] else f"({', '.join(letters)}{comma})"
        raise ArgumentError(name, got, f"{want}{bounds}{of}")
    if device is not None and x.device != device:
        raise ArgumentError(name, f"device {x.device}", f"{device}{of}")
    if dtype is not None:
        rule = isinstance(dtype, tuple)
        holds, want = dtype if rule else (lambda found: found == dtype, dtype)
        if not holds(x.dtype):
            raise ArgumentError(name, f"dtype {x.dtype}", f"{want}{of}")


@contextmanager
def eval_mode(*models: torch.nn.Module) -> Iterator[None]:
    """Put all parts of the models in eval mode; restore the mode of each at the end."""
    parts = [part for model in models for part in model.modules()]
    modes = [part.training for part in parts]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for part, mode in zip(parts, modes):
            part.training = mode


def check_mask(mask: torch.Tensor, full: tuple[int, ...]) -> None:
    """Check that a mask is boolean and broadcasts to the shape (…, T, S)."""
    boolean = isinstance(mask, torch.Tensor) and mask.dtype == torch.bool
    got = f"dtype {getattr(mask, 'dtype', type(mask).__name__)}"
    require(boolean, "mask", got, "torch.bool, True = may attend")
    shape = tuple(mask.shape)
    fits = 0 < len(shape) <= len(full)
    fits = fits and all(a in (1, b) for a, b in zip(shape[::-1], full[::-1]))
    if not fits:
        want = f"one that broadcasts to (…, T, S) = {full}"
        raise ArgumentError("mask", f"shape {shape}", want)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of this dtype are summed."""
    return torch.promote_types(dtype, torch.float32)


def compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which matrices of this dtype are multiplied on a device,
    which autocast may change."""
    kind = device.type  # the meta device has no autocast, and float64 is left alone
    if dtype == torch.float64 or kind == "meta":
        return dtype
    on = torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else dtype


def holds(test: Callable, x: torch.Tensor) -> bool:
    """Whether a test of the numbers in x holds. True where they are not read: on a
    GPU, which Python would wait for, in compiled code and under vmap."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return True
    try:
        return bool(test(x))
    except RuntimeError:  # from vmap
        return True


def is_length(x: object) -> bool:
    """Whether x is an integer ≥ 0, or a symbol for one in a traced program."""
    symbol = isinstance(x, torch.SymInt) or (torch.jit.is_tracing() and isinstance(x, torch.Tensor))
    return (symbol or is_integer(x)) and bool(x >= 0)


SIZE: Rule = is_length, "an integer that is not negative"


def rows_of_table(table: torch.nn.Embedding, name: str, numbers: torch.Tensor) -> torch.Tensor:
    """Return the rows of a table with these numbers; on a CPU a number beyond it is named."""
    try:
        return table(numbers)
    except IndexError:
        got = f"numbers from {int(numbers.min())} to {int(numbers.max())}"
        raise ArgumentError(name, got, f"0 to {len(table.weight) - 1}, the rows of a table") from None


def full_precision(X: torch.Tensor):
    """The context in which autocast leaves the precision of X alone."""
    kind = X.device.type
    if kind == "meta":  # has no autocast; to ask would stop the compiler
        return nullcontext()
    return torch.autocast(kind, enabled=False)
