"""The ledger: what one forward pass computed, per sequence, in multiply-accumulates (MACs) and bytes.

One MAC is one multiplication and one addition (two FLOPs). Matrix products are counted; norms, activations,
softmaxes and embedding look-ups are not, as in the papers. Two attention figures stand side by side:
`attention` is what was executed (query slots x keys, padding included), `attention_causal` is the pairs that the
mask lets through. The others are rows computed x cost of a row.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

KINDS = ("linear", "expert", "router", "halting", "attention", "head")


@dataclass
class Ledger:
    """MACs by kind and key/value bytes written; every value is an int64 tensor [B], one figure a sequence.

    layer: the name that what follows is booked under besides, in `layer_macs` and `layer_kv_bytes`; None: none.
    """

    batch: int
    macs: dict[str, Tensor] = field(default_factory=dict)
    attention_causal: Tensor | int = 0
    kv_bytes: Tensor | int = 0
    layer: str | None = None
    layer_macs: dict[str, Tensor] = field(default_factory=dict)
    layer_kv_bytes: dict[str, Tensor] = field(default_factory=dict)

    def add(self, kind: str, rows: Tensor, cost: int) -> None:
        """Books `rows` [B] rows at `cost` MACs each."""
        if cost:
            self.macs[kind] = self.macs.get(kind, 0) + rows.to(torch.int64) * cost
            if self.layer is not None:
                booked = self.layer_macs.get(self.layer, 0)
                self.layer_macs[self.layer] = booked + rows.to(torch.int64) * cost

    def add_attention(self, executed: Tensor, causal: Tensor, cost: int) -> None:
        """Books query-key pairs [B], executed and let through by the mask, at `cost` MACs a pair; or rows of attention
        that are no pairs (a query's products with relative positions), padded and true."""
        self.add("attention", executed, cost)
        self.attention_causal = self.attention_causal + causal.to(torch.int64) * cost

    def add_kv(self, rows: Tensor, size: int) -> None:
        """Books key/value rows [B] written, `size` bytes each."""
        written = rows.to(torch.int64) * size
        self.kv_bytes = self.kv_bytes + written
        if self.layer is not None:
            self.layer_kv_bytes[self.layer] = self.layer_kv_bytes.get(self.layer, 0) + written

    def merge(self, other: "Ledger") -> "Ledger":
        """The sum of two ledgers of the same batch (an encoder's and a decoder's)."""
        macs, named = dict(self.macs), (("encoder", self), ("decoder", other))
        for kind, value in other.macs.items():
            macs[kind] = macs.get(kind, 0) + value
        return Ledger(
            self.batch,
            macs,
            self.attention_causal + other.attention_causal,
            self.kv_bytes + other.kv_bytes,
            None,
            *(
                {
                    f"{side}.{name}": value
                    for side, part in named
                    for name, value in getattr(part, field).items()
                }
                for field in ("layer_macs", "layer_kv_bytes")
            ),
        )

    def paired(self) -> "Ledger":
        """A ledger of half as many sequences: each two neighbours as one."""

        def both(value):
            return value.view(-1, 2).sum(1) if torch.is_tensor(value) else value

        named = ({name: both(value) for name, value in one.items()} for one in (
            self.macs, self.layer_macs, self.layer_kv_bytes))  # fmt: skip
        macs, layer_macs, layer_kv_bytes = named
        return Ledger(
            self.batch // 2,
            macs,
            both(self.attention_causal),
            both(self.kv_bytes),
            None,
            layer_macs,
            layer_kv_bytes,
        )

    @property
    def per_sequence(self) -> Tensor:
        """[B] all MACs of each sequence: what a request is billed."""
        return sum(self.macs.values()) if self.macs else torch.zeros(self.batch, dtype=torch.int64)

    @property
    def total(self) -> int:
        """All MACs of the batch."""
        return int(self.per_sequence.sum())

    @property
    def total_causal(self) -> int:
        """All MACs of the batch, attention counted as the pairs that the mask lets through: what a cached decoder, one
        token at a time, computes."""
        attention = int(torch.as_tensor(self.macs.get("attention", 0)).sum())
        return self.total - attention + int(torch.as_tensor(self.attention_causal).sum())

    def summary(self) -> dict[str, int]:
        """Plain numbers: MACs by kind, their total, `attention_causal` and `kv_bytes`, over the batch."""
        figures = {kind: int(self.macs[kind].sum()) for kind in KINDS if kind in self.macs}
        figures["total"] = self.total
        figures["attention_causal"] = int(torch.as_tensor(self.attention_causal).sum())
        figures["kv_bytes"] = int(torch.as_tensor(self.kv_bytes).sum())
        return figures
