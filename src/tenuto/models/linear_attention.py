"""Linear attention: a token mixer whose memory of the past is one matrix per head, not a key per token.

What a stopped token cost attention it costs here as well: nothing. It is absent, it neither writes nor decays.

    (1) S_t = a_t S_{t-1} + k_t v_t^T                              "gla": one decay per head and step (RetNet, Mamba-2)
    (2) S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T      "gated_delta" (Yang et al. 2024, arXiv 2412.06464)
    (3) y_t = S_t^T q_t

Both are run in chunks of C tokens. S is the memory before the chunk, g_t the sum of log a from its first token to t,
A_tj = exp(g_t - g_j) for j <= t and 0 elsewhere; (2) in its WY form, where u_t is what t writes:

    (4) (I + tril(diag(b) A o K K^T, -1)) [U', W] = diag(b) [V, diag(exp g) K]      a unit triangular solve
    (5) U = U' - W S                                                                (1): U = V
    (6) Y = diag(exp g) Q S + (A o Q K^T) U
    (7) S' = exp(g_C) S + (diag(exp(g_C - g)) K)^T U

With decays <= 1 no exponent is positive: strong decays underflow to 0, nothing overflows. The arithmetic is in
float32 or wider, under autocast too. Its error is that of g, a sum over the chunk: about 1e-7 |g| in float32.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import initialization as init

from .ledger import Ledger
from .rows import Rows

# measured on one CPU core at D = 32; fla's kernels have their own
CHUNK = 32


def chunks(length: int, chunk: int = CHUNK) -> tuple[int, int]:
    """How many chunks of how many tokens `length` tokens are run in: the fewest of at most `chunk`, of like size."""
    number = -(-length // chunk)
    return number, -(-length // number)


def gated_linear_attention(
    q_STHD: Tensor,
    k_STHD: Tensor,
    v_STHE: Tensor,
    log_decay_STH: Tensor,
    state: Tensor | None = None,
    chunk: int = CHUNK,
    valid_ST: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Eq. 1 and 3: y [S, T, H, E] in v's dtype and the memory [S, H, D, E] after the last token, float32 or wider.

    `log_decay_STH` is log a <= 0, finite; `state` the memory before the first token (None: zeros). Places where
    `valid_ST` is false neither write nor decay, and their y is 0.
    """
    return _mix(q_STHD, k_STHD, v_STHE, None, log_decay_STH, state, chunk, valid_ST)


def gated_delta_rule(
    q_STHD: Tensor,
    k_STHD: Tensor,
    v_STHE: Tensor,
    beta_STH: Tensor,
    log_decay_STH: Tensor,
    state: Tensor | None = None,
    chunk: int = CHUNK,
    valid_ST: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Eq. 2 and 3, otherwise as `gated_linear_attention`; `beta_STH` is b. Keys should have length 1, or below.

    b |k|^2 beyond 2 makes the memory grow from token to token.
    """
    return _mix(q_STHD, k_STHD, v_STHE, beta_STH, log_decay_STH, state, chunk, valid_ST)


def _mix(q, k, v, beta, log_decay, state, chunk, valid_ST):
    """Masks, widens and picks the path: one step, fla's kernel or the chunked form."""
    (S, T, H, D), E = q.shape, v.shape[-1]
    dtype = torch.promote_types(v.dtype, torch.float32)
    log_decay = log_decay.to(dtype)
    if valid_ST is not None:
        # a key of zero writes nothing and erases nothing, whatever b is
        k = k.masked_fill(~valid_ST[..., None, None], 0)
        log_decay = log_decay.masked_fill(~valid_ST[..., None], 0)
    state = q.new_zeros(S, H, D, E, dtype=dtype) if state is None else state.to(dtype)
    kernel = None
    if v.is_cuda and v.dtype.itemsize == 2 and T > 1:
        kernel = _kernel(beta is not None)
    if kernel is not None:
        rates = {"g": log_decay} if beta is None else {"g": log_decay, "beta": beta}
        y, state = kernel(
            q.to(v.dtype), k.to(v.dtype), v, **rates, scale=1.0, initial_state=state, output_final_state=True
        )
    else:
        # autocast would put these products into half precision
        with torch.autocast(v.device.type, enabled=False):
            parts = [part if part is None else part.to(dtype) for part in (q, k, v, beta, log_decay)]
            y, state = _step(*parts, state) if T == 1 else _chunked(*parts, state, chunk)
        y = y.to(v.dtype)
    if valid_ST is not None:
        y = y.masked_fill(~valid_ST[..., None, None], 0)
    return y, state


@cache
def _kernel(delta: bool):
    """flash-linear-attention's chunked kernel for (2) or (1), None where it is not installed.

    Written from its documentation and not run: none of our machines has had it. Its gated delta rule takes half
    precision only, in some releases; the float32 promise is this file's own path for both.
    """
    module, name = (
        ("gated_delta_rule", "chunk_gated_delta_rule") if delta else ("simple_gla", "chunk_simple_gla")
    )
    try:
        return getattr(import_module(f"fla.ops.{module}"), name)
    except ImportError:
        return None


def _step(q, k, v, beta, log_decay, state):
    """One token, [S, 1, H, ...], by the recurrence itself."""
    q, k, v = (part.flatten(0, 2).unsqueeze(1) for part in (q, k, v))
    S, H = state.shape[:2]
    memory = state.flatten(0, 1) * log_decay.exp().reshape(S * H, 1, 1)
    if beta is not None:
        v = (v - k @ memory) * beta.reshape(S * H, 1, 1)
    memory = torch.baddbmm(memory, k.transpose(1, 2), v)
    return (q @ memory).view(S, 1, H, -1), memory.view_as(state)


def _chunked(q, k, v, beta, log_decay, state, chunk):
    """Eq. 4-7. Inside, N chunks of G = S*H heads: [N, G, C, ...]."""
    S, T, H, _ = q.shape
    N, C = chunks(T, chunk)

    def cut(part):
        part = part.reshape(S, T, H, -1)
        if N * C > T:
            part = F.pad(part, (0, 0, 0, 0, 0, N * C - T))
        return part.view(S, N, C, H, -1).permute(1, 0, 3, 2, 4).reshape(N, S * H, C, -1)

    q, k, v = cut(q), cut(k), cut(v)
    g = cut(log_decay).cumsum(2)
    future = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1)
    # the future is hidden before exp: its exponents are positive and may be large
    decay = (g - g.mT).masked_fill(future, -torch.inf).exp()
    since_start, to_end = g.exp(), (g[:, :, -1:] - g).exp()
    scores = (q @ k.mT) * decay
    writers, kept = (k * to_end).mT, since_start[:, :, -1:]
    memory = state.flatten(0, 1)
    before = []
    if beta is None:
        u = v
        for n, written in enumerate(writers @ v):
            before.append(memory)
            memory = torch.addcmul(written, kept[n], memory)
    else:
        beta = cut(beta)
        weighted = beta * k
        # the solve reads below the diagonal only, and sets the diagonal to 1
        overlap = (weighted @ k.mT) * decay
        known = torch.cat([beta * v, since_start * weighted], -1)
        solved = torch.linalg.solve_triangular(overlap, known, upper=False, unitriangular=True)
        own, reads = (part.unbind(0) for part in solved.split([v.shape[-1], k.shape[-1]], -1))
        u = []
        for n in range(N):
            before.append(memory)
            u.append(torch.baddbmm(own[n], reads[n], memory, alpha=-1))
            memory = torch.baddbmm(kept[n] * memory, writers[n], u[n])
        u = torch.stack(u)
    y = (q * since_start) @ torch.stack(before) + scores @ u
    y = y.view(N, S, H, C, -1).permute(1, 0, 3, 2, 4).reshape(S, N * C, H, -1)
    return y[:, :T], memory.view_as(state)


@dataclass(frozen=True)
class RecurrentState:
    """What a sequence carries on: memory [S, H, D, D], and conv [S, conv_size-1, 3HD], the last tokens' q, k, v.

    A sequence's whole past has this size, whatever its length.
    """

    memory: Tensor
    conv: Tensor

    def select(self, index: Tensor) -> "RecurrentState":
        """The sequences at `index` [n], in that order; a beam may be there twice."""
        return RecurrentState(self.memory.index_select(0, index), self.conv.index_select(0, index))

    def replace(self, index: Tensor, new: "RecurrentState") -> "RecurrentState":
        """The state with the sequences at `index` [n] replaced by those of `new`."""
        return RecurrentState(
            self.memory.index_copy(0, index, new.memory.to(self.memory.dtype)),
            self.conv.index_copy(0, index, new.conv.to(self.conv.dtype)),
        )


class LinearAttention(nn.Module):
    """The mixer around the recurrence, as in Gated DeltaNet (section 3.4); the same for "gla".

    (8)  [q, k, v] = SiLU(conv(W_qkv x))             causal depthwise convolution; none, nor a SiLU, at conv_size 0
    (9)  q := q/|q|, k := k/|k|  ("gated_delta")     q := D^-0.5 q  ("gla")         per head
    (10) log a = -exp(A) softplus(W_a x + c)         per head
    (11) b = sigmoid(W_b x)                          per head, "gated_delta" only
    (12) out = W_o (RMSNorm(y) * SiLU(W_g x))        the norm over each head's D

    Reads of config: hidden_size d, num_attention_heads H, head_dim D, mixer, norm_eps, conv_size. On a GPU, in half
    precision, flash-linear-attention's kernels do the recurrence if they are installed (not run here).

    `forward` takes sequences of tokens, `mix` the live rows of a stack.
    """

    def __init__(self, config):
        super().__init__()
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.delta, self.conv_size = config.mixer == "gated_delta", config.conv_size
        size, width = config.hidden_size, self.heads * self.head_dim
        self.query = nn.Linear(size, width, bias=False)
        self.key = nn.Linear(size, width, bias=False)
        self.value = nn.Linear(size, width, bias=False)
        self.gate = nn.Linear(size, width, bias=False)
        self.decay = nn.Linear(size, self.heads, bias=False)
        self.beta = nn.Linear(size, self.heads, bias=False) if self.delta else None
        self.output = nn.Linear(width, size, bias=False)
        self.norm = nn.RMSNorm(self.head_dim, eps=config.norm_eps)
        self.log_rate = nn.Parameter(torch.empty(self.heads))
        self.decay_bias = nn.Parameter(torch.empty(self.heads))
        # three axes, as in nn.Conv1d: an optimiser for matrices must not take it for one
        self.conv = nn.Parameter(torch.empty(3 * width, 1, self.conv_size)) if self.conv_size else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Rates, their bias and the convolution, as in Mamba-2: at x = 0 memory halves in 0.4 to 700 tokens."""
        init.uniform_(self.log_rate, 1, 16)
        init.copy_(self.log_rate, self.log_rate.detach().log())
        init.uniform_(self.decay_bias, log(1e-3), log(1e-1))
        init.copy_(self.decay_bias, self.decay_bias.detach().exp().expm1().log())
        if self.conv is not None:
            init.uniform_(self.conv, -(self.conv_size**-0.5), self.conv_size**-0.5)

    @property
    def row_macs(self) -> int:
        """MACs of one token outside the recurrence: projections, convolution, gates and output."""
        weights = [self.query, self.key, self.value, self.gate, self.decay, self.output]
        weights = [part.weight for part in weights + ([self.beta] if self.delta else [])]
        return sum(weight.numel() for weight in weights + ([] if self.conv is None else [self.conv]))

    @property
    def conv_macs(self) -> int:
        """MACs of one token in the convolution."""
        return 0 if self.conv is None else self.conv.numel()

    def mixing_macs(self, chunk: int = CHUNK) -> int:
        """MACs per token of the recurrence in chunks of C = `chunk`, which `chunks` gives for a length.

        Per head: 2CD scores and their use, 2D^2 read and write; the delta rule CD overlaps and D^2 for W S in
        addition, and (C-1)D for the solve, which PyTorch's FLOP counter does not see. Padding to N*C tokens is the
        caller's to count.
        """
        C, D = chunk, self.head_dim
        macs = 2 * C * D + 2 * D * D
        if self.delta:
            macs += C * D + D * D + (C - 1) * D
        return self.heads * macs

    @property
    def state_macs(self) -> int:
        """MACs of the recurrence of a token that comes alone (T = 1): D^2 per head for write, read and erasure."""
        return (3 if self.delta else 2) * self.heads * self.head_dim**2

    def start(self, sequences: int) -> RecurrentState:
        """The state of `sequences` sequences before their first token."""
        weight = self.query.weight
        H, D = self.heads, self.head_dim
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return RecurrentState(
            weight.new_zeros(sequences, H, D, D, dtype=dtype),
            weight.new_zeros(sequences, max(self.conv_size - 1, 0), 3 * H * D),
        )

    def forward(
        self,
        x_STd: Tensor,
        valid_ST: Tensor | None = None,
        state: RecurrentState | None = None,
    ) -> tuple[Tensor, RecurrentState]:
        """[S, T, d] -> [S, T, d] and the state after each sequence's last valid token.

        `valid_ST` (None: all) must be a prefix of each row: the caller packs live tokens in order and pads at the
        end. There the output is 0. A sequence in pieces, the state handed on, gives what it gives at once.
        """
        if valid_ST is not None and not torch.compiler.is_compiling():
            torch._assert_async(
                (valid_ST[:, 1:] <= valid_ST[:, :-1]).all(), "valid is not a prefix of each row"
            )
        state = self.start(len(x_STd)) if state is None else state
        y, state = self._remember(*self._project(x_STd), valid_ST, state)
        return self._leave(y, x_STd), state

    def mix(self, x_Nd: Tensor, rows: Rows, state: RecurrentState | None) -> tuple[Tensor, RecurrentState]:
        """Live rows -> live rows, and the state of all B sequences after each one's last live row.

        Tokens that are absent neither write nor decay; a sequence without a live row keeps its state.
        """
        state = self.start(rows.batch) if state is None else state
        inputs, pieces = self._project(x_Nd), []
        for group in rows.groups:
            valid = None
            if group.slots is not None:
                slots = torch.arange(group.positions.shape[1], device=x_Nd.device)
                valid = slots < group.sequences_of(rows.per_sequence)[:, None]
            own = state if group.sequences is None else state.select(group.sequences)
            grids = (None if part is None else group.pad(part) for part in inputs)
            y, own = self._remember(*grids, valid, own)
            pieces.append(group.unpad(y))
            state = own if group.sequences is None else state.replace(group.sequences, own)
        return self._leave(rows.regroup(pieces), x_Nd), state

    def account(self, ledger: Ledger, rows: Rows) -> None:
        """Books one application to `rows`.

        Projections are linear. Convolution and recurrence stand with the attention: executed in chunks with their
        padding, and as the plain recurrence in `attention_causal`. A sequence's state is written once.
        """
        counts = rows.per_sequence
        ledger.add("linear", counts, self.row_macs - self.conv_macs)
        executed = torch.zeros_like(counts)
        for group in rows.groups:
            where = slice(None) if group.sequences is None else group.sequences
            length = group.positions.shape[1]
            number, size = chunks(length)
            mixing = self.state_macs if length == 1 else number * size * self.mixing_macs(size)
            executed[where] = length * self.conv_macs + mixing
        ledger.add_attention(executed, counts * (self.conv_macs + self.state_macs), 1)
        ledger.add_kv(counts > 0, self.state_bytes)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state."""
        return sum(part.numel() * part.element_size() for part in vars(self.start(1)).values())

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """[..., d] -> q, k, v [..., 3HD] before the convolution, b and log a [..., H]: all that is each token's own."""
        qkv = torch.cat([self.query(x), self.key(x), self.value(x)], -1)
        return qkv, self.beta(x).sigmoid() if self.delta else None, self._log_decay(x)

    def _remember(
        self, qkv, beta, log_decay, valid_ST, state: RecurrentState
    ) -> tuple[Tensor, RecurrentState]:
        """What runs along the sequence: convolution and recurrence; [S, T, ...] -> y [S, T, H, D] and the state."""
        conv = state.conv
        if self.conv is not None:
            qkv, conv = self._convolve(qkv, conv, valid_ST)
        q, k, v = qkv.view(*qkv.shape[:2], 3, self.heads, self.head_dim).unbind(2)
        if self.delta:
            q, k = unit(q, 1e-6), unit(k, 1e-6)
            y, memory = gated_delta_rule(q, k, v, beta, log_decay, state.memory, valid_ST=valid_ST)
        else:
            q = q * self.head_dim**-0.5
            y, memory = gated_linear_attention(q, k, v, log_decay, state.memory, valid_ST=valid_ST)
        return y, RecurrentState(memory, conv)

    def _leave(self, y: Tensor, x: Tensor) -> Tensor:
        """Eq. 12: [..., H, D] and the input [..., d] -> [..., d]."""
        D = self.head_dim
        y = unit(y, D * self.norm.eps) * (D**0.5 * self.norm.weight).to(y.dtype)
        return self.output(y.flatten(-2) * F.silu(self.gate(x)))

    def _convolve(self, qkv: Tensor, conv: Tensor, valid_ST: Tensor | None) -> tuple[Tensor, Tensor]:
        """SiLU of the causal convolution [S, T, 3HD], and the inputs its next call needs."""
        T, kept = qkv.shape[1], self.conv_size - 1
        window = torch.cat([conv.to(qkv.dtype), qkv], 1)
        # two axes, channels last: a CPU has a kernel for that, twice as fast as conv1d's or a sum of shifts
        out = F.conv2d(window.mT.unsqueeze(2), self.conv.to(qkv.dtype).unsqueeze(2), groups=qkv.shape[-1])
        out = out.squeeze(2).mT
        if valid_ST is None:
            return F.silu(out), window[:, T:]
        last = valid_ST.sum(1, keepdim=True) + torch.arange(kept, device=qkv.device)
        return F.silu(out), window.gather(1, last.unsqueeze(-1).expand(-1, -1, qkv.shape[-1]))

    def _log_decay(self, x: Tensor) -> Tensor:
        """Eq. 10: [..., H], float32 or wider."""
        inputs = self.decay(x)
        dtype = torch.promote_types(inputs.dtype, torch.float32)
        return -self.log_rate.to(dtype).exp() * F.softplus(inputs.to(dtype) + self.decay_bias.to(dtype))


class _Unit(torch.autograd.Function):
    """x / sqrt(|x|^2 + eps) with its derivative written out, for CPUs: see `FusedRMS` of the block."""

    @staticmethod
    def forward(ctx, x: Tensor, eps: float) -> Tensor:
        scale = (torch.linalg.vecdot(x, x) + eps).rsqrt().unsqueeze(-1)
        unit = x * scale
        ctx.save_for_backward(unit, scale)
        return unit

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        unit, scale = ctx.saved_tensors
        along = torch.linalg.vecdot(grad, unit).unsqueeze(-1)
        return torch.addcmul(grad, unit, along, value=-1).mul_(scale), None


def unit(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(|x|^2 + eps) over the last axis: length 1, smooth at 0."""
    if x.is_cpu and x.dtype.itemsize >= 4 and not torch.compiler.is_compiling():
        return _Unit.apply(x, eps)
    size = x.shape[-1]
    return F.rms_norm(x, (size,), eps=eps / size) * size**-0.5
