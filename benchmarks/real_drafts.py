"""How many tokens SmolLM2, boosted, accepts from the first layers of SmolLM2 as its draft.

Greedy assisted decoding by transformers. Corrections start as nothing, so a draft of all thirty layers is accepted
whole: the control. Run with ``make real`` done:

    python benchmarks/real_drafts.py
"""

import torch

from gbattn.conventions import Record
from gbattn.ground.records import experiment_folder
from gbattn.lab.real_model import load_smollm2
from gbattn.pretrained import boost

EXPERIMENT, NEW = "real-drafts", 16
DEPTHS = (10, 20, 25, 28, 30)
PROMPTS = ("def add(a, b):", "The capital of France is", "To open a file in Python, use")


def written(model, ids, **options):
    """The text that a model writes, and how often it is called."""
    calls = []
    with model.register_forward_pre_hook(lambda *_: calls.append(1)):
        text = model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=2, **options)
    return text[0, ids.shape[1] :].tolist(), len(calls)


@torch.no_grad()
def main():
    """Measure, and write the record."""
    torch.set_num_threads(1)
    boosted, tokenizer = load_smollm2()
    boost(boosted, gate="head")
    prompts = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in PROMPTS]
    alone, found = [written(boosted, ids) for ids in prompts], {}
    for depth in DEPTHS:
        draft, _ = load_smollm2()
        draft.model.layers, draft.config.num_hidden_layers = draft.model.layers[:depth], depth
        runs = [written(boosted, ids, assistant_model=draft) for ids in prompts]
        tokens, calls = sum(len(text) for text, _ in runs), sum(calls for _, calls in runs)
        same = all(text == other for (text, _), (other, _) in zip(runs, alone))
        found[str(depth)] = dict(tokens=tokens, calls=calls, accepted=tokens - calls, same_text=same)
    settings = dict(prompts=PROMPTS, new_tokens=NEW, gate="head", layers=30, dtype="float32")
    experiment_folder("real-boost").with_name(EXPERIMENT).mkdir(exist_ok=True)
    Record(EXPERIMENT, settings, found).save("greedy")


if __name__ == "__main__":
    main()
