"""Attention: queries of live rows against the keys and values of every token of their sequence.

MoMHA (E, k, H, D, W), SUT section 2.2: E experts of H heads of width D; a token's k experts give k*H query heads,
and every expert's head h attends over the same keys K_h and values V_h, so its cost and its cache are those of H
key/value heads. E = 1 is ordinary multi-head attention; H = 1 is MoA.

    (1) score(i, j) = D^-0.5 (q_i . k_j + q_i . R[h, clip(j - i, -W, W)])      relative_positions "window"
    (2) score(i, j) = D^-0.5 q_i . k_j + b[h, bucket(j - i)]                   relative_positions "t5"
    (3) y_i = sum_e g(e|x_i) O_e softmax_j(score_e(i, j)) V_j

With relative_positions "geometric" the weights are those of geometric.py instead of the softmax.

Offsets clip at +-W (the released code clips at W-1, which leaves W = 1 without any position).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .experts import Dispatch, ExpertLinear, Router
from .geometric import GeometricWeights
from .ledger import Ledger
from .rows import QueryGroup, Rows


def sinusoidal_positions(length: int, size: int, device: torch.device) -> Tensor:
    """[T, d] sine and cosine codes (Vaswani et al. 2017), sines first as in fairseq."""
    half = size // 2
    scale = math.log(10_000) / max(half - 1, 1)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * torch.exp(
        torch.arange(half, device=device, dtype=torch.float32) * -scale
    )
    codes = torch.cat([angles.sin(), angles.cos()], dim=-1)
    return nn.functional.pad(codes, (0, size % 2))


class RelativeWindow(nn.Module):
    """R of Eq. 1: [H, D, 2W+1], zero at the start, shared by the experts."""

    def __init__(self, heads: int, head_dim: int, window: int):
        super().__init__()
        self.window = window
        self.embedding = nn.Parameter(torch.zeros(heads, head_dim, 2 * window + 1))

    @property
    def row_macs(self) -> int:
        """MACs of one query row of all H heads."""
        return self.embedding.numel()

    def forward(self, q_SHLD: Tensor, offsets_SLT: Tensor) -> Tensor:
        """Queries and key-query offsets ([1, L, T] if alike for all) -> [S, H, L, T], q . R of Eq. 1."""
        by_offset = q_SHLD @ self.embedding
        index = offsets_SLT.clamp(-self.window, self.window) + self.window
        return by_offset.gather(-1, index.unsqueeze(1).expand(*q_SHLD.shape[:3], -1))


class BucketBias(nn.Module):
    """b of Eq. 2: one learned number per head and bucket of offset (Raffel et al. 2020).

    Half of the buckets are exact small offsets, the rest grow logarithmically up to `max_distance`; a causal
    stack gives all buckets to the past.
    """

    def __init__(self, heads: int, buckets: int, max_distance: int, causal: bool):
        super().__init__()
        self.buckets, self.max_distance, self.causal = buckets, max_distance, causal
        self.bias = nn.Parameter(torch.zeros(buckets, heads))

    def bucket(self, offsets: Tensor) -> Tensor:
        """Key position minus query position -> bucket index, same shape."""
        buckets = self.buckets if self.causal else self.buckets // 2
        side = 0 if self.causal else (offsets > 0).long() * buckets
        distance = (-offsets).clamp(min=0) if self.causal else offsets.abs()
        exact = buckets // 2
        far = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + far * (buckets - exact)).long().clamp(max=buckets - 1)
        return side + torch.where(distance < exact, distance, far)

    def forward(self, offsets_SLT: Tensor) -> Tensor:
        """[S, L, T] offsets -> [S, H, L, T] scores to add."""
        return nn.functional.embedding(self.bucket(offsets_SLT), self.bias).permute(0, 3, 1, 2)

    def all_pairs(self, length: int, past: int = 0) -> Tensor:
        """[H, T, K] scores to add for K = length keys and the queries past..K-1: looked up once, for all steps."""
        positions = torch.arange(length, device=self.bias.device)
        return self((positions - positions[past:, None]).unsqueeze(0)).squeeze(0).contiguous()


class Rotary:
    """Rotary positions (Su et al. 2021): cosines and sines [B, T, D] of every place, packed once for live rows."""

    def __init__(self, cos_BTD: Tensor, sin_BTD: Tensor):
        self.grids, self.rows, self.last = (cos_BTD, sin_BTD), None, None

    def of(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """[N, D] cosines and sines of the rows."""
        if rows is not self.rows:
            self.rows, self.last = rows, tuple(rows.pack(grid) for grid in self.grids)
        return self.last


def rotate(x_NnD: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
    """Turns each pair (i, i + D/2) of the last axis of [N, ..., D] by its row's angle; None: no rotary positions."""
    if angles is None:
        return x_NnD
    cos, sin = (part.view(len(part), *(1,) * (x_NnD.dim() - 2), -1) for part in angles)
    first, second = x_NnD.chunk(2, dim=-1)
    return x_NnD * cos + torch.cat([-second, first], dim=-1) * sin


SPAN = 256


@dataclass(frozen=True)
class View:
    """What one query group may read. offsets: [1 or S, L, T] key minus query position (window positions only).
    scores: [S or 1, 1 or H, L, T] added to the scores (float) or visible keys (bool); None: everything, equally.
    causal: every place of the sequence is a query and sees itself and what is before it; then scores is None.
    spans: (first query, end, keys): queries in pieces that read only the first keys; (): all at once, all keys.
    """

    offsets: Tensor | None
    scores: Tensor | None
    causal: bool = False
    spans: tuple[tuple[int, int, int], ...] = ()

    def pairs(self, queries: int, keys: int) -> int:
        """Query-key pairs that are executed for one sequence."""
        return sum((end - first) * read for first, end, read in self.spans) or queries * keys


class Reach:
    """What the queries of a stack may read, made once per forward; groups that stay keep their views.

    mask_BT is true where a key may be read (None: all); bias_HTT is `BucketBias.all_pairs`; causal lets a query see
    its own and earlier positions only; chosen = k queries per token. length is the number of keys, past how many of
    them stand before the first query (in a cache). pairs [1 or B, 1, T, K], from transformers' mask functions, says it
    all instead (bool: visible; float: added).
    """

    def __init__(
        self,
        length: int,
        chosen: int,
        mask_BT: Tensor | None,
        causal: bool = False,
        bias_HTT: Tensor | None = None,
        offsets: bool = False,
        pairs: Tensor | None = None,
        past: int = 0,
    ):
        self.length, self.chosen, self.mask_BT = length, chosen, mask_BT
        self.causal, self.bias_HTT, self.offsets, self.pairs = causal, bias_HTT, offsets, pairs
        self.past = past
        self.rows, self.last = None, []

    def views(self, rows: Rows) -> list[View]:
        """One view for each of the rows' query groups."""
        if rows is not self.rows:
            self.rows, self.last = rows, [self._view(group) for group in rows.groups]
        return self.last

    def _view(self, group: QueryGroup) -> View:
        # without gathering, every sequence has the same positions: one row stands for all
        positions = group.positions if group.slots is not None else group.positions[:1]
        if self.pairs is not None:
            return View(None, self._pairs(group).repeat(1, 1, self.chosen, 1))
        if self.causal and self.mask_BT is None and self.bias_HTT is None and not self.offsets:
            if group.slots is None and self.chosen == 1 and not self.past:
                return View(None, None, causal=True)
        keys = torch.arange(self.length, device=positions.device)
        offsets = keys - (positions + self.past).repeat(1, self.chosen).unsqueeze(-1)
        visible = None
        if self.mask_BT is not None:
            visible = group.sequences_of(self.mask_BT)[:, None, :]
        if self.causal and self.length > self.past + 1:  # else one new token, which sees all
            visible = offsets <= 0 if visible is None else visible & (offsets <= 0)
        if visible is not None:
            visible = visible.unsqueeze(1)
        if self.bias_HTT is None:
            return View(offsets if self.offsets else None, visible, spans=self._spans(group))
        bias = self.bias_HTT.index_select(1, positions.flatten())
        bias = bias.unflatten(1, positions.shape).transpose(0, 1).repeat(1, 1, self.chosen, 1)
        return View(None, bias if visible is None else hide(bias, visible))

    def _spans(self, group: QueryGroup) -> tuple[tuple[int, int, int], ...]:
        """Long causal groups in pieces: a piece reads no key beyond its last query, half of the triangle is saved."""
        queries = group.positions.shape[1]
        if not self.causal or self.chosen > 1 or self.offsets or queries <= SPAN:
            return ()
        last = (group.positions.max(0).values + self.past).tolist()
        firsts = range(0, queries, SPAN)
        ends = [min(first + SPAN, queries) for first in firsts]
        return tuple((first, end, last[end - 1] + 1) for first, end in zip(firsts, ends, strict=True))

    def readable(self, rows: Rows) -> Tensor:
        """[N] how many keys each row may read."""
        if self.pairs is not None:
            visible = self.pairs if self.pairs.dtype == torch.bool else self.pairs == 0
            counts_BT = visible.squeeze(1).sum(-1).expand(rows.batch, -1)
            return counts_BT.reshape(-1)[rows.places]
        if not self.causal:
            counts = None if self.mask_BT is None else self.mask_BT.sum(-1)[rows.sequence]
            return torch.full_like(rows.places, self.length) if counts is None else counts
        if self.mask_BT is None:
            return rows.position + self.past + 1
        return self.mask_BT.cumsum(-1)[rows.sequence, rows.position + self.past]

    def _pairs(self, group: QueryGroup) -> Tensor:
        """[1 or S, 1, Q, K]: the prepared mask's lines for the group's queries."""
        one_for_all = len(self.pairs) == 1
        chosen = self.pairs if one_for_all else group.sequences_of(self.pairs)
        if group.slots is None:
            return chosen
        if one_for_all:
            return chosen[0, 0][group.positions].unsqueeze(1)
        return chosen[torch.arange(len(chosen), device=chosen.device)[:, None], 0, group.positions].unsqueeze(
            1
        )


def hide(scores: Tensor, visible: Tensor) -> Tensor:
    """Scores with the lowest finite number where a key may not be read."""
    return scores.masked_fill(~visible, torch.finfo(scores.dtype).min)


class Attention(nn.Module):
    """Multi-head attention over rows, with experts (MoMHA) when config.attention_experts > 1.

    `causal` lets a query see its own and earlier positions only. `cross` reads another sequence's states: no
    relative positions. With `num_key_value_heads` below `num_attention_heads` (grouped-query attention) neighbouring
    query heads share a key/value head.
    """

    def __init__(self, config, causal: bool = False, cross: bool = False):
        super().__init__()
        self.config, self.is_causal, self.cross = config, causal, cross
        experts, self.chosen = config.attention_experts, config.attention_experts_per_token
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.kv_heads = config.num_key_value_heads or self.heads
        self.num_key_value_groups = (
            self.heads // self.kv_heads
        )  # by this name transformers' functions read it
        size, width, narrow = config.hidden_size, self.heads * self.head_dim, self.kv_heads * self.head_dim
        # MACs of one query row, query and output of its k experts (router, keys and values apart), and of one row's key
        # and value; from the sizes, since an adapter (PEFT) wraps the layers
        self.row_macs, self.kv_macs = 2 * self.chosen * size * width, 2 * size * narrow
        self.router = Router(
            size, experts, self.chosen, config.router, config.router_samples, config.router_dropout
        )
        self.query = ExpertLinear(experts, size, width, config.attention_bias)
        self.key = nn.Linear(size, narrow, bias=config.attention_bias)
        self.value = nn.Linear(size, narrow, bias=config.attention_bias)
        self.output = ExpertLinear(experts, width, size)
        self.relative = None
        if config.relative_positions == "window" and not cross:
            self.relative = RelativeWindow(self.heads, self.head_dim, config.window)
        self.geometric = None
        if config.relative_positions == "geometric" and not cross:
            self.geometric = GeometricWeights(self.heads, causal)

    @property
    def pair_macs(self) -> int:
        """MACs of one query token against one key token: scores and mixing, all k*H heads."""
        return 2 * self.chosen * self.heads * self.head_dim

    def project(
        self, states_Md: Tensor, rows: Rows, kv: tuple | None, angles: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Writes the keys and values of `rows`' states into the [B, T, H, D] buffers; returns the new buffers.

        Tokens not in `rows` keep what `kv` holds: that is how stopped tokens stay visible without being computed.
        `angles`: the rows' rotary positions.
        """
        shape = (-1, self.kv_heads, self.head_dim)
        old_k, old_v = kv if kv is not None else (None, None)
        return (
            rows.write(old_k, rotate(self.key(states_Md).view(shape), angles)),
            rows.write(old_v, self.value(states_Md).view(shape)),
        )

    def forward(
        self,
        x_Nd: Tensor,
        rows: Rows,
        kv: tuple[Tensor, Tensor],
        views: list[View],
        angles: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Dispatch | None]:
        """Rows -> rows (Eq. 3), and the routing decision.

        `kv` are key and value buffers [B, K, H, D]; `views` says for each query group what it may read; `angles` are
        the rows' rotary positions.
        """
        dispatch = self.router(x_Nd)
        if dispatch is None:
            q_NkHD = self.query(x_Nd, None).view(-1, 1, self.heads, self.head_dim)
        else:
            q = dispatch.receive(self.query(dispatch.send(x_Nd), dispatch))
            q_NkHD = q.view(-1, self.chosen, self.heads, self.head_dim)
        q_NkHD = rotate(q_NkHD, angles)
        groups = zip(rows.groups, views, strict=True)
        out_Nkn = rows.regroup([self._attend(q_NkHD, group, view, kv) for group, view in groups])
        if dispatch is None:
            return self.output(out_Nkn.squeeze(1), None), None
        return dispatch.combine(self.output(dispatch.send_each(out_Nkn), dispatch)), dispatch

    def _attend(self, q_NkHD: Tensor, group: QueryGroup, view: View, kv: tuple[Tensor, Tensor]) -> Tensor:
        """One group of sequences: [N, k, H, D] queries -> its members' [n, k, H*D] results."""
        q_SQkHD = group.pad(q_NkHD)
        S, Q, k, H, D = q_SQkHD.shape
        # a token's k experts share K and V, so they are k more queries, not k copies of the keys
        q_SHLD = q_SQkHD.permute(0, 3, 2, 1, 4).reshape(S, H, k * Q, D)
        keys, values = (group.sequences_of(part).transpose(1, 2) for part in kv)
        scores = view.scores
        if self.relative is not None:
            scores = self.relative(q_SHLD * D**-0.5, view.offsets)
            scores = scores if view.scores is None else hide(scores, view.scores)
        elif scores is not None and scores.dtype == torch.bool:
            scores = scores.expand(S, 1, k * Q, -1)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        if self.geometric is not None:
            attend = geometric_attention
        elif q_SHLD.is_cpu and scores is not None and scores.requires_grad:
            # no fused kernel gives a bias its gradient on a CPU; SDPA's fallback is slower than the plain formula
            attend = eager_attention
        dropout = self.config.attention_dropout if self.training else 0.0
        common = {"dropout": dropout, "scaling": D**-0.5, "is_causal": view.causal, "offsets": view.offsets}
        pieces = []
        for first, end, read in view.spans or ((0, k * Q, keys.shape[2]),):
            part = scores if scores is None else scores[..., first:end, :read]
            q_SHlD, k_SHrD, v_SHrD = q_SHLD[:, :, first:end], keys[:, :, :read], values[:, :, :read]
            pieces.append(attend(self, q_SHlD, k_SHrD, v_SHrD, part, **common)[0])
        out_SLHD = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
        out = out_SLHD.reshape(S, k, Q, H * D).transpose(1, 2)
        return group.unpad(out)

    def account(self, ledger: Ledger, rows: Rows, reach: Reach) -> None:
        """Books the queries, outputs, router and scores of one application (keys and values: `account_kv`)."""
        kind = "linear" if self.router.experts == 1 else "expert"
        ledger.add(kind, rows.per_sequence, self.row_macs)
        ledger.add("router", rows.per_sequence, self.router.row_macs)
        queries, executed = torch.zeros_like(rows.per_sequence), torch.zeros_like(rows.per_sequence)
        for group, view in zip(rows.groups, reach.views(rows), strict=True):
            where = slice(None) if group.sequences is None else group.sequences
            queries[where] = group.positions.shape[1]
            executed[where] = view.pairs(group.positions.shape[1], reach.length)
        pairs = torch.zeros_like(rows.per_sequence).index_add(0, rows.sequence, reach.readable(rows))
        ledger.add_attention(executed, pairs, self.pair_macs)
        if self.relative is not None:
            ledger.add_attention(queries, rows.per_sequence, self.chosen * self.relative.row_macs)

    def account_kv(self, ledger: Ledger, rows: Rows) -> None:
        """Books the keys and values projected for `rows`."""
        ledger.add("linear", rows.per_sequence, self.kv_macs)
        ledger.add_kv(rows.per_sequence, 2 * self.kv_heads * self.head_dim * self.key.weight.element_size())


def eager_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, is_causal=False, **_):
    """The plain formula, for `attn_implementation="eager"`; same layouts as transformers' functions."""
    key, value = (part.repeat_interleave(module.num_key_value_groups, 1) for part in (key, value))
    scores = (query * scaling) @ key.transpose(-1, -2)
    if is_causal:
        attention_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + attention_mask
    weights = nn.functional.dropout(scores.softmax(-1), dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


def geometric_attention(module, query, key, value, visible, offsets, scaling, dropout=0.0, **_):
    """The plain formula with geometric.py's weights; same layouts as transformers' functions."""
    key, value = (part.repeat_interleave(module.num_key_value_groups, 1) for part in (key, value))
    weights = module.geometric((query * scaling) @ key.transpose(-1, -2), offsets, visible)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2), weights
