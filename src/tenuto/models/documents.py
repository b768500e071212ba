"""Documents packed into one sequence: for whatever runs along a sequence, each is a sequence of its own.

Attention keeps documents apart by its mask. A recurrent state or a count of tokens has no mask; it is started anew
where a document starts, that is at a token that may read no key but its own.
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from .attention import Reach
from .ledger import Ledger
from .rows import Rows


class Documents:
    """The documents of one call, whose tokens are `every`; found out when first asked for.

    cached: there is a cache, which knows sequences only: packed documents are then refused.
    """

    def __init__(self, every: Rows, reach: Reach, cached: bool):
        self.every, self.reach, self.cached = every, reach, cached
        self.rows, self.last = None, None

    def of(self, rows: Rows) -> Rows:
        """The same rows in the same order, in a grid of documents; where nothing is packed, the rows themselves."""
        if self._packed is None:
            return rows
        if rows is not self.rows:
            places, sequence, length = self._packed
            index = places.index_select(0, rows.places)
            self.rows, self.last = rows, Rows(index, len(sequence), length, rows.device)
        return self.last

    def book(self, ledger: Ledger, account: Callable[[Ledger], None]) -> None:
        """Books what `account` books for each document on the document's sequence."""
        if self._packed is None:
            return account(ledger)
        sequence, own = self._packed[1], Ledger(len(self._packed[1]))
        account(own)

        def total(figures: Tensor | int) -> Tensor:
            figures = torch.as_tensor(figures, device=sequence.device).expand(len(sequence))
            return figures.new_zeros(ledger.batch).index_add(0, sequence, figures)

        for kind, figures in own.macs.items():
            ledger.add(kind, total(figures), 1)
        ledger.add_attention(sequence.new_zeros(1), total(own.attention_causal), 1)
        ledger.add_kv(total(own.kv_bytes), 1)

    @cached_property
    def _packed(self) -> tuple[Tensor, Tensor, int] | None:
        """[B*T] place of each token in the grid of documents, [D] each document's sequence, the longest's length."""
        every = self.every
        if every.length == 1 or not len(every):
            return None
        sequence = every.sequence
        first = torch.ones_like(sequence, dtype=torch.bool)
        first[1:] = sequence[1:] != sequence[:-1]
        starts = (first | (self.reach.readable(every) == 1)).nonzero().squeeze(1)
        if len(starts) == int(first.sum()):
            return None
        if self.cached:
            raise ValueError(
                "Documents packed into one sequence do not go with a cache: pass use_cache=False."
            )
        document = torch.zeros_like(sequence).index_fill(0, starts, 1).cumsum(0) - 1
        position = torch.arange(len(every), device=every.device) - starts[document]
        length = int(position.max()) + 1
        return every.unpack(document * length + position).flatten(), sequence[starts], length
