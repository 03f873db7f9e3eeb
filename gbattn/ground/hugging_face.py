"""What layers with several rounds of attention need of the package transformers: a cache in which each round has an
entry of its own, and classes that find a model."""

import torch

from gbattn.ground.arguments import ArgumentError, require


def append_layer(cache, model: int) -> None:
    """Append one more layer to a cache with a fixed number of them, of the kind and size of the layer `model`."""
    layer = cache.layers[model]
    # A program would begin each call with an empty layer.
    traced = torch.compiler.is_exporting() or torch.jit.is_tracing()
    got = "a static one without the layers of further rounds, while exporting"
    want = "one that the model was called with before, which appends them"
    require(not (traced and layer.is_compileable), "cache", got, want)
    names = ("max_cache_len", "sliding_window")
    sizes = {name: getattr(layer, name) for name in names if hasattr(layer, name)}
    if getattr(layer, "is_sliding", False):  # a static one has only its length
        sizes.setdefault("sliding_window", sizes.get("max_cache_len"))
    cache.layers.append(type(layer)(**sizes))
    if getattr(layer, "record_past", False):  # a draft may be taken back
        cache.layers[-1].activate_past_recording()


def check_buffer(layer, keys: torch.Tensor) -> None:
    """Check the heads of a static layer that was filled before the first call, as an export does: with a shift, keys are
    stored unmixed, as one head."""
    buffer = getattr(layer, "keys", None)
    if layer.is_compileable and isinstance(buffer, torch.Tensor):
        got, want = (tuple(x.shape[1::2]) for x in (buffer, keys))
        if got != want:
            why = f"{want}, as this round stores them: no cache filled in advance"
            raise ArgumentError("cache", f"keys of (heads, width) = {got}", why)


def update_cache(
    cache, keys: torch.Tensor, values: torch.Tensor, layer: int, extra: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append keys and values (B, G, T, K) of a round to a cache of transformers, and return all of them.

    Parameters
    ----------
    cache : transformers.Cache
        Dynamic or static; of a fixed number of layers, or growing.
    keys, values : torch.Tensor
        Of the new tokens.
    layer : int
        The layer of the model.
    extra : int
        0 for round 0, which is stored where transformers stores that layer. For a further round, the number of a cache
        layer of its own, counted from the model's number of layers on. It is appended if it does not exist, and of the
        same kind: transformers' own code handles windows, static buffers, beams and offloading.

    Notes
    -----
    Extra layers are asked for in the order of their numbers. Source: chapter 30.
    """
    index = extra or layer
    if cache.layer_class_to_replicate is None and index == len(cache.layers):
        append_layer(cache, layer)
    if index < len(cache.layers):
        check_buffer(cache.layers[index], keys)
    return cache.update(keys, values, index)


class LayerCache:
    """An adapter of a transformers cache for this library's attention layers.

    Attributes
    ----------
    cache : transformers.Cache
        The cache of the model.
    layer, extra : int
        The entries of round 0 and of the next further round.
    last : int or None
        The entry of the last round.
    """

    def __init__(self, cache, layer: int, extra: int):
        self.cache, self.layer, self.extra, self.last = cache, layer, extra, None

    def extend_pair(self, k: torch.Tensor, v: torch.Tensor):
        """Append keys and values of the next round; return all of them."""
        first = self.last is None
        self.last = self.layer if first else self.extra
        self.extra += not first
        return update_cache(self.cache, k, v, self.layer, 0 if first else self.last)

    def extend(self, name: str, new: torch.Tensor) -> torch.Tensor:
        """Append one tensor, which is stored as keys beside values of no width."""
        return self.extend_pair(new, new[..., :0])[0]

    def extend_unmixed(self, k: torch.Tensor, v: torch.Tensor) -> tuple:
        """Append keys and values (B, T, W), not yet mixed by a shift, as a round of their own, so that tokens can be taken
        back. Return the places of these tokens, and the key and the value before the first, zeros where there is none.
        """
        T = k.shape[1]
        stored = self.extend_pair(k[:, None], v[:, None])  # (B, 1, S, W)
        layer = self.cache.layers[self.last]
        end = layer.cumulative_length if layer.is_compileable else stored[0].shape[-2]
        places = torch.arange(T, device=k.device) + (end - T)
        before = places[:1] - 1
        row = before.clamp(min=0)
        last = (x.index_select(-2, row)[:, 0] * (before >= 0) for x in stored)
        return places, *last

    def newest(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return, of all keys (…, S, width) of the last round, those of the new tokens."""
        layer = self.cache.layers[self.last]
        if not layer.is_compileable:
            return x[..., x.shape[-2] - tokens :, :]
        places = torch.arange(tokens, device=x.device) - tokens  # in a static buffer
        return x.index_select(-2, places + layer.cumulative_length)

    def advance(self, tokens: int) -> None:
        """Nothing: the layers of the cache count their tokens themselves."""


def no_continuous_batching(model, *args, **kwargs):
    """Raise: of continuous batching, whose cache has one place for each layer of a model, and of every call that begins
    it, such as ``generate_batch``."""
    got = f"{type(model).__name__} in generate_batch, or other continuous batching"
    want = "generate, with prompts padded on the left: here a layer caches its rounds"
    raise ArgumentError("model", got, want)


# In ``config.json``, before the type of a boosted layer's attention: a config that is not of a boosted class refuses it.
BOOSTED_TYPE = "boosted_"


class BoostedConfig:
    """What the configs of boosted classes share: in the file, ``layer_types`` names each boosted layer, so that a class
    that would drop the corrections raises an error. In memory the types are those of the plain config.

    The file does not repeat the number of layers: `Trainer` reads it with the base class of all configs, which refuses
    such a name only beside that number."""

    def __post_init__(self, **kwargs):
        found = kwargs if "layer_types" in kwargs else vars(self)  # Llama and GPT-2 have no such field
        types = found.get("layer_types") or []
        if any(name.startswith(BOOSTED_TYPE) for name in types):
            self.num_hidden_layers = len(types)
            found["layer_types"] = [name.removeprefix(BOOSTED_TYPE) for name in types]
        if {*kwargs.get("layer_types", ())} == {"full_attention"}:  # as `to_diff_dict` adds
            del kwargs["layer_types"]
        super().__post_init__(**kwargs)

    def to_diff_dict(self) -> dict:
        """Return what is written."""
        written, boosted = super().to_diff_dict(), (self.boosting or {}).get("layers", [])
        types = getattr(self, "layer_types", None) or ["full_attention"] * self.num_hidden_layers
        if boosted:
            written["layer_types"] = [BOOSTED_TYPE * (n in boosted) + name for n, name in enumerate(types)]
            written.pop("num_hidden_layers", None)
        return written


def register_model(kind: type) -> None:
    """Make a class and its config known to all of transformers that asks for a causal language model: to the Auto
    classes, and by its name to `Trainer`, which otherwise smooths labels that are not shifted, to pipelines and to model
    cards."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    config = kind.config_class
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModelForCausalLM.register(config, kind, exist_ok=True)
    names[config.model_type] = kind.__name__
