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

The other policies keep the question (3) and change the rest:

    act           (Graves 2016)           a_l = â_l while their sum stays below the threshold, the rest to the last
                                          step; penalised: steps + rest
    depth_router  (T-LoopFormer)          a = softmax(net(h_0)), decided before the first step; mixes as (2)
    pondernet     (Banino et al. 2021)    a as (1), loss sum_l a_l loss(h_l) + KL(a || prior); runs every step in
                                          training, leaves with h, not s, where the mass passes the threshold
    exit_head     (oracle labels)         a head on detached h_l says "stop", its probability is held against the
                                          threshold; it is trained on whether a deeper loop lowers the token's loss
    latent, second_difference, kl, margin     no weights: confidence that the state, its change, the prediction have
                                          settled, or that the first choice leads, held against the threshold

Whatever the policy, a threshold of 1 asks for certainty and one of 0 stops everybody at the first question.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .surprise import wide


@dataclass(frozen=True)
class HaltState:
    """Per live row: log_left [N] log of the mass not yet spent, spent [N, d] sum a_j h_j, depth [N] sum a_j j.

    Policies that look at one step at a time hold in log_left the log-probability that it is not the last. `kept` are
    tensors [N, ...] of the policy's own.
    """

    log_left: Tensor
    spent: Tensor | None
    depth: Tensor
    kept: tuple[Tensor, ...] = ()

    def select(self, kept: Tensor) -> "HaltState":
        """The rows at `kept`."""
        spent = None if self.spent is None else self.spent.index_select(0, kept)
        own = tuple(part.index_select(0, kept) for part in self.kept)
        return HaltState(self.log_left.index_select(0, kept), spent, self.depth.index_select(0, kept), own)


def check_knobs(threshold: float | Tensor, min_steps: int, max_steps: int, batch: int) -> None:
    """ValueError with one sentence when a call's knobs make no sense for `batch` sequences."""
    if not 1 <= min_steps <= max_steps:
        raise ValueError(f"min_steps={min_steps} must lie between 1 and max_steps={max_steps}.")
    if torch.is_tensor(threshold) and threshold.shape != (batch,):
        raise ValueError(
            f"threshold has shape {tuple(threshold.shape)}; it is a number, or one for each of {batch} sequences."
        )
    if not torch.as_tensor((threshold >= 0) & (threshold <= 1)).all():
        raise ValueError(f"threshold={threshold} must lie between 0 and 1.")


class Fixed(nn.Module):
    """Every token runs every step; the state is the last one.

    `row_macs`, `start_macs`: MACs of one asking, and of a token's start. `heads`: output heads called for one asking.
    `skips_in_training`: whether tokens stop in training as well. `mixes`: whether states of several steps are mixed.
    `watches`: whether it must be shown every step, those before the first question too. `inference_only`: training
    runs every step and asks nothing. `distributes`: whether `expected_depth` is the mean of a distribution over steps.
    """

    row_macs = start_macs = heads = 0
    skips_in_training = mixes = watches = inference_only = distributes = False

    def start(self, x_Nd: Tensor) -> HaltState:
        """Nothing spent."""
        zeros = x_Nd.new_zeros(len(x_Nd), dtype=torch.promote_types(x_Nd.dtype, torch.float32))
        return HaltState(zeros, torch.zeros_like(x_Nd) if self.mixes else None, zeros)

    def asks(self, step: int, threshold: float | Tensor, min_steps: int) -> bool:
        """Whether tokens are asked before `step`: never."""
        return False

    def combine(self, state: HaltState, h_Nd: Tensor) -> Tensor:
        """s_l = h_l."""
        return h_Nd

    def expected_depth(self, state: HaltState, steps: int) -> Tensor:
        """[N] the steps run."""
        return state.depth + steps


class Asking(Fixed):
    """What all policies share that ask: when, and Eq. 3."""

    def asks(self, step: int, threshold: float | Tensor, min_steps: int) -> bool:
        """Whether tokens are asked before `step`: from step min_steps + 1 on."""
        return step > max(min_steps, 1)

    def go_on(self, state: HaltState, threshold_N: float | Tensor) -> Tensor:
        """[N] bool, Eq. 3: 1 - sum a_j > 1 - threshold. A threshold of 1 stops nobody, 0 everybody."""
        threshold = torch.as_tensor(threshold_N, dtype=state.log_left.dtype, device=state.log_left.device)
        # a mass or confidence may round to 1
        return (state.log_left > torch.log1p(-threshold)) | (threshold >= 1)

    def ask(self, state: HaltState, h_Nd: Tensor, step: int, readout=None) -> HaltState:
        """The state after h_step was asked. `readout` maps states to logits, for policies with `heads`."""
        raise NotImplementedError


class StickBreaking(Asking):
    """Eq. 1-4. The halting net is Linear-GELU-Linear, its last layer zero at the start.

    `bias` is added to the halt logit for good: 0 gives â = 0.5 at the start (mean depth 2 whatever the depth of the
    stack, the published setting); -3 gives 0.047, a deep start from which training comes down.
    """

    skips_in_training = mixes = distributes = True

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

    def halt(self, h_Nd: Tensor) -> tuple[Tensor, Tensor]:
        """log(1 - â) and log â, [N] each, in float32 or wider."""
        logits = self.out(F.gelu(self.hidden(h_Nd)))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_probs = torch.stack([logits[:, 0], logits[:, 1] + self.bias], -1).log_softmax(-1)
        return log_probs[:, 0], log_probs[:, 1]

    def ask(self, state: HaltState, h_Nd: Tensor, step: int, readout=None) -> HaltState:
        """Eq. 1: the state after h_step was asked."""
        log_go, log_halt = self.halt(h_Nd)
        return self._spend(state, h_Nd, step, (state.log_left + log_halt).exp(), state.log_left + log_go)

    def _spend(self, state: HaltState, h_Nd: Tensor, step: int, a: Tensor, log_left: Tensor) -> HaltState:
        spent = None
        if state.spent is not None:
            spent = state.spent + a.to(h_Nd.dtype).unsqueeze(-1) * h_Nd
        return HaltState(log_left, spent, state.depth + a * step, state.kept)

    def combine(self, state: HaltState, h_Nd: Tensor) -> Tensor:
        """Eq. 2."""
        left = state.log_left.exp().to(h_Nd.dtype)
        return state.spent + left.unsqueeze(-1) * h_Nd

    def expected_depth(self, state: HaltState, steps: int) -> Tensor:
        """[N] sum_l a_l l with the remaining mass on step `steps`."""
        return state.depth + state.log_left.exp() * steps


class ACT(StickBreaking):
    """Adaptive computation time (Graves 2016, arXiv 1603.08983).

    N = first step with sum_{l<=N} â_l >= threshold (1 - epsilon); a_l = â_l for l < N, a_N = R = 1 - sum_{l<N} â_l.
    The weights sum to 1 and nothing accumulates after the halt. Its penalty is N + R.
    """

    # N + R is a price, up to L + 1, and no mean
    distributes = False

    def ask(self, state: HaltState, h_Nd: Tensor, step: int, readout=None) -> HaltState:
        """a = â, not what stick-breaking leaves of it."""
        # under a threshold of 1 nobody stops, but no more than what is left can be spent
        a = torch.minimum(self.halt(h_Nd)[1].exp(), state.log_left.exp())
        left = state.log_left.exp() - a
        # a token whose mass is used up stops here and keeps the state before: its gradient must not see log 0
        return self._spend(state, h_Nd, step, a, left.clamp(min=torch.finfo(left.dtype).tiny).log())

    def expected_depth(self, state: HaltState, steps: int) -> Tensor:
        """[N] N + R, the ponder cost: its gradient flows through R alone."""
        return steps + state.log_left.exp()


class DepthRouter(StickBreaking):
    """The depth is decided before the first step: a = softmax(net(h_0)) over the loops (T-LoopFormer, 2609.15160).

    -halt_bias is added to the last loop's logit: a deep start.
    """

    row_macs = 0

    def __init__(self, config):
        Asking.__init__(self)
        size = config.hidden_size
        self.hidden = nn.Linear(size, size)
        self.out = nn.Linear(size, config.num_loops, bias=False)
        self.out.starts_at_zero = True
        self.bias = config.halt_bias

    @property
    def start_macs(self) -> int:
        """MACs of deciding."""
        return self.hidden.weight.numel() + self.out.weight.numel()

    def start(self, x_Nd: Tensor) -> HaltState:
        """kept: [N, L] log of the mass beyond loop 1..L."""
        logits = self.out(F.gelu(self.hidden(x_Nd)))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = torch.cat([logits[:, :-1], logits[:, -1:] - self.bias], -1)
        # log sum_{j >= l} softmax_j, for l = 2..L; beyond the last loop nothing is left
        tails = logits.log_softmax(-1).flip(-1).logcumsumexp(-1).flip(-1)[:, 1:]
        none = torch.full_like(tails[:, :1], torch.finfo(tails.dtype).min)
        state = super().start(x_Nd)
        return HaltState(state.log_left, state.spent, state.depth, (torch.cat([tails, none], -1),))

    def ask(self, state: HaltState, h_Nd: Tensor, step: int, readout=None) -> HaltState:
        """What the plan puts on the steps up to `step` and was not spent goes to h_step."""
        plan = state.kept[0]
        log_left = plan[:, min(step, plan.shape[1]) - 1]
        return self._spend(state, h_Nd, step, state.log_left.exp() - log_left.exp(), log_left)


class PonderNet(StickBreaking):
    """PonderNet (Banino, Balaguer, Blundell 2021, arXiv 2107.05407), deterministic at inference.

    Trained at full depth on sum_l a_l loss(h_l) + beta KL(a || prior); at inference a token leaves with h_l where
    sum_{j<=l} a_j reaches the threshold (0.5: the median).
    """

    skips_in_training = mixes = False

    def combine(self, state: HaltState, h_Nd: Tensor) -> Tensor:
        """s_l = h_l."""
        return h_Nd

    def weights(self, states: list[HaltState]) -> Tensor:
        """[N, L] a_1..a_L from the states after each asking, the rest on the last step; rows sum to 1."""
        left = torch.stack(
            [torch.zeros_like(states[0].log_left)] + [one.log_left for one in states], -1
        ).exp()
        return torch.cat([left[:, :-1] - left[:, 1:], left[:, -1:]], -1)

    @staticmethod
    def prior(steps: int, rate: float | None, device: torch.device) -> Tensor:
        """[L] geometric with `rate`, truncated and renormalised; uniform when it is None."""
        if rate is None:
            return torch.full((steps,), 1 / steps, device=device, dtype=torch.float64)
        prior = rate * (1 - rate) ** torch.arange(steps, device=device, dtype=torch.float64)
        return prior / prior.sum()

    def divergence(self, weights_NL: Tensor, rate: float | None) -> Tensor:
        """[N] KL(a || prior) in nats."""
        prior = self.prior(weights_NL.shape[1], rate, weights_NL.device).to(weights_NL.dtype)
        safe = weights_NL.clamp(min=torch.finfo(weights_NL.dtype).tiny)
        return (weights_NL * (safe.log() - prior.log())).sum(-1)


class ExitHead(Asking):
    """A head on the detached, normed state: probability that h_l is deep enough for this token.

    It never moves the language model. Trained on labels "no deeper loop lowers this token's loss by more than a
    margin" (`exit_labels`); one output for each loop. bias -3 is a deep start.
    """

    def __init__(self, config):
        super().__init__()
        size = config.hidden_size
        self.hidden = nn.Linear(size, size)
        self.out = nn.Linear(size, config.num_loops, bias=False)
        self.out.starts_at_zero = True
        self.bias = config.halt_bias

    @property
    def row_macs(self) -> int:
        """MACs of one asking."""
        return self.hidden.weight.numel() + self.out.in_features

    def stop(self, h_Nd: Tensor, step: int) -> Tensor:
        """[N] logit of "stop after `step`", in float32 or wider."""
        states = F.rms_norm(h_Nd.detach(), h_Nd.shape[-1:])
        weight = self.out.weight[min(step, len(self.out.weight)) - 1]
        logit = F.gelu(self.hidden(states)) @ weight.to(states.dtype)
        return logit.to(torch.promote_types(logit.dtype, torch.float32)) + self.bias

    def ask(self, state: HaltState, h_Nd: Tensor, step: int, readout=None) -> HaltState:
        """log_left is the log-probability of going on; the logit is kept for the loss."""
        logit = self.stop(h_Nd, step)
        return HaltState(F.logsigmoid(-logit), None, state.depth, (logit,))


class Convergence(Asking):
    """Rules without weights, for inference: stop once a confidence in 0..1 reaches the threshold.

    latent             1 - |h_l - h_{l-1}| / |h_l|
    second_difference  1 - |D_l - D_{l-1}| / |D_l|, D_l = h_l - h_{l-1}; twice in a row (2509.23314)
    kl                 exp(-KL(p_l || p_{l-1})), p the predicted distribution
    margin             p(first choice) - p(second choice)

    In float32 or wider: differences of half-precision states and logits are mostly rounding.
    """

    inference_only = True

    def __init__(self, config):
        super().__init__()
        self.rule = config.policy
        self.watches = self.rule != "margin"
        self.heads = int(self.rule in ("kl", "margin"))

    def start(self, x_Nd: Tensor) -> HaltState:
        """What each rule compares the first step with; 0 confidence where there is nothing to compare."""
        state, x_Nd = super().start(x_Nd), wide(x_Nd)
        zero = x_Nd.new_zeros(len(x_Nd), dtype=state.log_left.dtype)
        kept = {"latent": (x_Nd,), "second_difference": (x_Nd, torch.full_like(x_Nd, torch.inf), zero)}
        return HaltState(state.log_left, None, state.depth, kept.get(self.rule, ()))

    def ask(self, state: HaltState, h_Nd: Tensor, step: int, readout=None) -> HaltState:
        """The confidence after h_step."""
        kept: tuple[Tensor, ...] = ()
        logits, h_Nd = wide(readout(h_Nd)) if self.heads else None, wide(h_Nd)
        if self.rule == "margin":
            first, second = logits.softmax(-1).topk(2, dim=-1).values.unbind(-1)
            confidence = first - second
        elif self.rule == "kl":
            kept = (logits.log_softmax(-1),)
            confidence = torch.zeros_like(state.log_left)
            if state.kept:
                confidence = (-(kept[0].exp() * (kept[0] - state.kept[0])).sum(-1)).exp()
        elif self.rule == "latent":
            kept = (h_Nd,)
            confidence = 1 - (h_Nd - state.kept[0]).norm(dim=-1) / h_Nd.norm(dim=-1)
        else:
            change = h_Nd - state.kept[0]
            now = 1 - (change - state.kept[1]).norm(dim=-1) / change.norm(dim=-1)
            now = now.clamp(min=0.0)
            confidence, kept = torch.minimum(now, state.kept[2]), (h_Nd, change, now)
        confidence = confidence.clamp(0.0, 1.0)
        return HaltState(torch.log1p(-confidence), None, state.depth, kept)


RULES = ("latent", "second_difference", "kl", "margin")
POLICIES = {
    "fixed": lambda config: Fixed(),
    "stick_breaking": StickBreaking,
    "act": ACT,
    "depth_router": DepthRouter,
    "pondernet": PonderNet,
    "exit_head": ExitHead,
    **dict.fromkeys(RULES, Convergence),
}
