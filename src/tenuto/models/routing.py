"""Routing: which tokens get a layer in full, and how a layer is run on them alone (Mixture-of-Depths, SDT, STT).

Training takes the k = max(1, floor(capacity T)) tokens with the highest scores of each sequence (Top-K): pads never,
the first `protected_tokens` always. Top-K looks at the whole sequence, so it cannot decode; inference decides by rules
that look at no later token, the same for a prompt and for what is generated:

    threshold   score >= a level of the layer: the call's, or the one calibrated to a capacity on some text
    running     the score is among the highest `capacity` of the sequence's last `score_window` scores
    topk        Top-K all the same: an upper bound, refused with a cache
    dense       every token, gates exactly 1: the plain Transformer

The chosen tokens make a grid of their own, sequence by sequence in original order and with their original positions:
they attend to the chosen ones before them, of the same sequence, and write keys and values. The others go around: they
cost nothing and leave nothing (`skipped="identity"`), or take what a small net foresees (`skipped="forecast"`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Reach
from .rows import Rows
from .surprise import CONSTANT, Prior, Recent, wide

RULES = ("threshold", "running", "topk", "dense")
CAPACITIES = (
    0.0,
    0.1,
    0.2,
    0.25,
    0.3,
    0.4,
    0.5,
    0.6,
    0.7,
    0.75,
    0.8,
    0.9,
    1.0,
)  # at which levels are calibrated
NOWHERE = 2**31 - 1  # place of an empty slot: no query reaches it


@dataclass
class Sight:
    """What a router may look at. x [N, d]: the layer's input. before: input and output [N, d] of the layer before.

    layer: its number. rows, position [N]: which tokens, and how many of their text each looks back on. past: by name,
    what the calls before left [B, ...]; the router puts there what the next call needs. run: the whole layer on every
    token. watch: also work out what is only for looking at.
    """

    layer: int
    x: Tensor
    before: tuple[Tensor, Tensor] | None
    rows: Rows
    position: Tensor
    past: dict[str, Tensor]
    run: Callable[[], Tensor]
    training: bool
    watch: bool

    def previous(self, name: str, values_Nd: Tensor) -> Tensor:
        """[N, d] each row's value of the token before, zeros at a text's first token; remembered under `name`."""
        rows, sequence = self.rows, self.rows.sequence
        shifted = F.pad(values_Nd[:-1], (0, 0, 1, 0))
        first = F.pad(sequence[1:] != sequence[:-1], (1, 0), value=True)
        kept = self.past.get(name)
        if kept is not None:
            shifted = torch.where(first.unsqueeze(1), kept[sequence].to(shifted.dtype), shifted)
        last = F.pad(sequence[1:] != sequence[:-1], (0, 1), value=True)
        grid = values_Nd.new_zeros(rows.batch, values_Nd.shape[1]) if kept is None else kept
        # a sequence without a token in this call keeps what it had
        self.past[name] = grid.index_copy(0, sequence[last], values_Nd[last].to(grid.dtype))
        return shifted.masked_fill((self.position == 0).unsqueeze(1), 0.0)


@dataclass
class Verdict:
    """A router's opinion of N tokens. causal: the score [N] that inference goes by, in 0..1, of no later token.

    teacher: the score that Top-K goes by, None where it needs the layer's result and that was not asked for.
    scale: [N] what a chosen token's change is multiplied with; None: nothing. dense: the layer's result on every
    token, where it was needed; passes_dense: that is also what the layer passes on. taught: [N] logits of `causal`
    where it is learnt from who was chosen. losses, signs: terms of the loss, and figures to log, by name.
    """

    causal: Tensor
    teacher: Tensor | None
    scale: Tensor | None = None
    dense: Tensor | None = None
    passes_dense: bool = False
    taught: Tensor | None = None
    losses: dict[str, Tensor] = field(default_factory=dict)
    signs: dict[str, Tensor] = field(default_factory=dict)

    def teach(self, chosen_N: Tensor) -> None:
        """Adds the loss of a causal router that should have said who was chosen, and how well it did."""
        self.losses["router"] = F.binary_cross_entropy_with_logits(
            self.taught, chosen_N.to(self.taught.dtype)
        )
        said = self.taught > 0
        both, rate = (said & chosen_N).sum(), chosen_N.float().mean()
        self.signs |= {
            "accuracy": (said == chosen_N).float().mean(),
            "majority": torch.maximum(rate, 1 - rate),
            "f1": 2 * both / (said.sum() + chosen_N.sum()).clamp(min=1),
        }


def wide_scores(layer: nn.Module, x_Nd: Tensor) -> Tensor:
    """[N, d] -> [N], a net of one output in float32 or wider, whatever autocast says: half precision makes ties."""
    with torch.autocast(x_Nd.device.type, enabled=False):
        if isinstance(layer, nn.Sequential):
            *inner, layer = layer
            for part in inner:
                x_Nd = part(x_Nd.to(part.weight.dtype)) if isinstance(part, nn.Linear) else part(x_Nd)
        bias = None if layer.bias is None else wide(layer.bias)
        return F.linear(wide(x_Nd), wide(layer.weight), bias).squeeze(1)


class LayerRouter(nn.Module):
    """What the routers of one layer have in common: levels, chosen tokens, and what the others get."""

    row_macs = 0  # MACs of one row's score
    teacher_macs = 0  # and of what only a teacher's score takes
    remembers = False  # whether what `look` finds out is needed in later calls

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.register_buffer("levels", torch.empty(len(CAPACITIES), dtype=torch.float32))
        self.starts_at = {"levels": float("nan")}
        self.forecast = Prior(config, config.forecast_width) if config.skipped == "forecast" else None
        if config.scale == "learned":
            self.gain = nn.Parameter(torch.empty(()))
            self.starts_at["gain"] = 1.0

    def _apply(self, fn: Callable, recurse: bool = True):
        # scores differ by less than half precision can tell
        levels = self.levels
        super()._apply(fn, recurse)
        if self.levels.dtype.itemsize < 4:
            self.levels = levels.to(self.levels.device)
        return self

    def look(self, sight: Sight) -> Verdict:
        """The tokens' scores."""
        raise NotImplementedError

    def learn(self, verdict: Verdict, chosen_N: Tensor) -> None:
        """Adds the losses, and the signs, that depend on whom the teacher chose."""

    def scaled(self, gate_N: Tensor) -> Tensor | None:
        """What a chosen token's change is multiplied with, by the config's `scale`."""
        kind = self.config.scale
        if kind == "gate":
            return gate_N
        if kind == "straight":
            # the value is 1, the gradient that of a gate; of a gate of 0 too
            return 1 + (gate_N - gate_N.detach())
        if kind == "constant":
            return torch.full_like(gate_N, CONSTANT)
        return self.gain.expand_as(gate_N) if kind == "learned" else None

    def level(self, capacity: float | Tensor) -> float | Tensor:
        """The calibrated level of a capacity: a number, or [B]; ValueError before calibration."""
        wanted = torch.as_tensor(capacity, dtype=torch.float64, device=self.levels.device)
        inside = (wanted > 0) & (wanted < 1)
        level = torch.where(wanted >= 1, -torch.inf, torch.inf).double()
        if bool(inside.any()):
            levels = self.levels.double()
            if bool(levels.isnan().any()):
                raise ValueError(
                    "The layers have no calibrated levels yet: run `tenuto calibrate` or model.calibrate(input_ids=x),"
                    ' or give threshold, or selection="running".'
                )
            known = torch.tensor(CAPACITIES, dtype=torch.float64, device=levels.device)
            high = torch.searchsorted(known, wanted.clamp(0, 1)).clamp(min=1)
            share = (wanted - known[high - 1]) / (known[high] - known[high - 1])
            level = torch.where(inside, levels[high - 1].lerp(levels[high], share), level)
        return level if torch.is_tensor(capacity) else float(level)


@dataclass(frozen=True)
class Rule:
    """How a call chooses. kind: one of `RULES`; "calibrate"; "gate", STT's variable capacity, instead of Top-K.
    capacity, threshold: a number or [B]; threshold None: the calibrated level.
    """

    kind: str
    capacity: float | Tensor
    threshold: float | Tensor | None

    @property
    def by_teacher(self) -> bool:
        """Whether it goes by the score that may look at the whole sequence, or at the layer's result."""
        return self.kind in ("topk", "gate")

    def choose(self, router: LayerRouter, verdict: Verdict, sight: Sight) -> Tensor:
        """[N] bool: who gets the layer."""
        config, rows, scores = router.config, sight.rows, verdict.causal.detach()
        shielded = sight.position < config.protected_tokens
        capacity = config.share_of(sight.layer, self.capacity)
        if self.kind == "gate":
            return (verdict.teacher.detach() >= config.gate_threshold) | shielded
        if self.kind == "topk":
            if verdict.teacher is not None:
                scores = verdict.teacher.detach()
            return top_k(scores.masked_fill(shielded, torch.inf), rows, capacity) | shielded
        if self.kind == "running":
            recent, grid = self.remember(router, scores, sight)
            # 0.55 * 100 is a little more than 55
            chosen = recent.larger(grid) < rows.value_of(capacity) * recent.spans - 1e-6
        elif self.kind == "calibrate":
            level = scores.double().quantile(1 - capacity).to(scores.dtype)
            verdict.signs["level"] = level
            chosen = scores >= level
        else:
            level = router.level(self.capacity) if self.threshold is None else self.threshold
            chosen = scores >= rows.value_of(level)
        if self.kind != "running" and "score" in sight.past:
            self.remember(router, scores, sight)
        return chosen | shielded

    def remember(self, router: LayerRouter, scores_N: Tensor, sight: Sight) -> tuple[Recent, Tensor]:
        """The last scores of each sequence, these included; ValueError where earlier calls did not keep theirs."""
        kept = sight.past.get("score")
        if kept is None and bool((sight.position > sight.rows.position).any()):
            raise ValueError(
                'selection="running" goes on from the scores of earlier calls, which this cache does not have: use it'
                " from the first call on."
            )
        recent = Recent(sight.rows, sight.position, router.config.score_window)
        grid = recent.grid(scores_N, kept)
        sight.past["score"] = recent.history(grid)
        return recent, grid


def top_k(scores_N: Tensor, rows: Rows, capacity: float | Tensor) -> Tensor:
    """[N] bool: the k = max(1, floor(capacity n)) highest of each sequence's n scores; of equals, the first."""
    grid = torch.full((rows.batch * rows.length,), -torch.inf, dtype=scores_N.dtype, device=scores_N.device)
    grid = grid.index_copy(0, rows.places, scores_N).view(rows.batch, rows.length)
    share = capacity.to(grid.device) if torch.is_tensor(capacity) else capacity
    # 0.29 * 100 is a little less than 29
    counts = (share * rows.per_sequence + 1e-6).floor().clamp(min=1)
    rank = grid.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (rank < counts.unsqueeze(1)).flatten()[rows.places]


class Chosen:
    """The chosen tokens of a layer as a B x Q grid of their own. kept [n]: which of the N rows; past: tokens before.

    places [B, Q]: where each stands among all tokens of its sequence, `NOWHERE` in empty slots.
    """

    def __init__(self, chosen_N: Tensor, every: Rows, past: int):
        self.every, self.past = every, past
        self.kept = chosen_N.nonzero().squeeze(1)
        sequence = every.sequence[self.kept]
        self.counts = torch.bincount(sequence, minlength=every.batch)
        width = int(self.counts.max()) if len(self.kept) else 0
        starts = self.counts.cumsum(0) - self.counts
        slots = sequence * width + torch.arange(len(self.kept), device=every.device) - starts[sequence]
        full = len(self.kept) == every.batch * width
        self.rows = Rows(None if full else slots, every.batch, width, every.device)
        places = torch.full((every.batch * width,), NOWHERE, device=every.device)
        self.places = places.index_copy(0, slots, every.position[self.kept] + past).view(every.batch, width)

    def __len__(self) -> int:
        return len(self.kept)

    def reach(self, reach: Reach, keys_BK: Tensor) -> Reach:
        """What they may read of the keys at places [B, K], given what all tokens may read of all."""
        length, queries_BQ = keys_BK.shape[1], self.places
        if not reach.causal and reach.pairs is None and not self.past:
            # an encoder's
            return Reach(length, reach.chosen, None if self.rows.index is None else keys_BK != NOWHERE)
        if reach.causal and reach.pairs is None and keys_BK is queries_BQ:
            # empty slots lie behind all others
            mask = None if self.rows.index is None else keys_BK != NOWHERE
            return Reach(length, reach.chosen, mask, causal=True)
        real = keys_BK != NOWHERE
        if reach.pairs is None:
            visible = (keys_BK.unsqueeze(1) <= queries_BQ.unsqueeze(2)) & real.unsqueeze(1)
        else:
            pairs = reach.pairs if reach.pairs.dtype == torch.bool else reach.pairs == 0
            pairs = pairs[:, 0].expand(len(keys_BK), -1, -1)
            lines = (queries_BQ - self.past).clamp(max=pairs.shape[1] - 1)
            lines = pairs.gather(1, lines.unsqueeze(2).expand(-1, -1, pairs.shape[2]))
            columns = keys_BK.clamp(max=pairs.shape[2] - 1).unsqueeze(1).expand(-1, lines.shape[1], -1)
            visible = lines.gather(2, columns) & real.unsqueeze(1)
        # an empty slot's query reads something, lest its softmax be NaN
        visible = visible | (queries_BQ == NOWHERE).unsqueeze(2)
        return Reach(length, reach.chosen, None, pairs=visible.unsqueeze(1))


def check_rule(
    config, selection: str | None, capacity: Any, threshold: Any, training: bool, cached: bool, batch: int
) -> Rule:
    """The call's rule, the config's where the call says nothing; ValueError where it makes no sense."""
    kind = selection or ("topk" if training else config.selection)
    if kind not in (*RULES, "calibrate"):
        raise ValueError(f"selection={kind!r} is none of {', '.join(RULES)}.")
    if kind == "topk" and cached:
        raise ValueError(
            'selection="topk" looks at the whole sequence and cannot decode with a cache: use selection="threshold" or'
            ' "running", or use_cache=False.'
        )
    if threshold is not None and (capacity is not None or kind != "threshold"):
        raise ValueError(
            'threshold is for selection="threshold", instead of capacity: give one of them, not both.'
        )
    for name, value in (("capacity", capacity), ("threshold", threshold)):
        if torch.is_tensor(value) and value.shape != (batch,):
            raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be a number or ({batch},).")
    if getattr(config, "stt_capacity", "fixed") == "variable":
        if training and capacity is not None:
            raise ValueError(
                'capacity has nothing to set in training with stt_capacity="variable": gate_threshold decides.'
            )
        # without a capacity the teacher goes by its gate, the student by what it was taught
        if kind == "topk" and capacity is None:
            kind = "gate"
        elif kind == "threshold" and capacity is None and threshold is None:
            threshold = 0.5
    capacity = config.capacity if capacity is None else capacity
    inside = (torch.as_tensor(capacity) >= 0) & (torch.as_tensor(capacity) <= 1)
    if not bool(inside.all()):
        raise ValueError(f"capacity={capacity} must lie between 0 and 1.")
    if threshold is not None and bool(torch.as_tensor(threshold).isnan().any()):
        raise ValueError(f"threshold={threshold} must be a number.")
    return Rule(kind, capacity, threshold)
