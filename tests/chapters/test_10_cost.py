"""Chapter 10: the counts against torch's own, for every layer and option, and what a lesson should not carry."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from refusals import refused

from claims import claim
from gbattn import cost
from gbattn.boosted import GradientBoostedAttention
from gbattn.cost import (
    Cost,
    Machine,
    attention_cost,
    attention_parts,
    count_flops,
    count_saved_bytes,
    count_traffic_bytes,
    linear_cost,
    measure_machine,
    roofline_seconds,
)
from gbattn.layers import LinearAttention, MultiHeadAttention, make_attention
from gbattn.twicing import TwicingAttention

KV_FROM = ("residual", "input", "shared")
GATES = ("feature", "head", "scalar", "none")
F64 = torch.float64
COUNTS_GROUPED = torch.__version__ >= "2.12"  # an older torch refuses to count grouped queries; here they are left out


def family(D=16, H=4, rounds=(1, 2, 3), **options):
    """Every softmax layer of the book, with every option that changes its cost."""
    yield MultiHeadAttention(D, H, **options)
    for m in rounds:
        yield TwicingAttention(D, H, rounds=m, **options)
        for kv_from, gate in itertools.product(KV_FROM, GATES):
            yield GradientBoostedAttention(D, H, rounds=m, kv_from=kv_from, gate=gate, **options)
        for kv_from in KV_FROM:
            yield GradientBoostedAttention(D, H, rounds=m, kv_from=kv_from, query_from="input", **options)


def measured(layer, x, **call):
    """What torch counts, keeps and moves in one forward and one backward pass."""
    forward = count_flops(layer, x, **call)
    backward = count_flops(layer(x, **call).sum().backward)
    saved = count_saved_bytes(layer, x, **call)
    with torch.no_grad():
        traffic = count_traffic_bytes(layer, x, **call)
    return forward, backward, traffic, saved


def counted(cost):
    return cost.forward_flops, cost.backward_flops, cost.traffic_bytes, cost.saved_bytes


def tokens(B, T, D=16, dtype=torch.float32):
    return torch.randn(B, T, D, dtype=dtype, requires_grad=True)


# ---- The claims ----


class Drawn:
    """A drawn layer and batch. `says` are what the theorems say, written here anew from their formulas."""

    def __init__(self, layer, B, T, grouped, rounds, kv_from, gate):
        self.H, self.G, K = 4, 2 if grouped and layer != "twicing" else 4, 3
        self.D, self.B, self.T, self.M = 4 * K, B, T, 1 if layer == "multi_head" else rounds
        self.own = layer == "boosted" and kv_from != "shared"
        self.n = {"feature": self.D, "head": self.H, "scalar": 1, "none": 0}[gate] if layer == "boosted" else 0
        self.name, options = layer, {"n_kv_heads": self.G}
        if layer != "multi_head":
            options["rounds"] = rounds
        if layer == "boosted":
            options |= {"kv_from": kv_from, "gate": gate}
        self.layer = make_attention(layer, self.D, self.H, **options, dtype=F64)

    def flops(self, backward_of_a_look=2.5, gate=4):
        """Forward and backward, as the theorem has them."""
        D, M, more = self.D, self.M, (self.M - 1) * (self.name == "boosted")
        share = self.G / self.H
        products = 4 * (1 + share) * D**2 + more * ((2 + 4 * share * self.own) * D**2 + gate * self.n * D)
        looks = 4 * M * self.T * D
        return self.B * self.T * torch.tensor([products + looks, 2 * products + backward_of_a_look * looks], dtype=F64)

    def counted_flops(self):
        x = torch.randn(self.B, self.T, self.D, dtype=F64, requires_grad=True)
        forward = count_flops(self.layer, x, causal=True)
        backward = count_flops(self.layer(x, causal=True).sum().backward)
        return torch.tensor([forward, backward], dtype=F64)

    def saved(self, kept_estimates=None):
        D, H, M, narrow = self.D, self.H, self.M, self.G * self.D // self.H
        numbers = 3 * D + 2 * narrow + H
        if self.name == "twicing" and M > 1:
            numbers += (M - 1) * (2 * D + H) + D
        if self.name == "boosted":
            estimates = min(M - 1, 1) if kept_estimates is None else kept_estimates
            gate = 2 * D + self.n if self.n else 0
            numbers += (M - 1) * (3 * D + H + 2 * narrow * self.own + gate) + estimates * D
        weights = D * (D + 2 * narrow)
        if self.own:
            weights += (M - 1) * D * (D * (self.layer.kv_from == "residual") + 2 * narrow)
        return torch.tensor([self.B * self.T * numbers + weights], dtype=F64)

    def counted_saved(self):
        x = torch.randn(self.B, self.T, self.D, dtype=F64, requires_grad=True)
        return torch.tensor([count_saved_bytes(self.layer, x, causal=True) / 8], dtype=F64)


def drawn(layers=("multi_head", "twicing", "boosted"), rounds=(1, 3)):
    return st.builds(
        Drawn,
        st.sampled_from(layers),
        st.integers(1, 3),
        st.integers(2, 40),
        st.booleans() if COUNTS_GROUPED else st.just(False),
        st.integers(*rounds),
        st.sampled_from(KV_FROM),
        st.sampled_from(GATES),
    )


@claim(drawn(), tolerance=0, examples=40, mutant=lambda p: (p.counted_flops(), p.flops(backward_of_a_look=2)))
def test_thm_flops(p):
    """Torch counts what the theorem says. Mutant: a look's backward pass that kept its weights."""
    return p.counted_flops(), p.flops()


@claim(drawn(), tolerance=0, mutant=lambda p: (p.counted_saved(), p.saved(kept_estimates=0)))
def test_thm_saved(p):
    """Autograd keeps what the theorem says. Mutant: no estimate is kept."""
    return p.counted_saved(), p.saved()


def sizes():
    """Heads, head width, and a length."""
    return st.tuples(st.integers(1, 16), st.integers(1, 64), st.integers(1, 5000))


PUBLISHED = {}
CHEAP = {"kv_from": "shared", "gate": "head"}


def on_paper(name, D, H, options, T, **call):
    return attention_cost(make_attention(name, D, H, device="meta", **options), T, **call)


def ratios(p):
    H, K, T = p
    one = on_paper("multi_head", H * K, H, {}, T).forward_flops
    family = (("boosted", PUBLISHED), ("boosted", CHEAP), ("twicing", {}))
    return torch.tensor([on_paper(name, H * K, H, o, T).forward_flops / one for name, o in family], dtype=F64)


def said_ratios(p, gate=2):
    H, K, T = p
    D = H * K
    return torch.tensor(
        [2 + D / (4 * D + 2 * T), 2 - (3 * D - gate * H) / (4 * D + 2 * T), 2 - 2 * D / (2 * D + T)], dtype=F64
    )


@claim(sizes(), tolerance=1e-12, mutant=lambda p: (ratios(p), said_ratios(p, gate=0)))
def test_prop_ratio(p):
    """Two rounds against one. Mutant: the gate per head is free."""
    return ratios(p), said_ratios(p)


class Remembering(Drawn):
    """A drawn layer, or a linear one, and the cache it makes."""

    def __init__(self, linear, *drawn):
        super().__init__(*drawn)
        if linear == 0:
            self.name = "linear"
            self.layer = LinearAttention(self.D, self.H, n_kv_heads=self.G, dtype=F64)

    def numbers(self, of_later_rounds=1):
        narrow, K = self.G * self.D // self.H, self.D // self.H
        S = self.T
        said = {
            "multi_head": 2 * narrow * S,
            "boosted": 2 * narrow * S * (1 + of_later_rounds * (self.M - 1) * self.own),
            "twicing": 2 * narrow * S + of_later_rounds * (self.M - 1) * self.D * S,
            "linear": narrow * (K + 1),
        }[self.name]
        return torch.tensor([said * self.B], dtype=F64)


def remembering():
    layers = st.sampled_from(("multi_head", "twicing", "boosted"))
    rest = (st.booleans(), st.integers(1, 4), st.sampled_from(KV_FROM), st.sampled_from(GATES))
    return st.builds(Remembering, st.integers(0, 3), layers, st.integers(1, 3), st.integers(2, 40), *rest)


def in_the_cache(p):
    return torch.tensor([p.layer.make_cache(p.B, p.T, dtype=F64).nbytes / 8], dtype=F64)


@claim(remembering(), tolerance=0, mutant=lambda p: (in_the_cache(p), p.numbers(of_later_rounds=0)))
def test_prop_cache(p):
    """A cache holds what the table says. Mutant: later rounds remember nothing."""
    return in_the_cache(p), p.numbers()


@pytest.mark.parametrize("H, K", [(1, 4), (4, 16), (12, 64)])
def test_at_t_equal_d_a_correction_adds_half_a_block(H, K):
    """And no longer at T = 2D; one more product of A with values adds a fourteenth."""
    D = H * K
    for T in (D, 2 * D):
        ffn = linear_cost(D, 4 * D, T) + linear_cost(4 * D, D, T)
        one, two, twice = (on_paper(name, D, H, {}, T).forward_flops for name in ("multi_head", "boosted", "twicing"))
        block = one + ffn.forward_flops
        assert (2 * (two - one) == block) == (T == D)
        assert (7 * (twice - one) == block) == (T == D)  # two products


# ---- Every option against torch ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [{}, {"shift": True}] + COUNTS_GROUPED * [{"n_kv_heads": 2, "bias": False}, {"rotary": 100.0, "n_kv_heads": 1}],
)
def test_every_count_is_torchs(dtype, options):
    B, T = 2, 11
    for layer in family(rounds=(1, 3), dtype=dtype, **options):
        x = tokens(B, T, dtype=dtype)
        for causal in (False, True):
            cost = attention_cost(layer, T, batch_size=B, causal=causal, itemsize=x.element_size())
            seen, said = measured(layer, x, causal=causal), counted(cost)
            if "rotary" in options:  # whose bytes are left out
                seen, said = seen[:2], said[:2]
            elif "n_kv_heads" in options and isinstance(layer, TwicingAttention):
                seen, said = seen[:2] + seen[3:], said[:2] + said[3:]
            assert seen == said, layer
        assert cost.cache_bytes == layer.make_cache(B, T).nbytes
        assert cost.parameters == sum(p.numel() for p in layer.parameters())


def test_a_context():
    without = 0
    for layer in (*family(rounds=(1, 2)), MultiHeadAttention(16, 4, shift=True)):
        x, context = tokens(2, 5), tokens(2, 9)
        try:
            layer(x, context=context)
        except ValueError:  # what the layer refuses has no cost
            without += 1
            for count in (attention_cost, attention_parts):
                with refused("context"):
                    count(layer, 5, context=9, batch_size=2)
            continue
        cost = attention_cost(layer, 5, context=9, batch_size=2)
        assert measured(layer, x, context=context) == counted(cost), layer
        assert cost.cache_bytes == 0
    assert without == 2 + len(GATES)  # twicing, and boosted from the residual


@pytest.mark.parametrize("T", [1, 3])
def test_decoding(T):
    layers = [*family(rounds=(2,)), *family(rounds=(2,), shift=True)]
    layers += family(rounds=(2,), n_kv_heads=2) if COUNTS_GROUPED else ()
    layers += [LinearAttention(16, 4, n_kv_heads=g, feature_map=f) for g in (4, 2) for f in ("elu", "identity")]
    layers += [LinearAttention(16, 4, shift=True)]
    for layer in layers:
        cache = layer.make_cache(2, 20)
        with torch.no_grad():
            layer(tokens(2, 9), causal=True, cache=cache)
            seen = count_flops(layer, tokens(2, T), causal=True, cache=cache)
        cost = attention_cost(layer, T, past=9, causal=True, batch_size=2)
        assert seen == cost.forward_flops, layer
        full = layer.make_cache(2, 9 + T)
        assert full.nbytes == cost.cache_bytes


@pytest.mark.parametrize("feature_map", ["elu", "identity"])
def test_linear_attention(feature_map):
    for groups, T, causal in itertools.product((4, 2), (20, 64, 130, 4100), (True, False)):
        layer = LinearAttention(16, 4, n_kv_heads=groups, feature_map=feature_map)
        cost = attention_cost(layer, T, causal=causal)
        forward, backward, traffic, saved = measured(layer, tokens(1, T), causal=causal)
        assert (forward, backward) == (cost.forward_flops, cost.backward_flops)
        assert traffic >= cost.traffic_bytes and saved >= cost.saved_bytes  # lower bounds
        parts = attention_parts(layer, T, causal=causal)
        plain = attention_parts(MultiHeadAttention(16, 4, n_kv_heads=groups), T)
        assert parts == plain | {"attention": parts["attention"]}  # the other parts are exact
        assert parts["attention"].traffic_bytes == 4 * T * 2 * (16 + 4 * groups)  # what comes in and goes out
        assert parts["attention"].saved_bytes == 4 * T * 16  # what goes out
        assert cost.cache_bytes == layer.make_cache(1, T).nbytes
    cost = attention_cost(LinearAttention(16, 4), 20, context=33)
    assert cost.forward_flops == count_flops(LinearAttention(16, 4), tokens(1, 20), context=tokens(1, 33))


def test_masked_pairs_and_nothing_else():
    """Without the masked pairs the difference is that of the looks, T(T − 1)/2 pairs in each head."""
    for layer in family(rounds=(2,)):
        every, kept = (attention_cost(layer, 9, causal=True, count_masked=c) for c in (True, False))
        looks = 2 if hasattr(layer, "rounds") else 1
        assert every.forward_flops - kept.forward_flops == 4 * 16 * looks * 36
        assert replaced(every) == replaced(kept)
        assert attention_cost(layer, 9, count_masked=False) == attention_cost(layer, 9)
    step = attention_cost(MultiHeadAttention(16, 4), 1, past=8, causal=True, count_masked=False)
    assert step == attention_cost(MultiHeadAttention(16, 4), 1, past=8, causal=True)


def replaced(cost):
    return cost.traffic_bytes, cost.saved_bytes, cost.cache_bytes, cost.parameters


def test_parts_sum_to_the_whole():
    layer = GradientBoostedAttention(16, 4)
    parts = attention_parts(layer, 9, batch_size=3)
    whole = attention_cost(layer, 9, batch_size=3)
    assert list(parts) == ["projections", "attention", "gate", "elementwise"]
    assert replace(whole, cache_bytes=0) == sum(parts.values(), Cost())
    assert parts["elementwise"].forward_flops == 0 < parts["elementwise"].traffic_bytes


def test_costs_add_and_multiply():
    a, b = Cost(1, 2, 3, 4, 5, 6), Cost(10, 20, 30, 40, 50, 60)
    assert a + b == Cost(11, 22, 33, 44, 55, 66)
    assert 3 * a == a * 3 == a + a + a == sum([a, a, a])
    with pytest.raises(TypeError):
        1 + a
    assert b.training_flops == 30


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
def test_a_product(bias, dtype):
    linear = torch.nn.Linear(5, 3, bias=bias, dtype=dtype)
    x = torch.randn(7, 5, dtype=dtype, requires_grad=True)
    cost = linear_cost(5, 3, 7, bias=bias, itemsize=x.element_size())
    assert counted(cost) == measured(linear, x)
    assert cost.parameters == sum(p.numel() for p in linear.parameters())


def test_a_layer_without_memory():
    big = make_attention("boosted", 2**14, 2**7, device="meta")
    assert attention_cost(big, 2**20, batch_size=64).forward_flops > 2**62


def test_what_is_saved_is_counted_without_memory():
    """A storage on meta has no address of its own."""
    x = tokens(2, 5)
    for layer in (MultiHeadAttention(16, 4), TwicingAttention(16, 4)):
        here = count_saved_bytes(layer.explain, x)  # the fused product has no kernel on meta
        away = x.detach().to("meta").requires_grad_()
        assert count_saved_bytes(layer.to("meta").explain, away) == here > 3000
    assert count_saved_bytes(lambda: (away * away, away.mT @ away)) == away.nbytes


def test_the_counters_see_each_thing_once():
    x = torch.randn(8, 8, requires_grad=True)
    assert count_saved_bytes(lambda: (x * x, x.T @ x)) == x.nbytes  # four looks at one storage
    assert count_traffic_bytes(lambda: x.T.flatten().unflatten(0, (16, 4))) == 2 * x.nbytes  # one copy, two views
    assert count_traffic_bytes(torch.add, x, x) == 2 * x.nbytes  # read once, written once
    assert count_traffic_bytes(torch.zeros(8).add_, 1) == 2 * 32
    assert count_traffic_bytes(torch.zeros(8).copy_, torch.ones(8)) == 2 * 32
    assert count_flops(torch.nn.Linear(8, 2), x) == 2 * 8 * 8 * 2


def test_a_roofline():
    machine = Machine(flops=100.0, bandwidth=10.0)
    assert roofline_seconds(Cost(forward_flops=500, traffic_bytes=20), machine) == 5  # arithmetic decides
    assert roofline_seconds(Cost(forward_flops=500, traffic_bytes=80), machine) == 8  # memory decides
    here = measure_machine(size=32, runs=1)
    assert here.flops > 0 and here.bandwidth > 0


def test_a_machine_is_its_work_over_the_least_seconds(monkeypatch):
    seconds = {2: iter((1.0, 8.0, 4.0)), 1: iter((1.0, 3.0, 6.0))}  # the product, and the sum; the first does not count
    monkeypatch.setattr(cost, "call_seconds", lambda call, device: next(seconds[call().ndim]))
    assert measure_machine(dtype=F64, size=10, runs=2) == Machine(2 * 10**3 / 4, 3 * 16 * 10**2 * 8 / 3)


@pytest.mark.parametrize(
    "wrong, argument",
    [
        (dict(layer=torch.nn.Linear(2, 2)), "layer"),
        (dict(T=0), "T"),
        (dict(batch_size=-1), "batch_size"),
        (dict(context=0), "context"),
        (dict(context=4, causal=True), "context"),
        (dict(past=-3), "past"),
        (dict(past=4), "causal"),
        (dict(causal=1), "causal"),
        (dict(count_masked="False"), "count_masked"),
        (dict(itemsize=3), "itemsize"),
    ],
)
def test_every_error_names_the_argument(wrong, argument):
    options = {"layer": MultiHeadAttention(4, 2), "T": 3} | wrong
    for count in (attention_cost, attention_parts):
        with refused(argument):
            count(options["layer"], options["T"], **{k: v for k, v in options.items() if k not in ("layer", "T")})


@pytest.mark.parametrize(
    "call, argument",
    [
        (lambda: linear_cost(0, 3, 4), "inputs"),
        (lambda: linear_cost(2, 0, 4), "outputs"),
        (lambda: linear_cost(2, 3, 0), "rows"),
        (lambda: linear_cost(2, 3, 4, itemsize=1), "itemsize"),
        (lambda: linear_cost(2, 3, 4, bias="False"), "bias"),
        (lambda: measure_machine(size=0), "size"),
        (lambda: measure_machine(runs=0), "runs"),
        (lambda: roofline_seconds(3, Machine(1.0, 1.0)), "cost"),
        (lambda: roofline_seconds(Cost(), Machine(1.0, 0.0)), "machine"),
    ],
)
def test_errors_of_a_product_and_of_a_machine(call, argument):
    with refused(argument):
        call()


def test_a_cost_adds_to_a_cost_alone():
    with pytest.raises(TypeError):
        Cost() + 3


def test_a_layer_made_causal_is_counted_so():
    made, plain = MultiHeadAttention(4, 2, causal=True), MultiHeadAttention(4, 2)
    for told in (dict(count_masked=False), dict(past=3)):
        assert attention_cost(made, 5, **told) == attention_cost(plain, 5, causal=True, **told)
    assert attention_cost(made, 5, causal=False, count_masked=False) == attention_cost(plain, 5, count_masked=False)


class OneMore(MultiHeadAttention):
    """A layer of one's own: the same attention, twice."""

    def estimate(self, inputs):
        return super().estimate(inputs) + super().estimate(inputs)


def test_a_layer_of_ones_own_is_refused_until_its_count_is_registered(monkeypatch):
    layer, x = OneMore(16, 4), tokens(1, 9)
    monkeypatch.setattr(cost, "COUNTS", dict(cost.COUNTS))
    for count in (attention_cost, attention_parts):
        with refused("layer", "counts(OneMore"):
            count(layer, 9)

    @cost.counts(OneMore)
    def count_one_more(p):
        again = {"projections": p.query() + p.keys_and_values(), "attention": p.attention(p.kv_dim)}
        return cost.add_parts(cost.one_round(p), again)

    found = attention_cost(layer, 9).forward_flops
    assert found == count_flops(layer, x)
    plain = attention_cost(MultiHeadAttention(16, 4), 9).forward_flops  # mutant: the count of the class it derives from
    assert found > plain
    with refused("layer"):
        attention_cost(type("Further", (OneMore,), {})(16, 4), 9)
