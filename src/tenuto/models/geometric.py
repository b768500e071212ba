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

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class NearestMatch(torch.autograd.Function):
    """Eqs. 1 and 2 with their derivative written out, a third of autograd's passes over the pairs (once
    differentiable, and not for torch.func; `weights` alone is):

    log w_ij = z_ij - sum_{k from i to j} log(1 + e^z_ik)                  j counted; z the biased scores, -inf at
    dL/dz_ij = u_ij - p_ij sum_{k from j outwards} u_ik                    keys not to be read; u_ij = w_ij dL/dw_ij
    """

    @staticmethod
    def sums(x_SHLT: Tensor, back: int, outwards: bool) -> Tensor:
        """Running sums along the keys, away from the query or towards it; the first `back` heads look to the left."""
        left, right = x_SHLT[:, :back], x_SHLT[:, back:]
        if outwards:
            return torch.cat([left.flip(-1).cumsum(-1).flip(-1), right.cumsum(-1)], 1)
        return torch.cat([left.cumsum(-1), right.flip(-1).cumsum(-1).flip(-1)], 1)

    @staticmethod
    def weights(z_SHLT: Tensor, back: int) -> Tensor:
        """w of the first equation."""
        logs = z_SHLT - NearestMatch.sums(F.softplus(z_SHLT), back, outwards=True)
        # by way of exp2: PyTorch's exp is ten to thirty times slower on a CPU where its result is next to nothing
        return logs.mul_(1 / math.log(2)).exp2_()

    @staticmethod
    def forward(ctx, z_SHLT: Tensor, back: int) -> Tensor:
        weights, ctx.back = NearestMatch.weights(z_SHLT, back), back
        ctx.save_for_backward(z_SHLT, weights)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        z_SHLT, weights = ctx.saved_tensors
        u = grad * weights
        farther = NearestMatch.sums(u, ctx.back, outwards=False)
        return torch.addcmul(u, z_SHLT.sigmoid(), farther, value=-1), None


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
        scores, back, sides = scores + self.bias[:, None, None], self.looking_back, []
        for some, on_side in ((scores[:, :back], offsets_SLT < 0), (scores[:, back:], offsets_SLT > 0)):
            read = on_side.unsqueeze(1)
            if visible_S1LT is not None:
                read = read & visible_S1LT
            sides.append(torch.where(read, some, -torch.inf))
        z_SHLT = torch.cat(sides, 1)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            weights = NearestMatch.apply(z_SHLT, back)
        else:
            weights = NearestMatch.weights(z_SHLT, back)
        return weights.to(scores_SHLT.dtype)


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
