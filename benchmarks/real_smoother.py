"""What a trained attention looks like to a smoother: SmolLM2 on text, head by head, and after a second round.

Nothing is trained. For each text, and each document of it:

- `heads`: scores of each head (attention to the first token, to the token before, to what followed the same token
  before; effective number of tokens; degrees of freedom) and derivatives of the loss at 0, all from one backward
  pass: by the factor of a second round of the same attention, F + ν A(V − F); by that of a mere scale, F + ν F; and by
  the share of the token before in keys and values.
- `layer-NN`: the loss for each factor ν in one layer alone. The layers below are computed once.
- `all`: the loss for each ν in all layers at once; for the same scale in all layers; for a shift of all keys and
  values.
- `classes`: the loss when only the heads of a class are given a second round.

Run with ``make real`` done; the records that are there are not computed again:

    python benchmarks/real_smoother.py --wikitext wikitext-103/wiki.test.raw

`--curves` names the text whose layers are measured one by one. The test split of WikiText-103 is that of WikiText-2,
word for word, with the words that WikiText-2 calls unknown. Prediction for its part `all`, written after its other
parts and before this one: the loss with all layers at ν is higher at each of eight ν ≠ 0 than at 0, as on the
documentation.
"""

import argparse
import re
from pathlib import Path

import torch
import torch.nn.functional as nnf
from transformers import AttentionInterface

from gbattn.conventions import Record
from gbattn.corpora import python_docs
from gbattn.ground.records import experiment_folder
from gbattn.lab.real_model import load_smollm2
from gbattn.smoothers import degrees_of_freedom

EXPERIMENT = "real-smoother"
NU = (-1.0, -0.5, -0.2, -0.1, 0.0, 0.1, 0.2, 0.5, 1.0)
ONE = (-1.0, -0.5, -0.2, 0.0, 0.2, 0.5, 1.0)  # of one layer, where the derivatives say what 0.1 would
SCALES = (-0.2, -0.1, 0.0, 0.1, 0.2)
SHIFTS = (-0.05, 0.0, 0.05, 0.1)
DOCUMENTS, LENGTH, SINK = 16, 256, 0.3


def attend(layer, q, k, v, mask=None, scaling=None, **options):
    """One round, and what `layer.second` makes of it; causal, on whole windows only."""
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    one = lambda v: nnf.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
    F = one(v)
    if hasattr(layer, "second"):
        F = layer.second(F, lambda: one(v - F), q, k)
    return F.transpose(1, 2), None


AttentionInterface.register("second", attend)


def twice(nu):
    """F + ν A(V − F); ν is a number or one for each head, (H, 1, 1)."""
    return lambda F, correction, q, k: F + nu * correction()


def scaled(nu):
    """F + ν F, the control: no second round."""
    return lambda F, correction, q, k: F + nu * F


class Layers:
    """A model's layers, to be run from any of them on."""

    def __init__(self, model, ids):
        model.config._attn_implementation = "second"
        self.model, self.ids, self.layers = model, ids, model.model.layers
        places = torch.arange(ids.shape[1])[None]
        self.angles = model.model.rotary_emb(model.model.embed_tokens(ids[:1]), places)
        self.inputs = [model.model.embed_tokens(ids)]

    def loss(self, start=0, keep=False):
        """The loss of each document, (documents,), from the input of a layer on."""
        h = self.inputs[start]
        for layer in self.layers[start:]:
            h = layer(h, position_embeddings=self.angles, attention_mask=None)
            if keep:
                self.inputs.append(h)
        h = self.model.model.norm(h)
        wide = lambda x: x.float() if x.dtype == torch.bfloat16 else x
        of = lambda h, ids: nnf.cross_entropy(wide(self.model.lm_head(h[:-1])), ids[1:])
        return torch.stack([of(*pair) for pair in zip(h, self.ids)])

    def loss_with(self, seconds, start=0):
        """The loss with these functions as `second` of these layers."""
        for number, second in seconds.items():
            self.layers[number].self_attn.second = second
        try:
            return self.loss(start).tolist()
        finally:
            for number in seconds:
                del self.layers[number].self_attn.second


def windows(texts, tokenizer):
    """The first tokens of documents that are long enough, spread evenly over them."""
    rows = [tokenizer(text).input_ids for text in texts]
    rows = [row[:LENGTH] for row in rows if len(row) >= LENGTH]
    chosen = [rows[i * len(rows) // DOCUMENTS] for i in range(DOCUMENTS)]
    return torch.tensor(chosen)


def write(place, value):
    """Write a value; as a hook it returns nothing, so that the gradient stays."""
    place.copy_(value)


def derivatives(model, ids):
    """Derivatives of each document's loss at 0: lists (documents, layers, heads or groups)."""
    found = {name: [] for name in ("twice", "scale", "shift_key", "shift_value")}
    run, handles = Layers(model, ids), []

    def second(F, correction, q, k):
        with torch.no_grad():
            c, first = correction(), F.detach()
        for name, of in (("twice", c), ("scale", first)):
            place = torch.zeros(F.shape[:2], dtype=F.dtype)
            found[name].append(place)
            F.register_hook(lambda g, place=place, of=of: write(place, (g * of).sum((-2, -1))))
        return F

    def shifted(name, width):
        def hook(module, inputs, y):
            place = torch.zeros(len(y), y.shape[-1] // width, dtype=y.dtype)
            found[name].append(place)
            change = nnf.pad(y.detach(), (0, 0, 1, -1)) - y.detach()
            change[:, 0] = 0  # the first token has none before it
            y.register_hook(lambda g: write(place, (g * change).unflatten(-1, (-1, width)).sum((1, 3))))

        return hook

    for layer in run.layers:
        attention = layer.self_attn
        attention.second = second
        for name, projection in (("shift_key", attention.k_proj), ("shift_value", attention.v_proj)):
            handles.append(projection.register_forward_hook(shifted(name, attention.head_dim)))
    run.inputs[0] = run.inputs[0].detach().requires_grad_()
    loss = run.loss()
    loss.sum().backward()
    for layer in run.layers:
        del layer.self_attn.second
    for handle in handles:
        handle.remove()
    return {name: torch.stack(of, 1).tolist() for name, of in found.items()} | dict(loss=loss.tolist())


def scores(model, ids):
    """Scores of each head: lists (layers, heads), means over documents and tokens."""
    found = {}

    def keep(name, value):
        found.setdefault(name, []).append(value.tolist())

    repeated = torch.randint(100, 49_000, (8, 64), generator=torch.Generator().manual_seed(0))
    repeated = torch.cat([repeated, repeated], 1)
    for kind, batch in (("text", ids), ("repeated", repeated)):

        def second(F, correction, q, k, kind=kind):
            T = q.shape[-2]
            far = torch.ones(T, T, dtype=torch.bool).triu(1)
            A = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(far, float("-inf")).softmax(-1)
            if kind == "repeated":
                keep("induction", A.diagonal(-63, -2, -1)[..., 1:].mean((0, 2)))
                return F
            late = A[..., T // 4 :, :]
            places = torch.arange(T)
            distance = (places[:, None] - places).clamp(min=0)[T // 4 :]
            keep("sink", A[..., 1:, 0].mean((0, 2)))
            keep("previous", A.diagonal(-1, -2, -1).mean((0, 2)))
            keep("tokens", (1 / late.square().sum(-1)).mean((0, 2)))
            keep("distance", (late * distance).sum(-1).mean((0, 2)))
            keep("trace", degrees_of_freedom(A).mean(0))
            keep("variance", degrees_of_freedom(A, "variance").mean(0))
            return F

        run = Layers(model, batch)
        run.loss_with(dict.fromkeys(range(len(run.layers)), second))
    return found


def class_of(found):
    """The class of each head, (layers, heads): induction, previous, sink or other."""
    get = lambda name: torch.tensor(found[name]) > SINK
    rows = zip(get("induction").tolist(), get("previous").tolist(), get("sink").tolist())
    name = lambda i, p, s: "induction" if i else "previous" if p else "sink" if s else "other"
    return [[name(*head) for head in zip(*row)] for row in rows]


def short(found):
    """Numbers with six digits: lists of lists of them would make long files."""
    if isinstance(found, float):
        return float(f"{found:.6g}")
    if isinstance(found, dict):
        return {name: short(x) for name, x in found.items()}
    return [short(x) for x in found] if isinstance(found, list) else found


def measure(model, ids, text, curves, first):
    """Write the records of one text that are not there; at first, those alone that a planned comparison needs."""
    folder, base = experiment_folder(EXPERIMENT), dict(text=text, documents=len(ids), tokens=ids.shape[1])
    there = lambda name: (folder / f"{text}-{name}.json").is_file()

    def save(name, settings, found):
        Record(EXPERIMENT, base | settings, short(found)).save(f"{text}-{name}")

    if not there("heads"):
        found = derivatives(model, ids)
        with torch.no_grad():
            of_heads = scores(model, ids)
        save("heads", dict(part="heads", dtype="float32"), found | of_heads | dict(classes=class_of(of_heads)))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        run = Layers(model, ids)
        plain, every = run.loss(keep=True).tolist(), range(len(run.layers))
        of_all = lambda kind, nu: plain if nu == 0 else run.loss_with({n: kind(nu) for n in every})
        run_on = dict(dtype="bfloat16 products")
        if not there("all") and (curves or not first):
            found = dict(twice=[of_all(twice, nu) for nu in NU], scale=[of_all(scaled, nu) for nu in SCALES])
            found["shift"] = [plain if share == 0 else shifted_loss(run, share) for share in SHIFTS]
            save("all", run_on | dict(part="all", nu=NU, scale=SCALES, shift=SHIFTS), found)
        if not there("classes"):
            (record,) = [r for r in _records(folder) if r.settings["text"] == text and r.settings["part"] == "heads"]
            kinds, found = record.measured["classes"], dict(plain=plain)
            for kind in sorted({kind for row in kinds for kind in row}):
                for nu in (-0.5, 0.5):
                    factors = torch.tensor([[nu * (k == kind) for k in row] for row in kinds])[..., None, None]
                    found[f"{kind}_{nu:+}"] = run.loss_with({n: twice(factors[n]) for n in every if factors[n].any()})
            save("classes", run_on | dict(part="classes"), found)
        spread = sorted(every, key=lambda number: number % 3)  # every third first, should the time run out
        for number in spread if curves and not first else ():
            if not there(f"layer-{number:02}"):
                losses = [plain if nu == 0 else run.loss_with({number: twice(nu)}, number) for nu in ONE]
                save(f"layer-{number:02}", run_on | dict(part="layer", layer=number, nu=ONE), dict(loss=losses))


def shifted_loss(run, share):
    """The loss with this share of the token before in all keys and values."""
    mix = lambda module, inputs, y: torch.cat([y[:, :1], y[:, 1:] + share * (y[:, :-1] - y[:, 1:])], 1)
    projections = [p for layer in run.layers for p in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
    handles = [p.register_forward_hook(mix) for p in projections]
    try:
        return run.loss().tolist()
    finally:
        for handle in handles:
            handle.remove()


def _records(folder):
    from gbattn.conventions import read_records

    return [record for path in sorted(folder.glob("*.json")) for record in read_records(path)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--wikitext", type=Path, help="the file wiki.test.raw of WikiText-103")
    parser.add_argument("--curves", default="python-docs", help="the text whose layers are measured one by one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_smollm2()
    model.requires_grad_(False)
    texts = {"python-docs": list(python_docs()["test"].values())}
    if options.wikitext:
        articles = re.split(r"(?m)^(?= = [^=].*[^=] = $)", options.wikitext.read_text())
        texts["wikitext-103"] = articles[1:]
    ids = {name: windows(documents, tokenizer) for name, documents in texts.items()}
    for first in (True, False):
        for name in texts:
            measure(model, ids[name], name, name == options.curves, first)
