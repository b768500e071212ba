"""A slow, obvious reference of the models whose layers some tokens go around, written from the papers' equations.

One token at a time, in plain Python; each reads the tokens it may read, one by one. It never sees a pad, a grid, an
index or another sequence. Differentiable, with every term of the loss. Then the models and batches that
tests/test_routed.py holds against it.
"""

import math
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from reference import activate, feed_forward, normalise
from reference_causal import keys_of, rope
from torch import Tensor

from tenuto.models.routing import CAPACITIES
from tenuto.presets import build, preset


@dataclass(frozen=True)
class Token:
    """Token number `order` of sequence `b`, at column `t`; `rank` counts from the start of its document."""

    b: int
    t: int
    order: int
    rank: int
    document: int
    place: int  # rotary position

    def sees(self, other: "Token") -> bool:
        """Whether `other` may be read: of the same document, and not later."""
        return (self.b, self.document) == (other.b, other.document) and other.order <= self.order


@dataclass
class Answer:
    """Grids [B, T, ...], zeros at pads. scores: by layer, what each token was chosen by. closest: least distance of a
    decision from turning out otherwise. signs: by name, as the model reports them."""

    logits: Tensor
    executed: Tensor
    scores: dict = field(default_factory=dict)
    losses: dict = field(default_factory=dict)
    loss: Tensor | None = None
    closest: float = 1.0


def tokens_of(mask: Tensor, position_ids: Tensor | None) -> list[list[Token]]:
    """Each sequence's tokens; another document begins where positions do not go on."""
    sequences = []
    for b, row in enumerate(mask):
        some, rank, document = [], 0, 0
        for order, t in enumerate([t for t in range(len(row)) if row[t]]):
            place = order if position_ids is None else int(position_ids[b, t])
            if some and place != some[-1].place + 1:
                rank, document = 0, document + 1
            some.append(Token(b, t, order, rank, document, place))
            rank += 1
        sequences.append(some)
    return sequences


# mechanisms, on one token


def run_block(config, block, states: dict[Token, Tensor], members: list[Token]) -> dict[Token, Tensor]:
    """The block on some tokens, which read each other and nobody else."""
    kv = {one: keys_of(config, block, states[one], torch.tensor(one.place)) for one in members}
    out = {}
    for one in members:
        keys, values = zip(*(kv[other] for other in members if one.sees(other)), strict=True)
        out[one] = one_layer(config, block, states[one], one, torch.stack(keys), torch.stack(values))
    return out


def one_layer(config, block, x: Tensor, one: Token, keys: Tensor, values: Tensor) -> Tensor:
    """A token through a layer; keys and values [K, Hkv, D] of the tokens it reads."""
    H, D, branch = config.num_attention_heads, config.head_dim, block.attention_branch
    group, heads = H // config.num_key_value_heads, []
    q = normalise(branch.before, x) @ block.attention.query.weight[0]
    q = rope(config, q.view(H, D), torch.tensor(one.place))
    for h in range(H):
        weights = (keys[:, h // group] @ q[h] / math.sqrt(D)).softmax(0)
        heads.append(weights @ values[:, h // group])
    y = torch.cat(heads) @ block.attention.output.weight[0]
    x = normalise(branch.after, x + normalise(branch.inner, y))
    branch = block.feed_forward_branch
    y, _, _ = feed_forward(block.feed_forward, normalise(branch.before, x), config.activation)
    return normalise(branch.after, x + normalise(branch.inner, y))


def foresee(net, x: Tensor) -> Tensor:
    """W2 (SiLU(W1 n) * W3 n), n = norm(x)."""
    n = normalise(net.norm, x)
    return net.down.weight @ activate("swiglu", net.up.weight @ n, net.gate.weight @ n)


def mean_square(x: Tensor) -> Tensor:
    """|x|^2 / d."""
    return (x * x).sum() / len(x)


def softplus(x: Tensor) -> Tensor:
    return torch.log(1 + torch.exp(x))


def before(one: Token, sequence: list[Token]) -> Token | None:
    """The token before, of the same document."""
    return next((other for other in sequence if other.order == one.order - 1 and one.sees(other)), None)


def window(one: Token, sequence: list[Token], size: int) -> list[Token]:
    """The last `size` tokens of the document, this one included."""
    return [other for other in sequence if one.sees(other) and other.rank > one.rank - size]


def surprise(config, room, sequences, x, residual, foreseen) -> dict[Token, Tensor]:
    """g of every token: D_st and D_ch, CE and CU, S_CE and S_CU."""
    change, error = {}, {}
    for one in residual:
        scale = mean_square(x[one].detach()) + 1e-6 if config.normalise_surprise else 1.0
        change[one] = mean_square(residual[one]) / scale
        error[one] = mean_square(residual[one] - foreseen[one]) / scale
    if config.inverse_temperature == "learned":
        b_ce, b_cu = softplus(room.expected_beta), softplus(room.unexpected_beta)
    else:
        b_ce = b_cu = room.temperature
    gates = {}
    for sequence in sequences:
        for one in sequence:
            seen = window(one, sequence, config.surprise_window)
            average = sum(change[other].detach() for other in seen) / len(seen)
            ce = change[one] - (error[one] - torch.log(softplus(room.offset) + 1e-10))
            cu = change[one] - room.multiplier * average
            s_ce, s_cu = 1 / (1 + torch.exp(-b_ce * ce)), 1 / (1 + torch.exp(-b_cu * cu))
            both = 1 - (1 - s_ce) * (1 - s_cu)
            gates[one] = {"both": both, "expected": s_ce, "unexpected": s_cu}[config.surprise_terms]
    return gates


def calibrated(levels: Tensor, capacity: float) -> float:
    """A level between the two calibrated ones on either side."""
    if capacity <= 0 or capacity >= 1:
        return math.inf if capacity <= 0 else -math.inf
    above = next(number for number, known in enumerate(CAPACITIES) if known >= capacity - 1e-9)
    low, high = CAPACITIES[above - 1], CAPACITIES[above]
    part = (capacity - low) / (high - low)
    return float(levels[above - 1]) * (1 - part) + float(levels[above]) * part


# choosing: who of a sequence gets the layer, and how close a call it was


def choose(kind, config, sequence, scores, capacity, level) -> tuple[set[Token], float]:
    """By Top-K, the level, or the rank among the document's last scores; the protected ones besides."""
    shielded = {one for one in sequence if one.rank < config.protected_tokens}
    scores = {one: float(scores[one].detach()) for one in sequence}
    if kind == "topk":
        k = max(1, math.floor(capacity * len(sequence) + 1e-9))
        order = sorted(sequence, key=lambda one: (one not in shielded, -scores[one], one.order))
        margin = 1.0
        if len(shielded) < k < len(order):
            margin = scores[order[k - 1]] - scores[order[k]]
        return set(order[:k]) | shielded, margin
    if kind == "threshold":
        chosen = {one for one in sequence if scores[one] >= level}
        return chosen | shielded, min(abs(scores[one] - level) for one in sequence)
    chosen, margin = set(), 1.0
    for one in sequence:
        seen = window(one, sequence, config.score_window)
        larger = sum(scores[other] > scores[one] for other in seen)
        if larger < capacity * len(seen) - 1e-9:
            chosen.add(one)
        margin = min([margin, *(abs(scores[other] - scores[one]) for other in seen if other is not one)])
    return chosen | shielded, margin


def own_share(config, layer: int, capacity: float) -> float:
    """A layer's capacity at the knob's: on the straight lines from (0, 0) over (the mean, its own) to (1, 1)."""
    if config.layer_capacities is None:
        return capacity
    own = config.layer_capacities[config.routed_layers.index(layer)]
    mean = sum(config.layer_capacities) / len(config.layer_capacities)
    (x0, y0), (x1, y1) = ((0.0, 0.0), (mean, own))
    if capacity > mean:
        (x0, y0), (x1, y1) = (x1, y1), (1.0, 1.0)
    return y0 + (y1 - y0) * (capacity - x0) / (x1 - x0)


# the whole model


def walk(
    model, input_ids, attention_mask=None, labels=None, position_ids=None, selection=None, capacity=None,
    threshold=None, loss_weights=None, calls=None, **_,
) -> Answer:  # fmt: skip
    """`model.training` says whether it is training's algorithm or inference's. selection, capacity and threshold as in
    a call, numbers or one for each sequence. calls: by token order, selection and capacity of the call it came in."""
    config, stack, (B, T) = model.config, model.stack, input_ids.shape
    kind_of_model, training = config.model_type.removeprefix("tenuto_"), model.training
    mask = torch.ones(B, T) if attention_mask is None else attention_mask
    sequences = tokens_of(mask, position_ids)
    everyone = [one for sequence in sequences for one in sequence]
    rule = selection or ("topk" if training else config.selection)
    if rule == "topk" and training and getattr(config, "stt_capacity", "") == "variable":
        rule = "gate"
    capacity = config.capacity if capacity is None else capacity
    shares, limits = ([float(v) for v in torch.as_tensor(value or 0.0, dtype=torch.float64).expand(B)]
                      if not torch.is_tensor(value) else value.tolist() for value in (capacity, threshold))  # fmt: skip

    x = {one: model.embed_tokens.weight[input_ids[one.b, one.t]] for one in everyone}
    answer, terms, ran, last = Answer(None, None), {}, {one: [] for one in everyone}, None
    for layer, block in enumerate(stack.blocks):
        y = run_block(config, block, x, everyone) if str(layer) not in stack.routers else None
        if y is not None or rule == "dense":
            y = y or run_block(config, block, x, everyone)
            for one in everyone:
                ran[one].append(True)
            last, x = (x, y), y
            continue
        router = stack.routers[str(layer)]

        # what each token is chosen by (Top-K; every other rule), its gate, and the logits of what learns the choice
        gate, taught, dense = None, None, None
        if kind_of_model == "mod":
            logit = {one: (router.router.weight @ x[one])[0] for one in everyone}
            gate, taught = {one: torch.sigmoid(r) for one, r in logit.items()}, logit
            if config.causal_router == "predictor":
                first, _, second = router.predictor
                taught = {}
                for one in everyone:
                    hidden = activate("gelu", first.weight @ x[one].detach() + first.bias, None)
                    taught[one] = (second.weight @ hidden + second.bias)[0]
            best, causal = gate, {one: torch.sigmoid(r) for one, r in taught.items()}
        elif kind_of_model == "sdt":
            residual = {one: last[1][one] - last[0][one] for one in everyone}
            foreseen = {one: foresee(router.prior, last[0][one]) for one in everyone}
            gate = surprise(config, router.surprise, sequences, last[0], residual, foreseen)
            best = causal = gate
            if config.score == "change":
                size = {one: mean_square(residual[one]) for one in everyone}
                best = causal = {one: size[one] / (1 + size[one]) for one in everyone}
            elif config.score == "random":
                best = causal = dict(zip(everyone, torch.rand(len(everyone)), strict=True))
            if training:
                wrong = [mean_square(residual[one].detach() - foreseen[one]) for one in everyone]
                terms.setdefault("prior", []).append(sum(wrong) / len(wrong))
        else:
            taught, nothing = {}, torch.zeros(config.hidden_size, dtype=model.dtype)
            for sequence in sequences:
                for one in sequence:
                    earlier = before(one, sequence)
                    pair = [x[one], nothing if earlier is None else x[earlier]]
                    read = torch.cat([normalise(router.norm, half.detach()) if half is not nothing else half
                                      for half in pair])  # fmt: skip
                    for net in router.student:
                        read = (
                            read * torch.sigmoid(read)
                            if isinstance(net, torch.nn.SiLU)
                            else net.weight @ read
                        )
                    taught[one] = read[0]
            best = causal = {one: torch.sigmoid(r) for one, r in taught.items()}
            if training or rule == "topk":
                dense = run_block(config, block, x, everyone)
                residual, foreseen = {}, {}
                for sequence in sequences:
                    for one in sequence:
                        earlier = before(one, sequence)
                        residual[one] = dense[one] - x[one]
                        foreseen[one] = foresee(
                            router.transition, nothing if earlier is None else dense[earlier]
                        )
                best = surprise(config, router.surprise, sequences, x, residual, foreseen)
                gate = best if training else None
            if training:
                wrong = [mean_square(residual[one].detach() - foreseen[one]) for one in everyone]
                terms.setdefault("prior", []).append(sum(wrong) / len(wrong))
                terms.setdefault("gate", []).append(sum(gate.values()) / len(gate))

        chosen: set[Token] = set()
        for b, sequence in enumerate(sequences):
            if rule == "gate":
                values = {one: float(best[one].detach()) for one in sequence}
                picked = {one for one in sequence
                          if values[one] >= config.gate_threshold or one.rank < config.protected_tokens}  # fmt: skip
                margin = min(abs(value - config.gate_threshold) for value in values.values())
            elif calls is None:
                level = limits[b] if threshold is not None else calibrated(router.levels, shares[b])
                scores = best if rule == "topk" else causal
                own = own_share(config, layer, shares[b])
                picked, margin = choose(rule, config, sequence, scores, own, level)
            else:
                picked, margin = set(), 1.0
                for one in sequence:
                    kind, share = calls[one.order]
                    if kind == "dense":
                        picked.add(one)
                        continue
                    own, level = own_share(config, layer, share), calibrated(router.levels, share)
                    who, near = choose(kind, config, sequence, causal, own, level)
                    picked, margin = picked | (who & {one}), min(margin, near)
            chosen, answer.closest = chosen | picked, min(answer.closest, margin)
        answer.scores[layer] = causal
        members = [one for one in everyone if one in chosen]
        for one in everyone:
            ran[one].append(one in chosen)

        if training and taught is not None:
            wrong = []
            for one in everyone:
                said = 1 / (1 + torch.exp(-taught[one]))
                wrong.append(-(said if one in chosen else 1 - said).log())
            terms.setdefault("router", []).append(sum(wrong) / len(wrong))

        y = dict(x)
        if kind_of_model == "stt" and training and config.trains_on == "dense":
            y = dense
        else:
            out = run_block(config, block, x, members)
            if router.forecast is not None:
                guess = {one: foresee(router.forecast, x[one]) for one in everyone}
                y = {one: x[one] + guess[one] for one in everyone}
                if training and members:
                    known, some = (out, members) if dense is None else (dense, everyone)
                    wrong = [mean_square((known[one] - x[one]).detach() - guess[one]) for one in some]
                    terms.setdefault("forecast", []).append(sum(wrong) / len(wrong))
            for one in members:
                scale = 1.0
                if calls is not None and calls[one.order][0] == "dense":
                    pass
                elif config.scale == "gate" and gate is not None:
                    scale = gate[one]
                elif config.scale == "straight" and gate is not None:
                    scale = 1 + gate[one] - float(gate[one].detach())
                elif config.scale == "student":
                    scale = causal[one]
                elif config.scale == "constant":
                    scale = 0.757
                elif config.scale == "learned":
                    scale = router.gain
                y[one] = x[one] + scale * (out[one] - x[one])
        last, x = (x, y), y

    logits = {one: model.lm_head.weight @ normalise(stack.final_norm, x[one]) for one in everyone}
    answer.logits = grid(logits, mask, config.vocab_size)
    answer.executed = torch.zeros(B, T, len(stack.blocks), dtype=torch.bool)
    for one in everyone:
        answer.executed[one.b, one.t] = torch.tensor(ran[one])
    if labels is None:
        return answer
    nats = []
    for one in everyone:
        target = int(labels[one.b, one.t + 1]) if one.t + 1 < T else -100
        if target != -100:
            nats.append(torch.logsumexp(logits[one], 0) - logits[one][target])
    answer.losses = {
        "task": sum(nats) / len(nats),
        **{name: sum(some) / len(some) for name, some in terms.items()},
    }
    weights = {
        "task": 1.0, "prior": config.prior_weight, "forecast": config.prior_weight,
        "router": config.router_weight, "gate": getattr(config, "gate_weight", 0.0), **(loss_weights or {}),
    }  # fmt: skip
    answer.loss = sum(weights[name] * value for name, value in answer.losses.items())
    return answer


def grid(values: dict[Token, Tensor], mask: Tensor, width: int) -> Tensor:
    """[B, T, width], zeros where there is no token."""
    zeros = next(iter(values.values())).new_zeros(width)
    at = {(one.b, one.t): value for one, value in values.items()}
    return torch.stack(
        [torch.stack([at.get((b, t), zeros) for t in range(mask.shape[1])]) for b in range(len(mask))]
    )


# models and batches to hold against it

CASES = {
    "mod": {},
    "mod-straight": {"scale": "straight", "capacity": 0.3, "protected_tokens": 1},
    "mod-predictor": {"causal_router": "predictor", "skipped": "forecast"},
    "mod-constant": {"scale": "constant", "capacity": 0.7, "norm": "layernorm", "activation": "gelu"},
    "mod-learned": {"scale": "learned", "tie_word_embeddings": False, "protected_tokens": 2, "capacity": 0.25},
    "mod-uneven": {"layer_capacities": [0.3, 0.5], "capacity": 0.6},
    "mod-none": {"scale": "none", "positions": "none", "norm_placement": "sandwich"},
    "sdt": {},
    "sdt-straight": {"scale": "straight", "protected_tokens": 1, "surprise_window": 1},
    "sdt-expected": {"surprise_terms": "expected", "norm_placement": "post"},
    "sdt-unexpected": {
        "surprise_terms": "unexpected", "skipped": "forecast", "forecast_width": 0.3, "surprise_window": 3
    },
    "sdt-normalised": {"normalise_surprise": True, "routed_layers": [1, 3], "prior_width": 0.2, "capacity": 0.6},
    "sdt-scheduled": {"inverse_temperature": "scheduled", "scale": "learned"},
    "sdt-change": {"score": "change", "scale": "constant"},
    "sdt-random": {"score": "random", "scale": "none"},
    "sdt-sparse": {"routed_layers": [2], "num_hidden_layers": 4, "num_key_value_heads": 4},
    "stt": {},
    "stt-gate": {"scale": "gate", "protected_tokens": 1, "routed_layers": [1, 2]},
    "stt-none": {"scale": "none", "router_width": 6},
    "stt-constant": {"scale": "constant", "normalise_surprise": True, "capacity": 0.3},
    "stt-learned": {"scale": "learned", "skipped": "forecast", "surprise_terms": "unexpected"},
    "stt-student": {"scale": "student", "layer_capacities": [0.8, 0.2], "skipped": "forecast"},
    "stt-scheduled": {"inverse_temperature": "scheduled", "surprise_terms": "expected", "scale": "gate"},
    "stt-dense": {"trains_on": "dense", "gate_weight": 0.1},
    "stt-variable": {"stt_capacity": "variable", "gate_weight": 0.1, "scale": "gate"},
    "stt-variable-dense": {"stt_capacity": "variable", "trains_on": "dense", "protected_tokens": 1},
}  # fmt: skip
SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "head_dim": 4,
    "intermediate_size": 12,
    "max_position_embeddings": 64,
}
LENGTHS = (9, 5, 2)


def make(
    case: str, seed: int = 0, dtype=torch.float64, calibrate: bool = True, head: str = "causal", **overrides
):
    """A model of a case, every weight away from its initial value, its levels calibrated on random tokens."""
    torch.manual_seed(seed)
    model = build(preset(f"{case.partition('-')[0]}-tiny", **{**SMALL, **CASES[case], **overrides}), head)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # scores that differ from token to token
            size = 0.05 if ".router." in name or "surprise" in name else 0.3
            weight.add_(torch.randn_like(weight) * size)
    model.schedule(0.12)
    model = model.to(dtype)
    if calibrate:
        model.calibrate(input_ids=tokens(8, 12, seed=7))
    return model


def tokens(B: int = 1, T: int = 9, seed: int = 3) -> Tensor:
    """[B, T] random ids."""
    return torch.randint(3, 32, (B, T), generator=torch.Generator().manual_seed(seed))


def batch(side: str = "right", longer: int = 0) -> dict:
    """Three sequences of 9, 5 and 2 tokens, padded on a side, and labels with a hole in them."""
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


RULES = {
    "threshold": {"selection": "threshold"},
    "capacities": {"capacity": torch.tensor([0.35, 0.8, 0.5], dtype=torch.float64)},
    "running": {"selection": "running", "capacity": 0.4},
    "dense": {"selection": "dense"},
}


SEEDS = {
    "mod-predictor": 2,
    "stt-none": 1,
}  # where under seed 0 a decision is nearer than 1e-4 to turning out otherwise


@lru_cache
def _made(case: str, overrides: tuple) -> torch.nn.Module:
    return make(case, SEEDS.get(case, 0), **dict(overrides))


def ready(case: str, **overrides):
    """A copy of a case's model under its seed."""
    return deepcopy(_made(case, tuple(overrides.items())))
