"""What a run computes on: accelerate, a device, a precision, processes that share the weights."""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from gbattn.ground.arguments import ArgumentError, check, require
from gbattn.training import CONFIG_RULES


def check_precision(precision: str, gpu: bool | None = None) -> None:
    """Raise if a precision needs a GPU and none is available.

    Parameters
    ----------
    precision : {"no", "tf32", "bf16", "fp16"}
        As in `gbattn.training.TrainConfig`.
    gpu : bool, optional
        Whether there is one; by default whether torch finds one.
    """
    check(precision=(precision, CONFIG_RULES["precision"]))
    gpu = torch.cuda.is_available() if gpu is None else gpu
    possible = gpu or precision in ("no", "bf16")
    require(possible, "precision", f"{precision!r} without a GPU", "'no' or 'bf16'")


def check_device(device: torch.device | str) -> None:
    """Raise if torch cannot compute on a device here."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        got = f"{device!r} ({str(error).splitlines()[0]})"
        raise ArgumentError("device", got, "cpu, or cuda where torch finds a GPU") from None


def _plugin(precision: str):
    """What accelerate takes to share the weights among processes, if the launcher asks for that."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    version = os.environ.get("FSDP_VERSION", "nothing")
    require(version == "2", "FSDP_VERSION", version, "2, or no ACCELERATE_USE_FSDP")
    got, want = "'fp16' with weights in shards", "'no', 'tf32' or 'bf16'"
    require(precision != "fp16", "precision", got, want)
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        mixed_precision_policy=MixedPrecisionPolicy(),  # `gbattn.training.backward` casts
        cpu_offload=False,
        cpu_ram_efficient_loading=False,
        activation_checkpointing=False,
    )


def accelerator_of(precision: str):
    """accelerate for one run: what it finds here, with nothing left to its environment but the processes."""
    from accelerate import Accelerator, PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, GradientAccumulationPlugin

    check_precision(precision)
    plugin = _plugin(precision)
    AcceleratorState._reset_state()  # it would keep the precision of a run before
    accelerator = Accelerator(  # what is left out, its environment would decide
        mixed_precision="no" if precision == "tf32" else precision,
        dynamo_backend="no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        fsdp_plugin=plugin,
    )
    # accelerate may be kept off the GPU.
    check_precision(precision, accelerator.device.type == "cuda")
    kind = accelerator.distributed_type.value
    known = ["NO", "MULTI_CPU", "MULTI_GPU"] + ["FSDP"] * (plugin is not None)
    require(kind in known, "accelerate", kind, "one of " + ", ".join(known))
    if plugin and kind != "NO":
        # accelerate 1.15 heeds the plugin on GPUs only, and in a process only once.
        accelerator.state.fsdp_plugin = plugin
        for state in (accelerator.state, PartialState()):
            state.distributed_type = DistributedType.FSDP
    return accelerator


def _units(module: nn.Module) -> set[str]:
    """The classes of what is gathered at once for its pass: what stands in a ModuleList,
    and has parts. In a transformer these are its blocks."""
    names = set()
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            names |= {type(x).__name__ for x in child if any(x.children())}
        else:
            names |= _units(child)
    return names


def placed(model: nn.Module, accelerator) -> nn.Module:
    """The model on accelerate's device; where processes share the weights a copy, of
    which each will keep a part, as a model in shards is none that others can use."""
    if not accelerator.is_fsdp2:
        return model.to(accelerator.device)
    scalars = [name for name, p in model.named_parameters() if p.ndim == 0]
    want = "parameters of shape (1,) at least, to be cut into shards"
    require(not scalars, "model", f"scalars: {', '.join(scalars)}", want)
    plugin = accelerator.state.fsdp_plugin
    plugin.transformer_cls_names_to_wrap = sorted(_units(model))
    return copy.deepcopy(model)


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """For as long as a run in TF32 lasts, let a GPU multiply float32 so."""
    if precision != "tf32":
        yield
        return
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before
