"""The models whose layers some tokens go around, against their reference, their cache, transformers' generation, the
design's invariants, and what the published code got wrong.

Random weights everywhere (`reference_routed.make`), float64 unless said otherwise, no decision within 1e-4 of turning
out otherwise where two computations of it are compared.
"""

import math
import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from reference_routed import CASES, LENGTHS, RULES, SMALL, batch, make, ready, tokens, walk
from test_causal import close, counted_macs, gradients, greedy, same_gradients
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache

from tenuto.models import LoopedConfig, LoopedForCausalLM
from tenuto.models.cache import ChosenLayer
from tenuto.models.routing import Chosen, LayerRouter, Rule, Sight, Verdict, top_k
from tenuto.models.rows import Rows
from tenuto.presets import build, preset

MODELS = ("mod", "sdt", "stt")
# what decoding goes by: scores, protected tokens, a history, chance, the token before
STATES = ("mod", "mod-learned", "sdt", "sdt-unexpected", "sdt-random", "stt", "stt-learned")
# a sequence that chooses some of its tokens, one that chooses all, one that chooses none
EACH = torch.tensor([0.4, 1.0, 0.0], dtype=torch.float64)

cases = pytest.mark.parametrize("case", CASES)
models = pytest.mark.parametrize("case", MODELS)
# one for each kind of net and placement
FLOPS = (
    *MODELS,
    "mod-predictor",
    "mod-constant",
    "mod-none",
    "sdt-unexpected",
    "sdt-sparse",
    "stt-none",
    "stt-learned",
)
states = pytest.mark.parametrize("case", STATES)


def decoding(model, rule):
    """A rule's knobs, one for each of three sequences."""
    if rule == "threshold":
        middle = sum(float(router.levels[6]) for router in model.stack.routers.values())
        return {
            "threshold": torch.tensor([middle / len(model.stack.routers), -1.0, 2.0], dtype=torch.float64)
        }
    return {"capacity": {"capacity": EACH}, "running": {"selection": "running", "capacity": EACH},
            "dense": {"selection": "dense"}}[rule]  # fmt: skip


def chosen_of(out, model):
    """[B, T, R] who ran the routed layers."""
    return out.executed[..., model.config.routed_layers]


def agree(out, want, atol=1e-10):
    assert want.closest > 1e-4
    assert torch.equal(out.executed, want.executed)
    close(out.logits, want.logits, atol)


def new_cache(model):
    return DynamicCache(config=model.config)


def decode(model, ids, mask, sizes, cache, **knobs):
    """Logits and layers run of a forward in pieces; a list of knobs has one set for each piece."""
    outs, done = [], 0
    each = knobs.pop("each", [knobs] * len(sizes))
    for size, one in zip(sizes, each, strict=True):
        part = slice(done, done + size)
        done += size
        seen = None if mask is None else mask[:, :done]
        outs.append(model(ids[:, part], attention_mask=seen, cache=cache, **one))
    assert done == ids.shape[1]
    return torch.cat([out.logits for out in outs], 1), torch.cat([out.executed for out in outs], 1)


def prompts(more: int = 6):
    """Left-padded prompts of 6, 4 and 2 tokens, and `more` tokens each."""
    ids, mask = tokens(3, 6 + more, seed=5), torch.ones(3, 6 + more, dtype=torch.long)
    for b, n in enumerate((6, 4, 2)):
        mask[b, : 6 - n] = 0
    return ids, mask


# 1. the equations


@cases
def test_training_equals_the_reference(case):
    """Who is chosen, logits, every term of the loss, every gradient."""
    model, data = ready(case).train(), batch("left" if case in MODELS else "right")
    torch.manual_seed(0)
    out = model(**data)
    torch.manual_seed(0)
    want = walk(model, **data)
    agree(out, want)
    assert 0 < chosen_of(out, model).sum() < sum(LENGTHS) * len(model.config.routed_layers)
    assert set(out.losses) == set(want.losses)
    for name, value in want.losses.items():
        close(out.losses[name], value)
    close(out.loss, want.loss)
    same_gradients(gradients(model, out.loss), gradients(model, want.loss))


@pytest.mark.parametrize(
    "case,rule",
    [(case, "capacities") for case in CASES if case != "sdt-random"]
    + [(case, "running") for case in (*MODELS, "mod-learned", "mod-predictor", "sdt-change", "stt-learned")],
)
def test_inference_equals_the_reference(case, rule):
    """The same algorithm, decisions by a level or by the rank among the last scores; the loss is the task's alone."""
    model, data = ready(case).eval(), batch("left" if rule == "running" else "right")
    with torch.no_grad():
        out, want = model(**data, **RULES[rule]), walk(model, **data, **RULES[rule])
    agree(out, want)
    assert 0 < chosen_of(out, model).sum() < sum(LENGTHS) * len(model.config.routed_layers)
    assert set(out.losses) == {"task"}
    close(out.loss, want.loss)


@pytest.mark.parametrize("case", ["mod", "mod-predictor", "sdt", "sdt-change", "stt", "stt-learned"])
def test_top_k_at_evaluation_is_training_s_choice(case):
    """The upper bound: STT's teacher decides too, which costs the dense block; its losses are no part of the loss."""
    model, data = ready(case).eval(), batch()
    with torch.no_grad():
        out = model(**data, selection="topk", output_routing=True)
        want = walk(model, **data, selection="topk")
        agree(out, want)
        assert torch.equal(out.executed, model.train()(**data).executed) or case not in ("mod", "sdt")
    assert set(out.losses) == {"task"}
    close(out.loss, want.loss)


@pytest.mark.parametrize("case", ["mod-learned", "sdt", "stt-learned"])
def test_gradients_flow_at_inference_too(case):
    """Fine-tuning under the rule that inference goes by."""
    model, data = ready(case).eval(), batch()
    out, want = model(**data, **RULES["capacities"]), walk(model, **data, **RULES["capacities"])
    same_gradients(gradients(model, out.loss), gradients(model, want.loss))


@models
def test_training_under_another_capacity_and_loss_weights(case):
    """A call's capacity, one for each sequence, and its weights of the terms."""
    model, data = ready(case).train(), batch()
    knobs = {"capacity": torch.tensor([0.25, 0.9, 1.0], dtype=torch.float64)}
    weights = {"prior": 2.0, "router": 3.0, "gate": 4.0}
    out, want = (
        model(**data, **knobs, loss_weights=weights),
        walk(model, **data, **knobs, loss_weights=weights),
    )
    agree(out, want)
    close(out.loss, want.loss)


def test_straight_scale_is_1_and_has_the_gate_s_gradient():
    """Of a gate that came out as exactly 0 too: 0 / 0 is no scale."""
    router = ready("stt").stack.routers["1"]
    gates = torch.tensor([0.5, 1e-300, 0.0, 1.0], dtype=torch.float64, requires_grad=True)
    scale = router.scaled(gates)
    assert torch.equal(scale.detach(), torch.ones(4, dtype=torch.float64))
    assert torch.equal(torch.autograd.grad(scale.sum(), gates)[0], torch.ones(4, dtype=torch.float64))


def test_width_of_a_foreseeing_net():
    """f d rounded up, then up to even, at least 2: the published widths and parameters."""
    for share, width in (
        (0.0625, 56),
        (0.125, 112),
        (0.25, 224),
        (0.5, 448),
        (0.001, 2),
        (0.1, 90),
        (0.0635, 58),
    ):
        with torch.device("meta"):
            net = build(preset("sdt-qwen-0.5b", num_hidden_layers=2, prior_width=share), "causal").stack
        prior = net.routers["1"].prior
        assert prior.gate.weight.shape == prior.up.weight.shape == (width, 896)
        assert prior.down.weight.shape == (896, width)
        assert share != 0.0625 or prior.row_macs == 150_528


# 2. the neutral setting


def plain_of(model):
    """The dense decoder of the same blocks."""
    fields = {name: getattr(model.config, name) for name in (
        "vocab_size", "hidden_size", "head_dim", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "activation", "norm", "norm_placement", "norm_eps", "tie_word_embeddings", "positions",
    )}  # fmt: skip
    config = LoopedConfig(
        **fields, num_prelude_layers=0, num_core_layers=len(model.stack.blocks), num_coda_layers=0, num_loops=1,
        input_injection="none", scale_embeddings=False,
    )  # fmt: skip
    plain = LoopedForCausalLM(config).to(model.dtype).eval()
    state = {name.replace(".blocks.", ".core."): value for name, value in model.state_dict().items()
             if ".routers." not in name}  # fmt: skip
    plain.load_state_dict(state)
    return plain


@cases
def test_dense_selection_is_the_plain_decoder(case):
    """Gates of exactly 1, whatever the scale: bit-equal without a cache, and in pieces with one."""
    model, data = ready(case).eval(), batch("left")
    plain = plain_of(model)
    with torch.no_grad():
        out, want = model(**data, selection="dense", use_cache=False), plain(**data, use_cache=False)
        assert torch.equal(out.logits, want.logits) and torch.equal(out.loss, want.loss)
        assert out.executed[data["attention_mask"].bool()].all()
        if case in MODELS:
            ids, mask = prompts()
            logits, _ = decode(model, ids, mask, [6, 1, 3, 2], new_cache(model), selection="dense")
            close(logits, plain(ids, mask, use_cache=False).logits)


@pytest.mark.parametrize("case", ["mod-none", "sdt-random", "stt", "stt-gate"])
@pytest.mark.parametrize(
    "knobs", [{"capacity": 1.0}, {"threshold": -1.0}, {"capacity": 1.0, "selection": "running"}]
)
def test_everybody_chosen_is_the_plain_decoder(case, knobs):
    """Where chosen tokens take the block's result as it is; with a cache too."""
    model, (ids, mask) = ready(case).eval(), prompts()
    with torch.no_grad():
        want = plain_of(model)(ids, mask, use_cache=False).logits
        close(model(ids, mask, use_cache=False, **knobs).logits, want)
        close(decode(model, ids, mask, [5, 1, 2, 4], new_cache(model), **knobs)[0], want)


@pytest.mark.parametrize("case", ["stt", "stt-dense", "mod-straight"])
def test_training_with_everybody_chosen_is_the_plain_decoder(case):
    """Capacity 1 and a scale of 1: the task's loss is the dense one; STT trained dense has it at any capacity."""
    model, data = ready(case).train(), batch()
    with torch.no_grad():
        want = plain_of(model)(**data).losses["task"]
        close(model(**data, capacity=1.0).losses["task"], want)
        apart = abs(float(model(**data, capacity=0.5).losses["task"] - want))
    assert apart < 1e-10 if case == "stt-dense" else apart > 1e-3


# 3. cached decoding


@states
@pytest.mark.parametrize("rule", ["threshold", "capacity", "running", "dense"])
def test_decoding_in_pieces_equals_the_full_forward(case, rule):
    """Left padding, pieces of a prompt, single tokens; one sequence chooses all of its tokens, one none."""
    model, (ids, mask) = ready(case).eval(), prompts()
    knobs = decoding(model, rule)
    with torch.no_grad():
        full = model(ids, mask, use_cache=False, **knobs)
        for sizes in ([5, 1, 1, 3, 2], [12], [6, *[1] * 6]):
            logits, executed = decode(model, ids, mask, sizes, new_cache(model), **knobs)
            close(logits, full.logits)
            assert torch.equal(executed, full.executed)
    if rule != "dense":
        routed = chosen_of(full, model)
        late = mask.cumsum(1) > model.config.protected_tokens
        assert routed[1][mask[1].bool()].all() and not routed[2][late[2]].any()
        assert 0 < routed[0].sum() < 12 * len(model.config.routed_layers)


@states
def test_batch_mates_and_padding_change_nothing(case):
    """Each sequence of a batch alone and unpadded, padded on either side, padded further."""
    model = ready(case).eval()
    for side, longer in (("right", 0), ("left", 3)):
        data = batch(side, longer)
        for knobs in ({"capacity": 0.4}, {"selection": "running", "capacity": 0.4}, {"selection": "topk"}):
            with torch.no_grad():
                out = model(**data, use_cache=False, **knobs)
                for b in range(len(LENGTHS)):
                    live = data["attention_mask"][b].bool()
                    alone = model(data["input_ids"][b : b + 1, live], use_cache=False, **knobs)
                    close(out.logits[b, live], alone.logits[0])
                    assert torch.equal(out.executed[b, live], alone.executed[0])
                    assert not out.executed[b, ~live].any() and not out.last_hidden_state[b, ~live].any()


@pytest.mark.parametrize("case", ["mod", "sdt", "stt"])
@pytest.mark.parametrize("T", [1, 2])
def test_short_texts(case, T):
    """One token, two tokens: every rule and training, equal to the reference."""
    model, ids = ready(case), tokens(3, T)
    knobs = [{}, {"capacity": 0.2}, {"selection": "running", "capacity": 0.3}, {"selection": "topk"}]
    with torch.no_grad():
        for one in knobs:
            out, want = model.eval()(ids, **one, use_cache=False), walk(model, ids, **one)
            assert torch.equal(out.executed, want.executed)
            close(out.logits, want.logits)
    out, want = model.train()(ids), walk(model, ids)
    close(out.logits, want.logits)
    assert chosen_of(out, model).sum(1).eq(1).all()


@models
def test_nobody_chosen(case):
    """Capacity 0, or a level no score reaches: the routed layers are not there, and cost and keep nothing."""
    model, ids = ready(case).eval(), tokens(2, 5)
    cache = new_cache(model)
    with torch.no_grad():
        out = model(ids, capacity=0.0, use_cache=False)
        close(decode(model, ids, None, [3, 1, 1], cache, threshold=2.0)[0], out.logits)
        close(model(ids, selection="running", capacity=0.0, use_cache=False).logits, out.logits)
    assert not chosen_of(out, model).any()
    for layer in model.config.routed_layers:
        assert int(out.compute.layer_macs[str(layer)].sum()) == 10 * model.stack.routers[str(layer)].row_macs
        assert cache.layers[layer].get_seq_length() == 0


@models
def test_greedy_and_beams_equal_the_uncached_ones(case):
    """`generate` on left-padded prompts, with a capacity for each request, greedy and with three beams."""
    model, (ids, mask) = ready(case).eval(), prompts(0)
    settings = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    capacities = torch.tensor([0.4, 0.7, 0.2], dtype=torch.float64)
    for knobs in (
        {"capacity": capacities},
        {"selection": "running", "capacity": capacities},
        {"threshold": 0.5},
    ):
        got = model.generate(ids, **settings, **knobs)
        assert torch.equal(got, greedy(model, ids, mask, 4, **knobs))
        beams = [
            model.generate(ids, num_beams=3, use_cache=kept, **settings, **knobs) for kept in (True, False)
        ]
        assert torch.equal(*beams)
    for b, n in enumerate((6, 4, 2)):
        one = {**settings, "attention_mask": None, "threshold": 0.5}
        assert torch.equal(model.generate(ids[b : b + 1, -n:], num_beams=3, **one)[0, n:], beams[0][b, -4:])


@models
def test_each_call_has_its_own_rule_and_the_cache_survives(case):
    """A dense prompt, then a level, then dense, then another level: what routers remember saw every token."""
    model, ids = ready(case).eval(), tokens(3, 9)
    each = [{"selection": "dense"}, {"capacity": 0.5}, {"selection": "dense"}, {"capacity": 0.7}]
    calls = [*[("dense", 0)] * 3, *[("threshold", 0.5)] * 2, *[("dense", 0)] * 2, *[("threshold", 0.7)] * 2]
    with torch.no_grad():
        logits, executed = decode(model, ids, None, [3, 2, 2, 2], new_cache(model), each=each)
        want = walk(model, ids, selection="mixed", calls=calls)
    assert want.closest > 1e-4
    assert torch.equal(executed, want.executed)
    close(logits, want.logits)


@models
def test_running_goes_on_from_its_own_scores_or_is_refused(case):
    """Begun with the running rule, scores are kept under every rule; begun otherwise there are none."""
    model, ids = ready(case).eval(), tokens(2, 9)
    running = {"selection": "running", "capacity": 0.4}
    each = [running, {"capacity": 0.5}, {"selection": "dense"}, running]
    calls = [*[("running", 0.4)] * 3, *[("threshold", 0.5)] * 2, *[("dense", 0)] * 2, *[("running", 0.4)] * 2]
    with torch.no_grad():
        logits, executed = decode(model, ids, None, [3, 2, 2, 2], new_cache(model), each=each)
        want = walk(model, ids, selection="mixed", calls=calls)
        assert torch.equal(executed, want.executed)
        close(logits, want.logits)
        cache = new_cache(model)
        model(ids[:, :3], cache=cache, capacity=0.5)
        with pytest.raises(ValueError, match="goes on from the scores of earlier calls"):
            model(ids[:, 3:], cache=cache, **running)


# 4. causality


@states
@pytest.mark.parametrize("rule", ["capacity", "running"])
def test_future_tokens_change_nothing(case, rule):
    """Changed or dropped, they leave every earlier logit and decision alone."""
    model, ids = ready(case).eval(), tokens(3, 8)
    changed = torch.cat([ids[:, :5], tokens(3, 3, seed=9)], 1)
    knobs = {"capacity": 0.4, "selection": "running" if rule == "running" else None}
    with torch.no_grad():
        outs = [model(one, use_cache=False, **knobs) for one in (ids, changed, ids[:, :5])]
    for other in outs[1:]:
        close(other.logits[:, :5], outs[0].logits[:, :5], 1e-12)
        assert torch.equal(other.executed[:, :5], outs[0].executed[:, :5])
    assert not torch.equal(outs[1].logits[:, 5:], outs[0].logits[:, 5:])


@models
def test_top_k_looks_at_the_future_and_is_refused_with_a_cache(case):
    """Which is why it is an upper bound and no rule to decode by."""
    model, ids = ready(case).eval(), tokens(16, 10)
    changed = torch.cat([ids[:, :5], tokens(16, 5, seed=9)], 1)
    with torch.no_grad():
        outs = [model(one, selection="topk", use_cache=False) for one in (ids, changed)]
    assert not torch.equal(outs[0].executed[:, :5], outs[1].executed[:, :5])
    assert (outs[0].logits[:, :5] - outs[1].logits[:, :5]).abs().max() > 1e-3
    with pytest.raises(ValueError, match='selection="topk" looks at the whole sequence'):
        model(ids, selection="topk", use_cache=True)
    with pytest.raises(ValueError, match='selection="topk" looks at the whole sequence'):
        model.generate(ids, selection="topk", max_new_tokens=2)


# 5. packed documents

PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3], [0, 1, 0, 1, 2, 0, 1, 2, 3]])


@states
@pytest.mark.parametrize("rule", ["capacity", "running"])
@pytest.mark.parametrize("use_cache", [False, None])
def test_packed_documents_do_not_see_each_other(case, rule, use_cache):
    """position_ids that start again begin another document: attention, averages, the token before, the last scores and
    protected tokens start anew."""
    model, ids = ready(case).eval(), tokens(2, 9)
    knobs = {"capacity": 0.4, "selection": "running" if rule == "running" else None, "use_cache": use_cache}
    with torch.no_grad():
        out = model(ids, position_ids=PACKED, **knobs)
        for b, row in enumerate(PACKED):
            starts = [*(row == 0).nonzero().flatten().tolist(), 9]
            for start, end in pairwise(starts):
                alone = model(ids[b : b + 1, start:end], **knobs)
                close(out.logits[b, start:end], alone.logits[0])
                assert torch.equal(out.executed[b, start:end], alone.executed[0])


@pytest.mark.parametrize("case", ["mod-learned", "sdt", "sdt-unexpected", "stt", "stt-gate"])
def test_packed_documents_train_alone(case):
    """Top-K is the sequence's, all else each document's: losses and gradients are the reference's."""
    model, ids = ready(case).train(), tokens(2, 9)
    out = model(ids, position_ids=PACKED, labels=ids)
    want = walk(model, ids, position_ids=PACKED, labels=ids)
    agree(out, want)
    for name, value in want.losses.items():
        close(out.losses[name], value)
    same_gradients(gradients(model, out.loss), gradients(model, want.loss))


# 6. choosing


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("case", ["mod", "sdt", "stt", "sdt-random"])
def test_top_k_takes_k_of_each_sequence_and_no_pad(case, side):
    """k = max(1, floor(capacity n)) of a sequence's n tokens, at one capacity and at one for each."""
    model, data = ready(case).train(), batch(side, longer=2)
    real = data["attention_mask"].bool()
    for capacity in (0.1, 0.3, 0.5, 0.99, 1.0, torch.tensor([0.2, 0.6, 1.0])):
        out = model(**data, capacity=capacity)
        each = torch.as_tensor(capacity, dtype=torch.float64).expand(3)
        wanted = [
            max(1, math.floor(round(float(c), 6) * n + 1e-9)) for c, n in zip(each, LENGTHS, strict=True)
        ]
        for layer in model.config.routed_layers:
            assert out.executed[..., layer].sum(1).tolist() == wanted
        assert not out.executed[~real].any() and out.executed[real][:, 0].all()
        assert torch.equal(out.depths, out.executed.sum(-1))


def test_top_k_by_hand():
    """Ties go to the first, floor(0.29 * 100) is 29, pads have no place."""
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]]).bool()
    rows = Rows.from_mask(mask)
    scores = torch.tensor([0.5, 0.9, 0.5, 0.5, 0.1, 0.1, 0.1, 0.0])
    assert rows.unpack(top_k(scores, rows, 0.5)).tolist() == [
        [True, True, False, False, False], [False, True, True, False, False]]  # fmt: skip
    whole = Rows(None, 1, 100, torch.device("cpu"))
    for capacity, k in ((0.29, 29), (torch.tensor([0.29]), 29), (0.001, 1), (1.0, 100), (0.07, 7)):
        assert int(top_k(torch.rand(100), whole, capacity).sum()) == k


@pytest.mark.parametrize(
    "capacity", [0.07, 0.55, torch.tensor([0.29]), torch.tensor([0.55], dtype=torch.float64)]
)
def test_running_counts_a_share_of_the_window_exactly(capacity):
    """In a window of 100 a token is among the highest 0.55 if fewer than 55 are larger, in any precision."""
    router = LayerRouter(preset("mod-tiny", score_window=100))
    rows = Rows(None, 1, 100, torch.device("cpu"))
    limit = round(100 * float(capacity))
    for larger in (limit - 1, limit, limit + 1):
        scores = torch.tensor([1.0] * larger + [0.0] * (99 - larger) + [0.5])
        sight = Sight(1, torch.zeros(100, 4), None, rows, rows.position, {}, lambda: None, False, False)
        chosen = Rule("running", capacity, None).choose(router, Verdict(scores, None), sight)
        assert bool(chosen[-1]) == (larger < limit)


@pytest.mark.parametrize("case", ["mod", "sdt", "stt"])
@pytest.mark.parametrize("protected", [1, 3])
def test_protected_tokens_are_always_chosen(case, protected):
    """In training, within the k unless they are more than k; under every rule; of each packed document."""
    model = ready(case, protected_tokens=protected)
    data = batch("left")
    first = (data["attention_mask"].cumsum(1) <= protected) & data["attention_mask"].bool()
    rules = [{"selection": "topk", "capacity": 0.4}, {"capacity": 0.4}, {"selection": "running", "capacity": 0.4},
             {"threshold": 2.0}]  # fmt: skip
    with torch.no_grad():
        for knobs in rules:
            out = model.eval()(**data, **knobs, use_cache=False)
            assert chosen_of(out, model)[first].all()
        assert torch.equal(chosen_of(out, model).all(-1), first)  # none but them reaches 2
    out = model.train()(**data, capacity=0.4)
    assert chosen_of(out, model)[first].all()
    k = [max(max(1, math.floor(0.4 * n)), min(protected, n)) for n in LENGTHS]
    assert chosen_of(out, model).sum(1).tolist() == [[one] * 2 for one in k]
    ids = tokens(2, 9)
    out = model(ids, position_ids=PACKED)
    assert chosen_of(out, model)[protected > PACKED].all()


@models
def test_capacity_of_each_sequence_is_its_own(case):
    """[B] capacities, and [B] thresholds, choose what each alone chooses."""
    model, ids = ready(case).eval(), tokens(3, 9)
    for name, values in (("capacity", [0.1, 0.5, 0.9]), ("threshold", [0.3, 0.5, 0.75])):
        with torch.no_grad():
            out = model(ids, use_cache=False, **{name: torch.tensor(values)})
            for b, value in enumerate(values):
                alone = model(ids[b : b + 1], use_cache=False, **{name: value})
                assert torch.equal(out.executed[b], alone.executed[0])
                close(out.logits[b], alone.logits[0])


# 7. the cache


@models
def test_keys_of_skipped_tokens_are_neither_written_nor_allocated(case):
    """At capacity 0.5, used and allocated bytes against the same cache under dense: saved is what was skipped."""
    model, ids = ready(case).eval(), tokens(1, 200)
    model.calibrate(input_ids=ids)

    def bytes_of(**knobs):
        cache, used, allocated = new_cache(model), 0, 0
        with torch.no_grad():
            out = model(ids[:, :150], cache=cache, **knobs)
            executed = [out.executed, model(ids[:, 150:], cache=cache, **knobs).executed]
        for layer in cache.layers:
            kept = layer.get_seq_length()
            used += 2 * layer.keys[:, :, :kept].numel() * 8
            # a growing layer shows what it has written of what it has allocated
            allocated += 2 * getattr(layer, "keys_room", layer.keys).numel() * 8
        return used, allocated, torch.cat(executed, 1), cache

    dense = bytes_of(selection="dense")
    used, allocated, executed, cache = bytes_of(capacity=0.5)
    realised = float(executed[..., model.config.routed_layers].double().mean())
    assert 0.45 < realised < 0.55
    expected = len(model.config.routed_layers) / 4 * (1 - realised)
    assert 1 - used / dense[0] == pytest.approx(expected, abs=1e-9)
    assert 1 - allocated / dense[1] == pytest.approx(expected, abs=0.02)
    for layer in model.config.routed_layers:
        held = cache.layers[layer]
        assert isinstance(held, ChosenLayer)
        assert (
            held.places[0, : int(held.used[0])].tolist() == executed[0, :, layer].nonzero().flatten().tolist()
        )
        assert held.bytes_used.tolist() == [2 * int(held.used[0]) * 2 * 4 * 8]


@models
def test_cache_follows_its_sequences(case):
    """Reordered, selected, repeated: decoding goes on as the sequences that are now there."""
    model, (ids, mask) = ready(case).eval(), prompts()
    knobs = {"capacity": 0.5}

    def after(change, order):
        cache = new_cache(model)
        with torch.no_grad():
            model(ids[:, :8], mask[:, :8], cache=cache, **knobs)
            change(cache)
            logits, _ = decode_rest(cache, order)
            close(logits, model(ids[order], mask[order], use_cache=False, **knobs).logits[:, 8:])

    def decode_rest(cache, order):
        outs = [
            model(ids[order][:, t : t + 1], mask[order][:, : t + 1], cache=cache, **knobs)
            for t in range(8, 12)
        ]
        return torch.cat([out.logits for out in outs], 1), cache

    after(lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0])
    after(lambda cache: cache.batch_select_indices(torch.tensor([1])), [1])
    after(lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2])


@models
def test_cropping_where_nothing_is_remembered(case):
    """MoD under a level: decoding after a crop is decoding afresh. Where a router remembers: refused."""
    model, ids = ready(case).eval(), tokens(2, 10)
    other = torch.cat([ids[:, :4], tokens(2, 5, seed=8)], 1)
    cache = new_cache(model)
    with torch.no_grad():
        decode(model, ids, None, [7, 1, 2], cache, capacity=0.5)
        if case != "mod":
            with pytest.raises(RuntimeError, match="cannot be cropped"):
                cache.crop(-6)
            return
        cache.crop(-6)
        assert cache.get_seq_length() == 4
        got = [model(other[:, a:b], cache=cache, capacity=0.5) for a, b in ((4, 6), (6, 7), (7, 9))]
        fresh = model(other, use_cache=False, capacity=0.5)
        close(torch.cat([out.logits for out in got], 1), fresh.logits[:, 4:])
        assert torch.equal(torch.cat([out.executed for out in got], 1), fresh.executed[:, 4:])
        cache = new_cache(model)
        model(ids, cache=cache, selection="running")
        with pytest.raises(RuntimeError, match="cannot be cropped"):
            cache.crop(-1)


def test_prompt_lookup_equals_greedy():
    """Assisted generation crops: MoD's cache can."""
    model, ids = ready("mod").eval(), torch.tensor([[5, 9, 5, 9, 5, 9, 5]])
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "capacity": 0.5}
    plain = model.generate(ids, **settings)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=3, **settings), plain)


@models
def test_caches_that_cannot_hold_them_are_refused(case):
    """Static, paged, or made without the config: one sentence each."""
    model, ids = ready(case).eval(), tokens(2, 4)
    with pytest.raises(ValueError, match="need a dynamic cache, not a static"):
        model(ids, cache=StaticCache(config=model.config, max_cache_len=8))
    with pytest.raises(ValueError, match=r"DynamicCache\(config=model\.config\)"):
        model(ids, cache=DynamicCache())


# 8. the ledger


@pytest.mark.parametrize(
    "case,kernel", [*((case, "eager") for case in FLOPS), *((case, "sdpa") for case in MODELS)]
)
def test_ledger_equals_flop_counter_on_the_dense_path(case, kernel):
    """2 FLOPs = 1 MAC, to the last one: everybody runs everything; under capacity 1 the routers are asked as well."""
    model, ids = ready(case, dtype=torch.float32).eval(), tokens(3, 6)
    model.set_attn_implementation(kernel)
    for knobs in ({"selection": "dense"}, {"capacity": 1.0}):
        out, macs = counted_macs(model, ids, **knobs)
        assert out.compute.total == macs
    # nothing but the routers' nets is added
    nets = sum(router.row_macs + (router.forecast.row_macs if router.forecast else 0)
               for router in model.stack.routers.values())  # fmt: skip
    dense = model(ids, selection="dense", use_cache=False).compute.total
    assert out.compute.total == dense + 18 * nets
    pairs = 3 * 21 * model.stack.pair_macs()
    heads = 18 * 16 * 32
    assert dense - int(out.compute.macs["attention"].sum()) == 18 * (model.stack.token_macs() - sum(
        router.row_macs for router in model.stack.routers.values())) + heads  # fmt: skip
    assert int(torch.as_tensor(out.compute.attention_causal).sum()) == pairs


@pytest.mark.parametrize("case", ["mod-predictor", "sdt-unexpected", "stt", "stt-dense", "stt-variable"])
@pytest.mark.parametrize("rule", ["capacities", "topk", "training"])
def test_ledger_equals_flop_counter_when_tokens_are_skipped(case, rule):
    """Rows that ran, the teacher's pass and its nets: the ledger books what was executed."""
    model, data = ready(case, dtype=torch.float32).train(rule == "training"), batch()
    model.set_attn_implementation("eager")
    knobs = {"capacities": RULES["capacities"], "topk": {"selection": "topk"}, "training": {}}[rule]
    data.pop("labels")
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        out = model(**data, use_cache=False, **knobs)
    assert out.compute.total == counter.get_total_flops() / 2


@models
def test_routed_layers_are_billed_for_the_chosen_alone(case):
    """Pairs among the chosen, rows of the chosen, keys of the chosen; figures by layer and by request add up."""
    model, data = ready(case).eval(), batch("left")
    data.pop("labels")
    with torch.no_grad():
        out = model(**data, **RULES["capacities"], use_cache=False)
        alone = [model(data["input_ids"][b : b + 1, -n:], capacity=float(c), use_cache=False) for b, (n, c) in
                 enumerate(zip(LENGTHS, RULES["capacities"]["capacity"], strict=True))]  # fmt: skip
    ledger, stack = out.compute, model.stack
    total = torch.zeros(3, dtype=torch.long)
    for layer, block in enumerate(stack.blocks):
        n = out.executed[..., layer].sum(1)
        total += n * (n + 1) // 2 * block.attention.pair_macs
        width = 2 * model.config.num_key_value_heads * model.config.head_dim * 8
        assert torch.equal(ledger.layer_kv_bytes[str(layer)], n * width)
        router = stack.routers[str(layer)].row_macs if str(layer) in stack.routers else 0
        least = n * block.token_macs() + data["attention_mask"].sum(1) * router
        assert (ledger.layer_macs[str(layer)] >= least + n * (n + 1) // 2 * block.attention.pair_macs).all()
    assert torch.equal(ledger.attention_causal, total)
    assert torch.equal(ledger.kv_bytes, sum(ledger.layer_kv_bytes.values()))
    assert torch.equal(sum(ledger.layer_macs.values()), ledger.per_sequence - ledger.macs["head"])
    assert (
        int(ledger.per_sequence.sum()) == ledger.total == sum(ledger.summary()[kind] for kind in ledger.macs)
    )
    for b, one in enumerate(alone):
        # padding beside it is executed attention, and head, of nobody's tokens
        for kind in set(ledger.macs) - {"attention", "head"}:
            assert int(ledger.macs[kind][b]) == int(one.compute.macs[kind]), kind
        assert int(ledger.attention_causal[b]) == int(one.compute.attention_causal)
        assert int(ledger.kv_bytes[b]) == int(one.compute.kv_bytes)


@models
def test_ledger_of_a_decoding_step(case):
    """One new token reads the chosen before it, in a layer that chose it."""
    model, ids = ready(case).eval(), tokens(1, 10)
    cache = new_cache(model)
    with torch.no_grad():
        full = model(ids, capacity=0.6, use_cache=False)
        model(ids[:, :9], cache=cache, capacity=0.6)
        out = model(ids[:, 9:], cache=cache, capacity=0.6)
    pair = model.stack.blocks[0].attention.pair_macs
    reads = [int(full.executed[0, :, layer].sum()) * bool(full.executed[0, 9, layer]) for layer in range(4)]
    assert int(out.compute.attention_causal) == int(out.compute.macs["attention"]) == sum(reads) * pair


# 9. training, saving, loading


def unreached(model) -> set[str]:
    """Parameters of the routers that the equations leave without a gradient."""
    config, names = model.config, set()
    terms = {
        "both": (),
        "expected": ("multiplier", "unexpected_beta"),
        "unexpected": ("offset", "expected_beta"),
    }
    for layer, router in model.stack.routers.items():
        gated = config.scale in ("gate", "straight") and getattr(config, "trains_on", "gated") == "gated"
        gated = gated or getattr(config, "gate_weight", 0.0) > 0
        if hasattr(router, "surprise"):
            # the gate is all that the loss sees of it
            dead = (
                terms[config.surprise_terms]
                if gated
                else [name for name, _ in router.surprise.named_parameters()]
            )
            names |= {f"stack.routers.{layer}.surprise.{name}" for name in dead}
        if config.scale == "learned" and getattr(config, "trains_on", "gated") == "dense":
            names.add(f"stack.routers.{layer}.gain")
    return {name for name in names if name in dict(model.named_parameters())}


@pytest.mark.parametrize(
    "case,fresh", [*((case, False) for case in CASES), *((case, True) for case in MODELS)]
)
def test_every_parameter_gets_a_gradient(case, fresh):
    """But for the surprise of a gate that scales nothing, and for the term that `surprise_terms` leaves out."""
    model = ready(case)
    if fresh:
        torch.manual_seed(0)
        model = build(model.config, "causal").double()
    out = model.train()(**batch())
    names, weights = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(out.loss, weights, allow_unused=True)
    reached = {name for name, grad in zip(names, grads, strict=True) if grad is not None and grad.any()}
    assert all(grad is None or grad.isfinite().all() for grad in grads)
    assert set(names) - reached == unreached(model)


@pytest.mark.parametrize("case", ["mod-predictor", "sdt-unexpected", "stt-gate", "stt-variable"])
def test_losses_do_not_change_with_padding_or_a_batch_twice(case):
    """Every term is a mean over tokens, and over layers."""
    model, data = ready(case).train(), batch()
    once = model(**data).losses
    twice = model(**{name: torch.cat([value, value]) for name, value in data.items()}).losses
    longer = model(**batch("left", longer=3)).losses
    assert set(once) == set(twice) == set(longer)
    for name, value in once.items():
        close(twice[name], value)
        close(longer[name], value)


@pytest.mark.parametrize("case", ["mod-predictor", "sdt", "sdt-scheduled", "stt"])
def test_a_forward_leaves_nothing_on_the_modules(case):
    """Training, evaluation and generation change no parameter, no buffer and no attribute."""
    model, data = ready(case).train(), batch()

    def attributes():
        return {name: {k: repr(v) for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
                for name, module in model.named_modules()}  # fmt: skip

    before, state = attributes(), {name: value.clone() for name, value in model.state_dict().items()}
    first = model(**data)
    model.eval()(**data)
    model.generate(data["input_ids"][:1], max_new_tokens=2, do_sample=False)
    second = model.train()(**data)
    assert attributes() == before and torch.equal(first.loss, second.loss)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("case", ["mod-predictor", "sdt-scheduled", "stt-learned"])
def test_save_and_load_change_nothing(case, tmp_path, monkeypatch):
    """Config, weights, levels, temperatures and logits come back; the bare model loads from it too."""
    model, data = ready(case, dtype=torch.float32).eval(), batch()
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        bare = AutoModel.from_pretrained(tmp_path).eval()
    finally:
        torch.use_deterministic_algorithms(False)
    assert type(again) is type(model)
    state = again.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert (
        any("levels" in name for name in state) and model.config.routed_layers == again.config.routed_layers
    )
    with torch.no_grad():
        want = model(**data)
        assert torch.equal(want.logits, again(**data).logits)
        states = bare(data["input_ids"], data["attention_mask"])
    assert torch.equal(states.last_hidden_state, want.last_hidden_state)
    assert torch.equal(states.executed, want.executed)


@pytest.mark.parametrize("case", ["sdt", "stt"])
def test_levels_keep_their_precision_in_half_precision(case, tmp_path):
    """Scores differ by thousandths: levels stay float32 when a model is cast, or loaded, as bfloat16."""
    model = ready(case, dtype=torch.float32).eval()
    levels = model.stack.routers["1"].levels.clone()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    for half in (loaded, model.bfloat16()):
        assert half.lm_head.weight.dtype == torch.bfloat16
        assert torch.equal(half.stack.routers["1"].levels, levels)
        with torch.no_grad():
            out = half(**batch())
        assert out.logits.isfinite().all() and out.loss.isfinite()


REMOTE = """
import sys, torch
sys.modules["tenuto"] = None  # whatever is installed, importing it fails
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    saved = torch.load(folder + "/io.pt")
    with torch.no_grad():
        out = model(**saved["inputs"])
    assert type(model).__module__.startswith("transformers_modules"), type(model).__module__
    assert torch.equal(out.logits, saved["logits"]) and torch.equal(out.executed, saved["executed"]), folder
    ids = saved["inputs"]["input_ids"][:1]
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), saved["generated"]), folder
print("loaded", len(sys.argv) - 1)
"""


def test_checkpoints_load_where_tenuto_is_not_installed(tmp_path):
    """A checkpoint carries its code and its levels: an isolated process without tenuto gives the same."""
    folders = []
    for case in MODELS:
        model, data = ready(case, dtype=torch.float32).eval(), batch()
        model.save_pretrained(tmp_path / case)
        with torch.no_grad():
            out = model(**data)
        made = model.generate(data["input_ids"][:1], max_new_tokens=4, do_sample=False)
        saved = {"inputs": data, "logits": out.logits, "executed": out.executed, "generated": made}
        torch.save(saved, tmp_path / case / "io.pt")
        folders.append(str(tmp_path / case))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, "-I", "-c", REMOTE, *folders], cwd=tmp_path, env=env, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.strip().endswith("loaded 3")


@pytest.mark.parametrize("case", ["mod", "sdt-unexpected", "stt", "stt-dense"])
def test_gradient_checkpointing_changes_nothing(case):
    """Same loss, same gradients, and blocks really run again."""
    model, data = ready(case).train(), batch()
    plain = model(**data)
    want = gradients(model, plain.loss)
    model.activation_checkpointing_enable()
    runs = []
    model.stack.blocks[1].feed_forward.register_forward_pre_hook(lambda *_: runs.append(1))
    again = model(**data)
    forward = len(runs)
    close(again.loss, plain.loss, 1e-12)
    same_gradients(gradients(model, again.loss), want, 1e-12)
    assert len(runs) == 2 * forward


@models
def test_loss_chunk_changes_nothing(case):
    """Logits of 3 tokens at a time: same losses and gradients, and no logits kept."""
    model, data = ready(case).train(), batch()
    plain = model(**data)
    want = gradients(model, plain.loss)
    model.config.loss_chunk = 3
    chunked = model(**data)
    assert chunked.logits is None
    for name, value in plain.losses.items():
        close(chunked.losses[name], value, 1e-12)
    same_gradients(gradients(model, chunked.loss), want, 1e-12)


@pytest.mark.parametrize("case", ["mod-predictor", "sdt", "stt"])
def test_float32_and_bfloat16_stay_within_tolerance(case):
    """float32 decides as float64 and agrees to 1e-4; bfloat16 runs and stays finite."""
    model, data = ready(case).eval(), batch()
    with torch.no_grad():
        want = model(**data, **RULES["capacities"])
        got = model.float()(**data, **RULES["capacities"])
        assert torch.equal(got.executed, want.executed)
        assert_close(got.logits, want.logits.float(), atol=1e-4, rtol=1e-4)
    rough = model.bfloat16().train()(**data)
    assert rough.logits.dtype == torch.bfloat16 and rough.loss.isfinite()
    assert all(value.dtype == torch.float32 for value in rough.losses.values())


# 10. inverse temperatures


def test_first_step_s_ce_is_as_published():
    """An untouched prior that says nothing: D_ch = D_st, S_CE = sigmoid(softplus(-0.3) log 1.025) = 0.503."""
    model = build(preset("sdt-tiny"), "causal").double().train()
    with torch.no_grad():
        for router in model.stack.routers.values():
            router.prior.down.weight.zero_()
    out = model(**batch())
    want = 1 / (1 + math.exp(-math.log(1 + math.exp(-0.3)) * math.log(1.025)))
    assert want == pytest.approx(0.503, abs=5e-4)
    for layer in (1, 3):
        # o is a float32 number
        assert float(out.signs[f"{layer}.s_ce"]) == pytest.approx(want, abs=1e-7)


def test_the_offset_cannot_end_the_expected_change():
    """Learned raw it crosses 0, and S_CE and its gradient are 0 from then on; here both come back from anywhere."""
    model = ready("sdt").train()
    surprise = model.stack.routers["1"].surprise
    for raw in (-3.0, 0.0, 3.0):
        surprise.offset.data.fill_(raw)
        gate, s_ce, _ = surprise(*(torch.ones(4, dtype=torch.float64) for _ in range(3)))
        (slope,) = torch.autograd.grad(gate.sum(), [surprise.offset])
        assert float(s_ce[0].detach()) > 1e-3 and float(slope) > 1e-4, raw


@pytest.mark.parametrize("kind", ["learned", "scheduled"])
def test_trained_inverse_temperatures_are_used_at_evaluation(kind, tmp_path):
    """What training ended with is saved, loaded, and decides; the published code fell back to the first one."""
    model = make("sdt", dtype=torch.float32, inverse_temperature=kind, calibrate=False).eval()
    data = batch()

    def gates(model):
        with torch.no_grad():
            out = model(**data, selection="topk", output_routing=True)
        return {name: value for name, value in out.signs.items() if "s_ce" in name or "s_cu" in name}

    first = gates(model)
    if kind == "learned":
        with torch.no_grad():
            for router in model.stack.routers.values():
                router.surprise.expected_beta += 1.0
                router.surprise.unexpected_beta += 2.0
    else:
        for share, b in ((0.0, 0.1), (0.1, 0.1), (0.55, 50.05), (1.0, 100.0)):
            model.schedule(share)
            assert float(model.stack.routers["1"].surprise.temperature) == pytest.approx(b)
    last = gates(model)
    assert all(not torch.equal(first[name], value) for name, value in last.items())
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert all(torch.equal(value, last[name]) for name, value in gates(again).items())
    close(walk(model.double(), **data, selection="topk").logits, model(**data, selection="topk").logits)


def test_a_sharp_schedule_gives_no_nan():
    """At 100 gates of calm tokens are exactly 0: chosen all the same by Top-K, they must not divide by themselves."""
    model, data = (
        make("stt", dtype=torch.float32, inverse_temperature="scheduled", calibrate=False).train(),
        batch(),
    )
    model.schedule(1.0)
    with torch.no_grad():
        for router in model.stack.routers.values():
            router.transition.down.weight.mul_(1000)
            router.surprise.multiplier.fill_(20.0)
    out = model(**data, capacity=1.0)
    assert float(out.signs["3.s_ce"]) < 0.9 and float(out.signs["3.s_cu"]) < 0.1
    assert out.loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients(model, out.loss).values())


# 11. calibration and refusals


@pytest.mark.parametrize("case", ["mod-predictor", "sdt", "sdt-change", "stt"])
def test_calibration_realises_the_capacity(case):
    """On the text it saw, layer by layer, within 2 points; in between the levels too; padding left out."""
    model, ids = ready(case).eval(), tokens(8, 48)
    mask = torch.ones_like(ids)
    mask[::2, :9] = 0
    model.calibrate(input_ids=ids, attention_mask=mask)
    # the last one lies between two levels
    for capacity, off in ((0.25, 0.02), (0.5, 0.02), (0.75, 0.02), (0.65, 0.05)):
        with torch.no_grad():
            out = model(ids, mask, capacity=capacity, use_cache=False)
        for layer in model.config.routed_layers:
            share = float(out.executed[..., layer][mask.bool()].double().mean())
            assert share == pytest.approx(capacity, abs=off), layer
    assert not model.training
    levels = model.stack.routers["1"].levels
    assert (levels[1:] <= levels[:-1]).all()


@pytest.mark.parametrize("case", ["mod-uneven", "stt-student"])
def test_layers_have_capacities_of_their_own(case):
    """Each its own, all of them the knob in the mean, by every rule; levels realise them."""
    model, ids = ready(case).eval(), tokens(8, 48)
    model.calibrate(input_ids=ids)
    config = model.config
    mean = sum(config.layer_capacities) / 2
    for capacity in (0.1, mean, 0.6, 0.9):
        wanted = [config.share_of(layer, capacity) for layer in config.routed_layers]
        assert sum(wanted) / len(wanted) == pytest.approx(capacity) and all(0 < one < 1 for one in wanted)
        each = config.share_of(config.routed_layers[0], torch.tensor([capacity, 0.0, 1.0]))
        assert each.tolist() == pytest.approx([wanted[0], 0.0, 1.0])
        assert sum(config.share_of(layer, 1.0) == 1.0 for layer in config.routed_layers) == 2
        if capacity == mean:
            assert wanted == pytest.approx(config.layer_capacities)
        first = config.routed_layers[0]
        for rule, off in (("threshold", 0.03), ("topk", 1 / 48), ("running", None)):
            with torch.no_grad():
                out = model(ids, capacity=capacity, selection=rule, use_cache=False)
                shares = [float(out.executed[..., layer].double().mean()) for layer in config.routed_layers]
                if off is not None:
                    assert shares == pytest.approx(wanted, abs=off), (rule, capacity)
                if rule != "threshold":
                    # the first routed layer's choice is that of a model whose layers all have this capacity
                    own, config.layer_capacities = config.layer_capacities, None
                    even = model(ids, capacity=wanted[0], selection=rule, use_cache=False)
                    config.layer_capacities = own
                    assert torch.equal(out.executed[..., first], even.executed[..., first])


@pytest.mark.parametrize("own", [[0.1, 0.6], [0.2, 0.3], [0.7, 0.2]])
def test_layers_capacities_never_exceed_1(own):
    """Shares whose sums round upwards: calibration asks for the quantile of 1 minus them."""
    model = make("mod", layer_capacities=own, calibrate=False)
    model.calibrate(input_ids=tokens(4, 12))
    assert all(model.config.share_of(layer, 1.0) == 1.0 for layer in model.config.routed_layers)


def test_uncalibrated_models_say_so():
    """One sentence for a capacity between 0 and 1; what needs no level works."""
    for case in MODELS:
        model, ids = make(case, calibrate=False).eval(), tokens(2, 5)
        with torch.no_grad():
            for knobs in ({"threshold": 0.5}, {"selection": "running"}, {"selection": "dense"}, {"capacity": 1.0},
                          {"selection": "topk"}, {"capacity": torch.tensor([0.0, 1.0])}):  # fmt: skip
                model(ids, use_cache=False, **knobs)
            for knobs in ({}, {"capacity": 0.5}, {"capacity": torch.tensor([1.0, 0.3])}):
                with pytest.raises(ValueError, match="no calibrated levels yet: run `tenuto calibrate`"):
                    model(ids, **knobs)
        model.train()(ids)


def test_what_cannot_be_is_refused_in_one_sentence():
    """Knobs that would be ignored, or fail deep inside."""
    model, ids = ready("sdt").eval(), tokens(2, 5)
    looped = LoopedForCausalLM(LoopedConfig(vocab_size=32, hidden_size=16, head_dim=4, num_attention_heads=4))
    for call, kind, sentence in [
        (lambda: looped(ids, capacity=0.5), ValueError, "LoopedForCausalLM has no capacity; its knobs are threshold"),
        (lambda: looped(ids, selection="dense"), ValueError, "LoopedForCausalLM has no selection"),
        (lambda: model(ids, max_steps=2), ValueError, "SDTForCausalLM has no max_steps; its knobs are capacity"),
        (lambda: model(ids, min_steps=2), ValueError, "SDTForCausalLM has no min_steps"),
        (lambda: model(ids, capacity=0.5, threshold=0.5), ValueError, "give one of them, not both"),
        (lambda: model(ids, threshold=0.5, selection="running"), ValueError, 'threshold is for selection="threshold"'),
        (lambda: model(ids, threshold=0.5, selection="dense"), ValueError, 'threshold is for selection="threshold"'),
        (lambda: model(ids, selection="top-k"), ValueError, "selection='top-k' is none of threshold, running, topk"),
        (lambda: model(ids, selection="gate"), ValueError, "selection='gate' is none of"),
        (lambda: model(ids, capacity=1.5), ValueError, "capacity=1.5 must lie between 0 and 1"),
        (lambda: model(ids, capacity=float("nan")), ValueError, "capacity=nan must lie between 0 and 1"),
        (lambda: model(ids, capacity=torch.tensor([0.5, -0.1])), ValueError, "must lie between 0 and 1"),
        (lambda: model(ids, threshold=float("nan")), ValueError, "threshold=nan must be a number"),
        (lambda: model(ids, capacity=torch.rand(3)), ValueError, r"capacity has shape \(3,\); it must be a number or"),
        (lambda: model(ids, threshold=torch.rand(2, 1)), ValueError, r"threshold has shape \(2, 1\)"),
        (lambda: model(ids, capacty=0.5), TypeError, "no argument capacty"),
        (lambda: model.train()(ids, threshold=0.5), ValueError, 'threshold is for selection="threshold"'),
        (lambda: build(preset("mod-tiny", positions="sinusoidal"), "causal"), ValueError, 'positions="sinusoidal" is'),
        (lambda: make("mod", head=HEADS[1], positions="sinusoidal", num_decoder_layers=2, layer_capacities=[0.4, 0.6]),
         ValueError, "of which a stack of num_decoder_layers=2 lacks some"),
    ]:  # fmt: skip
        with pytest.raises(kind, match=sentence):
            call()


@pytest.mark.parametrize("name,fields,sentence", [
    ("sdt", {"routed_layers": [1, 2]}, "layer 2 follows another routed layer"),
    ("mod", {"routed_layers": [0, 2]}, "every token runs layer 0"),
    ("mod", {"routed_layers": [4]}, "must be different layers from 1 to num_hidden_layers - 1 = 3"),
    ("mod", {"routed_layers": [1, 1]}, "must be different layers"),
    ("stt", {"capacity": 0.0}, "capacity=0.0 must lie above 0"),
    ("stt", {"gate_threshold": 1.0}, "gate_threshold=1.0 must lie between 0 and 1"),
    ("sdt", {"prior_width": 1.5}, "prior_width=1.5"),
    ("sdt", {"score_window": 0}, "score_window=0"),
    ("mod", {"protected_tokens": -1}, "protected_tokens=-1"),
    ("mod", {"relative_positions": "t5"}, "counts neighbours, which routed layers leave out"),
    ("mod", {"scale": "raw"}, "scale"),
    ("stt", {"forecast_width": 0.0}, "forecast_width=0.0"),
    ("stt", {"scale": "student", "trains_on": "dense"}, "multiplies in training as well"),
    ("stt", {"layer_capacities": [0.5, 0.4], "stt_capacity": "variable"}, "have nothing to set with stt_capacity"),
    ("stt", {"layer_capacities": [0.5]}, "must be one number between 0 and 1 for each of routed_layers"),
    ("stt", {"layer_capacities": [1.0, 0.0]}, "must be one number between 0 and 1 for each of routed_layers"),
])  # fmt: skip
def test_wrong_combinations_of_fields_name_both(name, fields, sentence):
    """A config that cannot work says why when it is made."""
    with pytest.raises(Exception, match=sentence):
        preset(f"{name}-tiny", **{**SMALL, **fields})


# 12. what the published code got wrong


@pytest.mark.parametrize("case", ["mod", "mod-predictor", "stt", "stt-none"])
def test_published_error_router_loss_was_not_in_the_total(case):
    """It was looked up under another name: weight 0. Here it is part of the loss, and the student learns from it."""
    model, data = ready(case).train(), batch()
    out = model(**data)
    weights = model.config.loss_weights()
    assert weights["router"] == 0.01 and weights["prior"] == 0.05
    close(
        out.loss,
        out.losses["task"]
        + sum(weights[name] * value for name, value in out.losses.items() if name != "task"),
    )
    student = {
        "mod": "router.weight",
        "mod-predictor": "predictor.",
        "stt": "student.",
        "stt-none": "student.",
    }[case]
    mine = [(name, weight) for name, weight in model.named_parameters() if f"routers.1.{student}" in name]
    total = torch.autograd.grad(out.loss, [weight for _, weight in mine], retain_graph=True)
    assert all(gradient.any() for gradient in total)
    optimiser = torch.optim.Adam([w for n, w in model.named_parameters() if f".{student}" in n], lr=0.05)
    before = float(out.losses["router"].detach())
    for _ in range(20):
        optimiser.zero_grad()
        model(**data).losses["router"].backward()
        optimiser.step()
    after = model(**data)
    assert float(after.losses["router"].detach()) < 0.7 * before
    assert float(after.signs["1.accuracy"]) > float(after.signs["1.majority"]) - 1e-6


@models
def test_published_error_attention_crossed_sequences(case):
    """The batch's chosen tokens were packed into one sequence: here no gradient goes from one to another."""
    model, ids = ready(case).train(), tokens(3, 7)
    x = model.embed_tokens(ids).detach().requires_grad_()
    out = model(inputs_embeds=x)
    for b in range(3):
        reached = torch.autograd.grad(out.logits[b].sum(), x, retain_graph=True)[0].abs().sum((1, 2))
        assert [bool(one) for one in reached] == [other == b for other in range(3)]


@models
def test_published_error_results_depended_on_the_batch(case):
    """In training's Top-K too: each sequence alone is what it is among others, pads or not."""
    model, data = ready(case).train(), batch("left", longer=2)
    out = model(**data)
    for b, n in enumerate(LENGTHS):
        alone = model(data["input_ids"][b : b + 1, -n:])
        assert torch.equal(out.executed[b, -n:], alone.executed[0])
        close(out.logits[b, -n:], alone.logits[0])


def test_published_error_chosen_tokens_stood_in_order_of_their_scores():
    """Whatever the scores, the chosen stand as they did: places ascend, and nobody reads a later one."""
    rows = Rows.from_mask(torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]).bool())
    scores = torch.tensor([0.1, 0.9, 0.2, 0.8, 0.95, 0.3, 0.2, 0.9])
    chosen = Chosen(top_k(scores, rows, 0.7), rows, 0)
    assert chosen.places[0].tolist() == [1, 3, 4]
    assert chosen.places[1, :2].tolist() == [2, 4]
    for case in MODELS:
        model, ids = ready(case).train(), tokens(2, 8)
        x = model.embed_tokens(ids).detach().requires_grad_()
        # who is chosen depends on the future, what a token then reads does not
        logits = model(inputs_embeds=x).logits
        for t in range(7):
            later = torch.autograd.grad(logits[:, t].sum(), x, retain_graph=True)[0][:, t + 1 :]
            assert not later.any()


@models
def test_published_error_padding_was_chosen(case):
    """Pads competed: here they are chosen by nobody, take nobody's place, and count in no mean."""
    model = ready(case).train()
    short, padded = batch("right"), batch("right", longer=5)
    padded["input_ids"][~padded["attention_mask"].bool()] = 17  # whatever stands there
    first, second = model(**short), model(**padded)
    assert torch.equal(first.executed, second.executed[:, :9]) and not second.executed[:, 9:].any()
    for name, value in first.losses.items():
        close(second.losses[name], value)


def test_published_error_top_k_was_over_the_batch():
    """A sequence of high scores took the places of one of low scores: each has its own k."""
    rows = Rows(None, 2, 4, torch.device("cpu"))
    scores = torch.tensor([0.9, 0.8, 0.99, 0.7, 0.1, 0.2, 0.3, 0.05])
    assert top_k(scores, rows, 0.5).view(2, 4).tolist() == [
        [True, False, True, False],
        [False, True, True, False],
    ]


def test_published_error_one_gate_for_all_layers():
    """Each routed layer has its own surprise and its own scores: changing one layer's changes no earlier one."""
    model, data = ready("sdt").train(), batch()
    before = model(**data)
    assert not torch.equal(before.executed[..., 1], before.executed[..., 3])
    assert float(before.signs["1.gate"]) != float(before.signs["3.gate"])
    with torch.no_grad():
        model.stack.routers["3"].surprise.offset.add_(1.0)
    after = model(**data)
    assert torch.equal(after.signs["1.gate"], before.signs["1.gate"])
    assert not torch.equal(after.signs["3.gate"], before.signs["3.gate"])
    rooms = [router.surprise for router in model.stack.routers.values()]
    assert len({id(room.offset) for room in rooms}) == len(rooms)


@models
def test_published_error_decoding_chose_every_token(case):
    """Top-K of one token is that token: at decode the rule decides, and skips as often as in one pass."""
    model, ids = ready(case).eval(), tokens(4, 20)
    model.calibrate(input_ids=ids)
    with torch.no_grad():
        _, executed = decode(model, ids, None, [1] * 20, new_cache(model), capacity=0.5)
    assert float(executed[..., [1, 3]].double().mean()) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("case", ["stt", "stt-gate"])
def test_published_error_training_never_ran_the_gated_layer(case):
    """Trained on the dense result, the task knows nothing of who is chosen; gated, it does."""
    gated, data = ready(case).train(), batch()
    dense = ready(case, trains_on="dense").train()
    few, many = (
        [float(model(**data, capacity=c).losses["task"].detach()) for c in (0.2, 0.9)]
        for model in (gated, dense)
    )
    assert abs(few[0] - few[1]) > 1e-3 and abs(many[0] - many[1]) < 1e-12


# 9. int8, encoders


def test_int8_priors_look_at_one_row_at_a_time():
    """Each row by its own scale: no other row changes it, decoding equals one pass, and little is lost."""
    model, ids = make("sdt", prior_width=0.5, dtype=torch.float32).eval(), tokens(3, 12)
    with torch.no_grad():
        want = model(ids, capacity=0.5, use_cache=False).logits
        net = model.stack.routers["1"].prior
        x = torch.randn(6, 16) * torch.tensor([1.0, 1e-3, 1e3, 1.0, 0.0, 5.0])[:, None]
        exact = net(x)
        model.quantise_priors()
        got = net(x)
        # eight bits of weights, seven of rows
        assert float((got - exact).norm() / exact.norm()) < 0.03
        for row in range(6):
            assert_close(net(x[row : row + 1]), got[row : row + 1], rtol=1e-5, atol=1e-7)
        whole = model(ids, capacity=0.5, use_cache=False)
        logits, executed = decode(model, ids, None, [5, 1, 1, 5], new_cache(model), capacity=0.5)
        assert torch.equal(executed, whole.executed)
        assert_close(logits, whole.logits, rtol=1e-4, atol=1e-4)
    assert 0 < float((whole.logits - want).abs().max())


HEADS = ("classification", "text-to-text")


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("case", ["mod", "sdt", "sdt-random", "stt", "stt-student"])
def test_encoders_and_encoder_decoders(case, head):
    """Routed layers in both: gradients of every router, a batch and its members alike, padding nothing, and with
    everyone chosen and no gate the plain Transformer of the same blocks."""
    model = make(case, head=head, positions="sinusoidal", num_decoder_layers=4, calibrate=False)
    data = sides(head)
    model.train()
    out = model(**data)
    out.loss.backward()
    scored = "random" not in case
    for name, weight in model.named_parameters():
        if ".routers." in name and ".surprise." not in name and scored:
            assert weight.grad is not None and float(weight.grad.abs().sum()) > 0, name
    always = model.config.num_hidden_layers - len(model.config.routed_layers)
    for depths in [out.depths] if head == HEADS[0] else [out.depths, out.decoder_depths]:
        assert always < float(depths[depths > 0].double().mean()) < model.config.num_hidden_layers
    model.eval()
    model.calibrate(**data)
    with torch.no_grad():
        # between two levels, so that none is a token's own score
        whole = model(**data, capacity=0.47)
        for b in range(3):
            alone = {name: value[b : b + 1] for name, value in data.items()}
            n = int(data["attention_mask"][b].sum())
            alone |= {name: alone[name][:, :n] for name in ("input_ids", "attention_mask")}
            close(model(**alone, capacity=0.47).logits, whole.logits[b : b + 1])
        dense = model(**data, selection="dense").logits
        model.config.scale = "none"
        if model.config.skipped == "identity":
            close(model(**data, capacity=1.0).logits, dense)
        assert float((dense - whole.logits).abs().max()) > 1e-3


def sides(head):
    """Three sources of 8, 5 and 3 tokens, and labels."""
    mask = torch.zeros(3, 8, dtype=torch.long)
    for b, n in enumerate((8, 5, 3)):
        mask[b, :n] = 1
    labels = torch.tensor([0, 1, 1]) if head == HEADS[0] else tokens(3, 6, seed=11)
    return {"input_ids": tokens(3, 8, seed=9) * mask, "attention_mask": mask, "labels": labels}
