"""Geometric attention and the copy gate (Csordás, Irie, Schmidhuber 2022, "The Neural Data Router", 2110.07732): a
token reads the nearest one that matches, however far, and stays as it is until what it needs has been worked out.

    (1) p_ij = sigmoid(D^-0.5 q_i . k_j + b_h)                                    does j match?
    (2) w_ij = p_ij prod_{k between i and j} (1 - p_ik)                           and nobody nearer does
    (3) h' = h + g (f(h) - h)                                                     f the block
        g = sigmoid(W_2 GELU(W_1 N(a) + b_1) + b_2)                               a before its feed-forward

Nothing in them knows a distance, so that a rule learnt on short texts may hold on long ones, if positions are "none". A
head looks to one side, the first half of the heads to the left, the others to the right (a causal stack's all look
back); the paper has one order over both sides and a score for the direction. A token does not read itself; what no key
takes of the weights is read from nobody, so that they sum to at most 1. There is one implementation, whatever
attn_implementation says. With input injection, what the gate keeps has the embedding added.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GeometricWeights(nn.Module):
    """Eqs. 1 and 2: scores to weights."""

    def __init__(self, heads: int, causal: bool):
        super().__init__()
        self.looking_back = heads if causal else heads // 2
        self.bias = nn.Parameter(torch.empty(heads))
        self.starts_at = {"bias": 0.0}

    def forward(self, scores_SHLT: Tensor, offsets_SLT: Tensor, visible_S1LT: Tensor | None) -> Tensor:
        """Scaled scores, key minus query position, keys that may be read (None: all) -> weights [S, H, L, T]."""
        # sums of logarithms, in float32 or wider
        scores = scores_SHLT.to(torch.promote_types(scores_SHLT.dtype, torch.float32))
        scores, back, parts = scores + self.bias[:, None, None], self.looking_back, []
        for some, on_side in ((scores[:, :back], offsets_SLT < 0), (scores[:, back:], offsets_SLT > 0)):
            read = on_side.unsqueeze(1)
            if visible_S1LT is not None:
                read = read & visible_S1LT
            match = F.logsigmoid(some)
            passed = (match - some).masked_fill(~read, 0.0)  # log(1 - p)
            sums = passed.cumsum(-1)
            # to the left the later keys are nearer
            nearer = sums[..., -1:] - sums if not parts else sums - passed
            parts.append((match + nearer).exp().masked_fill(~read, 0.0))
        return torch.cat(parts, 1).to(scores_SHLT.dtype)


class CopyGate(nn.Module):
    """Eq. 3's g, of one number a feature; b_2 = `start` at first, so that a low one begins near the identity."""

    def __init__(self, size: int, start: float, norm: nn.Module):
        super().__init__()
        self.norm, self.hidden, self.out = norm, nn.Linear(size, size), nn.Linear(size, size)
        self.out.starts_at_zero, self.out.starts_at = True, {"bias": start}
        self.row_macs = 2 * size * size  # MACs of one row

    def forward(self, h_Nd: Tensor, after_attention_Nd: Tensor, after_Nd: Tensor) -> Tensor:
        """The block's input, its state after attention, its result -> h'."""
        gate_Nd = self.out(F.gelu(self.hidden(self.norm(after_attention_Nd)))).sigmoid()
        return torch.lerp(h_Nd, after_Nd, gate_Nd.to(h_Nd.dtype))
