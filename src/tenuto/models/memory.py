"""Compressed memory: what a chunk of tokens leaves behind, for the tokens of later chunks to read.

The tokens of a sequence, counted from its first real one, are cut into chunks of C = memory_chunk. e_t is what the
prelude makes of token t, n_t = N(e_t), and w_1..w_m are m = memory_slots learned queries:

    (1) p_cs(t) = softmax over the C tokens t of chunk c of  d^-0.5 w_s . n_t
    (2) M_cs = sum_t p_cs(t) n_t                                        the m slots of chunk c, once it is complete
    (3) a token of chunk c reads {M_bs : b < c, s = 1..m}               by cross-attention in every layer of the core
    (4) a token of chunk 0 has nothing to read: it does not take part in the branch, which so adds exactly nothing

Causal: a slot is made of prelude outputs of complete, earlier chunks, which see no later token. It does not change
with the loop: each layer's keys and values of a slot are projected once, when its chunk completes, and kept. Between
two calls a sequence carries those, the prelude outputs of its open chunk, and its count of tokens; what is computed
for a chunk does not depend on how the tokens came in.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from .attention import Attention, Reach, View
from .documents import Documents
from .ledger import Ledger
from .rows import Rows

KV = tuple[Tensor, Tensor]  # each [S, slots, H, D]


@dataclass(frozen=True)
class MemoryState:
    """What S sequences carry on: count [S] of tokens, open [S, C-1, d] those of the chunk not yet complete, and each
    core layer's keys and values of the slots, a sequence's own first, zeros behind them.
    """

    count: Tensor
    open: Tensor
    kv: list[KV]

    def select(self, index: Tensor) -> "MemoryState":
        """The sequences at `index` [n], in that order; a beam may be there twice."""
        kv = [tuple(part.index_select(0, index) for part in one) for one in self.kv]
        return MemoryState(self.count.index_select(0, index), self.open.index_select(0, index), kv)


class Sight:
    """Which slots the tokens of a call may read. seen_ST: [S, T] the first so many of its sequence's `slots`."""

    def __init__(self, seen_ST: Tensor, slots: int, documents: Documents):
        self.seen_ST, self.slots, self.documents = seen_ST, slots, documents
        self.rows, self.last = None, None

    def of(self, rows: Rows) -> tuple[Tensor, Rows]:
        """[n] which of the rows have something to read, and these rows in the grid of documents."""
        if rows is not self.rows:
            own = self.documents.of(rows)
            readers = own.pack(self.seen_ST).nonzero().squeeze(1)
            self.rows, self.last = rows, (readers, own if len(readers) == len(own) else own.select(readers))
        return self.last

    @cached_property
    def reach(self) -> Reach:
        """The same for attention; a place that may read nothing is no query, as padding it must not divide by 0."""
        seen = self.seen_ST.unsqueeze(-1)
        visible = (torch.arange(self.slots, device=seen.device) < seen) | (seen == 0)
        return Reach(self.slots, 1, None, pairs=visible.unsqueeze(1))


@dataclass(frozen=True)
class Recall:
    """The memory of one call as one core layer reads it."""

    kv: KV
    sight: Sight

    def of(self, rows: Rows) -> tuple[Tensor, Rows, list[View]]:
        """[n] which of the rows read it, these rows, and what each may read."""
        readers, own = self.sight.of(rows)
        return readers, own, self.sight.reach.views(own)

    def account(self, cross: Attention, ledger: Ledger, rows: Rows) -> None:
        """Books one application to `rows`."""
        _, own = self.sight.of(rows)
        if len(own):
            self.sight.documents.book(ledger, lambda ledger: cross.account(ledger, own, self.sight.reach))


class Memory(nn.Module):
    """Eq. 1-2, and what is carried from call to call."""

    def __init__(self, config, norm: nn.Module):
        super().__init__()
        self.chunk, self.slots = config.memory_chunk, config.memory_slots
        self.norm = norm
        self.queries = nn.Parameter(torch.empty(self.slots, config.hidden_size))

    def reset_parameters(self) -> None:
        """Queries of unit variance: scores are then of order 1."""
        init.normal_(self.queries)

    @property
    def chunk_macs(self) -> int:
        """MACs of making one chunk's slots."""
        return 2 * self.chunk * self.queries.numel()

    def token_macs(self, layers: list[Attention]) -> int:
        """MACs of one token's share of its chunk's slots, and of their keys and values in every layer."""
        return (self.chunk_macs + self.slots * sum(layer.kv_macs for layer in layers)) // self.chunk

    def pool(self, e_KCd: Tensor) -> Tensor:
        """Eq. 1-2: K complete chunks -> slots [K, m, d]."""
        n_KCd = self.norm(e_KCd)
        scores_KCm = n_KCd @ self.queries.T * self.queries.shape[1] ** -0.5
        return scores_KCm.softmax(1).mT @ n_KCd

    def forward(
        self,
        e_Nd: Tensor,
        every: Rows,
        layers: list[Attention],
        state: MemoryState | None,
        documents: Documents,
        ledger: Ledger,
    ) -> tuple[list[Recall], MemoryState]:
        """Prelude outputs of a call's tokens -> what each core layer's cross-attention reads, and the state after.

        state: what the call before left (None: nothing came before).
        """
        rows, C, m = documents.of(every), self.chunk, self.slots
        S, device = rows.batch, e_Nd.device
        if state is None:
            state = MemoryState(
                rows.per_sequence * 0, e_Nd.new_zeros(S, C - 1, e_Nd.shape[-1]), [None] * len(layers)
            )
        counts, waiting, before = rows.per_sequence, state.count % C, state.count // C
        # each sequence's new tokens, behind those that wait
        rank = torch.arange(len(rows), device=device) - (counts.cumsum(0) - counts)[rows.sequence]
        chunks = max(-(-int((waiting + counts).max()) // C), 1)
        grid = F.pad(state.open, (0, 0, 0, chunks * C - (C - 1))).flatten(0, 1)
        grid = grid.index_copy(0, rows.sequence * chunks * C + waiting[rows.sequence] + rank, e_Nd)
        grid = grid.view(S, chunks, C, -1)
        complete = (waiting + counts) // C
        slots_Kmd = self.pool(grid[torch.arange(chunks, device=device) < complete[:, None]])
        number = int((before + complete).max()) * m
        kv = self._project(slots_Kmd, layers, state.kv, before * m, complete * m, number, documents, ledger)
        # the tokens after the last complete chunk wait on, zeros behind them
        kept = complete[:, None] * C + torch.arange(C - 1, device=device)
        flat = F.pad(grid.flatten(1, 2), (0, 0, 0, C - 1))
        left = flat.gather(1, kept.unsqueeze(-1).expand(-1, -1, flat.shape[-1]))
        seen = rows.unpack((state.count[rows.sequence] + rank) // C * m)
        sight = Sight(seen, number, documents)
        return [Recall(one, sight) for one in kv], MemoryState(state.count + counts, left, kv)

    def _project(self, slots_Kmd, layers, old, before, new, number, documents, ledger) -> list[KV]:
        """Each layer's keys and values: the `new` [S] slots of every sequence written behind its `before` [S]."""
        if not len(slots_Kmd) and old[0] is not None:
            return old
        S, device = len(before), slots_Kmd.device
        owner = torch.arange(S, device=device).repeat_interleave(new)
        rank = torch.arange(len(owner), device=device) - (new.cumsum(0) - new)[owner]
        rows = Rows(owner * number + before[owner] + rank, S, number, device)
        kv = []
        for layer, past in zip(layers, old, strict=True):
            if past is not None:
                past = tuple(F.pad(part, (0, 0, 0, 0, 0, number - part.shape[1])) for part in past)
            kv.append(layer.project(slots_Kmd.flatten(0, 1), rows, past))

        def account(ledger: Ledger) -> None:
            ledger.add_attention(new // self.slots, new // self.slots, self.chunk_macs)
            for layer in layers:
                layer.account_kv(ledger, rows)

        documents.book(ledger, account)
        return kv
