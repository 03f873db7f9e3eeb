"""The commands of the program `gbattn`: keyword arguments in, a dictionary out.

A command loads what it needs when it is called: the list of commands and their help take no torch.
"""

from collections.abc import Callable
from typing import NamedTuple

from gbattn.lab.commands.diagnosis import diagnose_model, say_diagnosed
from gbattn.lab.commands.experiments import compare_arms, run_or_list, say_compared, say_run
from gbattn.lab.commands.score import evaluate_model, say_evaluated
from gbattn.lab.commands.speed import measure_arms, say_measured
from gbattn.lab.commands.text import say_tokenized, tokenize_corpus
from gbattn.lab.commands.train import say_trained, train_model
from gbattn.lab.commands.write import generate_text, say_generated


class Command(NamedTuple):
    """A command: the function that does it, the function that says its result in
    words, and the fields of its dataclasses that are not among its options, each
    with the option whose first word it takes ``instead``."""

    function: Callable[..., dict]
    say: Callable[[dict], str]
    instead: dict[str, str] = {}


COMMANDS: dict[str, Command] = {
    "train": Command(train_model, say_trained),
    "evaluate": Command(evaluate_model, say_evaluated),
    "generate": Command(generate_text, say_generated),
    "tokenize": Command(tokenize_corpus, say_tokenized),
    "diagnose": Command(diagnose_model, say_diagnosed),
    "run": Command(run_or_list, say_run),
    "compare": Command(compare_arms, say_compared),
    "bench": Command(measure_arms, say_measured, {"attention": "arms"}),
}
