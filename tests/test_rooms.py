"""Each room against its naive reference: rows, routing, experts, balance losses, attention, halting."""

import itertools
import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import HALTING, batch, make
from torch.testing import assert_close

from tenuto.models.attention import (
    Attention,
    BucketBias,
    Reach,
    RelativeWindow,
    sinusoidal_positions,
)
from tenuto.models.experts import Balance, Dispatch, ExpertLinear, FeedForward, Router, grouped_matmul
from tenuto.models.halting import StickBreaking
from tenuto.models.rows import Rows
from tenuto.presets import build, preset

quick = settings(deadline=None, max_examples=30, derandomize=True, database=None)
masks = st.integers(1, 5).flatmap(
    lambda t: st.lists(st.lists(st.booleans(), min_size=t, max_size=t), min_size=1, max_size=5)
)
double = torch.float64


def close(actual, expected, atol=1e-12):
    assert_close(actual, expected, atol=atol, rtol=atol)


def shaken(module, scale=0.5):
    """The module in float64 with random weights."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn_like(weight) * scale)
    return module.double()


# rows


@quick
@given(masks)
def test_rows_pack_unpack_write_and_count(mask):
    """Packing keeps the live places in order; unpacking puts zeros elsewhere; writing replaces the live
    ones only.
    """
    mask = torch.tensor(mask)
    rows, (B, T) = Rows.from_mask(mask), mask.shape
    grid = torch.randn(B, T, 3)
    places = [(b, t) for b in range(B) for t in range(T) if mask[b, t]]
    assert len(rows) == len(places)
    assert list(zip(rows.sequence.tolist(), rows.position.tolist(), strict=True)) == places
    assert rows.per_sequence.tolist() == mask.sum(1).tolist()
    packed = rows.pack(grid)
    assert torch.equal(packed, torch.stack([grid[p] for p in places]) if places else packed[:0])
    assert torch.equal(rows.unpack(packed), grid * mask[..., None])
    other = torch.randn(B, T, 3)
    assert torch.equal(rows.write(other, packed), torch.where(mask[..., None], grid, other))
    assert torch.equal(rows.value_of(torch.arange(B)), rows.sequence) and rows.value_of(0.5) == 0.5


@quick
@given(masks)
def test_groups_cover_every_row_once_with_little_padding(mask):
    """Regrouping is a permutation with zeros in unused slots; less than half of a group is padding."""
    mask = torch.tensor(mask)
    rows = Rows.from_mask(mask)
    packed = torch.arange(1, len(rows) + 1, dtype=torch.float)[:, None]
    if not len(rows):
        assert rows.groups == []
        return
    pieces, seen = [], 0
    for group in rows.groups:
        grid = group.pad(packed)
        sequences = range(len(mask)) if group.sequences is None else group.sequences.tolist()
        for line, sequence in enumerate(sequences):
            mine = packed[rows.sequence == sequence]
            assert torch.equal(grid[line, : len(mine)], mine) and not grid[line, len(mine) :].any()
            assert group.positions[line, : len(mine)].tolist() == mask[sequence].nonzero()[:, 0].tolist()
            assert (group.positions[line, len(mine) :] == mask.shape[1] - 1).all()
            seen += len(mine)
        assert group.positions.numel() < 2 * int((grid > 0).sum()) or group.positions.numel() == 1
        pieces.append(group.unpad(grid))
    assert seen == len(rows)
    assert torch.equal(rows.regroup(pieces), packed)


def test_rows_of_a_full_grid_copy_nothing():
    """When all are alive packing is a view: the dense path pays nothing."""
    grid = torch.randn(2, 3, 4)
    rows = Rows.of(grid, torch.ones(2, 3, dtype=torch.bool))
    assert rows.index is None and rows.pack(grid).data_ptr() == grid.data_ptr()
    assert rows.groups[0].pad(rows.pack(grid)).data_ptr() == grid.data_ptr()


def test_rows_select_keeps_places():
    """Selecting among live rows names their places in the grid, not in the packed matrix."""
    rows = Rows.from_mask(torch.tensor([[True, False, True], [True, True, False]]))
    assert rows.select(torch.tensor([1, 3])).index.tolist() == [2, 4]


# routing


@pytest.mark.parametrize("kind", ["mlp", "linear"])
@pytest.mark.parametrize("experts,chosen", [(2, 1), (6, 2), (8, 8), (48, 4)])
def test_router_takes_the_k_largest_of_a_softmax_over_all(kind, experts, chosen):
    """Softmax first, then the k largest, renormalised to exactly 1."""
    router = shaken(Router(8, experts, chosen, kind, 0, 0.0))
    x = torch.randn(7, 8, dtype=double)
    out = router(x)
    close(out.gates.sum(-1), torch.ones(7, dtype=double), 1e-15)
    for n in range(7):
        p, gates = reference.route(router, x[n])
        close(out.probs[n], p)
        assert set(out.experts[n].tolist()) == set(gates) and len(set(out.experts[n].tolist())) == chosen
        for e, gate in zip(out.experts[n].tolist(), out.gates[n], strict=True):
            close(gate, gates[e])


def test_router_samples_in_training_only():
    """sample_topk: k-s sure, s drawn from the rest in proportion to p, never twice the same; none in
    evaluation.
    """
    router = shaken(Router(8, 6, 3, "mlp", 1, 0.0), 0.4)
    x = torch.randn(1, 8, dtype=double).expand(20_000, 8)
    drawn = router.train()(x)
    order = drawn.probs[0].argsort(descending=True)
    assert (drawn.experts[:, :2].sort(-1).values == order[:2].sort().values).all()
    rest = drawn.probs[0].scatter(0, order[:2], 0.0)
    share = torch.bincount(drawn.experts[:, 2], minlength=6) / len(x)
    assert share[order[:2]].eq(0).all() and len(share.nonzero()) == 4
    assert_close(share, (rest / rest.sum()).to(share.dtype), atol=0.02, rtol=0)
    close(drawn.gates.sum(-1), torch.ones(len(x), dtype=double), 1e-15)
    sure = router.eval()(x[:3])
    assert (sure.experts.sort(-1).values == order[:3].sort().values).all()


def test_one_expert_has_no_router():
    """E = 1 is the dense layer: no decision and no parameters."""
    router = Router(8, 1, 1, "mlp", 0, 0.0)
    assert router(torch.randn(3, 8)) is None and not list(router.parameters()) and router.row_macs == 0


# experts


def skewed(tokens, experts, chosen, kind):
    """Dispatches: random; everything to the first experts; some experts empty."""
    probs = torch.rand(tokens, experts, dtype=double)
    if kind == "skewed":
        probs[:, :chosen] += 10
    if kind == "empty":
        probs[:, 1::2] = 0
        probs[:, -chosen:] += 1e-3
    probs = probs / probs.sum(-1, keepdim=True)
    top, chosen_experts = probs.topk(chosen, -1)
    return Dispatch(probs, top / top.sum(-1, keepdim=True), chosen_experts)


@pytest.mark.parametrize("kind", ["random", "skewed", "empty"])
@pytest.mark.parametrize("experts,chosen", [(8, 2), (24, 4), (48, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, double])
def test_experts_equal_one_product_per_token_and_choice(kind, experts, chosen, dtype):
    """Grouped product (float32) and its fallback (float64): values and gradients, empty and crowded
    experts.
    """
    dispatch = skewed(9, experts, chosen, kind)
    dispatch = Dispatch(*(part.to(dtype) for part in (dispatch.probs, dispatch.gates)), dispatch.experts)
    layer = ExpertLinear(experts, 8, 12, bias=True)
    with torch.no_grad():
        layer.weight.normal_()
        layer.bias.normal_()
    layer, x = layer.to(dtype), torch.randn(9, 8, dtype=dtype, requires_grad=True)
    got = dispatch.combine(layer(dispatch.send(x), dispatch))
    want = torch.stack([
        sum(g * reference.expert_of(layer, x[n], int(e))
            for g, e in zip(dispatch.gates[n], dispatch.experts[n], strict=True))
        for n in range(9)
    ])  # fmt: skip
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    close(got, want, tolerance)
    wanted = (x, layer.weight, layer.bias)
    weights = torch.randn_like(want)
    ours = torch.autograd.grad((got * weights).sum(), wanted)
    theirs = torch.autograd.grad((want * weights).sum(), wanted)
    for one, other in zip(ours, theirs, strict=True):
        close(one, other, 10 * tolerance)
    assert dispatch.counts.tolist() == [int((dispatch.experts == e).sum()) for e in range(experts)]
    unused = dispatch.counts == 0
    assert kind == "random" or unused.any()
    assert not ours[1][unused].any()


def test_grouped_matmul_without_rows_and_with_odd_widths():
    """Nobody left, and widths whose rows are no multiple of 16 bytes, take the fallback and agree."""
    counts = torch.tensor([2, 0, 3])
    weight = torch.randn(3, 6, 5)
    rows = torch.randn(5, 6)
    want = torch.cat([rows[:2] @ weight[0], rows[2:] @ weight[2]])
    close(grouped_matmul(rows, weight, counts), want, 1e-6)
    none = grouped_matmul(torch.randn(0, 8), torch.randn(3, 8, 8), torch.zeros(3, dtype=torch.long))
    assert none.shape == (0, 8)


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("experts,chosen", [(1, 1), (6, 2)])
def test_feed_forward_equals_the_naive_mixture(activation, experts, chosen):
    """Eq. 1 of the experts, token by token, and float64 gradcheck through router, dispatch and experts."""
    config = preset("sut-tiny", hidden_size=8, intermediate_size=4, ffn_experts=experts,
                    ffn_experts_per_token=chosen, activation=activation)  # fmt: skip
    layer = shaken(FeedForward(config).eval())
    x = torch.randn(5, 8, dtype=double, requires_grad=True)
    got, dispatch = layer(x)
    for n in range(5):
        y, p, chosen_experts = reference.feed_forward(layer, x[n], activation)
        close(got[n], y)
        assert p is None or set(dispatch.experts[n].tolist()) == set(chosen_experts)
    assert torch.autograd.gradcheck(lambda rows: layer(rows)[0], x)


# balance losses


def dispatch_of(probs, chosen=1):
    probs = torch.as_tensor(probs, dtype=double)
    top, experts = probs.topk(chosen, -1)
    return Dispatch(probs, top / top.sum(-1, keepdim=True), experts)


def balance_of(probs, weights=None, chosen=1):
    dispatch = dispatch_of(probs, chosen)
    weights = torch.ones(len(dispatch.probs), dtype=double) if weights is None else weights
    return Balance.of(dispatch, weights)


def test_published_defect_mim_sign_balanced_routing_beats_collapse():
    """sut.md 4.1: the released loss H(e|h) + H(e) scores total collapse best. Ours: -log E when every
    token is sure and the experts share the tokens; 0 for collapse and for indifference.
    """
    sure = torch.eye(4, dtype=double).repeat(3, 1)
    collapsed = torch.eye(4, dtype=double)[:1].repeat(12, 1)
    indifferent = torch.full((12, 4), 0.25, dtype=double)
    close(balance_of(sure).mim(), torch.tensor(-math.log(4), dtype=double))
    close(balance_of(collapsed).mim(), torch.zeros((), dtype=double))
    close(balance_of(indifferent).mim(), torch.zeros((), dtype=double))


def test_published_defect_marginal_of_mim_sums_to_one():
    """sut.md 4.11: a port divides by tokens x experts; then the marginal sums to 1/E and the loss is
    mis-scaled.
    """
    statistics = balance_of(torch.rand(9, 5, dtype=double).softmax(-1), torch.rand(9, dtype=double))
    close((statistics.probs / statistics.weight).sum(), torch.ones((), dtype=double))


@pytest.mark.parametrize("experts,chosen", [(2, 1), (6, 2), (24, 4)])
def test_balance_losses_equal_their_definitions(experts, chosen):
    """MIM and Switch with weights, pooled over two applications; bounds; gradients."""
    probs = (torch.randn(11, experts, dtype=double) * 2).softmax(-1).requires_grad_()
    weights = torch.rand(11, dtype=double)
    parts = [balance_of(probs[:4], weights[:4], chosen), balance_of(probs[4:], weights[4:], chosen)]
    pooled = parts[0] + parts[1]
    want = reference.mim(weights, probs)
    close(pooled.mim(), want)
    assert -math.log(experts) <= pooled.mim() <= 0
    chosen_experts = [row.topk(chosen).indices.tolist() for row in probs]
    close(pooled.switch(), reference.switch(weights, probs, chosen_experts))
    close(*(torch.autograd.grad(loss, probs)[0] for loss in (pooled.mim(), want)))
    close(pooled.usage().sum(), torch.ones((), dtype=double))
    close(balance_of(torch.eye(experts, dtype=double)).switch(), torch.ones((), dtype=double))


def test_published_defect_mim_weights_are_detached():
    """sut.md 4.9: survival probabilities weigh the tokens but receive no gradient."""
    weights = torch.rand(5, dtype=double, requires_grad=True)
    probs = torch.rand(5, 3, dtype=double).softmax(-1).requires_grad_()
    statistics = balance_of(probs, weights)
    loss = statistics.mim() + statistics.switch()
    by_weight, by_probs = torch.autograd.grad(loss, (weights, probs), allow_unused=True)
    assert by_weight is None and by_probs.abs().sum() > 0


# attention


def test_published_defect_window_of_one_keeps_three_offsets():
    """sut.md 4.10: the released code clips at W-1, so W = 1 has no positions. Here -1, 0 and +1 differ."""
    relative = RelativeWindow(1, 2, 1)
    with torch.no_grad():
        relative.embedding.copy_(torch.tensor([[[1.0, 2.0, 4.0], [0.0, 0.0, 0.0]]]))
    query = torch.tensor([1.0, 5.0]).expand(1, 1, 4, 2)
    offsets = torch.arange(4) - torch.arange(4)[:, None]
    scores = relative(query, offsets.unsqueeze(0))
    assert scores[0, 0].tolist() == [[2, 4, 4, 4], [1, 2, 4, 4], [1, 1, 2, 4], [1, 1, 1, 2]]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("buckets,distance", [(32, 128), (8, 20), (16, 64)])
def test_t5_buckets_equal_the_integer_reference_and_transformers(causal, buckets, distance):
    """Every offset a model can meet; transformers' T5 agrees except where its rounding misses a border."""
    from transformers.models.t5.modeling_t5 import T5Attention

    ours = BucketBias(2, buckets, distance, causal)
    offsets = torch.arange(-300, 301)
    got = ours.bucket(offsets).tolist()
    want = [reference.bucket(o, buckets, distance, causal) for o in offsets.tolist()]
    theirs = T5Attention._relative_position_bucket(offsets, not causal, buckets, distance).tolist()
    wrong = [o for o, g, w in zip(offsets.tolist(), got, want, strict=True) if g != w]
    other = [o for o, g, w in zip(offsets.tolist(), got, theirs, strict=True) if g != w]
    assert not wrong, wrong
    assert len(other) <= 4 and max(got) == buckets - 1 and min(got) == 0


def test_sinusoidal_positions():
    """Sines, then cosines, odd widths padded with a zero; float32 stays within 1e-4 of the exact table."""
    for size in (8, 7):
        want = torch.tensor([reference.position_code(i, size) for i in range(300)])
        assert_close(sinusoidal_positions(300, size, torch.device("cpu")), want, atol=1e-4, rtol=0)


def views_of(attention, rows, tokens):
    """What the queries of one attention module may read."""
    window = attention.relative is not None
    reach = Reach(rows.length, attention.chosen, tokens, attention.is_causal, None, window)
    return reach.views(rows)


ATTENTION = {
    "heads": {"attention_experts": 1, "attention_experts_per_token": 1},
    "momha": {},
    "moa": {"num_attention_heads": 1, "attention_experts": 4, "attention_experts_per_token": 3},
    "all": {"attention_experts": 3, "attention_experts_per_token": 3},
    "plain": {"relative_positions": "none"},
}  # fmt: skip


def attention_of(kind, **roles):
    config = preset("sut-tiny", hidden_size=8, head_dim=4, window=1, **ATTENTION[kind])
    config._attn_implementation = "sdpa"
    return shaken(Attention(config, **roles).eval())


@pytest.mark.parametrize("kind", ATTENTION)
@pytest.mark.parametrize("causal", [False, True])
def test_momha_equals_attention_expert_by_expert(kind, causal):
    """Live queries against every token's keys, expert by expert: E = 1 is multi-head attention, H = 1
    is MoA.
    """
    attention = attention_of(kind, causal=causal)
    tokens = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)
    live = tokens & torch.tensor([[1, 0, 1, 1, 1], [0, 1, 0, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)
    states, keyed, rows = torch.randn(3, 5, 8, dtype=double), Rows.from_mask(tokens), Rows.from_mask(live)
    kv = attention.project(keyed.pack(states), keyed, None)
    got = attention(rows.pack(states), rows, kv, views_of(attention, rows, tokens))[0]
    shape = (attention.heads, attention.head_dim)
    want = []
    for b, t in zip(rows.sequence.tolist(), rows.position.tolist(), strict=True):
        keys = [(attention.key.weight @ one).view(shape) for one in states[b]]
        values = [(attention.value.weight @ one).view(shape) for one in states[b]]
        visible = range(t + 1) if causal else range(int(tokens[b].sum()))
        want.append(reference.attend(attention, states[b, t], t, keys, values, visible)[0])
    close(got, torch.stack(want))


def test_attention_gradcheck():
    """Gradients through router, gather, regrouping and both kinds of experts, in float64."""
    attention = attention_of("momha", causal=True)
    tokens = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    rows = Rows.from_mask(tokens)

    def run(states):
        return attention(
            states, rows, attention.project(states, rows, None), views_of(attention, rows, tokens)
        )[0]

    assert torch.autograd.gradcheck(run, torch.randn(5, 8, dtype=double, requires_grad=True))


def test_projecting_keeps_what_others_wrote():
    """K/V of tokens outside the rows stay as they are: stopped tokens remain visible without being
    computed.
    """
    attention = attention_of("heads")
    everyone = Rows.from_mask(torch.ones(1, 4, dtype=torch.bool))
    some = Rows.from_mask(torch.tensor([[False, True, False, True]]))
    old = attention.project(torch.randn(4, 8, dtype=double), everyone, None)
    new = attention.project(torch.randn(2, 8, dtype=double), some, old)
    for before, after in zip(old, new, strict=True):
        assert torch.equal(before[0, [0, 2]], after[0, [0, 2]])
        assert (before[0, [1, 3]] != after[0, [1, 3]]).all()


# halting


def policy_of(bias=0.0, scale=1.0):
    config = preset("sut-tiny", hidden_size=8, halt_bias=bias)
    return shaken(StickBreaking(config), scale)


@quick
@given(
    st.lists(st.floats(0.01, 0.99), min_size=7, max_size=7),
    st.sampled_from([0.0, 0.3, 0.7, 0.999, 1.0]),
    st.integers(1, 8),
    st.integers(1, 8),
)
def test_stick_breaking_weights_sum_to_one_and_nothing_follows_the_halt(halts, threshold, low, steps):
    """Eq. 1-4 for one token whose h_l are unit vectors: s shows the weights themselves."""
    low = min(low, steps)
    policy = policy_of()
    policy.halt = lambda h: tuple(
        torch.tensor([value], dtype=double).log() for value in (1 - halts[step - 2], halts[step - 2])
    )
    basis = torch.eye(8, dtype=double)
    state, ran, s = policy.start(basis[:1]), 0, None
    for step in range(1, steps + 1):
        if policy.asks(step, threshold, low):
            asked = policy.ask(state, basis[step - 2 : step - 1], step - 1)
            if not policy.go_on(asked, threshold).all():
                break
            state = asked
        ran = step
        s = policy.combine(state, basis[step - 1 : step])
    weights, want = reference.stick(halts, threshold, low, steps)
    assert ran == want and ran >= low
    close(s[0, :ran], torch.tensor(weights, dtype=double))
    assert not s[0, ran:].any()
    close(s.sum(), torch.ones((), dtype=double))
    mean = sum(w * (step + 1) for step, w in enumerate(weights))
    close(policy.expected_depth(state, ran), torch.tensor([mean], dtype=double))


def test_worked_example_of_the_docstring():
    """â = 0.6, 0.9 at threshold 0.95: two steps, s = 0.6 h_1 + 0.4 h_2, expected depth 1.4 (counted from 1).

    sut.md 4.7 (published defect: the loss counts depth from 0).
    """
    weights, steps = reference.stick([0.6, 0.9, 0.5], 0.95, 1, 4)
    assert steps == 2 and weights == pytest.approx([0.6, 0.4])

    class Told(StickBreaking):
        def halt(self, h_Nd):
            halted = h_Nd[:, 0]  # the state says its own â
            return torch.log1p(-halted), halted.log()

    policy = Told(preset("sut-tiny"))
    first, second = (torch.tensor([[a, 1.0, 0.0]], dtype=double) for a in (0.6, 0.9))
    state = policy.ask(policy.start(first), first, 1)
    assert policy.go_on(state, 0.95).all()
    assert_close(policy.combine(state, second), 0.6 * first + 0.4 * second)
    asked = policy.ask(state, second, 2)
    assert not policy.go_on(asked, 0.95).any()
    assert policy.expected_depth(state, 2).item() == pytest.approx(1.4)


def test_go_on_at_the_ends_of_the_threshold():
    """A threshold of 1 stops nobody, 0 everybody, also one for each row; extreme logits stay finite."""
    policy = policy_of(scale=30.0)
    state = policy.ask(policy.start(torch.zeros(6, 8, dtype=double)), torch.randn(6, 8, dtype=double), 1)
    assert policy.go_on(state, 1.0).all() and not policy.go_on(state, 0.0).any()
    mixed = torch.tensor([0.0, 1.0] * 3, dtype=double)
    assert policy.go_on(state, mixed).tolist() == [False, True] * 3
    assert all(part.isfinite().all() for part in (state.log_left, state.spent, state.depth))


def test_halting_gradcheck():
    """Two questions and the mixture, in float64."""
    policy = policy_of(scale=0.5)

    def run(h1, h2, h3):
        state = policy.ask(policy.ask(policy.start(h1), h1, 1), h2, 2)
        return policy.combine(state, h3), policy.expected_depth(state, 3)

    inputs = [torch.randn(3, 8, dtype=double, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("bias,depth", [(0.0, 1.97), (-3.0, 5.33)])
def test_published_defect_shallow_start_is_cured_by_the_bias(bias, depth):
    """sut.md 4.6: with â = 0.5 at the start the mean depth of 6 loops is below 2; a bias of -3 starts
    deep.
    """
    a = 1 / (1 + math.exp(-bias))
    want = sum(a * (1 - a) ** (n - 1) * n for n in range(1, 6)) + 6 * (1 - a) ** 5
    assert want == pytest.approx(depth, abs=0.02)
    model = build(preset("sut-tiny", num_loops=6, halt_bias=bias, halt_threshold=1.0))
    out = model(batch("sut", "classification")["input_ids"])
    assert_close(out.expected_depths, torch.full_like(out.expected_depths, want), atol=1e-5, rtol=0)


def test_published_defect_the_variant_without_halting_runs():
    """sut.md 4.4: the released no-halting encoder returns an undefined variable."""
    out = make("sut-fixed", "text-to-text").train()(**batch("sut-fixed", "text-to-text"))
    assert out.loss.isfinite() and set(out.losses) == {"task", "act", "mim"}
    assert set(out.depths.unique().tolist()) == {0, 4}


@pytest.mark.parametrize("case", HALTING)
def test_published_defect_a_stopped_token_is_not_normalised_again(case):
    """sut.md 4.7: h of halted tokens drifted through the norms. At threshold 0 everybody stops after
    step 1, however many steps are allowed: states, depths and cost are those of one step.
    """
    model, data = make(case, "text-to-text").eval(), batch(case, "text-to-text")
    with torch.no_grad():
        many = model(**data, threshold=0.0, min_steps=1)
        one = model(**data, threshold=1.0, min_steps=1, max_steps=1)
    assert torch.equal(many.last_hidden_state, one.last_hidden_state)
    assert many.depths.max() == 1
    assert many.compute.macs["attention"].tolist() == one.compute.macs["attention"].tolist()


@pytest.mark.parametrize("case", HALTING)
def test_sequences_of_one_token(case):
    """Length 1, batch 1: every policy runs and agrees with the token-by-token loop."""
    model = make(case, "classification").eval()
    ids, segments = torch.tensor([[5]]), torch.tensor([[1]])
    extra = {"token_type_ids": segments} if model.config.type_vocab_size else {}
    with torch.no_grad():
        got = model(ids, **extra)
        want = reference.by_token(model, ids, torch.ones(1, 1), **extra)
    close(got.logits, want.logits, 1e-10)
    assert torch.equal(got.depths, want.encoder.depths)


def test_geometric_weights_by_hand():
    """Five tokens, two heads: the nearest match to the left, and to the right; what is passed over counts."""
    from tenuto.models.geometric import GeometricWeights

    module = GeometricWeights(2, causal=False)
    module.bias.data.zero_()
    p = torch.tensor([0.9, 0.5, 0.3, 0.8, 0.6], dtype=torch.float64)
    scores = (p / (1 - p)).log().expand(1, 2, 5, 5)
    offsets = torch.arange(5)[None, None, :] - torch.arange(5)[None, :, None]
    weights = module(scores, offsets, None)
    left, right = weights[0, 0, 3], weights[0, 1, 1]
    torch.testing.assert_close(left, torch.tensor([0.9 * 0.5 * 0.7, 0.5 * 0.7, 0.3, 0.0, 0.0]).double())
    torch.testing.assert_close(right, torch.tensor([0.0, 0.0, 0.3, 0.8 * 0.7, 0.6 * 0.7 * 0.2]).double())
    assert not weights[0, 0, 0].any() and not weights[0, 1, 4].any()
    # one that may not be read is passed over for nothing
    visible = torch.tensor([True, True, False, True, True]).view(1, 1, 1, 5)
    hidden = module(scores, offsets, visible)[0, 0, 3]
    torch.testing.assert_close(hidden, torch.tensor([0.9 * 0.5, 0.5, 0.0, 0.0, 0.0]).double())
    with pytest.raises(Exception, match="num_attention_heads=3 must be even"):
        preset("ut-tiny", relative_positions="geometric", num_attention_heads=3)


@pytest.mark.parametrize("heads, back", [(4, 2), (3, 3)])
def test_geometric_weights_have_the_formulas_gradient(heads, back):
    """Eqs. 1 and 2 as products, differentiated by PyTorch; large scores and keys that may not be read among them."""
    from tenuto.models.geometric import GeometricWeights

    torch.manual_seed(0)
    module = GeometricWeights(heads, causal=back == heads).double()
    module.bias.data.normal_()
    scores = (4 * torch.randn(2, heads, 6, 6)).double()
    scores[0, :, 1, 3] = 30.0
    offsets = torch.arange(6)[None, None, :] - torch.arange(6)[None, :, None]
    visible = (torch.rand(2, 1, 1, 6) < 0.7).contiguous()
    upstream, got, want = torch.randn(2, heads, 6, 6).double(), [], []
    for results in (got, want):
        leaf, module.bias.grad = scores.clone().requires_grad_(), None
        if results is got:
            weights = module(leaf, offsets, visible)
        else:
            p, weights = torch.sigmoid(leaf + module.bias[:, None, None]), torch.zeros_like(scores)
            for s, h, i, j in itertools.product(range(2), range(heads), range(6), range(6)):
                between = range(j + 1, i) if h < back else range(i + 1, j)
                if visible[s, 0, 0, j] and (j < i if h < back else j > i):
                    passed = [1 - p[s, h, i, k] for k in between if visible[s, 0, 0, k]]
                    weights[s, h, i, j] = p[s, h, i, j] * math.prod(passed)
        (weights * upstream).sum().backward()
        results += [weights.detach(), leaf.grad, module.bias.grad]
    for one, other in zip(got, want, strict=True):
        close(one, other, 1e-8)
    with torch.no_grad():
        close(module(scores, offsets, visible), want[0], 1e-8)


def test_geometric_weights_when_compiled_or_hidden():
    """What is compiled has the same gradient; what may not be read may be anything; half precision stays."""
    from tenuto.models.geometric import GeometricWeights, NearestMatch

    torch.manual_seed(0)
    z = (3 * torch.randn(2, 4, 5, 5)).double()
    z[0, :, 2], z[1, 1, 3, 0] = -torch.inf, -torch.inf
    upstream, grads = torch.randn_like(z), []
    for weights in (NearestMatch.apply, NearestMatch.weights):
        leaf = z.clone().requires_grad_()
        (weights(leaf, 2) * upstream).sum().backward()
        grads.append(leaf.grad)
    close(*grads, 1e-12)
    assert not grads[0][0, :, 2].any()
    module, offsets = (
        GeometricWeights(4, causal=False),
        torch.arange(5)[None, None] - torch.arange(5)[None, :, None],
    )
    module.bias.data.zero_()
    scores, visible = torch.randn(1, 4, 5, 5), torch.tensor([True, True, False, True, True]).view(1, 1, 1, 5)
    wild = scores.clone()
    wild[..., 2] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, 0.0])
    assert torch.equal(module(scores, offsets, visible), module(wild, offsets, visible))
    half = module(scores.bfloat16(), offsets, visible)
    assert half.dtype == torch.bfloat16
    close(half.float(), module(scores, offsets, visible), 0.02)


def test_copy_gate_begins_where_it_is_told():
    """Shut, the state stays; open, it is the block's."""
    from tenuto.models.geometric import CopyGate

    h, a, after = torch.randn(3, 4, 8).unbind(0)
    for start, want in ((-30.0, h), (30.0, after), (0.0, (h + after) / 2)):
        model = build(preset("ut-tiny", hidden_size=8, copy_gate=start), "encoder")
        gate = model.stack.block.gate
        assert isinstance(gate, CopyGate)
        torch.testing.assert_close(gate(h, a, after), want)


# two sentences, apart

PAIR = {"classifier_pooling": "pair", "encode_apart": True}


def sentences(side="right"):
    """Rows of 4 + 3, 1 + 3 and 1 + 1 tokens, the second sentence of the first row being the beginning of its first."""
    rows = [([5, 9, 7, 11], [8, 9, 7]), ([6], [4, 12, 30]), ([3], [3])]
    ids, mask, kinds = (torch.zeros(3, 8, dtype=torch.long) for _ in range(3))
    for b, (left, right) in enumerate(rows):
        n = len(left) + len(right)
        where = slice(0, n) if side == "right" else slice(8 - n, 8)
        ids[b, where], mask[b, where] = torch.tensor(left + right), 1
        kinds[b, where] = torch.tensor([0] * len(left) + [1] * len(right))
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "token_type_ids": kinds,
        "labels": torch.tensor([3, 0, 6]),
    }


@pytest.mark.parametrize("case", ["transformer", "ut", "sut", "ut-geometric"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_sentences_apart_equal_their_reference(case, side):
    """Logits, states, depths, loss and gradients are those of each sentence run alone."""
    model, data = make(case, "classification", 1, **PAIR).train(), sentences(side)
    out, want = model(**data), reference.masked(model, **data)
    alone = reference.by_token(model.eval(), **data)
    model.train()
    for one in (want, alone):
        assert one.closest > 1e-4
        assert_close(out.logits, one.logits, atol=1e-9, rtol=1e-9)
        assert_close(out.last_hidden_state, one.encoder.hidden, atol=1e-9, rtol=1e-9)
        assert torch.equal(out.depths, one.encoder.depths)
        assert_close(out.loss, one.loss, atol=1e-9, rtol=1e-9)
    weights = list(model.parameters())
    got, expected = (torch.autograd.grad(one.loss, weights) for one in (out, want))
    for one, other in zip(got, expected, strict=True):
        assert_close(one, other, atol=1e-9, rtol=1e-9)


def test_sentences_apart_are_billed_and_bounded_row_by_row():
    """A row's MACs are its two sentences'; a threshold of its own reaches both; equal sentences, equal states."""
    model, data = make("ut", "classification", 1, **PAIR).eval(), sentences()
    del data["labels"]
    with torch.no_grad():
        whole = model(**data, threshold=torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64))
        for b, threshold in enumerate((1.0, 0.5, 0.0)):
            n = int(data["attention_mask"][b].sum())
            one = {name: value[b : b + 1, :n] for name, value in data.items()}
            alone = model(**one, threshold=threshold)
            assert_close(alone.logits, whole.logits[b : b + 1], atol=1e-9, rtol=1e-9)
            assert torch.equal(alone.depths, whole.depths[b : b + 1, :n])
            linear = alone.compute.macs["linear"] + alone.compute.macs["head"]
            assert int(linear) == int(whole.compute.macs["linear"][b] + whole.compute.macs["head"][b])
    assert whole.compute.per_sequence.shape == (3,) and int(whole.depths[0].max()) == 4
    assert_close(whole.last_hidden_state[2, 0], whole.last_hidden_state[2, 1], atol=1e-12, rtol=1e-12)


def test_sentences_apart_need_two_segments():
    model, data = make("ut", "classification", **PAIR).eval(), sentences()
    for changed, sentence in (
        ({"token_type_ids": None}, "encode_apart needs token_type_ids"),
        ({"token_type_ids": torch.ones(3, 8, dtype=torch.long)}, "a token of segment 0 and one of segment 1"),
        ({"output_routing": True}, "output_routing has no places"),
    ):
        with pytest.raises(ValueError, match=sentence):
            model(**{**data, **changed})
    for fields in ({"encode_apart": True}, {**PAIR, "type_vocab_size": 2}):
        with pytest.raises(Exception, match="encode_apart needs classifier_pooling"):
            preset("ut-tiny", **fields)
