"""Sparse experts (SUT, arXiv 2310.07096, section 2.1 and 2.3): router, dispatch, feed-forward, balance losses.

    (1) y = sum_e g(e|h) f_e(h)                     only the k largest g(e|h) are non-zero and they sum to 1
    (2) L_MIM = H(e|h) - H(e)                        minimised: sure of each token, even over all tokens
    (3) L_Switch = E sum_e P_e F_e                   P_e mean probability, F_e share of the tokens sent to e

Departures from the published code, each tested: (2) has the sign of the paper's Eq. 1 (the released code minimises
both entropies); gates are renormalised exactly (no 1e-6: the sum of the k largest is never small), so that one
expert equals the dense layer; expert weights start Xavier-uniform per expert.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Dispatch:
    """One routing decision: which k experts each of N rows goes to, with what weight.

    probs: [N, E] softmax over all experts. gates: [N, k] weights that sum to 1. experts: [N, k] their indices.
    """

    probs: Tensor
    gates: Tensor
    experts: Tensor

    @cached_property
    def order(self) -> Tensor:
        """[N*k] the (row, choice) pairs sorted by expert, as indices into the flattened [N, k]."""
        return self.experts.reshape(-1).argsort(stable=True)

    @cached_property
    def inverse(self) -> Tensor:
        """[N*k] where in the sorted order each (row, choice) pair went."""
        inverse = torch.empty_like(self.order)
        inverse[self.order] = torch.arange(len(self.order), device=self.order.device)
        return inverse

    @cached_property
    def counts(self) -> Tensor:
        """[E] how many (row, choice) pairs each expert got."""
        return torch.bincount(self.experts.reshape(-1), minlength=self.probs.shape[1])

    @cached_property
    def sorted_experts(self) -> Tensor:
        """[N*k] the expert of each pair, in sorted order."""
        return self.experts.reshape(-1)[self.order]

    def send(self, rows: Tensor) -> Tensor:
        """[N, n] one row per token -> [N*k, n] a copy for each chosen expert, sorted by expert."""
        return rows.index_select(0, self.order.div(self.experts.shape[1], rounding_mode="floor"))

    def send_each(self, rows: Tensor) -> Tensor:
        """[N, k, n] one row per token and choice -> [N*k, n] sorted by expert."""
        return rows.flatten(0, 1).index_select(0, self.order)

    def receive(self, rows: Tensor) -> Tensor:
        """[N*k, n] sorted by expert -> [N, k, n]."""
        return rows.index_select(0, self.inverse).view(*self.experts.shape, rows.shape[-1])

    def combine(self, rows: Tensor) -> Tensor:
        """[N*k, n] sorted by expert -> [N, n], the gate-weighted sum of Eq. 1."""
        places = self.inverse.view(self.experts.shape)
        gates = self.gates.to(rows.dtype)
        return F.embedding_bag(places, rows, mode="sum", per_sample_weights=gates)


class Router(nn.Module):
    """g(e|h): softmax over ALL experts first, then the k largest, renormalised.

    `kind` is "mlp" (Linear-Tanh-Linear, SUT) or "linear" (MoA). `samples` of the k are drawn at random from the
    rest in training (`sample_topk`). One expert needs no router: then this module has no parameters.
    """

    def __init__(self, size: int, experts: int, chosen: int, kind: str, samples: int, dropout: float):
        super().__init__()
        self.experts, self.chosen, self.samples = experts, chosen, samples
        if experts > 1:
            hidden = [nn.Linear(size, size), nn.Tanh(), nn.Dropout(dropout)] if kind == "mlp" else []
            self.logits = nn.Sequential(*hidden, nn.Linear(size, experts, bias=False))

    @property
    def row_macs(self) -> int:
        """MACs of one row."""
        if self.experts == 1:
            return 0
        return sum(m.weight.numel() for m in self.logits if isinstance(m, nn.Linear))

    def forward(self, x_Nd: Tensor) -> Dispatch | None:
        """Rows -> where they go; None where there is but one expert."""
        if self.experts == 1:
            return None
        probs = self.logits(x_Nd).softmax(-1)
        if self.training and self.samples:
            sure = probs.topk(self.chosen - self.samples, dim=-1).indices
            rest = (probs.detach() + 1e-6).scatter(-1, sure, 0.0)
            experts = torch.cat([sure, rest.multinomial(self.samples)], dim=-1)
            top = probs.gather(-1, experts)
        else:
            top, experts = probs.topk(self.chosen, dim=-1)
        return Dispatch(probs, top / top.sum(-1, keepdim=True), experts)


def grouped_matmul(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """[M, n_in] rows sorted by expert, [E, n_in, n_out] weights, [E] counts -> [M, n_out].

    PyTorch's grouped matmul where it works (fp32, fp16, bf16; row strides of 16 bytes); else one product an expert.
    The weights are unbound, not indexed: indexing would build a full-size zero gradient for every expert.
    """
    weight = weight.to(rows.dtype)  # they differ under autocast
    size = rows.element_size()
    aligned = all(n * size % 16 == 0 for n in weight.shape[1:])
    if len(rows) and aligned and rows.dtype != torch.float64 and not torch.compiler.is_compiling():
        # the kernel wants dense rows; a product with an expanded gradient has none
        offsets = counts.cumsum(0).to(torch.int32)
        return F.grouped_mm(rows.contiguous(), weight, offs=offsets)
    parts = zip(rows.split(counts.tolist()), weight.unbind(), strict=True)
    return torch.cat([part @ one for part, one in parts])


class ExpertLinear(nn.Module):
    """E linear maps n_in -> n_out; each row goes through its own expert's. One expert is a plain linear map."""

    def __init__(self, experts: int, n_in: int, n_out: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, n_in, n_out))
        self.bias = nn.Parameter(torch.zeros(experts, n_out)) if bias else None

    @property
    def row_macs(self) -> int:
        """MACs of one row through one expert."""
        return self.weight[0].numel()

    def forward(self, rows: Tensor, dispatch: Dispatch | None) -> Tensor:
        """[M, n_in] sorted by expert (or all rows, when dispatch is None) -> [M, n_out]."""
        if dispatch is None:
            out = rows @ self.weight.squeeze(0)
            return out if self.bias is None else out + self.bias.squeeze(0)
        out = grouped_matmul(rows, self.weight, dispatch.counts)
        return out if self.bias is None else out + self.bias.index_select(0, dispatch.sorted_experts)


ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "swiglu": F.silu}


class FeedForward(nn.Module):
    """SMoE feed-forward (E, k, D): E experts of width D, k per token. E = 1 is the ordinary feed-forward.

    "swiglu" has a gate branch and no biases; "relu" and "gelu" have biases.
    """

    def __init__(self, config):
        super().__init__()
        size, experts, width = config.hidden_size, config.ffn_experts, config.intermediate_size
        self.activation = ACTIVATIONS[config.activation]
        self.chosen = config.ffn_experts_per_token
        bias = config.activation != "swiglu"
        self.router = Router(
            size, experts, self.chosen, config.router, config.router_samples, config.router_dropout
        )
        self.up = ExpertLinear(experts, size, width, bias)
        self.gate = None if bias else ExpertLinear(experts, size, width)
        self.down = ExpertLinear(experts, width, size, bias)
        self.dropout = nn.Dropout(config.activation_dropout)
        # MACs of one row through its k experts, router apart; from the sizes, since an adapter (PEFT) wraps the layers
        self.row_macs = self.chosen * (2 if bias else 3) * size * width

    def forward(self, x_Nd: Tensor) -> tuple[Tensor, Dispatch | None]:
        """Rows -> rows (Eq. 1), and the routing decision."""
        dispatch = self.router(x_Nd)
        rows = x_Nd if dispatch is None else dispatch.send(x_Nd)
        if self.gate is None:
            hidden = self.activation(self.up(rows, dispatch))
        else:
            hidden = self.activation(self.gate(rows, dispatch)) * self.up(rows, dispatch)
        rows = self.down(self.dropout(hidden), dispatch)
        return (rows if dispatch is None else dispatch.combine(rows)), dispatch


@dataclass(frozen=True)
class Balance:
    """Sums over every application of one router, from which the balance losses are made.

    weight: how many tokens (each weighted by its survival, detached). probs: [E] weighted sum of probabilities.
    neg_entropy: weighted sum of sum_e p log p. assigned: [E] weighted number of tokens sent to each expert.
    """

    weight: Tensor
    probs: Tensor
    neg_entropy: Tensor
    assigned: Tensor

    @classmethod
    def of(cls, dispatch: Dispatch, weight_N: Tensor) -> "Balance":
        """Statistics of one application; `weight_N` [N] are survival probabilities (detached here).

        Detached: the weights of the statistic must not be moved to balance the experts. (The states that the
        routers read still depend on halting.)
        """
        # thousands of tokens are summed: half precision would stop counting at 256
        wide = torch.promote_types(dispatch.probs.dtype, torch.float32)
        weight_N, p_NE = weight_N.detach().to(wide), dispatch.probs.to(wide)
        plogp = (p_NE * p_NE.clamp(min=torch.finfo(p_NE.dtype).tiny).log()).sum(-1)
        assigned = torch.zeros_like(p_NE[0]).detach()
        chosen = dispatch.experts.shape[1]
        assigned = assigned.index_add(0, dispatch.experts.reshape(-1), weight_N.repeat_interleave(chosen))
        return cls(weight_N.sum(), weight_N @ p_NE, weight_N @ plogp, assigned)

    def __add__(self, other: "Balance") -> "Balance":
        return Balance(
            self.weight + other.weight,
            self.probs + other.probs,
            self.neg_entropy + other.neg_entropy,
            self.assigned + other.assigned,
        )

    def mim(self) -> Tensor:
        """Eq. 2, in nats; between -log E (every token sure, all experts used alike) and 0."""
        marginal = self.probs / self.weight
        entropy = -(marginal * marginal.clamp(min=torch.finfo(marginal.dtype).tiny).log()).sum()
        return -self.neg_entropy / self.weight - entropy

    def switch(self) -> Tensor:
        """Eq. 3; 1 when balanced."""
        share = self.assigned / self.assigned.sum()
        return len(share) * (self.probs / self.weight * share).sum()

    def usage(self) -> Tensor:
        """[E] share of the assignments each expert got."""
        return (self.assigned / self.assigned.sum()).detach()
