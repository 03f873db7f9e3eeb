"""`gbattn bench`: how fast each attention trains and writes here."""

from dataclasses import replace
from typing import TYPE_CHECKING

from gbattn.ground.arguments import require
from gbattn.lab.commands.options import aligned, check_options, many, renamed
from gbattn.lab.commands.write import room_for

if TYPE_CHECKING:
    from gbattn.language_model import ModelConfig


def measure_arms(
    arms: tuple[str, ...] = ("multi_head", "twicing", "boosted"),
    *,
    model: "ModelConfig",
    batch_size: int = 16,
    rounds: int = 7,
    new_tokens: int | None = None,
    device: str = "cpu",
    dtype: str = "float32",
) -> dict:
    """Measure how fast each attention trains and writes here.

    The arms take turns, and the median of each counts. The benchmarks behind the
    book's figures are not in the package: run make bench in a checkout.

    Parameters
    ----------
    arms : tuple of str
        Registered names of attention.
    model : gbattn.language_model.ModelConfig
        The model of the first arm; the others differ only in their attention. All
        read random tokens.
    batch_size : int
        Sequences of a training step, each as long as the model's max_length.
    rounds : int
        Turns of each arm.
    new_tokens : int, optional
        Tokens that are written in a turn, one after the other, in one sequence: by
        default 32, or as many as learned positions leave.
    device : str
        cpu or cuda; by default the CPU.
    dtype : {"float32", "bfloat16"}
        Of weights and everything else.
    """
    import torch

    from gbattn.cost import measure_machine
    from gbattn.lab.processes import check_device
    from gbattn.lab.speed import measure_speed
    from gbattn.language_model import LanguageModel, model_cost, parameter_count

    check_options(model=model, dtype=dtype, arms=arms)
    room = room_for(model, 1, 32)  # a turn begins with one token
    want = "2 or more, as positions are learned: one to read, one to write"
    require(room > 0, "max_length", model.max_length, want)
    new_tokens = room if new_tokens is None else new_tokens
    counts = dict(rounds=rounds, batch_size=batch_size)
    check_options(new_tokens=new_tokens, **counts)
    want = f"fewer than max_length = {model.max_length}, as positions are learned"
    fits = new_tokens <= room_for(model, 1, new_tokens)
    require(fits, "new_tokens", new_tokens, want)
    check_device(device)
    place = dict(device=torch.device(device), dtype=getattr(torch, dtype))
    with renamed(attention="arms"):
        configs = {arm: replace(model, attention=arm) for arm in arms}
    machine = measure_machine(**place)
    models = (LanguageModel(config, **place) for config in configs.values())
    speeds = measure_speed(models, new_tokens=new_tokens, **counts)
    rows = []
    for (arm, config), (step, token) in zip(configs.items(), speeds):
        flops = model_cost(config, batch_size=batch_size).training_flops
        row = {"arm": arm, "parameters": parameter_count(config).total}
        row["step_seconds"] = step
        row["training_tokens_per_second"] = batch_size * config.max_length / step
        row["of_product_rate"] = flops / step / machine.flops
        row["written_tokens_per_second"] = 1 / token
        rows.append(row)
    facts = {"device": device, "dtype": dtype, "threads": torch.get_num_threads()}
    return {"machine": facts | machine._asdict(), "arms": rows}


def say_measured(result: dict) -> str:
    """What a terminal shows of the result of `measure_arms`."""
    m = result["machine"]
    table = [["", "parameters", "a step, ms", "tokens/s", "of product", "written/s"]]
    for row in result["arms"]:
        cells = [row["arm"], f"{row['parameters']:,}"]
        cells += [f"{1e3 * row['step_seconds']:.1f}"]
        cells += [f"{row['training_tokens_per_second']:,.0f}"]
        cells += [f"{row['of_product_rate']:.0%}"]
        table.append([*cells, f"{row['written_tokens_per_second']:,.0f}"])
    where = f"{m['device']}, {m['dtype']}, {many(m['threads'], 'thread')}"
    rate = f"a product of matrices at {m['flops'] / 1e9:,.0f} GFLOP/s"
    return "\n".join([f"{where}: {rate}", *aligned(table)])
