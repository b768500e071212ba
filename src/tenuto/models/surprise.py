"""Bayesian surprise (Subjective Depth / Timescale Transformers, 2511.21408): how far a block moved a token, and how
much of that was foreseen. Hidden states stand for means of Gaussians of one covariance, so that a KL divergence is a
squared distance. For a token whose residual is D, and foreseen was P:

    (1) D_st = |D|^2 / d                D_ch = |D - P|^2 / d
    (2) CE = D_st - (D_ch - log(o + 1e-10))                                        expected change
    (3) CU = D_st - m * mean of the last W D_st                                    unexpected change
    (4) g = S_CE + S_CU - S_CE S_CU,   S_CE = sigmoid(b_ce CE),  S_CU = sigmoid(b_cu CU)

All in float32 or wider. m, o = softplus(omega) and b = softplus(beta) are learned, one of each a layer, and start as
published; with inverse_temperature="scheduled" b rises from 0.1 to 100 instead, linearly after the first tenth of the
training.

Where the paper is silent, or its code wrong:
- The mean of Eq. 3 is over the tokens there are, this one included, and carries no gradient. The published code fills
  the missing ones with copies of the first token's D_st, which is far from typical, and shortens W to the length of
  the text: then early tokens depend on how long the text will be.
- A scheduled b is part of the checkpoint: evaluation uses the one that training ended with (published: the first one).
- o learned raw, as in some of the published versions, crosses 0, where its logarithm ends and with it S_CE and every
  gradient that could bring it back.
- Eq. 1 is not normalised, so a few tokens with huge states outweigh all others; normalise_surprise=True divides both
  by |x|^2 / d of the state before the block. Not in the paper; off unless asked for.
"""

import math
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .block import norm
from .rows import Rows

TEMPERATURES = 0.1, 100.0  # of the schedule
CONSTANT = 0.757  # what published gates come out as, nearly constant


class Prior(nn.Module):
    """Foresees a residual from the state before it: a SwiGLU on a norm of its own, f d wide, rounded up to even."""

    def __init__(self, config, share: float):
        super().__init__()
        size = config.hidden_size
        width = max(2, -(-int(-(-size * share // 1)) // 2) * 2)
        self.norm = norm(config)
        self.gate, self.up = (nn.Linear(size, width, bias=False) for _ in range(2))
        self.down = nn.Linear(width, size, bias=False)
        for layer in (self.gate, self.up, self.down):
            layer.starts_normal = 0.02

        self.row_macs = 3 * size * width  # MACs of one row

    def forward(self, x_Nd: Tensor) -> Tensor:
        """[N, d] states -> [N, d] residuals."""
        x_Nd = self.norm(x_Nd)
        return self.down(F.silu(self.gate(x_Nd)) * self.up(x_Nd))

    def quantise(self) -> None:
        """Int8 weights from now on, for inference on a CPU; not to be saved."""
        self.gate, self.up, self.down = (Int8Linear(layer) for layer in (self.gate, self.up, self.down))


class Int8Linear(nn.Module):
    """A linear map with int8 weights, one scale an output; rows are quantised as they come, each by its own largest
    number, so that no row changes another. For inference on a CPU.
    """

    def __init__(self, layer: nn.Linear):
        super().__init__()
        weight = layer.weight.detach().float()
        scale = weight.abs().amax(1).clamp(min=1e-8) / 127
        zero = torch.zeros(len(weight), dtype=torch.long)
        with warnings.catch_warnings():
            # deprecated, but a CPU has no other fast product of int8: torch._int_mm is thirty times slower than float
            warnings.simplefilter("ignore", UserWarning)
            whole = torch.quantize_per_channel(weight, scale, zero, 0, torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(whole, None)

    def forward(self, x_Nd: Tensor) -> Tensor:
        """[N, d] -> [N, n]."""
        size_N1 = x_Nd.float().abs().amax(1, keepdim=True).clamp(min=1e-30)
        # the kernel has one scale for all rows, from the least and the largest number: -1 and 1, of a row of its own
        ends_1d = torch.ones_like(x_Nd[:1], dtype=torch.float32)
        ends_1d[:, ::2] = -1.0
        rows = torch.cat([x_Nd.float() / size_N1, ends_1d])
        # without VNNI two products of eight bits must fit into sixteen
        out = torch.ops.quantized.linear_dynamic(rows, self.packed, reduce_range=True)[:-1]
        return (out * size_N1).to(x_Nd.dtype)


def wide(x: Tensor) -> Tensor:
    """In float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def foreseen_loss(actual_Nd: Tensor, foreseen_Nd: Tensor) -> Tensor:
    """Mean squared error of what was foreseen; what happened carries no gradient."""
    return F.mse_loss(wide(foreseen_Nd), wide(actual_Nd.detach()))


class Surprise(nn.Module):
    """Eqs. 1 to 4 for one layer. `surprise_terms` "expected" or "unexpected" leaves the other term of Eq. 4 out."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.offset, self.multiplier = (nn.Parameter(torch.empty(())) for _ in range(2))
        self.starts_at = {"offset": math.log(math.expm1(1.025)), "multiplier": 1.1}
        if config.inverse_temperature == "learned":
            self.expected_beta, self.unexpected_beta = (nn.Parameter(torch.empty(())) for _ in range(2))
            self.starts_at |= {"expected_beta": -0.3, "unexpected_beta": -0.6}
        else:
            self.register_buffer("temperature", torch.empty(()))
            self.starts_at |= {"temperature": TEMPERATURES[0]}

    def schedule(self, share: float) -> None:
        """Sets a scheduled inverse temperature to its value at a share (0..1) of the training."""
        if self.config.inverse_temperature == "scheduled":
            start, end = TEMPERATURES
            self.temperature.fill_(start + (end - start) * max(0.0, share - 0.1) / 0.9)

    def distances(self, before_Nd: Tensor, residual_Nd: Tensor, foreseen_Nd: Tensor) -> tuple[Tensor, Tensor]:
        """Eq. 1: [N] D_st and D_ch."""
        residual_Nd, foreseen_Nd = wide(residual_Nd), wide(foreseen_Nd)
        change, error = residual_Nd.square().mean(-1), (residual_Nd - foreseen_Nd).square().mean(-1)
        if self.config.normalise_surprise:
            scale = wide(before_Nd.detach()).square().mean(-1) + 1e-6
            change, error = change / scale, error / scale
        return change, error

    def forward(self, change_N: Tensor, error_N: Tensor, average_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Eqs. 2 to 4: [N] g, S_CE, S_CU."""
        if self.config.inverse_temperature == "learned":
            b_ce, b_cu = F.softplus(wide(self.expected_beta)), F.softplus(wide(self.unexpected_beta))
        else:
            b_ce = b_cu = wide(self.temperature)
        expected = change_N - (error_N - (F.softplus(wide(self.offset)) + 1e-10).log())
        unexpected = change_N - wide(self.multiplier) * average_N
        s_ce, s_cu = torch.sigmoid(b_ce * expected), torch.sigmoid(b_cu * unexpected)
        terms = {"both": s_ce + s_cu - s_ce * s_cu, "expected": s_ce, "unexpected": s_cu}
        return terms[self.config.surprise_terms], s_ce, s_cu


class Recent:
    """The last values of each sequence: those of the calls before, then those of this call's tokens.

    position [N]: how many tokens of its text each row may look back on; before its text's first token nothing counts.
    """

    def __init__(self, rows: Rows, position_N: Tensor, window: int):
        self.rows, self.window = rows, window
        self.spans = (position_N + 1).clamp(
            max=window
        )  # [N] how many values, its own included, each row sees
        self.counts = rows.per_sequence
        starts = self.counts.cumsum(0) - self.counts
        rank = torch.arange(len(rows), device=rows.device) - starts[rows.sequence]
        self.column = window - 1 + rank  # [N] of each row's own value

    def grid(self, values_N: Tensor, history_BW: Tensor | None) -> Tensor:
        """[N] one value a row, [B, W-1] those before -> [B, W-1+T]."""
        rows = self.rows
        if history_BW is None:
            history_BW = values_N.new_zeros(rows.batch, self.window - 1)
        grid = F.pad(history_BW.to(values_N.dtype), (0, rows.length))
        return grid.index_put((rows.sequence, self.column), values_N)

    def history(self, grid: Tensor) -> Tensor:
        """[B, W-1] what the next call must know."""
        last = torch.arange(self.window - 1, device=grid.device)
        return grid.gather(1, self.counts.unsqueeze(1) + last)

    def average(self, grid: Tensor) -> Tensor:
        """[N] mean over each row's span, in float64: sums of a long text are subtracted from each other."""
        sums, end = F.pad(grid.double().cumsum(1), (1, 0)), self.column + 1
        sequence = self.rows.sequence
        return ((sums[sequence, end] - sums[sequence, end - self.spans]) / self.spans).to(grid.dtype)

    def larger(self, grid: Tensor) -> Tensor:
        """[N] how many values of each row's span are larger than its own."""
        windows_NW = grid.unfold(1, self.window, 1)[self.rows.sequence, self.column - self.window + 1]
        age = torch.arange(self.window - 1, -1, -1, device=grid.device)
        seen = age < self.spans.unsqueeze(1)
        return ((windows_NW > windows_NW[:, -1:]) & seen).sum(1)
