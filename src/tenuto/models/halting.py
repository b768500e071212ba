"""Depth policies: who goes on after a step, and how the states of the steps combine.

Stick-breaking halting (SUT section 2.4), in log space. h_l is the state after step l, â_l = halt(h_l):

    (1) a_l = â_l prod_{j<l} (1 - â_j)                  probability of stopping after exactly l steps
    (2) s_l = (1 - sum_{j<l} a_j) h_l + sum_{j<l} a_j h_j      expected state if step l were the last
    (3) token t runs step l  iff  sum_{j<l} a_j < threshold
    (4) L_ACT = mean_t sum_l a_l l                      the last executed step takes the remaining mass

A token worked through with â = 0.6, 0.9, 0.5 and threshold 0.95 in a stack of at most 4 steps:

    step  asked before it   stopped so far   runs?   s after it
    1     -                 0                yes     h_1
    2     â_1 = 0.6         0.6              yes     0.6 h_1 + 0.4 h_2
    3     â_2 = 0.9         0.96 >= 0.95     no      as after step 2: what was left (0.4) stays on h_2
    4     -                 0.96             no      as after step 2

Three readings of the same distribution: s mixes (soft), `depths` = 2 says what was computed (hard exit),
`expected_depths` = 0.6*1 + 0.4*2 = 1.4 is what L_ACT penalises. Queries come from h, keys and values from s.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class HaltState:
    """Per live row: log_left [N] log of the mass not yet spent, spent [N, d] sum a_j h_j, depth [N] sum a_j j."""

    log_left: Tensor
    spent: Tensor
    depth: Tensor

    def select(self, kept: Tensor) -> "HaltState":
        """The rows at `kept`."""
        return HaltState(*(part.index_select(0, kept) for part in vars(self).values()))


class Fixed(nn.Module):
    """Every token runs every step; the state is the last one."""

    row_macs = 0

    def start(self, x_Nd: Tensor) -> HaltState:
        """Nothing spent."""
        zeros = x_Nd.new_zeros(len(x_Nd))
        return HaltState(zeros, torch.zeros_like(x_Nd), zeros)

    def asks(self, step: int, threshold: float | Tensor, min_steps: int) -> bool:
        """Whether tokens are asked before `step`: never."""
        return False

    def combine(self, state: HaltState, h_Nd: Tensor) -> Tensor:
        """s_l = h_l."""
        return h_Nd

    def expected_depth(self, state: HaltState, steps: int) -> Tensor:
        """[N] the steps run."""
        return state.depth + steps


class StickBreaking(Fixed):
    """Eq. 1-4. The halting net is Linear-GELU-Linear, its last layer zero at the start.

    `bias` is added to the halt logit for good: 0 gives â = 0.5 at the start (mean depth 2 whatever the depth of the
    stack, the published setting); -3 gives 0.047, a deep start from which training comes down.
    """

    def __init__(self, config):
        super().__init__()
        size = config.hidden_size
        self.hidden = nn.Linear(size, size)
        self.out = nn.Linear(size, 2, bias=False)
        self.out.starts_at_zero = True
        self.bias = config.halt_bias

    @property
    def row_macs(self) -> int:
        """MACs of one asking."""
        return self.hidden.weight.numel() + self.out.weight.numel()

    def asks(self, step: int, threshold: float | Tensor, min_steps: int) -> bool:
        """Whether tokens are asked before `step`: from step min_steps + 1 on."""
        return step > max(min_steps, 1)

    def halt(self, h_Nd: Tensor) -> tuple[Tensor, Tensor]:
        """log(1 - â) and log â, [N] each, in float32 or wider."""
        logits = self.out(F.gelu(self.hidden(h_Nd)))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_probs = torch.stack([logits[:, 0], logits[:, 1] + self.bias], -1).log_softmax(-1)
        return log_probs[:, 0], log_probs[:, 1]

    def ask(self, state: HaltState, h_Nd: Tensor, step: int) -> HaltState:
        """Eq. 1: the state after h_step was asked."""
        log_go, log_halt = self.halt(h_Nd)
        a = (state.log_left + log_halt).exp()
        return HaltState(
            state.log_left + log_go,
            state.spent + a.to(h_Nd.dtype).unsqueeze(-1) * h_Nd,
            state.depth + a * step,
        )

    def go_on(self, state: HaltState, threshold_N: float | Tensor) -> Tensor:
        """[N] bool, Eq. 3: 1 - sum a_j > 1 - threshold. A threshold of 1 stops nobody, 0 everybody."""
        threshold = torch.as_tensor(threshold_N, dtype=state.log_left.dtype, device=state.log_left.device)
        return state.log_left > torch.log1p(-threshold)

    def combine(self, state: HaltState, h_Nd: Tensor) -> Tensor:
        """Eq. 2."""
        left = state.log_left.exp().to(h_Nd.dtype)
        return state.spent + left.unsqueeze(-1) * h_Nd

    def expected_depth(self, state: HaltState, steps: int) -> Tensor:
        """[N] sum_l a_l l with the remaining mass on step `steps`."""
        return state.depth + state.log_left.exp() * steps


POLICIES = {"fixed": lambda config: Fixed(), "stick_breaking": StickBreaking}
