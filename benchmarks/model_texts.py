"""What three models of chapter 18 write, and which tokens the shift and a second round predict better: for chapter 17a.

Standard attention, the same with the shift, and boosted attention: seed 1 of the ordinary run, each as its record in
chapter 18 says. Models are not kept with the book, so they are trained here, 25 minutes of one core in all
(GBATTN_RUNS keeps them; GBATTN_CORPORA has the texts):

    python benchmarks/model_texts.py

Prediction, written before it was run: the shift lowers the loss of tokens that continue a word more than that of tokens
that start one, as it hands a key the token before. It holds if the 95 % interval of the difference of the two gains,
over windows of the test split, lies above zero. Whether a token has followed the same token before in
its window was added after the first run.
"""

import itertools

import numpy as np
import torch
from scipy.stats import t as student

from gbattn.conventions import Record
from gbattn.corpora import Batch, sequential_windows
from gbattn.diagnostics import token_losses
from gbattn.lab.catalogue import find_experiment
from gbattn.lab.diagnosis import token_groups
from gbattn.lab.queue import work_folder
from gbattn.lab.records import Plan, finished
from gbattn.lab.workers import train_and_score
from gbattn.language_model import LanguageModel

MODELS = {
    "standard": ("mini-warm", "standard"),
    "shift": ("shift", "standard_shift"),
    "second round": ("mini-warm", "boosted_residual"),
}
KINDS = {"starts a word": 0, "continues a word": 1, "other": 2}
SEED, PROMPT, NEW, PASSAGE = 1, "The city of", 60, 96


def trained(experiment, arm):
    """The model of a run, trained if it is not there, its corpus, and its test perplexity in the record."""
    plan = Plan(find_experiment(experiment))
    (one,) = (run for run in plan.tuned.runs() if (run.arm.name, run.seed) == (arm, SEED))
    place = work_folder() / one.id
    if not (place / "model").is_dir():
        train_and_score(one, plan.text, place, progress=True, capture=False)
    record = finished(one, plan.folder, plan.text.fingerprint)
    return LanguageModel.from_pretrained(place / "model").eval(), plan.text, record.measured["test_perplexity"]


def kinds_of(corpus):
    """For each token id: 0 if its text starts a word, 1 if it continues one, 2 if it is no word."""
    kinds = []
    for i in range(corpus.vocab_size):
        text = corpus.decode([i])
        start, letters = text.startswith(" "), text.strip()
        kinds.append(2 if not letters.isalpha() else 0 if start else 1)
    return np.array(kinds)


@torch.no_grad()
def losses_of(model, corpus):
    """The loss of each token of the test split in nats, by windows, and the tokens themselves."""
    losses, targets, inputs = [], [], []
    for batch in sequential_windows(corpus.test, model.config.max_length, batch_size=32):
        if batch.targets.shape[1] == model.config.max_length:  # the last window may be shorter
            losses.append(token_losses(model, batch))
            targets.append(batch.targets)
            inputs.append(batch.inputs)
    return [torch.cat(x).numpy() for x in (losses, targets, inputs)]


def follows_again(inputs, targets):
    """Whether each target has followed the same token earlier in its window (`token_groups`)."""
    found = []
    for i in range(0, len(inputs), 32):
        batch = Batch(torch.as_tensor(inputs[i : i + 32]), torch.as_tensor(targets[i : i + 32]))
        found.append(token_groups(batch, np.zeros(int(targets.max()) + 1))["novelty"]["pair"])
    return torch.cat(found).numpy()


def interval(values):
    """Mean, and the ends of its 95 % interval."""
    half = student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return [values.mean(), values.mean() - half, values.mean() + half]


def main():
    measured, losses = {}, {}
    for name, (experiment, arm) in MODELS.items():
        model, corpus, known = trained(experiment, arm)
        losses[name], targets, inputs = losses_of(model, corpus)
        prompt = torch.tensor(corpus.encode(PROMPT).astype(np.int64))[None]
        written = model.generate(prompt, NEW, seed=0)[0]
        perplexity = float(np.exp(losses[name].mean()))
        measured[name] = dict(perplexity=perplexity, known=known, text=corpus.decode(written))
    kinds, tokens = kinds_of(corpus)[targets], targets[0, :PASSAGE]
    pairs = follows_again(inputs, targets)
    # A letter after a letter continues a word; at the start of a line, or after a bracket, it starts one.
    after_word = kinds_of(corpus)[inputs] < 2
    kinds = np.where((kinds == 1) & ~after_word, 0, kinds)
    found = dict(tokens=[corpus.decode([i]) for i in tokens])
    for name in MODELS:
        found[name] = [round(float(x), 3) for x in losses[name][0, :PASSAGE]]
    measured["passage"] = found
    for name in ("shift", "second round"):
        gain, groups = losses["standard"] - losses[name], {}
        for (label, kind), again in itertools.product(KINDS.items(), (False, True)):
            of = (kinds == kind) & (pairs == again)
            row = dict(share=of.mean(), gain=gain[of].mean(), loss=losses["standard"][of].mean())
            groups[f"{label}, {'again' if again else 'first'}"] = row
        means = [np.ma.array(gain, mask=kinds != kind).mean(1) for kind in (1, 0)]
        apart = np.ma.compressed(means[0] - means[1])
        measured[f"{name}, gains"] = groups | dict(continues_minus_starts=interval(apart), windows=len(apart))
    settings = dict(seed=SEED, prompt=PROMPT, new_tokens=NEW, temperature=1.0, runs=MODELS)
    plain = lambda x: {k: plain(v) for k, v in x.items()} if isinstance(x, dict) else x
    Record("model-texts", settings, plain(measured)).save("three-models")


if __name__ == "__main__":
    main()
