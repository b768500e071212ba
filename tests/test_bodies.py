"""Bodies of the looped core: linear attention, compressed memory, and what they carry through a cache.

The reference is `by_token`: one token after the other, heads, keys and chunks one by one, each loop and layer with a
memory matrix of its own that only the tokens running that loop touch.
"""

import copy
import math
import os
import subprocess
import sys
from functools import lru_cache

import pytest
import torch
from reference import activate, attend, feed_forward, halting_probability, normalise
from test_ledger import MAPPING
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from tenuto.expert_usage import expert_loop_information
from tenuto.models import LoopedConfig, LoopedForCausalLM

BODIES = {
    "gla": {"mixer": "gla", "conv_size": 3},
    "gated_delta": {"mixer": "gated_delta"},
    "memory": {"memory_chunk": 3, "memory_slots": 2},
    "both": {"mixer": "gated_delta", "conv_size": 2, "memory_chunk": 2},
}
POLICIES = {
    "fixed": {},
    "stick_breaking": {"halt_bias": -0.5, "halt_threshold": 0.8},
    "exit_head": {"halt_bias": 0.0, "halt_threshold": 0.6},
}
SMALL = {
    "vocab_size": 24, "hidden_size": 12, "num_attention_heads": 2, "head_dim": 6, "intermediate_size": 16,
    "num_prelude_layers": 1, "num_core_layers": 2, "num_coda_layers": 1, "num_loops": 3, "pad_token_id": 0,
    "eos_token_id": None,
}  # fmt: skip
LENGTHS = (8, 4, 6)
bodies = pytest.mark.parametrize("body", BODIES)
linear = pytest.mark.parametrize("body", ["gla", "gated_delta", "both"])
cases = pytest.mark.parametrize("body,policy", [(body, policy) for body in BODIES for policy in POLICIES])
some = pytest.mark.parametrize(
    "body,policy",
    [*((body, "stick_breaking") for body in BODIES), ("gated_delta", "exit_head"), ("memory", "fixed")],
)


def close(actual, expected, atol=1e-10):
    assert_close(actual, expected, atol=atol, rtol=atol)


def make(body, policy, seed=None, dtype=torch.float64, **fields):
    """A model with random weights everywhere; the seed under which depths differ and no decision is close."""
    seed = settled(body, policy) if seed is None else seed
    torch.manual_seed(seed)
    config = LoopedConfig(**{**SMALL, **BODIES.get(body, {}), "policy": policy, **POLICIES[policy], **fields})
    model = LoopedForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    return model.to(dtype).eval()


@lru_cache
def settled(body, policy):
    """The first seed under which three depths occur and no decision comes within 1e-3 of its threshold."""
    if policy == "fixed":
        return 0
    for seed in range(80):
        with torch.no_grad():
            tried = [make(body, policy, seed, positions=kind) for kind in ("rotary", "none")]
            if any(len(one(**batch("left")).depths.unique()) < 4 for one in tried):
                continue
            if min(by_token(tried[1], ids)[2] for ids in sequences()) > 1e-3:
                return seed
    raise AssertionError("no seed")


def sequences():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 24, (n,), generator=generator) for n in LENGTHS]


def batch(side, longer=0):
    """The sequences in one grid, padded on one side."""
    width = max(LENGTHS) + longer
    ids, mask = torch.zeros(2, len(LENGTHS), width, dtype=torch.long)
    for b, one in enumerate(sequences()):
        where = slice(0, len(one)) if side == "right" else slice(width - len(one), width)
        ids[b, where], mask[b, where] = one, 1
    return {"input_ids": ids, "attention_mask": mask}


# the reference


def attention_layer(block, x, keys, values):
    """One token through attention: its key and value are the last of the lists."""
    attention, branch = block.attention, block.attention_branch
    y, _, _ = attend(attention, normalise(branch.before, x), len(keys) - 1, keys, values, range(len(keys)))
    return x + normalise(branch.inner, y)


def key_value(block, x):
    attention, shape = block.attention, (block.attention.kv_heads, block.attention.head_dim)
    x = normalise(block.attention_branch.before, x)
    return (attention.key.weight @ x).view(shape), (attention.value.weight @ x).view(shape)


def recurrent_layer(block, x, carried):
    """One token through the recurrence; `carried` is [the last tokens' q, k, v; a matrix for each head]."""
    mixer, branch = block.attention, block.attention_branch
    H, D, u = mixer.heads, mixer.head_dim, normalise(block.attention_branch.before, x)
    qkv = torch.cat([layer.weight @ u for layer in (mixer.query, mixer.key, mixer.value)])
    if mixer.conv_size:
        window = [*carried[0], qkv][-mixer.conv_size :]
        carried[0] = window
        taps = mixer.conv[:, 0, mixer.conv_size - len(window) :]
        mixed = sum(taps[:, j] * one for j, one in enumerate(window))
        qkv = mixed * torch.sigmoid(mixed)
    q, k, v = qkv.view(3, H, D)
    rate = mixer.log_rate.exp() * torch.log1p((mixer.decay.weight @ u + mixer.decay_bias).exp())
    heads = []
    for h in range(H):
        a, memory = torch.exp(-rate[h]), carried[1][h]
        if mixer.delta:
            key = k[h] / (k[h].dot(k[h]) + 1e-6).sqrt()
            query = q[h] / (q[h].dot(q[h]) + 1e-6).sqrt()
            b = torch.sigmoid(mixer.beta.weight[h].dot(u))
            erase = torch.eye(D, dtype=x.dtype) - b * torch.outer(key, key)
            memory = a * (erase @ memory) + b * torch.outer(key, v[h])
        else:
            query = q[h] / D**0.5
            memory = a * memory + torch.outer(k[h], v[h])
        carried[1][h] = memory
        y = memory.T @ query
        heads.append(y / (y.square().mean() + mixer.norm.eps).sqrt() * mixer.norm.weight)
    gate = mixer.gate.weight @ u
    y = mixer.output.weight @ (torch.cat(heads) * gate * torch.sigmoid(gate))
    return x + normalise(branch.inner, y)


def slots_of(memory, prelude):
    """The slots of every complete chunk of the tokens so far, in order."""
    C, slots = memory.chunk, []
    for c in range(len(prelude) // C):
        tokens = [normalise(memory.norm, e) for e in prelude[c * C : (c + 1) * C]]
        for query in memory.queries:
            scores = torch.stack([query.dot(n) / math.sqrt(len(n)) for n in tokens]).exp()
            slots.append(sum(p * n for p, n in zip(scores / scores.sum(), tokens, strict=True)))
    return slots


def recall_layer(block, x, slots):
    """One token reads the slots of earlier chunks; without any nothing happens."""
    if not slots:
        return x
    cross, branch = block.cross, block.cross_branch
    shape = (cross.kv_heads, cross.head_dim)
    keys = [(cross.key.weight @ slot).view(shape) for slot in slots]
    values = [(cross.value.weight @ slot).view(shape) for slot in slots]
    y, _, _ = attend(cross, normalise(branch.before, x), 0, keys, values, range(len(slots)))
    return x + normalise(branch.inner, y)


def ffn_layer(block, x, config):
    branch = block.feed_forward_branch
    y, _, _ = feed_forward(block.feed_forward, normalise(branch.before, x), config.activation)
    return x + normalise(branch.inner, y)


def by_token(model, ids, threshold=None):
    """Ids [T] of one sequence -> logits [T, V], depths, and how near a decision came to the threshold."""
    config, stack = model.config, model.stack
    assert config.positions == "none" and config.norm_placement == "sandwich"
    threshold = config.halt_threshold if threshold is None else threshold
    L, H, D = config.num_loops, config.num_attention_heads, config.head_dim
    outer = {name: [([], []) for _ in getattr(stack, name)] for name in ("prelude", "coda")}
    attended = [[([], []) for _ in stack.core] for _ in range(L)]
    recurrent = [[[[], list(torch.zeros(H, D, D, dtype=model.dtype))] for _ in stack.core] for _ in range(L)]
    prelude, logits, depths, closest = [], [], [], 1.0

    def once(name, x):
        for block, (keys, values) in zip(getattr(stack, name), outer[name], strict=True):
            key, value = key_value(block, x)
            keys.append(key), values.append(value)
            x = ffn_layer(block, attention_layer(block, x, keys, values), config)
        return x

    for t, token in enumerate(ids):
        e = once("prelude", model.embed_tokens.weight[token] * config.hidden_size**0.5)
        slots = []
        if stack.memory is not None:
            C = stack.memory.chunk
            slots = slots_of(stack.memory, prelude[: t // C * C])
        prelude.append(e)
        h, left, spent, depth, shown = e, 1.0, 0.0, L, [None] * len(stack.core)
        for step in range(1, L + 1):
            if step > 1 and config.policy == "stick_breaking":
                halt = halting_probability(stack.policy, h)
                mass = (1 - left * (1 - halt)).item()
                closest = min(closest, abs(mass - threshold))
                if threshold < 1 and mass >= threshold:
                    depth = step - 1
                    break
                left, spent = left * (1 - halt), spent + left * halt * h
            if step > 1 and config.policy == "exit_head":
                policy, unit = stack.policy, h / (h.square().mean() + torch.finfo(h.dtype).eps).sqrt()
                hidden = activate("gelu", policy.hidden.weight @ unit + policy.hidden.bias, None)
                stop = torch.sigmoid(policy.out.weight[step - 2].dot(hidden) + policy.bias)
                closest = min(closest, abs(stop.item() - threshold))
                if threshold < 1 and stop >= threshold:
                    depth = step - 1
                    break
            z = h + e if step > 1 else h
            for i, block in enumerate(stack.core):
                if config.mixer == "attention":
                    shown[i] = key_value(block, z)
                    keys, values = attended[step - 1][i]
                    keys.append(shown[i][0]), values.append(shown[i][1])
                    z = attention_layer(block, z, keys, values)
                else:
                    z = recurrent_layer(block, z, recurrent[step - 1][i])
                z = ffn_layer(block, recall_layer(block, z, slots), config)
            h = z
        for step in range(depth + 1, L + 1):
            for i, one in enumerate(shown):
                if one is not None:
                    keys, values = attended[step - 1][i]
                    keys.append(one[0]), values.append(one[1])
        s = spent + left * h
        logits.append(model.lm_head.weight @ normalise(stack.final_norm, once("coda", s)))
        depths.append(depth)
    return torch.stack(logits), depths, closest


# rows against the equations


@cases
def test_packed_equals_token_by_token(body, policy):
    """Logits and depths of a padded batch whose tokens stop at different loops."""
    model, data = make(body, policy, positions="none"), batch("left")
    with torch.no_grad():
        out = model(**data)
        for b, ids in enumerate(sequences()):
            live = data["attention_mask"][b].bool()
            logits, depths, _ = by_token(model, ids)
            close(out.logits[b, live], logits)
            assert out.depths[b, live].tolist() == depths
    assert not out.depths[~data["attention_mask"].bool()].any()
    assert policy == "fixed" or len(out.depths.unique()) >= 4


@bodies
def test_gradients_equal_those_of_the_equations(body):
    """Of every weight, with tokens stopping in training."""
    model, data = make(body, "stick_breaking", positions="none").train(), batch("left")
    weights = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(1)
    mixes = [torch.randn(n, 24, generator=generator, dtype=torch.float64) for n in LENGTHS]
    out = model(**data).logits
    loss = sum((out[b, -n:] * mixes[b]).sum() for b, n in enumerate(LENGTHS))
    got = torch.autograd.grad(loss, weights.values())
    want = sum((by_token(model, ids)[0] * mix).sum() for ids, mix in zip(sequences(), mixes, strict=True))
    close(loss, want)
    for name, one, other in zip(weights, got, torch.autograd.grad(want, weights.values()), strict=True):
        close(one, other, 1e-8)
        assert one.abs().sum() > 0, name


@bodies
@pytest.mark.parametrize(
    "policy,knobs", [("stick_breaking", {"threshold": 0.5}), ("exit_head", {"threshold": 1.0})]
)
def test_another_threshold_means_the_same(body, policy, knobs):
    model = make(body, policy, positions="none")
    with torch.no_grad():
        logits, depths, closest = by_token(model, sequences()[0], **knobs)
        out = model(sequences()[0][None], **knobs)
    assert closest > 1e-6
    close(out.logits[0], logits)
    assert out.depths[0].tolist() == depths


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_complete_chunk_a_memory_adds_exactly_nothing(policy):
    """Bit-equal to the model without it while every token is of the first chunk, under a norm with a bias too."""
    model = make("memory", policy, memory_chunk=max(LENGTHS), norm="layernorm")
    plain = make("none", policy, seed=0, norm="layernorm")
    missing = plain.load_state_dict(model.state_dict(), strict=False)
    assert not missing.missing_keys and missing.unexpected_keys
    with torch.no_grad():
        one, other = model(**batch("right")), plain(**batch("right"))
    assert torch.equal(one.logits, other.logits) and torch.equal(one.depths, other.depths)
    shorter = make("memory", policy, memory_chunk=3, norm="layernorm")
    shorter.load_state_dict(model.state_dict())
    with torch.no_grad():
        out = shorter(**batch("right"))
    close(out.logits[:, :3], other.logits[:, :3], 1e-12)
    assert not torch.equal(out.logits[:, 3:], other.logits[:, 3:])


# the cache


@cases
@pytest.mark.parametrize("cuts", [range(1, 9), [5, 6, 8]])
def test_cached_decoding_equals_the_full_forward(body, policy, cuts):
    """Token by token, and in pieces, at depths that differ; left-padded where every piece has a real token."""
    model, data = make(body, policy), batch("left")
    if cuts[0] == 1:
        data = {"input_ids": torch.stack([sequences()[0], sequences()[0].flip(0)])}
        data["attention_mask"] = torch.ones_like(data["input_ids"])
    live = data["attention_mask"].bool()
    with torch.no_grad():
        full, cache, start, pieces = model(**data, use_cache=False), None, 0, []
        for cut in cuts:
            out = model(
                data["input_ids"][:, start:cut], attention_mask=data["attention_mask"][:, :cut], cache=cache,
                use_cache=True,
            )  # fmt: skip
            cache, start = out.cache, cut
            pieces.append(out)
    assert policy == "fixed" or len(full.depths[live].unique()) >= 3
    close(torch.cat([one.logits for one in pieces], 1)[live], full.logits[live])
    assert torch.equal(torch.cat([one.depths for one in pieces], 1), full.depths)
    assert cache.get_seq_length() == 8


@some
def test_beams_and_greedy_do_not_depend_on_the_cache(body, policy):
    """Beam search reorders every state; a left-padded batch decodes to what each sequence does alone."""
    model, data = make(body, policy), batch("left")
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    beams = {
        **options,
        "num_beams": 2,
        "num_return_sequences": 2,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    with torch.no_grad():
        cached, plain = (model.generate(**data, **beams, use_cache=flag) for flag in (True, False))
        assert torch.equal(cached.sequences, plain.sequences)
        close(cached.sequences_scores, plain.sequences_scores)
        together = model.generate(**data, **options)
        for b, ids in list(enumerate(sequences()))[1:]:
            alone = model.generate(ids[None], attention_mask=torch.ones_like(ids)[None], **options)
            assert torch.equal(together[b, -5:], alone[0, -5:])


@bodies
def test_gradients_flow_through_a_cache(body):
    """In two pieces with a cache as at once: nothing that the backward pass needs is overwritten."""
    model, ids = make(body, "fixed"), sequences()[0][None]
    weights = list(model.parameters())
    first = model(ids[:, :6], use_cache=True)
    second = model(ids[:, 6:], cache=first.cache)
    got = torch.autograd.grad(torch.cat([first.logits, second.logits], 1).square().sum(), weights)
    want = torch.autograd.grad(model(ids, use_cache=False).logits.square().sum(), weights)
    for one, other in zip(got, want, strict=True):
        close(one, other, 1e-8)


@bodies
def test_a_cache_copied_selected_and_reset(body):
    """Sequences repeated or chosen out of a cache go on as their own; a cache that was reset is a new one."""
    model, ids = make(body, "stick_breaking"), torch.stack([sequences()[0], sequences()[0].flip(0)])
    with torch.no_grad():
        cache = model(ids[:, :7], use_cache=True).cache
        want = model(ids, use_cache=False).logits
        other = copy.deepcopy(cache)
        other.reorder_cache(torch.tensor([1, 1, 0]))
        order = torch.tensor([1, 1, 0])
        close(model(ids[order, 7:], cache=other).logits, want[order, 7:])
        close(model(ids[:, 7:], cache=cache).logits, want[:, 7:])
        if body == "memory":
            carried = copy.deepcopy(cache.layers[-1])
            carried.batch_repeat_interleave(2)
            assert carried.state.count.tolist() == [8] * 4 and len(carried.state.open) == 4
            carried.reset()
            assert carried.state is None
        assert not cache.is_croppable


@bodies
def test_what_a_cache_cannot_do_is_refused(body):
    """Cropping, static and paged caches, caches that do not know the layers, packed documents in a cache."""
    model, ids = make(body, "fixed"), sequences()[0][None]
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with pytest.raises(ValueError, match="crop"):
        model.generate(ids, prompt_lookup_num_tokens=2, **options)
    with pytest.raises(ValueError, match="crop"):
        model.generate(ids, assistant_model=model.draft(2), **options)
    with pytest.raises(ValueError, match="dynamic cache"):
        model.generate(ids, cache_implementation="static", **options)
    with pytest.raises(ValueError, match="dynamic cache"):
        model(ids, cache=StaticCache(config=model.config, max_cache_len=16))
    with pytest.raises(ValueError, match="DynamicCache"):
        model(ids, cache=DynamicCache())
    own = torch.ones(8, 8, dtype=torch.bool).tril()
    own[4:, :4] = False
    with pytest.raises(ValueError, match="use_cache=False"):
        model(ids, attention_mask=own[None, None], use_cache=True)
    if BODIES[body].get("memory_chunk"):
        with pytest.raises(RuntimeError, match="memory_chunk"):
            model(ids, use_cache=True).cache.layers[-1].crop(-1)


# causality, neighbours, documents


@cases
def test_the_future_changes_nothing(body, policy):
    model, ids = make(body, policy), torch.stack(sequences()[:1] * 2)
    ids[1, 6:] = (ids[1, 6:] + 3) % 20 + 3
    with torch.no_grad():
        out, short = model(ids), model(ids[:1, :6])
    close(out.logits[1, :6], out.logits[0, :6], 1e-12)
    close(out.logits[0, :6], short.logits[0], 1e-12)
    assert torch.equal(out.depths[1, :6], out.depths[0, :6])
    assert not torch.equal(out.logits[1, 6:], out.logits[0, 6:])


@some
def test_neighbours_and_padding_change_nothing(body, policy):
    """Logits, depths and what a request is billed: alone, and in a batch padded either way, further too."""
    model = make(body, policy)
    with torch.no_grad():
        alone = [model(ids[None]) for ids in sequences()]
        for side, longer in (("right", 0), ("left", 4)):
            data = batch(side, longer)
            out = model(**data)
            for b, one in enumerate(alone):
                live = data["attention_mask"][b].bool()
                close(out.logits[b, live], one.logits[0], 1e-12)
                assert torch.equal(out.depths[b, live], one.depths[0])
                for kind in ("linear", "halting"):
                    if kind in one.compute.macs:
                        assert out.compute.macs[kind][b] == one.compute.macs[kind][0]
                assert out.compute.attention_causal[b] == one.compute.attention_causal[0]
                assert out.compute.kv_bytes[b] == one.compute.kv_bytes[0]


@some
def test_packed_documents_are_sequences_of_their_own(body, policy):
    """Logits, depths, gradients and the ledger of documents in one row are those of each alone."""
    model = make(body, policy).train()
    one, two, three = sequences()
    rows = torch.stack([torch.cat([one, two]), torch.cat([two, three, one[:2]])])
    cuts = [[8, 4], [4, 6, 2]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in cuts])
    out = model(rows, position_ids=positions, use_cache=False)
    weights = [weight for name, weight in model.named_parameters() if ".policy." not in name]
    total, bills = 0, []
    for b, row in enumerate(cuts):
        start, bill = 0, 0
        for n in row:
            alone = model(rows[b : b + 1, start : start + n], use_cache=False)
            close(out.logits[b, start : start + n], alone.logits[0])
            assert torch.equal(out.depths[b, start : start + n], alone.depths[0])
            total, start = total + alone.logits.square().sum(), start + n
            spent = alone.compute
            bill = bill + torch.stack([spent.macs["linear"][0], spent.attention_causal[0], spent.kv_bytes[0]])
        bills.append(bill)
    got = torch.stack([out.compute.macs["linear"], out.compute.attention_causal, out.compute.kv_bytes], 1)
    assert torch.equal(got, torch.stack(bills))
    for left, right in zip(
        torch.autograd.grad(out.logits.square().sum(), weights),
        torch.autograd.grad(total, weights),
        strict=True,
    ):
        close(left, right, 1e-8)


# training


@cases
def test_every_parameter_gets_a_gradient(body, policy):
    model = make(body, policy).train()
    ids = torch.stack([sequences()[0], sequences()[0].flip(0)])
    model(ids, labels=ids).loss.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.abs().sum() > 0, name


@bodies
def test_gradient_checkpointing_changes_nothing(body):
    model = make(body, "stick_breaking").train()
    data = batch("right")
    data["labels"] = data["input_ids"].masked_fill(data["attention_mask"] == 0, -100)
    want = model(**data).loss
    grads = torch.autograd.grad(want, list(model.parameters()))
    model.activation_checkpointing_enable()
    runs = []
    model.stack.core[0].feed_forward.register_forward_pre_hook(lambda *_: runs.append(1))
    loss = model(**data).loss
    forward = len(runs)
    for one, other in zip(torch.autograd.grad(loss, list(model.parameters())), grads, strict=True):
        close(one, other, 1e-12)
    close(loss, want, 1e-12)
    assert len(runs) == 2 * forward


@bodies
def test_bfloat16_autocast_trains_and_decodes(body):
    """Finite gradients under autocast; the recurrent state stays in float32."""
    model = make(body, "stick_breaking", dtype=torch.float32).train()
    ids = sequences()[0][None]
    with torch.autocast("cpu", torch.bfloat16):
        model(**batch("left"), labels=batch("left")["input_ids"]).loss.backward()
        assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)
        with torch.no_grad():
            cache = model.eval()(ids[:, :6], use_cache=True).cache
            assert model(ids[:, 6:], cache=cache).logits.isfinite().all()
    if BODIES[body].get("mixer"):
        assert cache.get_recurrent_state(1).dtype == torch.float32


# the ledger


def counted(model, **inputs):
    """Output and MACs of a forward by PyTorch's counter, triangular solves by their definition."""

    def solve(matrix, right, *args, out_shape=None, **kwargs):
        *many, rows, columns = right
        return torch.Size(many).numel() * columns * rows * (rows - 1)

    def vector(matrix, right, *args, out_shape=None, **kwargs):
        return 2 * matrix[0] * matrix[1]

    aten = torch.ops.aten
    formulas = {**MAPPING, aten.linalg_solve_triangular: solve, aten.mv: vector}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        out = model(**inputs)
    return out, counter.get_total_flops() // 2


@some
@pytest.mark.parametrize("padded,kernel", [(False, "eager"), (False, "sdpa"), (True, "sdpa")])
def test_ledger_equals_flop_counter(body, policy, kernel, padded):
    """2 FLOPs = 1 MAC, to the last one: at full depth without padding, and with pads and tokens that stopped."""
    model = make(body, policy)
    model.set_attn_implementation(kernel)
    data = {"input_ids": torch.stack([sequences()[0], sequences()[0].flip(0)])}
    if policy != "fixed":
        data["threshold"] = 1.0
    out, macs = counted(model, **(batch("left") if padded else data), use_cache=False)
    assert out.compute.total == macs
    assert out.compute.total >= int(out.compute.attention_causal.sum())


@some
def test_ledger_of_decoding_equals_flop_counter(body, policy):
    """A cached token, and one that completes a chunk."""
    model, ids = make(body, policy), torch.stack([sequences()[0], sequences()[0].flip(0)])
    with torch.no_grad():
        cache = model(ids[:, :6], use_cache=True).cache
    for t in (6, 7):
        out, macs = counted(model, input_ids=ids[:, t : t + 1], cache=cache)
        assert out.compute.total == macs


@pytest.mark.parametrize("policy", POLICIES)
@linear
def test_packed_figures_are_rows_times_cost_of_a_row(body, policy):
    """Linear MACs and bytes from the depths alone: a state is written once for each layer and loop that ran."""
    model, data = make(body, policy), batch("right")
    with torch.no_grad():
        out = model(**data, use_cache=False)
    config, stack, depths = model.config, model.stack, out.depths
    tokens, deepest = data["attention_mask"].sum(1), depths.max(1).values
    outer, core = stack.prelude[0], stack.core[0]
    once = outer.attention.row_macs + outer.attention.kv_macs + outer.feed_forward.row_macs
    loop = core.attention.row_macs - core.attention.conv_macs + core.feed_forward.row_macs
    linear = 2 * tokens * once + 2 * depths.sum(1) * loop
    H, D = config.num_attention_heads, config.head_dim
    state = 8 * (H * D * D + (config.conv_size - 1) * 3 * H * D)
    size = 2 * tokens * 2 * H * D * 8 + 2 * deepest * state
    if config.memory_chunk:
        slots = tokens // config.memory_chunk * config.memory_slots
        linear = linear + 2 * slots * core.cross.kv_macs
        size = size + 2 * slots * 2 * H * D * 8
        readers = (depths * (torch.arange(depths.shape[1]) >= config.memory_chunk)).sum(1)
        linear = linear + 2 * readers * core.cross.row_macs
    assert torch.equal(out.compute.macs["linear"], linear)
    assert torch.equal(out.compute.kv_bytes, size)
    assert stack.token_macs() > 0


# experts and loops


def test_information_between_expert_and_loop():
    """Against the definition, counted one by one; 0 and log E at the ends."""
    model = make("none", "stick_breaking", seed=3, ffn_experts=4, ffn_experts_per_token=2, halt_threshold=0.9)
    with torch.no_grad():
        routing = model(**batch("left"), output_routing=True).routing
    core = [(loop, module, chosen) for loop, module, _, chosen, _ in routing if module.startswith("core.")]
    assert {loop for loop, *_ in core} == {1, 2, 3} and {module for _, module, _ in core} == {
        "core.0.feed_forward", "core.1.feed_forward"
    }  # fmt: skip
    outer = [(loop, module) for loop, module, *_ in routing if not module.startswith("core.")]
    assert outer == [(0, "prelude.0.feed_forward"), (0, "coda.0.feed_forward")]
    total = choices = 0
    for layer in (0, 1):
        draws = [
            (loop, expert) for loop, module, chosen in core if module == f"core.{layer}.feed_forward"
            for expert in chosen.flatten().tolist()
        ]  # fmt: skip
        for pair in draws:
            joint = draws.count(pair) / len(draws)
            loops = sum(loop == pair[0] for loop, _ in draws) / len(draws)
            experts = sum(expert == pair[1] for _, expert in draws) / len(draws)
            total += math.log(joint / (loops * experts))
        choices += len(draws)
    assert expert_loop_information(routing, 4) == pytest.approx(total / choices, abs=1e-12)
    assert total / choices > 0.01

    def record(loop, *experts):
        return (loop, "core.0.feed_forward", None, torch.tensor(experts)[:, None], None)

    assert expert_loop_information([record(1, 0, 1), record(2, 0, 1)], 2) == pytest.approx(0, abs=1e-12)
    alone = [record(1, 0, 0), record(2, 1, 1), record(1, 0), record(2, 1)]
    assert expert_loop_information(alone, 3) == pytest.approx(math.log(2))
    heads = [(loop, "core.0.attention", *rest) for loop, _, *rest in alone]
    assert expert_loop_information(heads, 3, "attention") == pytest.approx(math.log(2))
    with pytest.raises(ValueError, match="no feed_forward router"):
        expert_loop_information(heads, 3)


@pytest.mark.parametrize("body", ["gla", "memory"])
def test_experts_and_another_body_go_together(body):
    """Cached decoding equals the full forward with experts in every feed-forward."""
    model = make(body, "stick_breaking", ffn_experts=4, ffn_experts_per_token=2)
    ids = sequences()[0][None]
    with torch.no_grad():
        cache = model(ids[:, :6], use_cache=True).cache
        close(model(ids[:, 6:], cache=cache).logits, model(ids).logits[:, 6:])
    out = model.train()(ids, labels=ids)
    assert set(out.balance) == {
        f"{part}.feed_forward" for part in ("prelude.0", "core.0", "core.1", "coda.0")
    }


# config, files


@pytest.mark.parametrize(
    "fields,names",
    [
        ({"mixer": "gla", "num_prelude_layers": 0, "num_coda_layers": 0}, ["mixer", "num_prelude_layers"]),
        ({"mixer": "gla", "cache_slots": "last"}, ["mixer", "cache_slots"]),
        ({"memory_chunk": 4, "attention_experts": 2}, ["memory_chunk", "attention_experts"]),
        ({"memory_chunk": -1}, ["memory_chunk"]),
        ({"memory_chunk": 4, "memory_slots": 0}, ["memory_slots"]),
        ({"mixer": "gla", "conv_size": -1}, ["conv_size"]),
        ({"mixer": "mamba"}, ["mixer"]),
    ],
)
def test_wrong_combinations_name_the_fields(fields, names):
    with pytest.raises(Exception) as error:
        LoopedConfig(**fields)
    assert all(name in str(error.value) for name in names)


def test_layer_types_follow_the_config(tmp_path):
    """transformers makes the cache's layers by them; a loaded config has them, one for another depth its own."""
    config = LoopedConfig(mixer="gla", num_loops=3, num_core_layers=2)
    attend, mix = ["full_attention"], ["linear_attention"]
    assert config.layer_types == attend + mix * 6 + attend
    config.save_pretrained(tmp_path)
    saved = LoopedConfig.from_pretrained(tmp_path)
    assert saved.layer_types == config.layer_types and saved.num_hidden_layers == 8
    again = LoopedConfig.from_dict({**saved.to_dict(), "num_loops": 2, "max_loops": 2})
    assert again.layer_types == attend + mix * 4 + attend and again.num_hidden_layers == 6
    plain = LoopedConfig.from_dict({**saved.to_dict(), "mixer": "attention"})
    assert getattr(plain, "layer_types", None) is None


@pytest.mark.parametrize("outer", [{"num_prelude_layers": 0}, {"num_coda_layers": 0}, {"max_loops": 6}])
@pytest.mark.parametrize("body", ["gla", "both"])
def test_other_shapes_decode_as_well(body, outer):
    """Attention on one side only, and more loops at decoding than in the config."""
    model, ids = make(body, "fixed", conv_size=0, **outer), sequences()[0][None]
    knobs = {"max_steps": 6} if "max_loops" in outer else {}
    with torch.no_grad():
        cache = model(ids[:, :6], use_cache=True).cache
        want = model(torch.cat([ids[:, :6], ids[:, 6:]], 1), use_cache=False).logits[:, 6:]
        close(model(ids[:, 6:], cache=cache).logits, want)
        assert model(ids, use_cache=True, **knobs).logits.isfinite().all()


@bodies
def test_weights_start_as_the_papers_say(body):
    """Rates and convolution of a fresh model are those of the mixer, not of a plain matrix."""
    model = LoopedForCausalLM(LoopedConfig(**{**SMALL, **BODIES[body]}))
    mixer, memory = model.stack.core[0].attention, model.stack.memory
    if model.config.mixer != "attention":
        assert mixer.log_rate.exp().ge(1).all() and mixer.log_rate.exp().le(16).all()
        assert (
            F.softplus(mixer.decay_bias).ge(1e-3 * 0.999).all()
            and F.softplus(mixer.decay_bias).le(0.1001).all()
        )
        assert mixer.conv.abs().max() <= model.config.conv_size**-0.5
    if memory is not None:
        assert 0.3 < memory.queries.std() < 2
    ids = sequences()[0][None]
    assert 0.5 * math.log(24) < model(ids, labels=ids).loss < 3 * math.log(24)


REMOTE = """
import sys, torch
sys.modules["tenuto"] = None  # whatever is installed, importing it fails
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval().double()
    saved = torch.load(folder + "/io.pt")
    with torch.no_grad():
        out = model(**saved["inputs"])
    assert type(model).__module__.startswith("transformers_modules"), type(model).__module__
    assert torch.equal(out.logits, saved["logits"]) and torch.equal(out.depths, saved["depths"]), folder
    assert model.generate(saved["inputs"]["input_ids"][:1], max_new_tokens=4, do_sample=False).shape[1] == 12
print("loaded", len(sys.argv) - 1)
"""


def test_save_load_and_remote_code(tmp_path):
    """The same weights and logits here, and in a process without tenuto."""
    folders = []
    for body in ("gla", "both"):
        model, data, folder = (
            make(body, "stick_breaking", dtype=torch.float32),
            batch("left"),
            tmp_path / body,
        )
        model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert all(
            torch.equal(weight, again.state_dict()[name]) for name, weight in model.state_dict().items()
        )
        with torch.no_grad():
            out = model.double()(**data)
            assert torch.equal(out.logits, again.double()(**data).logits)
        torch.save({"inputs": data, "logits": out.logits, "depths": out.depths}, folder / "io.pt")
        folders.append(str(folder))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, "-I", "-c", REMOTE, *folders], cwd=tmp_path, env=env, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.strip().endswith("loaded 2")
