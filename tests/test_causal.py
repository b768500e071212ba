"""The looped language model against its references, its cache, transformers' generation, and the design's invariants.

Random weights everywhere (`reference_causal.make`), seeds under which no decision comes within 1e-3 of its threshold
while depths differ (`settled`), float64 unless said otherwise.
"""

import os
import subprocess
import sys

import pytest
import reference_causal as reference
import torch
from reference_causal import CASES, HALTING, LENGTHS, MIXES, SMALL, batch, make, masked, settled
from reference_routed import make as make_routed
from test_ledger import MAPPING
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)

from tenuto.models import LoopedConfig, LoopedForCausalLM, LoopedModel
from tenuto.models.causal import stop_labels
from tenuto.models.halting import POLICIES as POLICY
from tenuto.models.halting import RULES

cases = pytest.mark.parametrize("case", CASES)
halting = pytest.mark.parametrize("case", HALTING)
# one for each policy
POLICIES = (
    "fixed",
    "stick-moe",
    "act-budget",
    "router",
    "ponder",
    "exit",
    "latent",
    "second",
    "kl",
    "margin",
)
policies = pytest.mark.parametrize("case", POLICIES)
EACH = torch.tensor([0.5, 1.0, 0.0], dtype=torch.float64)  # one threshold for each sequence


def ready(case, **overrides):
    return make(case, settled(case), **overrides)


def close(actual, expected, atol=1e-10):
    assert_close(actual, expected, atol=atol, rtol=atol)


def gradients(model, loss):
    """By name; None stands for zeros."""
    names, weights = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, weights, allow_unused=True)
    return {n: torch.zeros_like(w) if g is None else g for n, w, g in zip(names, weights, grads, strict=True)}


def same_gradients(got, want, atol=1e-10):
    assert any(gradient.any() for gradient in want.values())
    for name, gradient in want.items():
        close(got[name], gradient, atol)


def thresholds(case, value=EACH):
    return {} if case.startswith("fixed") else {"threshold": value}


def tokens(B=1, T=7, seed=3):
    return torch.randint(3, 32, (B, T), generator=torch.Generator().manual_seed(seed))


def decode(model, ids, mask, sizes, cache, **knobs):
    """Logits and depths of a forward in pieces."""
    logits, depths, done = [], [], 0
    for size in sizes:
        part = slice(done, done + size)
        done += size
        out = model(
            ids[:, part], attention_mask=None if mask is None else mask[:, :done], cache=cache, **knobs
        )
        logits.append(out.logits)
        depths.append(out.depths)
    assert done == ids.shape[1]
    return torch.cat(logits, 1), torch.cat(depths, 1)


def rows_computed(model, **inputs):
    """Output of a forward, and the rows that went through the core's layers."""
    counts = []
    hooks = [
        block.register_forward_hook(lambda _, args, out: counts.append(len(out[0])))
        for block in model.stack.core
    ]
    out = model(**inputs)
    for hook in hooks:
        hook.remove()
    return out, sum(counts)


# 1. the equations


@cases
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("training", [True, False])
def test_packed_equals_masked_in_outputs_losses_and_gradients(case, side, training):
    """Skipping computes the same function; training at full depth and its losses are the equations'."""
    model, data = ready(case).train(training), batch(side)
    out = model(**data)
    drawn = int(out.depths.max()) if case.endswith("sampled") else None
    want = masked(model, **data, max_steps=drawn)
    assert want.closest > 1e-4
    if case in HALTING:
        kinds = len(out.depths.unique())
        assert kinds > 2 if model.config.policy in MIXES or not training else kinds == 2
    close(out.logits, want.logits)
    assert torch.equal(out.depths, want.depths)
    close(out.expected_depths.double(), want.expected)
    assert set(out.losses) == set(want.losses)
    for name, value in want.losses.items():
        close(torch.as_tensor(out.losses[name], dtype=torch.float64), value)
    close(out.loss, want.loss)
    same_gradients(gradients(model, out.loss), gradients(model, want.loss))


@pytest.mark.parametrize("case", [*POLICIES, "fixed-all", "stick-deep", "act"])
def test_packed_equals_the_token_by_token_loop(case):
    """One token after the other, each alone, none aware of a pad, gives the same logits and depths."""
    model, data = ready(case).eval(), batch("left")
    with torch.no_grad():
        out = model(**data)
    want = reference.by_token(model, **data)
    assert want.closest > 1e-4
    close(out.logits, want.logits)
    assert torch.equal(out.depths, want.depths)
    close(out.expected_depths.double(), want.expected)


@halting
@pytest.mark.parametrize("knobs", [{"threshold": EACH}, {"max_steps": 6}, {"max_steps": 2, "min_steps": 1},
                                   {"threshold": 0.0}, {"threshold": 1.0}])  # fmt: skip
def test_knobs_of_a_call_mean_what_the_equations_say(case, knobs):
    """threshold (one for each sequence too), min_steps and max_steps, below and above the config's num_loops."""
    model, data = ready(case).eval(), batch()
    with torch.no_grad():
        out, want = model(**data, **knobs), masked(model, **data, **knobs)
    assert want.closest > 1e-4
    close(out.logits, want.logits)
    close(out.expected_depths.double(), want.expected)
    assert torch.equal(out.depths, want.depths)
    ends = {0.0: model.config.min_steps, 1.0: model.config.num_loops}
    if isinstance(knobs.get("threshold"), float):
        assert set(out.depths.unique().tolist()) == {0, ends[knobs["threshold"]]}


@pytest.mark.parametrize(
    "case",
    [
        "stick",
        "act",
        "router",
        "ponder",
        "exit",
        "margin",
        "latent",
        "kl",
    ],
)
def test_min_steps_of_a_call_asks_nobody_before(case):
    """Under min_steps=3 the first question comes after the third loop, and compares what the equations compare."""
    model, data = ready(case).eval(), batch()
    with torch.no_grad():
        out, want = model(**data, min_steps=3), masked(model, **data, min_steps=3)
    assert want.closest > 1e-4 and out.depths[out.depths > 0].min() >= 3
    assert torch.equal(out.depths, want.depths)
    close(out.logits, want.logits)


def test_act_weights_sum_to_one_even_under_threshold_1():
    """Nobody stops, but a mass of 1 is spent once: what halting asks beyond it weighs nothing."""
    model, data = ready("act", halt_bias=1.0).eval(), batch()
    with torch.no_grad():
        out, want = model(**data, threshold=1.0), masked(model, **data, threshold=1.0)
    assert out.depths.max() == out.depths[out.depths > 0].min() == 4
    close(out.logits, want.logits)
    assert (out.expected_depths[out.depths > 0] == 4).any()


@pytest.mark.parametrize("min_steps", [1, 2, 4])
def test_pondernet_puts_no_mass_below_min_steps(min_steps):
    """The distribution lives on the loops from min_steps on; with min_steps = num_loops on the last alone."""
    model, data = ready("ponder", min_steps=min_steps).train(), batch()
    out, want = model(**data), masked(model, **data)
    for name, value in want.losses.items():
        close(out.losses[name], value)


@pytest.mark.parametrize("keep", [1, 2, 4])
@pytest.mark.parametrize("case", ["fixed", "stick", "act-budget", "exit", "ponder", "stick-moe"])
def test_backprop_loops_detaches_the_earlier_loops(case, keep):
    """Gradients flow through the last `keep` loops only; values do not change."""
    model, data = ready(case, backprop_loops=keep).train(), batch()
    out, want = model(**data), masked(model, **data)
    close(out.loss, want.loss)
    same_gradients(gradients(model, out.loss), gradients(model, want.loss))
    full = make(case, settled(case)).train()
    close(full(**data).loss, out.loss, 1e-14)
    changed = not torch.equal(gradients(full, full(**data).loss)["stack.core.0.attention.key.weight"],
                              gradients(model, model(**data).loss)["stack.core.0.attention.key.weight"])  # fmt: skip
    assert changed == (keep < 4)


@pytest.mark.parametrize("case", ["stick-deep", "act-budget"])
def test_backprop_loops_detaches_scaled_loops_too(case):
    """With loop_scale as well nothing of an earlier loop gets a gradient."""
    model, data = ready(case, backprop_loops=1).train(), batch()
    same_gradients(gradients(model, model(**data).loss), gradients(model, masked(model, **data).loss))


@pytest.mark.parametrize("prelude", [0, 1])
def test_backprop_loops_need_injection(prelude):
    """Without it the prelude, or the embeddings that the first loop reads, get no gradient."""
    shape = {"num_prelude_layers": prelude, "tie_word_embeddings": False}
    with pytest.raises(Exception, match="backprop_loops=2 is below num_loops=4 and needs input_injection"):
        make("fixed", input_injection="none", backprop_loops=2, **shape)
    for fields in ({"input_injection": "none", "backprop_loops": 4}, {"backprop_loops": 1}):
        model = make("fixed", **shape, **fields).train()
        found = gradients(model, model(**batch()).loss)
        early = [name for name in found if "embed_tokens" in name or "prelude" in name]
        assert len(early) > 8 * prelude and all(found[name].any() for name in early)


def test_an_exception_in_a_truncated_loop_leaves_autograd_on():
    """Gradients are off for the earlier loops only, and whatever happens there."""
    model = ready("fixed", backprop_loops=1).train()

    def fail(*_):
        raise RuntimeError("out of memory, say")

    model.stack.core[0].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="say"):
        model(**batch())
    assert torch.is_grad_enabled()


def test_loops_beyond_the_trained_ones_share_the_last_scale():
    """loop_scale has num_loops vectors; a call with more loops goes on with the last."""
    model, data = ready("stick-deep").eval(), batch()
    with torch.no_grad():
        out = model(**data, max_steps=7, threshold=1.0)
        close(out.logits, masked(model, **data, max_steps=7, threshold=1.0).logits)
    assert out.depths.max() == 7


# 2. the neutral setting


@pytest.mark.parametrize("case", ["stick", "act", "router", "ponder", "exit", "latent", "kl", "margin"])
def test_neutral_setting_equals_the_fixed_policy(case):
    """Threshold 1 and a halting bias of -200: every policy is "fixed" with the same weights."""
    model, data = ready(case, halt_bias=-200.0, halt_threshold=1.0).eval(), batch()
    fields = {**SMALL, **CASES[case], "policy": "fixed", "act_weight": 0.0}
    plain = LoopedForCausalLM(LoopedConfig(**fields)).double().eval()
    state = {name: weight for name, weight in model.state_dict().items() if ".policy." not in name}
    plain.load_state_dict(state)
    with torch.no_grad():
        out, want = model(**data), plain(**data)
    close(out.logits, want.logits)
    close(out.losses["task"], want.losses["task"])
    assert torch.equal(out.depths, want.depths)


def test_fixed_equals_tied_layers():
    """A core of two layers run four times is eight tied layers."""
    model, data = ready("fixed-all", objective="policy").eval(), batch()
    fields = {**SMALL, **CASES["fixed-all"], "objective": "policy"}
    layers = (
        LoopedForCausalLM(LoopedConfig(**{**fields, "num_loops": 1, "num_core_layers": 8})).double().eval()
    )
    state = {}
    for name, weight in model.state_dict().items():
        for copy in range(4):
            core, _, rest = name.removeprefix("stack.core.").partition(".")
            tied = name.startswith("stack.core.")
            state[f"stack.core.{2 * copy + int(core)}.{rest}" if tied else name] = weight
    layers.load_state_dict(state)
    with torch.no_grad():
        close(model(**data).logits, layers(**data).logits)


def test_one_loop_is_llama():
    """num_loops=1, pre-norm, swiglu, no injection: transformers' LlamaForCausalLM with the same weights."""
    model = make("fixed", num_loops=1, norm_placement="pre", input_injection="none", scale_embeddings=False,
                 num_key_value_heads=2, tie_word_embeddings=False).eval()  # fmt: skip
    config = model.config
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=12, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=4, rms_norm_eps=config.norm_eps, tie_word_embeddings=False,
            rope_parameters=config.rope_parameters, max_position_embeddings=64,
        )
    ).eval()  # fmt: skip
    # Llama's own norms compute in float32, whatever they are given
    for layer in llama.model.layers:
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, torch.nn.RMSNorm(16, config.norm_eps))
    llama.model.norm = torch.nn.RMSNorm(16, config.norm_eps)
    llama, stack = llama.double(), model.stack
    with torch.no_grad():
        llama.model.embed_tokens.weight.copy_(model.embed_tokens.weight)
        llama.lm_head.weight.copy_(model.lm_head.weight)
        llama.model.norm.weight.copy_(stack.final_norm.weight)
        for layer, ours in zip(llama.model.layers, (*stack.prelude, *stack.core, *stack.coda), strict=True):
            layer.self_attn.q_proj.weight.copy_(ours.attention.query.weight[0].T)
            layer.self_attn.k_proj.weight.copy_(ours.attention.key.weight)
            layer.self_attn.v_proj.weight.copy_(ours.attention.value.weight)
            layer.self_attn.o_proj.weight.copy_(ours.attention.output.weight[0].T)
            layer.mlp.gate_proj.weight.copy_(ours.feed_forward.gate.weight[0].T)
            layer.mlp.up_proj.weight.copy_(ours.feed_forward.up.weight[0].T)
            layer.mlp.down_proj.weight.copy_(ours.feed_forward.down.weight[0].T)
            layer.input_layernorm.weight.copy_(ours.attention_branch.before.weight)
            layer.post_attention_layernorm.weight.copy_(ours.feed_forward_branch.before.weight)
        for data in (batch(), {"input_ids": tokens(2, 9), "labels": tokens(2, 9)}):
            out, want = model(**data), llama(**data)
            live = data.get("attention_mask", torch.ones_like(data["input_ids"])).bool()
            close(out.logits[live], want.logits[live])
            close(out.loss, want.loss.double(), 1e-6)  # Llama's loss is float32


# 3. cached decoding


@cases
def test_decoding_token_by_token_equals_the_full_forward(case):
    """Thresholds 0.5, 1 and 0 side by side, left padding, one token at a time: same logits, same depths."""
    model, data = ready(case).eval(), batch("left")
    ids, mask = data["input_ids"], data["attention_mask"]
    # 1 + pads + 1 ... the first call must hold a token of every sequence
    first = ids.shape[1] - min(LENGTHS) + 1
    for sizes in ([first] + [1] * (ids.shape[1] - first), [first, ids.shape[1] - first]):
        for knobs in (thresholds(case), {}):
            with torch.no_grad():
                full = model(ids, mask, use_cache=False, **knobs)
                logits, depths = decode(model, ids, mask, sizes, DynamicCache(config=model.config), **knobs)
            close(logits, full.logits)
            assert torch.equal(depths, full.depths)


@cases
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_decoding_in_pieces_equals_the_full_forward(case, kind):
    """Pieces of 1, 3, 1 and 4 tokens, both caches, at thresholds 0, the config's and 1."""
    model, ids = ready(case).eval(), tokens(2, 9)
    for threshold in (None, 0.0, 1.0):
        knobs = {} if threshold is None else thresholds(case, threshold)
        cache = DynamicCache(config=model.config)
        if kind == "static":
            cache = StaticCache(config=model.config, max_cache_len=12)
        with torch.no_grad():
            full = model(ids, use_cache=False, **knobs)
            logits, depths = decode(model, ids, None, [1, 3, 1, 4], cache, **knobs)
        close(logits, full.logits)
        assert torch.equal(depths, full.depths)
    assert cache.get_seq_length() == 9


@pytest.mark.parametrize("case", ["stick", "exit", "latent"])
def test_each_call_has_its_own_knobs_and_the_cache_survives(case):
    """A prompt read shallow, then decoded deep, equals the loop whose tokens have those thresholds."""
    model, ids = ready(case, max_loops=6).eval(), tokens(1, 7)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        shallow = model(ids[:, :4], cache=cache, max_steps=2)
        deep = model(ids[:, 4:], cache=cache, threshold=1.0, max_steps=6)
    assert shallow.depths.max() <= 2 and deep.depths.tolist() == [[6, 6, 6]]
    want = reference.by_token(
        model, ids, calls=[(4, {"max_steps": 2}), (3, {"threshold": 1.0, "max_steps": 6})]
    )
    close(torch.cat([shallow.logits, deep.logits], 1), want.logits)


@pytest.mark.parametrize("case", ["stick", "exit-next", "fixed"])
def test_one_slot_a_layer_is_its_own_definition(case):
    """cache_slots="last": the prompt is exact; decoded tokens read everybody's last loop, at every loop of theirs."""
    model, data = ready(case, cache_slots="last").eval(), batch("left")
    exact = ready(case).eval()
    C, rest = model.config.num_core_layers, model.config.num_prelude_layers + model.config.num_coda_layers
    assert model.config.num_hidden_layers == C + rest < exact.config.num_hidden_layers == 4 * C + rest
    ids, mask = data["input_ids"][:1], data["attention_mask"][:1]
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        logits, depths = decode(model, ids, mask, [4, 1, 1, 1], cache)
        full = exact(ids, mask, use_cache=False)
    assert len(cache.layers) == C + rest
    close(logits[:, :4], full.logits[:, :4])
    assert (logits[:, 4:] - full.logits[:, 4:]).abs().max() > 1e-4
    want = reference.by_token(model, ids, mask, calls=[(4, {}), (1, {}), (1, {}), (1, {})])
    close(logits, want.logits)
    assert torch.equal(depths, want.depths)


def test_one_slot_a_layer_in_a_static_cache_is_exact_or_refused():
    """The same definition, or one sentence."""
    model, ids = ready("stick", cache_slots="last").eval(), tokens(1, 5)
    cache = StaticCache(config=model.config, max_cache_len=8)
    try:
        with torch.no_grad():
            logits, _ = decode(model, ids, None, [3, 1, 1], cache)
    except ValueError as error:
        assert "cache_slots" in str(error)
    else:
        close(logits, reference.by_token(model, ids, calls=[(3, {}), (1, {}), (1, {})]).logits)


def test_one_slot_a_layer_generates_under_beams_and_left_padding():
    """The smaller cache is an ordinary cache for transformers: each row of a batch alone gives the same tokens."""
    model, data = ready("stick", cache_slots="last").eval(), batch("left")
    settings = {"max_new_tokens": 4, "do_sample": False, "num_beams": 3, "eos_token_id": None}
    together = model.generate(data["input_ids"], attention_mask=data["attention_mask"], **settings)
    for b, n in enumerate(LENGTHS):
        alone = model.generate(data["input_ids"][b : b + 1, -n:], **settings)
        assert torch.equal(alone[0, n:], together[b, -4:])


# 4. generation


def greedy(model, ids, mask, steps, **knobs):
    """Argmax, everything computed anew for each token."""
    for _ in range(steps):
        with torch.no_grad():
            logits = model(ids, attention_mask=mask, use_cache=False, **knobs).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return ids


@policies
def test_greedy_and_beams_equal_the_uncached_ones(case):
    """`generate` on left-padded prompts, with one threshold for each request, greedy and with three beams."""
    model, data = ready(case).eval(), batch("left")
    ids, mask, knobs = data["input_ids"], data["attention_mask"], thresholds(case)
    settings = {
        "attention_mask": mask,
        "max_new_tokens": 4,
        "do_sample": False,
        "eos_token_id": None,
        **knobs,
    }
    got = model.generate(ids, **settings)
    assert torch.equal(got, greedy(model, ids, mask, 4, **knobs))
    if case == "fixed":
        shallow = model.generate(ids, max_steps=2, **settings)
        assert torch.equal(shallow, greedy(model, ids, mask, 4, max_steps=2))
    beams = [model.generate(ids, num_beams=3, use_cache=cached, **settings) for cached in (True, False)]
    assert torch.equal(*beams)
    if case in ("stick-moe", "exit"):
        # each request's own threshold, not a neighbour's
        for b, n in enumerate(LENGTHS):
            one = {**settings, "attention_mask": None, "threshold": float(EACH[b])}
            alone = model.generate(ids[b : b + 1, -n:], num_beams=3, **one)
            assert torch.equal(alone[0, n:], beams[0][b, -4:])


@pytest.mark.parametrize("case", ["fixed", "stick-moe", "exit", "kl"])
def test_speculation_equals_greedy(case):
    """Prompt lookup and the model's own draft of two loops give the tokens of plain greedy generation."""
    model, ids = ready(case).eval(), torch.tensor([[5, 9, 5, 9, 5, 9, 5]])
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    plain = model.generate(ids, **settings)
    assert torch.equal(plain, greedy(model, ids, torch.ones_like(ids), 8))
    before = model.generation_config.to_dict()
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **settings), plain)
    drafter, calls = model.draft(2), []
    drafter.register_forward_hook(lambda _, args, out: calls.append(int(out.depths.max())))
    assert torch.equal(model.generate(ids, assistant_model=drafter, **settings), plain)
    assert calls and max(calls) <= 2
    assert model.config.num_loops == 4 and model.generation_config.to_dict() == before
    assert torch.equal(model.generate(ids, **settings), plain)
    # the call's bounds are the full model's: the draft keeps within its own
    for knobs in ({"max_steps": 3}, {"max_steps": 3, "min_steps": 3}, {"min_steps": 3}):
        if case == "fixed" and "min_steps" in knobs:
            continue
        calls.clear()
        plain = model.generate(ids, **knobs, **settings)
        assert torch.equal(plain, greedy(model, ids, torch.ones_like(ids), 8, **knobs))
        assert torch.equal(model.generate(ids, assistant_model=drafter, **knobs, **settings), plain)
        assert calls and max(calls) <= 2


@pytest.mark.parametrize("case", ["stick", "ponder", "margin"])
def test_sampling_cached_equals_uncached(case):
    """The same seed draws the same tokens."""
    model, data, drawn = ready(case).eval(), batch("left"), []
    for cached in (True, False):
        torch.manual_seed(5)
        drawn.append(model.generate(data["input_ids"], attention_mask=data["attention_mask"], do_sample=True,
                                    max_new_tokens=6, use_cache=cached, eos_token_id=None))  # fmt: skip
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], greedy(model, data["input_ids"], data["attention_mask"], 6))


@pytest.mark.parametrize("case", ["fixed", "stick", "exit"])
def test_continuous_batching_equals_generate(case):
    """transformers' paged cache on CPU, prompts of three lengths: token for token, and no request comes back empty."""
    model = ready(case).eval()
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (7, 3, 5)]
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1}
    config = type(model.generation_config)(**settings, pad_token_id=0)
    depths = []
    hook = model.register_forward_hook(
        lambda _, args, out: depths.append(out.depths[out.depths > 0].unique())
    )
    small = ContinuousBatchingConfig(
        page_size=16, num_blocks=8, max_batch_tokens=32, max_requests_per_batch=3
    )
    results = model.generate_batch(
        inputs=prompts, generation_config=config, continuous_batching_config=small, warmup=False
    )
    hook.remove()
    assert len(results) == 3
    got = sorted(one.generated_tokens for one in results.values())
    assert all(len(one) == 6 for one in got), [one.error for one in results.values()]
    if case != "fixed":
        assert len(torch.cat(depths).unique()) > 1
    want = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        want.append(greedy(model, ids, torch.ones_like(ids), 6)[0, len(prompt) :].tolist())
    assert got == sorted(want)


@pytest.mark.parametrize("policy", RULES)
def test_rules_compare_in_float32(policy):
    """Their confidence in half-precision states and logits is that of float64 on the same ones."""
    torch.manual_seed(0)
    config = LoopedConfig(**{**SMALL, "policy": policy, "num_coda_layers": 0})
    rule, head = POLICY[policy](config), torch.randn(16, 200).bfloat16()
    states, drift = [torch.randn(64, 16).bfloat16()], torch.randn(64, 16) / 2
    for _ in range(5):
        states.append((states[-1] + drift + torch.randn(64, 16) / 20).bfloat16())
    half, full = (rule.start(states[0].to(dtype)) for dtype in (torch.bfloat16, torch.float64))
    for step, h_Nd in enumerate(states[1:], 1):
        half = rule.ask(half, h_Nd, step, lambda h: h @ head)
        full = rule.ask(full, h_Nd.double(), step, lambda h: (h.bfloat16() @ head).double())
        assert half.log_left.dtype == torch.float32
        close(half.log_left.exp().double(), full.log_left.exp(), 1e-5)


# 5. causality, documents, padding


@cases
def test_future_tokens_change_nothing(case):
    """Changed or dropped, they leave every earlier logit and depth alone."""
    model, ids = ready(case).eval(), tokens(3, 8)
    changed = ids.clone()
    changed[:, 5:] = tokens(3, 3, seed=9)
    for knobs in ({}, thresholds(case)):
        with torch.no_grad():
            outs = [model(one, use_cache=False, **knobs) for one in (ids, changed, ids[:, :5])]
        for other in outs[1:]:
            close(other.logits[:, :5], outs[0].logits[:, :5], 1e-12)
            assert torch.equal(other.depths[:, :5], outs[0].depths[:, :5])
        assert not torch.equal(outs[1].logits[:, 5:], outs[0].logits[:, 5:])


@policies
@pytest.mark.parametrize("use_cache", [False, None])
def test_packed_documents_do_not_see_each_other(case, use_cache):
    """position_ids that start again at 0 begin another document: each is what it is alone, borders anywhere."""
    model, ids = ready(case).eval(), tokens(2, 9)
    borders = ((4, 9), (2, 5, 9))
    positions = torch.cat([
        torch.cat([torch.arange(b - a) for a, b in zip((0, *ends[:-1]), ends, strict=True)])[None] for ends in borders
    ])  # fmt: skip
    with torch.no_grad():
        out = model(ids, position_ids=positions, use_cache=use_cache)
        close(out.logits, masked(model, ids, position_ids=positions).logits)
        for b, ends in enumerate(borders):
            for start, end in zip((0, *ends[:-1]), ends, strict=True):
                alone = model(ids[b : b + 1, start:end], use_cache=use_cache)
                close(out.logits[b, start:end], alone.logits[0], 1e-12)
                assert torch.equal(out.depths[b, start:end], alone.depths[0])


@pytest.mark.parametrize("case", ["fixed", "stick", "mod", "stt"])
def test_packed_documents_do_not_go_with_a_cache(case):
    """A later call could not tell whose keys it reads: refused, in the call that packs and in one that begins another
    document. By default such a call makes no cache; padding, and one document, are as ever."""
    routed = case in ("mod", "stt")
    model, ids = (make_routed(case) if routed else ready(case)).eval(), tokens(2, 6)
    packed, plain = torch.tensor([[0, 1, 2, 0, 1, 2]]), torch.arange(6)[None]
    refused = pytest.raises(ValueError, match="do not go with a cache: pass use_cache=False")
    with torch.no_grad():
        assert model(ids, position_ids=packed).cache is None
        for cached in ({"use_cache": True}, {"cache": DynamicCache(config=model.config)}):
            with refused:
                model(ids, position_ids=packed, **cached)
        if not routed:
            with refused:
                model(ids, position_ids=packed, cache=StaticCache(config=model.config, max_cache_len=16))
        cache = model(ids, position_ids=plain, use_cache=True).cache
        with refused:
            model(ids[:, :1], position_ids=torch.zeros(1, 1, dtype=torch.long), cache=cache)
        with refused:
            model(ids, position_ids=packed + 6, cache=cache)
        after = model(ids[:, :1], position_ids=torch.tensor([[6]]), cache=cache)
        close(after.logits[:, 0], model(torch.cat([ids, ids[:, :1]], 1), use_cache=False).logits[:, -1])
        mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
        # pads stand at position 0 too
        padded = (mask.cumsum(-1) - 1).clamp(min=0)
        assert model(ids, attention_mask=mask, position_ids=padded, use_cache=True).cache is not None


@pytest.mark.parametrize("case", ["stick", "exit", "ponder"])
def test_packed_documents_train_alone(case):
    """In training too: losses and gradients are the reference's."""
    model, ids = ready(case).train(), tokens(2, 8)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5]])
    out = model(ids, position_ids=positions, labels=ids)
    want = masked(model, ids, position_ids=positions, labels=ids)
    close(out.loss, want.loss)
    same_gradients(gradients(model, out.loss), gradients(model, want.loss))


@cases
@pytest.mark.parametrize("side", ["right", "left"])
def test_result_does_not_depend_on_batch_mates_or_padding(case, side):
    """Each sequence alone and unpadded gives what it gives in a batch, padded on either side, padded further."""
    model = ready(case).eval()
    with torch.no_grad():
        for data in (batch(side), batch(side, longer=3)):
            out = model(**data)
            for b in range(len(LENGTHS)):
                live = data["attention_mask"][b].bool()
                alone = model(data["input_ids"][b : b + 1, live], use_cache=False)
                close(out.logits[b, live], alone.logits[0], 1e-12)
                assert torch.equal(out.depths[b, live], alone.depths[0])
                assert not out.depths[b, ~live].any() and not out.last_hidden_state[b, ~live].any()


@pytest.mark.parametrize("case", ["fixed-all", "stick-moe", "ponder", "exit-next"])
def test_losses_do_not_change_with_padding_or_a_batch_twice(case):
    """Every term is a mean."""
    model, data = ready(case).train(), batch()
    once = model(**data).losses
    twice = model(**{name: torch.cat([value, value]) for name, value in data.items()}).losses
    longer = model(**batch("left", longer=3)).losses
    for name, value in once.items():
        close(torch.as_tensor(twice[name]), torch.as_tensor(value))
        close(torch.as_tensor(longer[name]), torch.as_tensor(value))


# 6. the ledger


def counted_macs(model, ids, **knobs):
    """MACs as FlopCounterMode sees them; combining the experts' results left out, as in test_ledger.py."""
    config = model.config
    gates = {config.attention_experts_per_token, config.ffn_experts_per_token}

    def without_combining(a, b, *args, out_shape=None, **kwargs):
        combining = a[1] == 1 and a[2] in gates and b[2] == config.hidden_size
        return 0 if combining else 2 * a[0] * a[1] * a[2] * b[2]

    def matrix_vector(a, b, *args, out_shape=None, **kwargs):
        return 2 * a[0] * a[1]

    aten = torch.ops.aten
    mapping = {**MAPPING, aten.bmm: without_combining, aten.mv: matrix_vector}
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    with torch.no_grad(), counter:
        out = model(ids, use_cache=False, **knobs)
    return out, counter.get_total_flops() / 2


@cases
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_ledger_equals_flop_counter_on_the_dense_path(case, kernel):
    """2 FLOPs = 1 MAC, to the last one, at full depth: asking, injection, and the head calls of kl and margin too."""
    model, ids = ready(case, dtype=torch.float32).eval(), tokens(3, 6)
    model.set_attn_implementation(kernel)
    out, macs = counted_macs(model, ids, **thresholds(case, 1.0))
    assert out.compute.total == macs
    heads = 1 + (model.config.num_loops - 1) * (model.config.policy in ("kl", "margin"))
    assert out.compute.summary()["head"] == heads * 3 * 6 * 16 * 32


@cases
def test_ledger_counts_rows_times_cost_when_packed(case):
    """Rows of every layer, questions, starts and head calls from the depths; pairs that the mask lets through."""
    model, data = ready(case).eval(), batch()
    data.pop("labels")
    with torch.no_grad():
        out, rows = rows_computed(model, **data, use_cache=False)
    config, stack, depths = model.config, model.stack, out.depths
    alive = depths > 0
    n, steps = alive.sum(1), depths.sum(1)
    assert rows == config.num_core_layers * int(steps.sum())
    block, macs = stack.core[0], out.compute.macs
    once = config.num_prelude_layers + config.num_coda_layers
    applied = once * n + config.num_core_layers * steps
    asked = ((depths.clamp(max=config.num_loops - 1) - config.min_steps + 1).clamp(min=0) * alive).sum(1)
    asked = asked * (case in HALTING)
    attention, ffn = block.attention, block.feed_forward
    want = {"linear": applied * attention.kv_macs + (steps - n) * stack.injection.row_macs, "expert": 0 * n}
    want["expert" if config.attention_experts > 1 else "linear"] += applied * attention.row_macs
    want["expert" if config.ffn_experts > 1 else "linear"] += applied * ffn.row_macs
    want["router"] = applied * (attention.router.row_macs + ffn.router.row_macs)
    want["halting"] = asked * stack.policy.row_macs + n * stack.policy.start_macs
    want["head"] = (depths.shape[1] + asked * (config.policy in ("kl", "margin"))) * 16 * 32
    for kind, value in want.items():
        assert torch.equal(macs.get(kind, torch.zeros_like(n)), value), kind
    assert set(macs) <= {*want, "attention"}
    width = 2 * config.num_key_value_heads * config.head_dim * 8
    assert torch.equal(out.compute.kv_bytes, applied * width)
    readable = alive.cumsum(1) * alive
    pairs = (readable * (once + config.num_core_layers * depths)).sum(1) * attention.pair_macs
    assert torch.equal(out.compute.attention_causal, pairs)
    assert (macs["attention"] >= pairs).all()


def test_ledger_of_a_decoding_step_reads_the_cache():
    """One new token against ten keys: ten pairs in every layer it runs."""
    model, ids = ready("stick").eval(), tokens(1, 10)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :9], cache=cache)
        out = model(ids[:, 9:], cache=cache)
    layers = 2 + 2 * int(out.depths)
    pair = model.stack.core[0].attention.pair_macs
    assert int(out.compute.attention_causal) == int(out.compute.macs["attention"]) == 10 * layers * pair


def test_token_macs_is_a_token_at_full_depth_without_scores():
    """The rule of the papers equals the ledger, scores, head and readouts apart."""
    for case in ("fixed", "stick-moe", "router-moe", "exit"):
        model = ready(case).eval()
        with torch.no_grad():
            out = model(tokens(1, 5), use_cache=False, **thresholds(case, 1.0))
        macs = dict(out.compute.macs)
        macs.pop("attention"), macs.pop("head")
        assert int(sum(macs.values())) == 5 * model.stack.token_macs()


# 7. saving, loading, checkpointing, chunks


@pytest.mark.parametrize("case", ["fixed-all", "stick-moe", "act-budget", "exit"])
def test_save_and_load_change_nothing(case, tmp_path, monkeypatch):
    """save_pretrained and the Auto classes give back config, weights, logits; the bare model loads from it too."""
    model, data = ready(case, dtype=torch.float32).eval(), batch()
    model.save_pretrained(tmp_path)
    # what loading leaves uninitialised shall be seen
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        bare = AutoModel.from_pretrained(tmp_path).eval().double()
    finally:
        torch.use_deterministic_algorithms(False)
    assert type(again) is LoopedForCausalLM
    state = again.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())
    skipped = {"_name_or_path", "dtype", "transformers_version", "architectures"}
    before, after = model.config.to_dict(), again.config.to_dict()
    assert {k: v for k, v in before.items() if k not in skipped} == {
        k: v for k, v in after.items() if k not in skipped
    }
    assert type(bare) is LoopedModel
    with torch.no_grad():
        want = model.double()(**data)
        assert torch.equal(want.logits, again.double()(**data).logits)
        states = bare(data["input_ids"], data["attention_mask"])
    assert torch.equal(states.last_hidden_state, want.last_hidden_state)
    assert torch.equal(bare.get_loop_depths(data["input_ids"], data["attention_mask"]), want.depths)


def test_slots_follow_an_override_at_loading(tmp_path):
    """max_loops and num_hidden_layers are derived again when a loaded config is given other loops."""
    LoopedConfig(**SMALL).save_pretrained(tmp_path)
    again = LoopedConfig.from_pretrained(tmp_path, num_loops=7, max_loops=7)
    assert (again.num_loops, again.num_hidden_layers) == (7, 9)


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
    assert torch.equal(out.logits, saved["logits"]), folder
    assert torch.equal(out.depths, saved["depths"]), folder
    ids = saved["inputs"]["input_ids"][:1]
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), saved["generated"]), folder
print("loaded", len(sys.argv) - 1)
"""


def test_checkpoints_load_where_tenuto_is_not_installed(tmp_path):
    """A checkpoint carries its code: an isolated process without tenuto gives the same logits, depths and tokens."""
    folders = []
    for case in ("stick-moe",):
        model, data = ready(case, dtype=torch.float32).eval(), batch()
        folder = tmp_path / case
        model.save_pretrained(folder)
        model.double()
        with torch.no_grad():
            out = model(**data)
        made = model.generate(data["input_ids"][:1], max_new_tokens=4, do_sample=False)
        saved = {"inputs": data, "logits": out.logits, "depths": out.depths, "generated": made}
        torch.save(saved, folder / "io.pt")
        folders.append(str(folder))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, "-I", "-c", REMOTE, *folders], cwd=tmp_path, env=env, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.strip().endswith("loaded 1")


@pytest.mark.parametrize("case", ["fixed-all", "stick-moe", "ponder", "exit", "stick-deep"])
@pytest.mark.parametrize("keep", [None, 2])
def test_gradient_checkpointing_changes_nothing(case, keep):
    """Same loss, same gradients, truncated back-propagation included, and blocks really run again."""
    # truncated loops need injection
    fields = {"input_injection": "add"} if case == "fixed-all" else {}
    model, data = ready(case, backprop_loops=keep, **fields).train(), batch()
    plain = model(**data)
    want = gradients(model, plain.loss)
    model.activation_checkpointing_enable()
    runs = []
    model.stack.core[0].feed_forward.register_forward_pre_hook(lambda *_: runs.append(1))
    again = model(**data)
    forward = len(runs)
    close(again.loss, plain.loss, 1e-12)
    same_gradients(gradients(model, again.loss), want, 1e-12)
    assert len(runs) == forward + (forward if keep is None else keep)


@pytest.mark.parametrize("case", ["fixed-all", "fixed", "stick", "ponder", "exit"])
def test_loss_chunk_changes_nothing(case):
    """Logits of 3 tokens at a time, made again in the backward pass: same losses and gradients, and no logits kept."""
    model, data = ready(case).train(), batch()
    plain, chunked = model(**data), None
    want = gradients(model, plain.loss)
    model.config.loss_chunk = 3
    sizes = []
    model.lm_head.register_forward_hook(lambda _, args, out: sizes.append(len(out)))
    chunked = model(**data)
    assert chunked.logits is None and max(sizes) == 3
    for name, value in plain.losses.items():
        close(torch.as_tensor(chunked.losses[name]), torch.as_tensor(value), 1e-12)
    same_gradients(gradients(model, chunked.loss), want, 1e-12)
    with torch.no_grad():
        assert model.eval()(**data).logits is not None


def test_logits_to_keep_and_embeddings_as_input():
    """logits_to_keep as a number and as indices; inputs_embeds are the embedding's rows."""
    model, ids = ready("stick").eval(), tokens(2, 6)
    with torch.no_grad():
        full = model(ids).logits
        assert_close(model(ids, logits_to_keep=2).logits, full[:, -2:], atol=1e-12, rtol=0)
        assert_close(
            model(ids, logits_to_keep=torch.tensor([0, 4])).logits, full[:, [0, 4]], atol=1e-12, rtol=0
        )
        assert torch.equal(model(inputs_embeds=model.embed_tokens(ids)).logits, full)
        assert int(model(ids, logits_to_keep=2).compute.macs["head"].sum()) == 2 * 2 * 16 * 32


@cases
def test_float32_and_bfloat16_stay_within_tolerance(case):
    """float32 agrees with float64 to 1e-4; bfloat16 runs, stays finite and decides in float32."""
    model, data = ready(case).eval(), batch()
    with torch.no_grad():
        want = model(**data)
        got = model.float()(**data)
        assert torch.equal(got.depths, want.depths)
        assert_close(got.logits, want.logits.float(), atol=1e-4, rtol=1e-4)
        rough = model.bfloat16()(**data)
    assert rough.logits.dtype == torch.bfloat16 and rough.logits.isfinite().all() and rough.loss.isfinite()
    if case in HALTING:
        assert rough.expected_depths.dtype == torch.float32


# 8. training


@cases
@pytest.mark.parametrize("fresh", [False, True])
def test_every_parameter_gets_a_gradient(case, fresh):
    """Nothing is dead: every weight has a gradient in training, non-zero away from the initial values."""
    model = LoopedForCausalLM(LoopedConfig(**{**SMALL, **CASES[case]})) if fresh else ready(case)
    torch.manual_seed(1)  # "sampled" draws more than one loop
    out = model.train()(**batch())
    assert int(out.depths.max()) > 1
    names, weights = zip(*model.named_parameters(), strict=True)
    for name, gradient in zip(names, torch.autograd.grad(out.loss, weights, allow_unused=True), strict=True):
        assert gradient is not None and gradient.isfinite().all(), name
        # at the start the last layers of halting nets are zero
        assert fresh or gradient.any(), name


@pytest.mark.parametrize(
    "kind,margin,labels",
    [("best_deeper", 0.0, [0, 0, 1]), ("next", 0.0, [1, 0, 1]), ("best_deeper", 2.5, [1, 0, 1])],
)
def test_stop_labels_by_hand(kind, margin, labels):
    """Losses 3, 4, 1, 2 after four loops: the third is best, the second alone looks like a reason to stop."""
    got = stop_labels(torch.tensor([[3.0, 4.0, 1.0, 2.0]]), kind, margin)
    assert got.tolist() == [[bool(label) for label in labels]]


def test_oracle_looks_at_every_deeper_loop():
    """A batch on which "next" and "best_deeper" disagree: each is its own equation."""
    apart = 0
    for seed in range(6):
        terms = []
        for kind in ("best_deeper", "next"):
            model, data = make("exit", seed, exit_labels=kind).train(), batch()
            want = masked(model, **data)
            if want.closest > 1e-4:
                terms.append(model(**data).losses["exit"])
                close(terms[-1], want.losses["exit"])
        apart += len(terms) == 2 and not torch.equal(*terms)
    assert apart > 0


def test_exit_head_never_moves_the_language_model():
    """Its loss has a gradient on the head alone; the task's has none there."""
    model, data = ready("exit").train(), batch()
    losses = model(**data).losses
    for name, gradient in gradients(model, losses["exit"]).items():
        assert bool(gradient.any()) == name.startswith("stack.policy."), name
    task = gradients(model, model(**data).losses["task"])
    assert not any(gradient.any() for name, gradient in task.items() if name.startswith("stack.policy."))


def test_sampled_depth_is_torchs_draw():
    """One depth a batch, any of the loops, the same for the same seed; evaluation runs them all."""
    model, data = make("fixed-sampled").train(), batch()
    drawn = []
    for seed in [*range(12)] * 2:
        torch.manual_seed(seed)
        depths = model(**data).depths
        drawn.append(int(depths.max()))
        assert set(depths.unique().tolist()) == {0, drawn[-1]}
    assert drawn[:12] == drawn[12:] and set(drawn) == {1, 2, 3, 4}
    assert model.eval()(**data).depths.max() == 4


def test_loss_weights_of_a_call():
    """The config's weights by default, a call's on top; terms themselves are unweighted."""
    model, data = ready("stick-moe").train(), batch()
    out = model(**data)
    assert set(out.losses) == {"task", "act", "mim"}
    close(out.loss, out.losses["task"] + 0.05 * out.losses["act"] + 0.1 * out.losses["mim"], 1e-14)
    again = model(**data, loss_weights={"act": 3.0, "mim": 0.0})
    close(again.loss, out.losses["task"] + 3.0 * out.losses["act"], 1e-14)


@policies
def test_a_forward_leaves_nothing_on_the_modules(case):
    """Evaluation and generation in between change nothing in training."""
    model, data = ready(case).train(), batch()

    def attributes():
        return {
            name: {k: repr(v) for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
            for name, module in model.named_modules()
        }

    before = attributes()
    torch.manual_seed(0)
    first = model(**data)
    model.eval()(**data)
    model.generate(data["input_ids"][:1], max_new_tokens=2, do_sample=False)
    model.train()
    torch.manual_seed(0)
    second = model(**data)
    assert attributes() == before
    assert torch.equal(first.loss, second.loss)


# 9. depths


@cases
def test_depths_lie_within_bounds_and_count_the_rows_computed(case):
    """min_steps <= depth <= num_loops at tokens, 0 at pads; the mean depth is the core's rows for each token."""
    model, data = ready(case).eval(), batch()
    with torch.no_grad():
        out, rows = rows_computed(model, **data)
    low, high = model.config.min_steps, model.config.num_loops
    alive = out.depths[out.depths > 0]
    assert low <= alive.min() and alive.max() <= high and len(alive) == sum(LENGTHS)
    assert torch.equal(out.depths > 0, data["attention_mask"].bool())
    assert float(alive.double().mean()) == rows / model.config.num_core_layers / sum(LENGTHS)
    if case in HALTING:
        assert len(alive.unique()) > 2
    means = out.expected_depths[out.depths > 0]
    assert (means >= 1 - 1e-9).all()
    assert (means <= alive + (1 if model.config.policy == "act" else 1e-9)).all()


@halting
def test_depth_is_monotone_in_the_threshold_on_a_recorded_trajectory(case):
    """A lone token reads itself alone: its trajectory does not change with the threshold, its depth only grows."""
    model, ids = ready(case).eval(), torch.arange(3, 32)[:, None]
    previous, seen = torch.zeros(29, 1, dtype=torch.long), set()
    for threshold in (0.0, 0.1, 0.3, 0.6, 0.9, 0.98, 1.0):
        with torch.no_grad():
            out, want = model(ids, threshold=threshold), masked(model, ids, threshold=threshold)
        sure = want.closest > 1e-6
        assert not sure or torch.equal(out.depths, want.depths)
        assert (out.depths >= previous).all()
        previous, seen = out.depths, seen | set(out.depths.flatten().tolist())
    assert {model.config.min_steps, model.config.num_loops} < seen


# refusals


def test_what_cannot_be_is_refused_in_one_sentence():
    """Knobs, masks, labels and arguments that would be ignored or fail deep inside."""
    model, fixed, ids = ready("stick").eval(), make("fixed").eval(), tokens(2, 5)
    cache = DynamicCache(config=model.config)
    for call, kind, sentence in [
        (lambda: model(ids, cache=cache, max_steps=5), ValueError, "max_steps=5 exceeds the cache's max_loops=4"),
        (lambda: fixed(ids, threshold=0.5), ValueError, 'threshold has nothing to set with policy="fixed"'),
        (lambda: fixed(ids, min_steps=2), ValueError, 'min_steps has nothing to set with policy="fixed"'),
        (lambda: model(ids, attention_mask=torch.ones(2, 4)), ValueError, r"must be \(2, 5\)"),
        (lambda: model(ids, attention_mask=torch.zeros(2, 5)), ValueError, "without any token"),
        (lambda: model(ids, treshold=0.5), TypeError, "no argument treshold"),
        (lambda: model(ids, labels=ids, logits_to_keep=1), ValueError, "leave logits_to_keep out"),
        (lambda: model(), ValueError, "either input_ids or inputs_embeds"),
        (lambda: model(ids, min_steps=3, max_steps=2), ValueError, "min_steps=3 must lie between 1 and max_steps=2"),
        (lambda: model(ids, threshold=1.5), ValueError, "threshold=1.5 must lie between 0 and 1"),
        (lambda: model(ids, threshold=float("nan")), ValueError, "threshold=nan must lie"),
        (lambda: model(ids, threshold=torch.rand(3)), ValueError, "one for each of 2 sequences"),
        (lambda: model(ids, labels=ids, loss_weights={"pondr": 1.0}), ValueError, "loss_weights names"),
        (lambda: model.draft(5), ValueError, "loops=5 must lie between 1 and num_loops=4"),
        (lambda: model.generate(ids, max_new_tokens=1, treshold=0.5), ValueError, "treshold"),
    ]:  # fmt: skip
        with pytest.raises(kind, match=sentence):
            call()
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        # once the mask and the cache disagree, the sentence says how many tokens are in it
        model(ids, cache=cache)
        with pytest.raises(
            ValueError, match=r"with 5 tokens in the cache and 2 new ones it must be \(2, 7\)"
        ):
            model(ids[:, :2], attention_mask=torch.ones(2, 2), cache=cache)


@pytest.mark.parametrize("fields,sentence", [
    ({"policy": "kl"}, "policy='kl' reads predictions after every loop and needs num_coda_layers=0, got 1"),
    ({"policy": "margin", "num_coda_layers": 2}, "needs num_coda_layers=0, got 2"),
    ({"min_steps": 5}, "min_steps=5 must lie between 1 and num_loops=4"),
    ({"max_loops": 3}, "max_loops=3 is below num_loops=4"),
    ({"halt_threshold": 1.2}, "halt_threshold=1.2 must lie between 0 and 1"),
    ({"act_weight": 0.1}, "act_weight=0.1 needs one of policy=stick_breaking, act, depth_router; got 'fixed'"),
    ({"policy": "act", "objective": "all"}, "objective='all' does not go with policy='act'"),
    ({"policy": "pondernet", "objective": "sampled"}, "objective='sampled' does not go with policy='pondernet'"),
    ({"backprop_loops": 0}, "backprop_loops=0 must be at least 1"),
    ({"num_core_layers": 0}, "num_core_layers=0"),
    ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
    ({"policy": "exit"}, "policy"),
])  # fmt: skip
def test_wrong_combinations_of_fields_name_both(fields, sentence):
    """A config that cannot work says why when it is made."""
    with pytest.raises(Exception, match=sentence):
        LoopedConfig(**{**SMALL, **fields})


def test_a_compiled_call_keeps_its_cache():
    """Whether documents are packed depends on values, which a graph does not know: it takes positions as given."""
    model = LoopedForCausalLM(LoopedConfig(**SMALL)).eval()
    ids, places = torch.randint(3, 32, (2, 6)), torch.arange(6).repeat(2, 1)
    with torch.no_grad():
        want = model(ids, position_ids=places, use_cache=True)
        got = torch.compile(model, backend="eager")(ids, position_ids=places, use_cache=True)
    assert got.cache is not None and want.cache is not None
    torch.testing.assert_close(got.logits, want.logits)
