"""A model in two files: its config as JSON, and its weights as safetensors with the config and a checksum beside them.
Nothing in either can run code."""

import hashlib
import json
import math
from pathlib import Path

import torch

from gbattn.ground.arguments import ArgumentError, require
from gbattn.ground.files import check_folder, read_json, write_atomic
from gbattn.ground.packages import check_packages

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_WANT = "what save_pretrained wrote"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_dtype(argument: str, got: str, dtype: object) -> None:
    """Check that a dtype is one in which models compute."""
    want = "torch.float64, torch.float32, torch.bfloat16 or torch.float16"
    require(isinstance(dtype, torch.dtype) and dtype in _DTYPES, argument, got, want)


def check_weights(argument: str, weights: dict[str, torch.Tensor], plan: dict[str, torch.Tensor], why: str) -> None:
    """Check names and shapes of weights against those of a plan, on any device, and their dtypes."""
    want = {name: tuple(w.shape) for name, w in plan.items()}
    got = {name: tuple(w.shape) for name, w in weights.items()}
    show = lambda shapes, name: f"{name} {shapes.get(name, 'missing')}"
    for name in {**want, **got}:
        if want.get(name) != got.get(name):
            raise ArgumentError(argument, show(got, name), f"{show(want, name)}, {why}")
    for name, weight in weights.items():
        check_dtype(argument, f"{name} of {weight.dtype}", weight.dtype)


def checksum(weights: dict[str, torch.Tensor]) -> str:
    """The SHA-256 of names and bytes."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def write_weights(folder: Path, kind: str, config: dict, weights: dict[str, torch.Tensor]) -> None:
    """Write both files, each whole or not at all; `kind` names the format in both.

    Raises `ArgumentError` for weights that could not be restored: without memory, or two of them in one place. Equal
    models give equal files.
    """
    check_packages("train", "safetensors")
    from safetensors.torch import save

    check_folder("folder", folder)
    places = {}
    for name, weight in weights.items():
        require(not weight.is_meta, "model", f"{name} on the meta device", "weights in memory")
        first = places.setdefault(weight.data_ptr(), name)
        want = "weights of their own, or a config with tie_embeddings=True"
        require(first == name, "model", f"{first} and {name} as one", want)
    folder.mkdir(parents=True, exist_ok=True)
    facts = dict(format=kind, config=config, sha256=checksum(weights))
    # In one entry: safetensors writes several in another order each time.
    metadata = {"gbattn": json.dumps(facts, sort_keys=True)}
    readable = json.dumps({"format": kind} | config, indent=1)
    write_atomic(folder / WEIGHTS, save(weights, metadata=metadata))
    write_atomic(folder / CONFIG, readable.encode() + b"\n")


def read_weights(folder: Path, kind: str) -> tuple[dict, object, dict[str, torch.Tensor]]:
    """Return the config in ``config.json``, that in the file of the weights, and the weights.

    Raises `ArgumentError`, which names the file, if one is missing, damaged or of another format.
    """
    path = folder / CONFIG
    require(path.is_file(), str(folder), f"no {CONFIG} in it", "a folder from save_pretrained")
    entries = read_json(path, _WANT)
    _check_kind(path, kind, entries)
    saved, weights = _read(folder / WEIGHTS, kind)
    return {name: x for name, x in entries.items() if name != "format"}, saved, weights


def _check_kind(path: Path, kind: str, facts: object) -> None:
    own = isinstance(facts, dict) and facts.get("format") == kind
    require(own, str(path), "the file of another program or version", f'"format": "{kind}"')


def _read(path: Path, kind: str) -> tuple[object, dict[str, torch.Tensor]]:
    check_packages("train", "safetensors")
    from safetensors import SafetensorError, safe_open

    require(path.is_file(), str(path.parent), f"no {path.name} in it", _WANT)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copies: a tensor of the file would change when the file does.
            weights = {name: file.get_tensor(name).clone() for name in file.keys()}
    except (OSError, RuntimeError, SafetensorError, TypeError) as error:
        raise ArgumentError(str(path), f"a damaged file ({error})", _WANT) from None
    try:
        facts = json.loads(metadata.get("gbattn", "null"))
    except (RecursionError, ValueError) as error:
        raise ArgumentError(str(path), f"a damaged file (its metadata: {error})", _WANT) from None
    _check_kind(path, kind, facts)
    whole = facts.get("sha256") == checksum(weights)
    require(whole, str(path), "weights that do not add up to their checksum", _WANT)
    return facts.get("config"), weights


# ---- new weights ----


def device_of_weights(device: object, dtype: object) -> torch.device:
    """The device of new weights, which a context such as accelerate's `init_empty_weights` may change."""
    if dtype is not None:
        check_dtype("dtype", repr(dtype), dtype)
    try:
        return torch.nn.LayerNorm(1, device=device).weight.device
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        got, want = f"{device!r} ({error})", "a device that torch has here"
        raise ArgumentError("device", got, want) from None


def tensors_to_reset(module: torch.nn.Module, is_layer: bool) -> list[torch.Tensor]:
    """Parameters and buffers that only `reset_parameters` of this module can set: its own and, of an attention layer,
    those of children that cannot reset themselves."""
    found = []
    for part in module.modules() if is_layer else (module,):
        if part is module or not hasattr(part, "reset_parameters"):
            found += [*part.parameters(recurse=False), *part.buffers(recurse=False)]
    return found


@torch.no_grad()
def fill_empty(model: torch.nn.Module, seed: int) -> None:
    """Draw the weights of a model by its `reset_parameters`, and check that it sets all of them."""
    tensors = lambda: [*model.named_parameters(), *model.named_buffers()]
    for name, x in tensors():
        numbers = x.is_floating_point() or x.is_complex()
        want = "a floating-point dtype: in others a missing value does not show"
        require(numbers, name, f"dtype {x.dtype}", want)
        x.fill_(math.nan)
    model.reset_parameters(seed)
    got = "a weight or buffer that reset_parameters does not set"
    want = "a layer whose reset_parameters sets all of its parameters and buffers"
    for name, x in tensors():
        require(not x.isnan().any(), name, got, want)
