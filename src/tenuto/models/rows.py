"""Rows: the tokens that are computed. A token that stopped is not masked, it is absent.

A batch of B sequences of T tokens is a grid of B*T places. `Rows` names the places that take part in a step,
in ascending order; every linear part (projections, feed-forward, experts, routers, halting nets) sees one packed
matrix with one row for each of them. Attention alone needs sequences: `Rows.groups` lays the live queries of each
sequence side by side, sequences of like size together, so that little padding is computed.

When the whole grid is alive nothing is gathered or copied: packing is a view.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class QueryGroup:
    """Live queries of some sequences, padded to the same number Q.

    sequences: [S] which sequences, or None for all of the batch in order.
    members: [n] which packed rows belong here, or None for all.
    slots: [n] place of each member in the S*Q grid, or None where members fill it in order.
    positions: [S, Q] place of each query in its sequence (unused slots hold T-1, which may see every key).
    """

    sequences: Tensor | None
    members: Tensor | None
    slots: Tensor | None
    positions: Tensor

    def pad(self, packed: Tensor) -> Tensor:
        """[N, ...] packed rows -> [S, Q, ...], zeros in unused slots."""
        shape = self.positions.shape
        rows = packed if self.members is None else packed.index_select(0, self.members)
        if self.slots is None:
            return rows.reshape(*shape, *packed.shape[1:])
        grid = rows.new_zeros(shape.numel(), *packed.shape[1:])
        return grid.index_copy(0, self.slots, rows).view(*shape, *packed.shape[1:])

    def unpad(self, grid: Tensor) -> Tensor:
        """[S, Q, ...] -> [n, ...], the members' rows."""
        flat = grid.reshape(-1, *grid.shape[2:])
        return flat if self.slots is None else flat.index_select(0, self.slots)

    def sequences_of(self, grid: Tensor) -> Tensor:
        """[B, ...] -> [S, ...]."""
        return grid if self.sequences is None else grid.index_select(0, self.sequences)


@dataclass(frozen=True, eq=False)
class Rows:
    """The live places of a B x T grid: `index` [N] ascending places b*T+t, or None for the whole grid."""

    index: Tensor | None
    batch: int
    length: int
    device: torch.device

    @classmethod
    def from_mask(cls, mask: Tensor) -> "Rows":
        """Rows where `mask` [B, T] (bool) is true; the whole grid costs no index."""
        index = None if bool(mask.all()) else mask.reshape(-1).nonzero().squeeze(1)
        return cls(index, *mask.shape, mask.device)

    @classmethod
    def of(cls, grid: Tensor, mask: Tensor | None) -> "Rows":
        """Rows of a grid [B, T, ...]: those where `mask` [B, T] is true, all if it is None."""
        return cls(None, *grid.shape[:2], grid.device) if mask is None else cls.from_mask(mask)

    def __len__(self) -> int:
        return self.batch * self.length if self.index is None else self.index.numel()

    @cached_property
    def places(self) -> Tensor:
        """[N] places in the grid, whether or not all are alive."""
        if self.index is not None:
            return self.index
        return torch.arange(self.batch * self.length, device=self.device)

    @cached_property
    def sequence(self) -> Tensor:
        """[N] the sequence each row belongs to."""
        return self.places.div(self.length, rounding_mode="floor")

    @cached_property
    def position(self) -> Tensor:
        """[N] the position of each row in its sequence."""
        return self.places.remainder(self.length)

    @cached_property
    def per_sequence(self) -> Tensor:
        """[B] how many rows of each sequence are alive."""
        if self.index is None:
            return torch.full((self.batch,), self.length, device=self.device)
        return torch.bincount(self.sequence, minlength=self.batch)

    def value_of(self, per_sequence: Tensor | float) -> Tensor | float:
        """[B] one value a sequence -> [N] one a row; a plain number stays one."""
        if not torch.is_tensor(per_sequence):
            return per_sequence
        return per_sequence.to(self.device)[self.sequence]

    def pack(self, grid: Tensor) -> Tensor:
        """[B, T, ...] -> [N, ...]."""
        flat = grid.reshape(self.batch * self.length, *grid.shape[2:])
        return flat if self.index is None else flat.index_select(0, self.index)

    def unpack(self, packed: Tensor) -> Tensor:
        """[N, ...] -> [B, T, ...], zeros elsewhere."""
        if self.index is None:
            return packed.reshape(self.batch, self.length, *packed.shape[1:])
        grid = packed.new_zeros(self.batch * self.length, *packed.shape[1:])
        grid = grid.index_copy(0, self.index, packed)
        return grid.view(self.batch, self.length, *packed.shape[1:])

    def write(self, grid: Tensor | None, packed: Tensor) -> Tensor:
        """A copy of `grid` [B, T, ...] with these rows replaced; None stands for zeros."""
        if grid is None or self.index is None:
            return self.unpack(packed)
        flat = grid.reshape(self.batch * self.length, *grid.shape[2:])
        return flat.index_copy(0, self.index, packed).view_as(grid)

    def select(self, kept: Tensor) -> "Rows":
        """The rows at `kept` [n] (ascending indices into the packed rows)."""
        return Rows(self.places.index_select(0, kept), self.batch, self.length, self.device)

    @cached_property
    def groups(self) -> list[QueryGroup]:
        """Query groups for attention; sequences without a live row are in none of them.

        Sequences whose counts lie within a factor of two share a group: less than half of a group is padding.
        """
        if self.index is None:
            positions = torch.arange(self.length, device=self.device).expand(self.batch, -1)
            return [QueryGroup(None, None, None, positions)]
        if self.length == 1 and 3 * len(self) >= self.batch:
            # one new token a sequence: to copy the keys of those alive costs more than an idle query for the others
            positions = torch.zeros(self.batch, 1, dtype=torch.long, device=self.device)
            return [QueryGroup(None, None, self.sequence, positions)]
        counts = self.per_sequence
        starts = counts.cumsum(0) - counts
        rank = torch.arange(len(self), device=self.device) - starts[self.sequence]
        # level 0 is the largest count down to more than its half, level 1 the next half, ...: like counts, which
        # are the rule, make one group, wherever they lie
        level = torch.log2(counts.max() / counts.clamp(min=1)).floor()
        levels = level[counts > 0].unique().tolist()
        groups = []
        for current in levels:
            chosen = level.eq(current) & counts.gt(0)
            sequences = chosen.nonzero().squeeze(1)
            queries = int(counts[sequences].max())
            members = None
            sequence, ranks = self.sequence, rank
            if len(levels) > 1:
                members = chosen[sequence].nonzero().squeeze(1)
                sequence, ranks = sequence[members], rank[members]
            order = chosen.cumsum(0) - 1
            slots = order[sequence] * queries + ranks
            positions = torch.full((len(sequences) * queries,), self.length - 1, device=self.device)
            position = self.position if members is None else self.position[members]
            positions = positions.index_copy(0, slots, position).view(len(sequences), queries)
            everyone = len(sequences) == self.batch
            groups.append(QueryGroup(None if everyone else sequences, members, slots, positions))
        return groups

    def regroup(self, pieces: list[Tensor]) -> Tensor:
        """Puts the groups' results (one [n, ...] piece per group, in order) back into row order [N, ...]."""
        if len(pieces) == 1:
            return pieces[0]
        order = torch.cat([group.members for group in self.groups])
        return torch.cat(pieces).index_select(0, order.argsort())
