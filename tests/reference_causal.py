"""Slow, obvious references of the looped language model, written from the equations in the docstrings.

    masked(model, ...)     every token at every loop, selected with torch.where; differentiable, with the losses
    by_token(model, ...)   tokens one after the other, each when those before it are finished; heads, keys, experts
                           one by one: what incremental decoding is, by definition

Then the models and batches that tests/test_causal.py holds against them.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from reference import (
    activate,
    expert_of,
    feed_forward,
    gates_of,
    masked_feed_forward,
    mim,
    normalise,
    route,
    switch,
)
from torch import Tensor

from tenuto.models import LoopedConfig, LoopedForCausalLM

MASS = ("stick_breaking", "act", "depth_router", "pondernet")  # policies that spend a mass of 1
MIXES = ("stick_breaking", "act", "depth_router")


@dataclass
class Answer:
    """What a reference gives; grids [B, T, ...], zeros at pads. closest: least |value - threshold| of a decision."""

    logits: Tensor
    depths: Tensor
    expected: Tensor
    losses: dict = field(default_factory=dict)
    loss: Tensor | None = None
    closest: float = 1.0


# mechanisms, on one token [..., d] or a grid of them


def angles(config, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., D/2] of positions; in float32 as transformers does it, whatever the model."""
    D = config.head_dim
    rates = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, D, 2).float() / D)
    angle = positions[..., None].float() * rates
    return angle.cos(), angle.sin()


def rope(config, x: Tensor, positions: Tensor) -> Tensor:
    """[..., H, D] turned by their positions [...]: pairs (i, i + D/2)."""
    if config.positions == "none":
        return x
    cos, sin = (part.to(x.dtype)[..., None, :] for part in angles(config, positions))
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def keys_of(config, block, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value [..., Hkv, D] of layer inputs."""
    attention, source = block.attention, normalise(block.attention_branch.before, x)
    shape = (config.num_key_value_heads, config.head_dim)
    key = (source @ attention.key.weight.T).unflatten(-1, shape)
    return rope(config, key, positions), (source @ attention.value.weight.T).unflatten(-1, shape)


def inject(config, injection, h: Tensor, e: Tensor) -> Tensor:
    """The line `inject` of looped.py."""
    kind = config.input_injection
    if kind == "add":
        return h + e
    if kind == "concat":
        d = h.shape[-1]
        return h @ injection.linear.weight[:, :d].T + e @ injection.linear.weight[:, d:].T
    if kind == "decay":
        # exp(-softplus(w)) = 1 / (1 + exp w)
        return h / (1 + injection.rate.exp()) + injection.gain * e
    return h


def halt_probability(policy, h: Tensor) -> Tensor:
    """â: softmax over (go on, halt + bias)."""
    hidden = activate("gelu", h @ policy.hidden.weight.T + policy.hidden.bias, None)
    logits = hidden @ policy.out.weight.T
    return 1 / (1 + torch.exp(logits[..., 0] - logits[..., 1] - policy.bias))


def exit_logit(policy, h: Tensor, step: int) -> Tensor:
    """The exit head's logit of "stop after `step`", on the detached, normed state."""
    h = h.detach()
    h = h / (h.pow(2).mean(-1, keepdim=True) + torch.finfo(h.dtype).eps).sqrt()
    hidden = activate("gelu", h @ policy.hidden.weight.T + policy.hidden.bias, None)
    return hidden @ policy.out.weight[min(step, len(policy.out.weight)) - 1] + policy.bias


def router_plan(policy, h_0: Tensor) -> Tensor:
    """The depth router's distribution [..., L] over loops."""
    hidden = activate("gelu", h_0 @ policy.hidden.weight.T + policy.hidden.bias, None)
    logits = hidden @ policy.out.weight.T
    shift = torch.zeros(logits.shape[-1], dtype=logits.dtype)
    shift[-1] = -policy.bias
    return (logits + shift).exp() / (logits + shift).exp().sum(-1, keepdim=True)


def mass_of(model, history: list[Tensor], spent: Tensor) -> Tensor:
    """What is spent on h_l, the last of h_0..h_l, when the token is asked after it."""
    policy, step = model.stack.policy, len(history) - 1
    kind = model.config.policy
    if kind == "depth_router":
        plan = router_plan(policy, history[0])
        return plan[..., :step].sum(-1) - spent
    a = halt_probability(policy, history[-1])
    return torch.minimum(a, 1 - spent) if kind == "act" else a * (1 - spent)


def confidence(model, history: list[Tensor]) -> Tensor:
    """What exit_head and the convergence rules hold against the threshold, after h_l, the last of h_0..h_l."""
    kind, step, h = model.config.policy, len(history) - 1, history[-1]
    if kind == "exit_head":
        return torch.sigmoid(exit_logit(model.stack.policy, h, step))

    def size(x):
        return x.pow(2).sum(-1).sqrt()

    def predicted(x):
        return (normalise(model.stack.final_norm, x) @ model.lm_head.weight.T).softmax(-1)

    def agreement(step):
        # of the last two changes; nothing to compare before there are two
        if step < 2:
            return torch.zeros_like(h[..., 0])
        now, before = history[step] - history[step - 1], history[step - 1] - history[step - 2]
        return (1 - size(now - before) / size(now)).clamp(0, 1)

    if kind == "latent":
        return (1 - size(h - history[-2]) / size(h)).clamp(0, 1)
    if kind == "second_difference":
        return torch.minimum(agreement(step), agreement(step - 1))
    if kind == "margin":
        best = predicted(h).sort(-1, descending=True).values
        return best[..., 0] - best[..., 1]
    if step < 2:
        return torch.zeros_like(h[..., 0])
    p, q = predicted(h), predicted(history[-2])
    return torch.exp(-(p * (p / q).log()).sum(-1))


def knobs_of(config, threshold, min_steps, max_steps):
    max_steps = config.num_loops if max_steps is None else max_steps
    min_steps = min(config.min_steps, max_steps) if min_steps is None else min_steps
    return config.halt_threshold if threshold is None else threshold, min_steps, max_steps


# the masked form


def masked_layer(config, block, x, keys, values, visible, positions):
    """[B, T, d] through one layer over keys and values [B, T, Hkv, D]; also probabilities and gates by part."""
    H, D, attention = config.num_attention_heads, config.head_dim, block.attention
    group = H // config.num_key_value_heads
    branch = block.attention_branch
    source = normalise(branch.before, x)
    p, gates = gates_of(attention.router, source)
    notes = {"attention": (p, gates)}
    y = torch.zeros_like(x)
    for e in range(config.attention_experts):
        q = rope(config, (source @ attention.query.weight[e]).unflatten(-1, (H, D)), positions)
        heads = []
        for h in range(H):
            scores = q[:, :, h] @ keys[:, :, h // group].transpose(1, 2) / math.sqrt(D)
            weights = torch.where(visible, scores, scores.new_tensor(-1e30)).softmax(-1)
            heads.append(weights @ values[:, :, h // group])
        y = y + gates[..., e, None] * (torch.cat(heads, -1) @ attention.output.weight[e])
    x = normalise(branch.after, x + normalise(branch.inner, y))
    branch = block.feed_forward_branch
    y, p, gates = masked_feed_forward(block.feed_forward, normalise(branch.before, x), config.activation)
    notes["feed_forward"] = (p, gates)
    return normalise(branch.after, x + normalise(branch.inner, y)), notes


def masked(
    model, input_ids, attention_mask=None, labels=None, position_ids=None, threshold=None, min_steps=None,
    max_steps=None, loss_weights=None,
) -> Answer:  # fmt: skip
    """The whole model; `model.training` says whether policies that train at full depth do so, and which losses."""
    config, stack, (B, T) = model.config, model.stack, input_ids.shape
    kind, training = config.policy, model.training
    threshold, min_steps, max_steps = knobs_of(config, threshold, min_steps, max_steps)
    mask = torch.ones(B, T, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    positions = (mask.long().cumsum(1) - 1).clamp(min=0) if position_ids is None else position_ids
    visible = mask[:, None, :] & torch.ones(T, T, dtype=torch.bool).tril()
    # a document begins where positions do not go on
    document = torch.zeros(B, T, dtype=torch.long)
    if position_ids is not None:
        document[:, 1:] = (positions[:, 1:] != positions[:, :-1] + 1).cumsum(1)
    visible = visible & (document[:, :, None] == document[:, None, :])
    threshold = torch.as_tensor(threshold, dtype=torch.float64).expand(B)[:, None]
    asks, skips = kind != "fixed", not training or kind in MIXES
    keep = max_steps if config.backprop_loops is None or not training else config.backprop_loops
    records, closest = {}, 1.0

    def layer(block, name, x, kv, weights, live, detached=False):
        new = keys_of(config, block, x, positions)
        if kv is not None:
            new = [torch.where(live[..., None, None], one, old) for one, old in zip(new, kv, strict=True)]
        if detached:
            new = [one.detach() for one in new]
        x, notes = masked_layer(config, block, x, *new, visible, positions)
        for part, (p, gates) in notes.items():
            if p is not None and name is not None:
                probs = p[live].detach() if detached else p[live]
                chosen = [row.nonzero().squeeze(1).tolist() for row in gates[live]]
                records.setdefault(f"{name}.{part}", []).append((weights[live].detach(), probs, chosen))
        return x, new

    def read(x, name=None):
        for i, block in enumerate(stack.coda):
            x, _ = layer(block, name and f"{name}.{i}", x, None, ones, mask)
        return normalise(stack.final_norm, x)

    x = model.embed_tokens.weight[input_ids]
    x = x * math.sqrt(config.hidden_size) if config.scale_embeddings else x
    ones = torch.ones_like(x[..., 0])
    for i, block in enumerate(stack.prelude):
        x, _ = layer(block, f"prelude.{i}", x, None, ones, mask)
    e = h = s = x
    history, asked = [x], []
    kv = [None] * config.num_core_layers
    live = mask.clone()
    spent, depth, mix = torch.zeros_like(ones), torch.zeros_like(ones), torch.zeros_like(x)
    depths = torch.zeros(B, T, dtype=torch.long)
    for step in range(1, max_steps + 1):
        if asks and step > max(min_steps, 1):
            if kind in MASS:
                a = mass_of(model, history, spent)
                value = spent + a
            else:
                a = torch.zeros_like(spent)
                value = confidence(model, history)
            stop = (value >= threshold) & (threshold < 1)
            if skips:
                # at 0 and 1 there is nothing to decide
                open_to = live & (threshold > 0) & (threshold < 1)
                if open_to.any():
                    closest = min(closest, float((value - threshold).detach().abs()[open_to].min()))
                live = live & ~stop
            else:
                asked.append(a if kind == "pondernet" else exit_logit(stack.policy, history[-1], step - 1)
                             if kind == "exit_head" else a)  # fmt: skip
            depth = torch.where(live, depth + a * (step - 1), depth)
            mix = torch.where(live[..., None], mix + a[..., None] * history[-1], mix)
            spent = torch.where(live, spent + a, spent)
        # experts are balanced over what a row's step weighs in the end
        left = 1 - spent if kind in MIXES else torch.ones_like(spent)
        detached = step <= max_steps - keep
        z = inject(config, stack.injection, h, e) if step > 1 else h
        for i, block in enumerate(stack.core):
            z, kv[i] = layer(block, f"core.{i}", z, kv[i], left, live, detached)
        if config.loop_scale:
            z = h + stack.scale[min(step, len(stack.scale)) - 1] * (z - h)
        h = torch.where(live[..., None], z, h)
        h = h.detach() if detached else h
        history.append(h)
        now = mix + (1 - spent)[..., None] * h if kind in MIXES else h
        s = torch.where(live[..., None], now, s)
        depths = torch.where(live, torch.full_like(depths, step), depths)
    if kind == "act":
        expected = depths + (1 - spent)
    elif kind in MASS:
        expected = depth + (1 - spent) * depths
    else:
        expected = depths.to(x.dtype)
    expected = torch.where(mask, expected, torch.zeros_like(expected))
    hidden = torch.where(mask[..., None], read(s, "coda"), torch.zeros_like(s))
    logits = hidden @ model.lm_head.weight.T
    answer = Answer(logits, depths, expected, closest=closest)
    if labels is None:
        return answer

    targets = torch.full_like(labels, -100)
    targets[:, :-1] = labels[:, 1:]
    real = (targets != -100) & mask  # a pad predicts nothing
    count = int(real.sum())

    def loss_of(some_logits):
        picked = some_logits.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
        return torch.where(real, some_logits.logsumexp(-1) - picked, torch.zeros_like(picked))

    losses = {}
    if kind in MIXES:
        losses["task"] = loss_of(logits).sum() / count
        mean = sum(expected[b, t] for b in range(B) for t in range(T) if mask[b, t]) / int(mask.sum())
        over = mean if config.depth_budget is None else mean - config.depth_budget
        losses["act"] = over if config.depth_budget is None or over > 0 else over * 0
    elif not training:
        losses["task"] = loss_of(logits).sum() / count
    else:
        every = [loss_of(read(one) @ model.lm_head.weight.T) for one in history[1:]]
        if kind == "pondernet":
            nothing = [torch.zeros_like(ones)] * (max_steps - 1 - len(asked))
            p = [*nothing, *asked, 1 - sum(asked, torch.zeros_like(ones))]
            losses["task"] = sum((w * one).sum() for w, one in zip(p, every, strict=True)) / count
            rate = config.ponder_prior
            prior = [1.0] * max_steps if rate is None else [rate * (1 - rate) ** i for i in range(max_steps)]
            prior = [one / sum(prior) for one in prior]
            kl = sum(w * (w.clamp(min=1e-300) / q).log() for w, q in zip(p, prior, strict=True))
            losses["ponder"] = kl[mask].mean()
        elif config.objective == "all":
            losses["task"] = sum(one.sum() for one in every) / max_steps / count
        else:
            losses["task"] = every[-1].sum() / count
        if kind == "exit_head" and asked:
            terms = []
            for step, logit in zip(range(max_steps - len(asked), max_steps), asked, strict=True):
                for b, t in real.nonzero().tolist():
                    now, later = (float(one[b, t].detach()) for one in (every[step - 1], every[step]))
                    if config.exit_labels == "best_deeper":
                        later = min(float(one[b, t].detach()) for one in every[step:])
                    answer.closest = min(answer.closest, abs(later - now + config.exit_margin))
                    right = later >= now - config.exit_margin
                    q = torch.sigmoid(logit[b, t])
                    terms.append(-(q if right else 1 - q).log())
            losses["exit"] = sum(terms) / len(terms)
    if training and records:
        statistic = config.balance_loss
        losses[statistic] = 0
        for notes in records.values():
            weights, probs = (torch.cat([note[i] for note in notes]) for i in (0, 1))
            chosen = [one for note in notes for one in note[2]]
            losses[statistic] = losses[statistic] + (
                mim(weights, probs) if statistic == "mim" else switch(weights, probs, chosen)
            )
    weights = {
        "task": 1.0, "act": config.act_weight, "ponder": config.ponder_weight, "exit": config.exit_weight,
        config.balance_loss: config.balance_weight, **(loss_weights or {}),
    }  # fmt: skip
    answer.losses, answer.loss = losses, sum(weights[name] * one for name, one in losses.items())
    return answer


# the token-by-token form


def token_layer(config, block, x, position, keys, values):
    """One token through one layer; keys and values [Hkv, D] of the tokens it may read, itself included."""
    H, D, attention = config.num_attention_heads, config.head_dim, block.attention
    group = H // config.num_key_value_heads
    branch = block.attention_branch
    source = normalise(branch.before, x)
    y = torch.zeros_like(x)
    for e, gate in route(attention.router, source)[1].items():
        q = rope(config, expert_of(attention.query, source, e).view(H, D), position)
        heads = []
        for h in range(H):
            scores = torch.stack([torch.dot(q[h], key[h // group]) for key in keys]) / math.sqrt(D)
            weights = scores.exp() / scores.exp().sum()
            heads.append(sum(w * value[h // group] for w, value in zip(weights, values, strict=True)))
        y = y + gate * expert_of(attention.output, torch.cat(heads), e)
    x = normalise(branch.after, x + normalise(branch.inner, y))
    branch = block.feed_forward_branch
    y, _, _ = feed_forward(block.feed_forward, normalise(branch.before, x), config.activation)
    return normalise(branch.after, x + normalise(branch.inner, y))


@torch.no_grad()
def by_token(
    model, input_ids, attention_mask=None, threshold=None, min_steps=None, max_steps=None, calls=None, **_
) -> Answer:
    """The whole model at inference, one sequence, one token, one loop after the other.

    A token at loop l reads of an earlier one the keys and values of that one's loop l, or of its last if it stopped
    before. With cache_slots="last" it reads the last loop's of every token of an earlier call. `calls` [(tokens,
    knobs), ...] says which tokens of each sequence come in one call, and under which knobs.
    """
    config, stack, (B, T) = model.config, model.stack, input_ids.shape
    kind, V = config.policy, config.vocab_size
    calls = calls or [(T, {"threshold": threshold, "min_steps": min_steps, "max_steps": max_steps})]
    schedule = [(which, knobs) for which, (count, knobs) in enumerate(calls) for _ in range(count)]
    mask = torch.ones(B, T) if attention_mask is None else attention_mask
    logits = torch.zeros(B, T, V, dtype=model.dtype)
    depths, expected = torch.zeros(B, T, dtype=torch.long), torch.zeros(B, T, dtype=model.dtype)
    closest = 1.0
    for b in range(B):
        outer = {name: [[] for _ in getattr(stack, name)] for name in ("prelude", "coda")}
        core: list[list[list]] = [[] for _ in stack.core]  # layer, token, loop
        call = []  # which call a token came in
        for rank, t in enumerate([t for t in range(T) if mask[b, t]]):
            position = torch.tensor(rank)
            which, knobs = schedule[rank]
            call.append(which)
            limit, low, high = knobs_of(
                config, *(knobs.get(k) for k in ("threshold", "min_steps", "max_steps"))
            )
            limit = float(limit[b]) if torch.is_tensor(limit) else limit

            def once(name, x, position=position, outer=outer):
                for block, seen in zip(getattr(stack, name), outer[name], strict=True):
                    seen.append(keys_of(config, block, x, position))
                    x = token_layer(config, block, x, position, *zip(*seen, strict=True))
                return x

            def shown(layer, step, core=core, call=call):
                for j, loops in enumerate(core[layer]):
                    last = config.cache_slots == "last" and call[j] != call[-1]
                    yield loops[-1] if last or step > len(loops) else loops[step - 1]

            x = model.embed_tokens.weight[input_ids[b, t]]
            x = x * math.sqrt(config.hidden_size) if config.scale_embeddings else x
            h_0 = h = once("prelude", x)
            for layer in core:
                layer.append([])
            history, masses, ran = [h_0], [], 0
            spent = torch.zeros((), dtype=model.dtype)
            for step in range(1, high + 1):
                if kind != "fixed" and step > max(low, 1):
                    a = mass_of(model, history, spent) if kind in MASS else None
                    value = float(spent + a) if kind in MASS else float(confidence(model, history))
                    closest = min(closest, abs(value - limit)) if 0 < limit < 1 else closest
                    if limit < 1 and value >= limit:
                        break
                    if kind in MASS:
                        masses.append((step - 1, a))
                        spent = spent + a
                z = inject(config, stack.injection, h, h_0) if step > 1 else h
                for layer, block in enumerate(stack.core):
                    core[layer][-1].append(keys_of(config, block, z, position))
                    z = token_layer(config, block, z, position, *zip(*shown(layer, step), strict=True))
                if config.loop_scale:
                    z = h + stack.scale[min(step, len(stack.scale)) - 1] * (z - h)
                h, ran = z, step
                history.append(h)
            s = h
            if kind in MIXES:
                s = sum((a * history[after] for after, a in masses), (1 - spent) * h)
            mean = sum((a * after for after, a in masses), (1 - spent) * ran) if kind in MASS else ran
            expected[b, t] = ran + (1 - spent) if kind == "act" else mean
            depths[b, t] = ran
            logits[b, t] = normalise(stack.final_norm, once("coda", s)) @ model.lm_head.weight.T
    return Answer(logits, depths, expected, closest=closest)


# models and batches to hold against them

SMALL = {
    "vocab_size": 32, "hidden_size": 16, "head_dim": 4, "num_attention_heads": 4, "intermediate_size": 12,
    "num_loops": 4, "max_position_embeddings": 64,
}  # fmt: skip
GQA = {"num_key_value_heads": 2}
FFN = {"ffn_experts": 4, "ffn_experts_per_token": 2, "balance_weight": 0.1}
MOE = {**FFN, "attention_experts": 3, "attention_experts_per_token": 2, "num_attention_heads": 2}
CASES = {
    "fixed": {},
    "fixed-all": {
        **GQA, "num_prelude_layers": 0, "num_core_layers": 2, "num_coda_layers": 0, "input_injection": "none",
        "norm_placement": "pre", "norm": "layernorm", "activation": "gelu", "tie_word_embeddings": False,
        "objective": "all",
    },
    "fixed-sampled": {
        **FFN, "input_injection": "decay", "loop_scale": True, "objective": "sampled", "num_prelude_layers": 2,
    },
    "stick": {
        **GQA, "policy": "stick_breaking", "num_core_layers": 2, "act_weight": 0.05, "halt_threshold": 0.8,
    },
    "stick-moe": {
        **MOE, "policy": "stick_breaking", "input_injection": "concat", "act_weight": 0.05, "depth_budget": 1.0,
        "halt_threshold": 0.8,
    },
    "stick-deep": {
        "policy": "stick_breaking", "num_prelude_layers": 2, "num_core_layers": 2, "num_coda_layers": 2,
        "input_injection": "decay", "loop_scale": True, "norm_placement": "pre", "min_steps": 2, "num_loops": 5,
        "halt_threshold": 0.8,
    },
    "act": {
        "policy": "act", "input_injection": "none", "norm_placement": "pre", "act_weight": 0.05,
        "halt_threshold": 0.9, "tie_word_embeddings": False,
    },
    "act-budget": {
        **GQA, "policy": "act", "input_injection": "concat", "loop_scale": True, "norm_placement": "post",
        "positions": "none", "depth_budget": 1.5, "act_weight": 0.05, "halt_threshold": 0.9,
        "scale_embeddings": False,
    },
    "router": {
        "policy": "depth_router", "num_core_layers": 2, "num_coda_layers": 0, "act_weight": 0.05,
        "halt_threshold": 0.6, "halt_bias": 0.0,
    },
    "router-moe": {
        **FFN, **GQA, "policy": "depth_router", "input_injection": "decay", "balance_loss": "switch",
        "router": "linear", "halt_threshold": 0.6, "halt_bias": -1.0, "num_prelude_layers": 0,
    },
    "ponder": {"policy": "pondernet", "halt_threshold": 0.5, "num_core_layers": 2},
    "ponder-uniform": {
        **FFN, "policy": "pondernet", "halt_threshold": 0.5, "ponder_prior": None, "input_injection": "concat",
        "num_prelude_layers": 0, "num_coda_layers": 2, "min_steps": 2, "num_loops": 5,
    },
    "exit": {"policy": "exit_head", "halt_threshold": 0.3, "objective": "all", "input_injection": "decay"},
    "exit-next": {
        **GQA, "policy": "exit_head", "halt_threshold": 0.3, "exit_labels": "next", "exit_margin": 0.05,
        "num_core_layers": 2, "num_coda_layers": 0, "input_injection": "none", "norm_placement": "pre",
    },
    "exit-sampled": {"policy": "exit_head", "halt_threshold": 0.3, "objective": "sampled", "exit_weight": 0.5},
    "latent": {"policy": "latent", "halt_threshold": 0.4, "input_injection": "decay", "objective": "all"},
    "second": {
        "policy": "second_difference", "halt_threshold": 0.1, "num_loops": 6, "norm_placement": "pre",
        "num_core_layers": 2, **GQA,
    },
    "kl": {"policy": "kl", "halt_threshold": 0.97, "num_coda_layers": 0},
    "margin": {
        **MOE, **GQA, "policy": "margin", "halt_threshold": 0.3, "num_coda_layers": 0, "input_injection": "concat",
        "norm_placement": "pre", "balance_weight": 0.0,
    },
}  # fmt: skip
HALTING = [case for case, fields in CASES.items() if "policy" in fields]
LENGTHS = (7, 4, 2)


def make(case: str, seed: int = 0, dtype=torch.float64, **overrides) -> LoopedForCausalLM:
    """A model of a case, every weight away from its initial value, the halting nets' above all."""
    torch.manual_seed(seed)
    model = LoopedForCausalLM(LoopedConfig(**{**SMALL, **CASES[case], **overrides}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.add_(torch.randn_like(weight) * (1.0 if "policy.out" in name else 0.2))
    return model.to(dtype)


def batch(side: str = "right", longer: int = 0) -> dict:
    """Three sequences of 7, 4 and 2 tokens, padded on a side, and labels with a hole in them."""
    generator = torch.Generator().manual_seed(11)
    T = max(LENGTHS) + longer
    ids, mask = torch.zeros(3, T, dtype=torch.long), torch.zeros(3, T, dtype=torch.long)
    labels = torch.full((3, T), -100)
    for b, n in enumerate(LENGTHS):
        where = slice(0, n) if side == "right" else slice(T - n, T)
        ids[b, where] = torch.randint(3, 32, (n,), generator=generator)
        labels[b, where] = ids[b, where]
        mask[b, where] = 1
    labels[0][mask[0].nonzero()[3]] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@lru_cache
def settled(case: str) -> int:
    """A seed whose decisions stay 1e-3 clear of the threshold, in training too, and whose depths differ."""
    if case not in HALTING:
        return 0
    data = batch()
    for seed in range(300):
        model = make(case, seed)
        with torch.no_grad():
            answer = masked(model.eval(), **data)
            if answer.closest < 1e-3 or len(answer.depths[answer.depths > 0].unique()) < 3:
                continue
            if masked(model.train(), **data).closest > 1e-3:
                return seed
    raise AssertionError(f"no seed gives {case} a spread of depths")
