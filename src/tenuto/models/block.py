"""One step: attention, cross-attention in a decoder, feed-forward, and their norms. It knows nothing of halting."""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import Attention, BucketBias, Reach, View
from .documents import Documents
from .experts import Dispatch, FeedForward
from .geometric import CopyGate
from .ledger import Ledger
from .linear_attention import LinearAttention, RecurrentState
from .memory import Recall
from .rows import Rows


class FusedRMS(torch.autograd.Function):
    """w x / sqrt(mean x^2 + eps) with its derivative written out: half the passes of PyTorch's on a CPU."""

    @staticmethod
    def unit(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x / rms(x), and 1 / rms(x) [..., 1]."""
        scale = (torch.linalg.vecdot(x, x) / x.shape[-1] + eps).rsqrt().unsqueeze(-1)
        return x * scale, scale

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        unit, scale = FusedRMS.unit(x, eps)
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, scale, weight = ctx.saved_tensors
        grad_weight = (grad * unit).flatten(0, -2).sum(0)
        grad = grad * weight
        along = torch.linalg.vecdot(grad, unit).unsqueeze(-1) / unit.shape[-1]
        return torch.addcmul(grad, unit, along, value=-1).mul_(scale), grad_weight, None


class RMSNorm(nn.RMSNorm):
    """PyTorch's, which has a fused kernel on GPUs only; on a CPU `FusedRMS`."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)  # autocast hands in half precision; norms stay in the weights'
        if x.is_cpu and x.dtype.itemsize >= 4 and not torch.compiler.is_compiling():
            if not torch.is_grad_enabled():
                # the same numbers without the cost of a Function, which decoding a few rows would feel
                return FusedRMS.unit(x, self.eps)[0] * self.weight
            return FusedRMS.apply(x, self.weight, self.eps)
        return super().forward(x)


def norm(config) -> nn.Module:
    """The config's norm over d."""
    kind = nn.LayerNorm if config.norm == "layernorm" else RMSNorm
    return kind(config.hidden_size, eps=config.norm_eps)


class Branch(nn.Module):
    """A residual branch's norms: post  N(x + f(x)); pre  x + f(N(x)); sandwich  x + N(f(N(x)))."""

    def __init__(self, config):
        super().__init__()
        place = config.norm_placement
        self.before = norm(config) if place in ("pre", "sandwich") else nn.Identity()
        self.inner = norm(config) if place == "sandwich" else nn.Identity()
        self.after = norm(config) if place == "post" else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)

    def add(self, x_Nd: Tensor, branch_Nd: Tensor) -> Tensor:
        """Adds the branch's result to the residual stream."""
        return self.after(x_Nd + self.dropout(self.inner(branch_Nd)))


class Block(GradientCheckpointingLayer):
    """The unit that is stacked (dense) or iterated (universal, looped).

    A decoder's is causal, with cross-attention unless `cross` is false (a language model's).
    """

    def __init__(self, config, decoder: bool = False, cross: bool | None = None):
        super().__init__()
        cross = decoder if cross is None else cross
        self.attention = Attention(config, causal=decoder)
        self.attention_branch = Branch(config)
        self.cross = Attention(config, cross=True) if cross else None
        self.cross_branch = Branch(config) if cross else None
        self.feed_forward = FeedForward(config)
        self.feed_forward_branch = Branch(config)
        start = getattr(config, "copy_gate", None)
        self.gate = None if start is None else CopyGate(config.hidden_size, start, norm(config))

    def forward(
        self,
        x_Nd: Tensor,
        rows: Rows,
        kv: tuple[Tensor, Tensor],
        views: list[View],
        memory_kv: tuple[Tensor, Tensor] | None = None,
        memory_views: list[View] | None = None,
        angles: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, dict[str, Dispatch]]:
        """Live rows -> live rows one step further, and the routing decisions by module name.

        `kv`: self-attention's buffers, from `keys_values`. `memory_kv`: the encoder's, from `memory_keys_values`.
        `views`, `memory_views`: what the queries may read, from `Reach`. `angles`: rotary positions of the rows.
        """
        routing, h_Nd = {}, x_Nd
        branch = self.attention_branch
        out, routing["attention"] = self.attention(branch.before(x_Nd), rows, kv, views, angles)
        x_Nd = branch.add(x_Nd, out)
        if self.cross is not None:
            branch = self.cross_branch
            out, routing["cross"] = self.cross(branch.before(x_Nd), rows, memory_kv, memory_views)
            x_Nd = branch.add(x_Nd, out)
        branch, a_Nd = self.feed_forward_branch, x_Nd
        out, routing["feed_forward"] = self.feed_forward(branch.before(x_Nd))
        x_Nd = branch.add(x_Nd, out)
        if self.gate is not None:
            x_Nd = self.gate(h_Nd, a_Nd, x_Nd)
        return x_Nd, {name: one for name, one in routing.items() if one is not None}

    def keys_values(
        self, states_Md: Tensor, rows: Rows, kv: tuple | None, angles: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Self-attention's K/V buffers with `rows` projected from their states."""
        return self.attention.project(self.attention_branch.before(states_Md), rows, kv, angles)

    def memory_keys_values(self, memory_BTd: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-attention's K/V of the encoder's states; for a tied block once, they do not change."""
        rows = Rows.of(memory_BTd, None)
        return self.cross.project(rows.pack(memory_BTd), rows, None)

    def account(
        self,
        ledger: Ledger,
        rows: Rows,
        kv_rows: Rows,
        reach: Reach,
        memory: Tensor | None = None,
        memory_reach: Reach | None = None,
        first: bool = True,
    ) -> None:
        """Books one application to `rows`, keys and values written for `kv_rows` (the encoder's, if `first`)."""
        self.attention.account_kv(ledger, kv_rows)
        self.attention.account(ledger, rows, reach)
        if self.cross is not None:
            if first:
                self.cross.account_kv(ledger, Rows.of(memory, None))
            self.cross.account(ledger, rows, memory_reach)
        self._account_feed_forward(ledger, rows)

    def _account_feed_forward(self, ledger: Ledger, rows: Rows) -> None:
        feed_forward = self.feed_forward
        kind = "linear" if feed_forward.router.experts == 1 else "expert"
        ledger.add(kind, rows.per_sequence, feed_forward.row_macs)
        ledger.add("router", rows.per_sequence, feed_forward.router.row_macs)
        if self.gate is not None:
            ledger.add("linear", rows.per_sequence, self.gate.row_macs)

    def token_macs(self) -> int:
        """MACs of one token through the block, keys and values (the encoder's too) included, scores not.

        This is the papers' counting rule (Table 1 of SUT).
        """
        parts = [self.attention] + ([self.cross] if self.cross is not None else [])
        macs = self.feed_forward.row_macs + self.feed_forward.router.row_macs
        macs += 0 if self.gate is None else self.gate.row_macs
        return macs + sum(part.row_macs + part.kv_macs + part.router.row_macs for part in parts)


class LoopBlock(Block):
    """The unit of a looped language model: attention or a recurrent mixer, and perhaps a memory to read (memory.py).

    `mixer`: "attention", or a kind of linear_attention.py, which then stands where attention does.
    """

    def __init__(self, config, mixer: str = "attention", memory: bool = False):
        super().__init__(config, decoder=True, cross=memory)
        self.recurrent = mixer != "attention"
        if self.recurrent:
            self.attention = LinearAttention(config)

    def forward(
        self,
        x_Nd: Tensor,
        rows: Rows,
        past: tuple[Tensor, Tensor] | RecurrentState | None,
        reach: Reach,
        documents: Documents,
        recall: Recall | None = None,
        angles: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, dict[str, Dispatch], RecurrentState | None]:
        """Live rows -> live rows one step further, the routing decisions, and a recurrent mixer's state after them.

        `past`: the K/V buffers of all that may be read, this call's rows among them; or the state before this call.
        """
        routing, state, branch = {}, None, self.attention_branch
        if self.recurrent:
            out, state = self.attention.mix(branch.before(x_Nd), documents.of(rows), past)
        else:
            views = reach.views(rows)
            out, routing["attention"] = self.attention(branch.before(x_Nd), rows, past, views, angles)
        x_Nd = branch.add(x_Nd, out)
        if recall is not None:
            x_Nd = self._recall(x_Nd, rows, recall)
        branch = self.feed_forward_branch
        out, routing["feed_forward"] = self.feed_forward(branch.before(x_Nd))
        x_Nd = branch.add(x_Nd, out)
        return x_Nd, {name: one for name, one in routing.items() if one is not None}, state

    def _recall(self, x_Nd: Tensor, rows: Rows, recall: Recall) -> Tensor:
        """The cross-attention branch, for the rows that have something to read."""
        readers, own, views = recall.of(rows)
        if not len(readers):
            return x_Nd
        branch, x_nd = self.cross_branch, x_Nd.index_select(0, readers)
        out, _ = self.cross(branch.before(x_nd), own, recall.kv, views)
        return x_Nd.index_copy(0, readers, branch.add(x_nd, out))

    def keys_values(
        self, states_Md: Tensor, rows: Rows, kv: tuple | None, angles: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """As a block's; a recurrent mixer has none."""
        return None if self.recurrent else super().keys_values(states_Md, rows, kv, angles)

    def account(
        self, ledger: Ledger, rows: Rows, reach: Reach, documents: Documents, recall: Recall | None = None
    ) -> None:
        """Books one application to `rows`."""
        if self.recurrent:
            documents.book(ledger, lambda ledger: self.attention.account(ledger, documents.of(rows)))
        else:
            self.attention.account_kv(ledger, rows)
            self.attention.account(ledger, rows, reach)
        if recall is not None:
            recall.account(self.cross, ledger, rows)
        self._account_feed_forward(ledger, rows)

    def token_macs(self) -> int:
        """As a block's; the memory's keys and values are not a token's (`Memory.token_macs`)."""
        macs = self.feed_forward.row_macs + self.feed_forward.router.row_macs + self.attention.row_macs
        if not self.recurrent:
            macs += self.attention.kv_macs + self.attention.router.row_macs
        return macs + (0 if self.cross is None else self.cross.row_macs)


class Stack(nn.Module):
    """What every stack has besides its blocks: position bias, final norm, what its queries may read.

    `cached`: whether its decoder takes a cache.
    """

    cached = False
    # transformers' generate asks an encoder for it
    main_input_name = "input_ids"

    def __init__(self, config, decoder: bool):
        super().__init__()
        self.config, self.is_causal = config, decoder
        self.bias = None
        if config.relative_positions == "t5":
            self.bias = BucketBias(
                config.num_attention_heads,
                config.relative_buckets,
                config.relative_max_distance,
                causal=decoder,
            )
        self.final_norm = nn.Identity() if config.norm_placement == "post" else norm(config)

    def reaches(
        self,
        length: int,
        mask_BT: Tensor | None,
        memory: Tensor | None,
        memory_mask: Tensor | None,
        past: int = 0,
    ) -> tuple[Reach, Reach | None]:
        """Self-attention's reach over `length` tokens and `past` ones in a cache, which `mask_BT` counts too, and
        cross-attention's over the encoder's.
        """
        chosen, keys = self.config.attention_experts_per_token, past + length
        bias_HTT = self.bias.all_pairs(keys, past) if self.bias is not None else None
        offsets = self.config.relative_positions in ("window", "geometric")
        own = Reach(keys, chosen, mask_BT, self.is_causal, bias_HTT, offsets, past=past)
        if memory is None:
            return own, None
        return own, Reach(memory.shape[1], chosen, memory_mask)
