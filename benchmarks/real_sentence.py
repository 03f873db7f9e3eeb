"""Three heads of SmolLM2 on one sentence: their attention weights, for the figure of chapter 3.

The heads are those with the highest scores of `real_smoother` on Python's documentation: of attention to the token
before, of attention to what followed the same token before, and the largest effective number of tokens. Run with
``make real`` done:

    python benchmarks/real_sentence.py
"""

import torch
from real_smoother import Layers

from gbattn.conventions import Record, load_records
from gbattn.lab.real_model import load_smollm2

SENTENCE = "The cat sat on the mat because the cat sat down."
SCORES = {"broad": "tokens", "previous": "previous", "induction": "induction"}


def chosen_heads():
    """Layer and head with the highest score, by the kind of head."""
    (found,) = (
        r for r in load_records("real-smoother") if (r.settings["text"], r.settings["part"]) == ("python-docs", "heads")
    )
    heads = {}
    for kind, score in SCORES.items():
        values = torch.tensor(found.measured[score])
        heads[kind] = divmod(values.argmax().item(), values.shape[1])
    return heads


@torch.no_grad()
def weights(model, ids, heads):
    """The attention weights (T, T) of heads, by kind."""
    found, far = {}, torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)

    def second_of(layer):
        def second(F, correction, q, k):
            A = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(far, float("-inf")).softmax(-1)
            for kind, (own, head) in heads.items():
                if own == layer:
                    found[kind] = A[0, head]
            return F

        return second

    run = Layers(model, ids)
    run.loss_with({layer: second_of(layer) for layer in range(len(run.layers))})
    return found


def main():
    model, tokenizer = load_smollm2()
    ids = tokenizer(SENTENCE, return_tensors="pt").input_ids
    tokens = [tokenizer.decode([i]).strip() for i in ids[0].tolist()]
    heads = chosen_heads()
    found = {kind: [[round(x, 4) for x in row] for row in A.tolist()] for kind, A in weights(model, ids, heads).items()}
    Record("real-sentence", dict(sentence=SENTENCE, heads=heads), dict(tokens=tokens, **found)).save("three-heads")


if __name__ == "__main__":
    main()
