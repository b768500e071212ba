"""Two sentences in a row, each encoded as if the other were not there (`encode_apart`), by the same weights.

The grid [B, T] of rows becomes one [2B, T'] of sentences, segment 0 and segment 1 of each row in turn, moved to the
left; what comes of it goes back to the places of the row. Both sentences begin with the row's first token and have no
segment vector, so that equal sentences get equal states.
"""

import torch
from torch import Tensor


class Apart:
    """ids, mask [2B, T'] of the sentences; ValueError without segments 0 and 1 in every row."""

    def __init__(self, ids_BT: Tensor, mask_BT: Tensor | None, segments_BT: Tensor | None):
        if segments_BT is None:
            raise ValueError("encode_apart needs token_type_ids: 0 and 1 for the two sentences.")
        mask_BT = torch.ones_like(ids_BT, dtype=torch.bool) if mask_BT is None else mask_BT
        member = torch.stack([mask_BT & (segments_BT == segment) for segment in (0, 1)], 1).flatten(0, 1)
        counts = member.sum(1)
        if not counts.all():
            raise ValueError("encode_apart needs a token of segment 0 and one of segment 1 in every row.")
        longest = int(counts.max())
        self.shape = ids_BT.shape
        # the sentence's tokens first, in order
        self.places = member.int().argsort(dim=1, descending=True, stable=True)[:, :longest]
        self.mask = torch.arange(longest, device=ids_BT.device) < counts.unsqueeze(1)
        self.ids = ids_BT.repeat_interleave(2, 0).gather(1, self.places)
        self.ids[1::2, 0] = self.ids[::2, 0]

    @staticmethod
    def knob(value: float | Tensor | None) -> float | Tensor | None:
        """A knob of the call: [B] values are both sentences'."""
        return value.repeat_interleave(2) if torch.is_tensor(value) else value

    def back(self, grid: Tensor | None) -> Tensor | None:
        """[2B, T', ...] -> [B, T, ...], zeros at pads."""
        if grid is None:
            return None
        rows, length = self.shape
        sentence = torch.arange(2 * rows, device=grid.device).unsqueeze(1)
        target = (sentence.div(2, rounding_mode="floor") * length + self.places)[self.mask]
        out = grid.new_zeros(rows * length, *grid.shape[2:]).index_copy(0, target, grid[self.mask])
        return out.view(rows, length, *grid.shape[2:])
