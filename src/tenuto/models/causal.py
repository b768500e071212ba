"""Causal language models over the stack of any decoder: embedding, masks, cache, head, the losses of the policies.

Losses, means over predicted tokens (act, ponder: over all tokens), labels shifted inside:

    task     -log p(next token): at the state the policy leaves with; "all": mean over the loops; "sampled": at a depth
             drawn for the batch; PonderNet: sum_l a_l loss_l
    act      mean depth (or what it exceeds depth_budget by)         stick_breaking, act, depth_router
    ponder   KL(a || prior)                                          pondernet
    exit     binary cross-entropy of "stop" against the oracle       exit_head
    prior, router, gate, forecast                                    routed layers: routing.py, mod.py, sdt.py, stt.py
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, GenerationMixin
from transformers.masking_utils import create_causal_mask, find_packed_sequence_indices
from transformers.modeling_utils import slice_logits_to_keep
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .attention import Reach, Rotary
from .base import AdaptiveOutput, AdaptivePreTrainedModel

# what continuous batching hands to a model besides ids, positions, mask and cache
PAGED = {"read_index", "write_index", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
         "block_table", "is_causal", "logits_indices", "logits_processor_args", "output_attentions",
         "output_hidden_states"}  # fmt: skip


class CausalModel(AdaptivePreTrainedModel):
    """Token ids -> states of every token. Subclasses name the architecture's config and stack."""

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = LlamaRotaryEmbedding(config) if config.positions == "rotary" else None
        self.stack = self.stack_class(config)
        self.add_head(config)
        self.post_init()

    def add_head(self, config) -> None:
        """What a subclass puts on top of the stack, before the weights are initialised."""

    def readout(self, h_Nd: Tensor) -> Tensor | None:
        """States -> logits; None without a head."""

    def run(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Any | None,
        inputs_embeds: Tensor | None,
        knobs: dict[str, Any],
        extra: dict[str, Any],
    ):
        """The stack on the embedded tokens -> its output and trajectory, and the reach and rotary positions used."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either input_ids or inputs_embeds.")
        paged = cache is not None and not hasattr(cache, "layers")
        self.refuse({name: value for name, value in extra.items() if not (paged and name in PAGED)})
        x_BTd = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.config.scale_embeddings:
            x_BTd = x_BTd * self.config.hidden_size**0.5
        B, T, _ = x_BTd.shape
        past = 0 if cache is None or paged else cache.get_seq_length()
        if cache is not None and not paged and _packed(position_ids, attention_mask, past):
            # later calls would not know where a document began
            raise ValueError(
                "Documents packed into one sequence do not go with a cache: pass use_cache=False."
            )
        mask_BT = keys_mask = None
        if torch.is_tensor(attention_mask) and attention_mask.dim() == 2:
            if attention_mask.shape != (B, past + T):
                raise ValueError(
                    f"attention_mask has shape {tuple(attention_mask.shape)}; with {past} tokens in the cache and {T}"
                    f" new ones it must be {(B, past + T)}."
                )
            keys_mask = attention_mask.bool()
            if not keys_mask.any(-1).all():
                raise ValueError("attention_mask leaves a sequence without any token.")
            # a piece of a long prompt may hold pads alone
            mask_BT = None if bool(keys_mask[:, past:].all()) else keys_mask[:, past:]
        if position_ids is None:
            position_ids = torch.arange(past, past + T, device=x_BTd.device).unsqueeze(0)
            if keys_mask is not None:
                position_ids = (keys_mask.cumsum(-1) - 1).clamp(min=0)[:, past:]
        pairs = create_causal_mask(
            config=self.config,
            inputs_embeds=x_BTd,
            attention_mask=attention_mask if keys_mask is None else keys_mask,
            cache=cache,
            position_ids=position_ids,
        )
        length = T if pairs is None else pairs.shape[-1]
        if pairs is None and past:
            length = past + T
        causal = pairs is None and not past
        reach = Reach(length, self.config.attention_experts_per_token, None, causal=causal, pairs=pairs)
        rotary = None
        if self.rotary is not None:
            cos, sin = self.rotary(x_BTd, position_ids)
            rotary = Rotary(cos.expand(B, -1, -1), sin.expand(B, -1, -1))
        slots = self.stack.slots(cache, extra)
        knobs = self.knobs_of(self.stack, knobs)
        out, trajectory = self.stack(x_BTd, mask_BT, reach, rotary, slots, readout=self.readout, **knobs)
        return out, trajectory, reach, rotary

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        threshold: float | Tensor | None = None,
        min_steps: int | None = None,
        max_steps: int | None = None,
        capacity: float | Tensor | None = None,
        selection: str | None = None,
        output_routing: bool = False,
        **extra,
    ) -> AdaptiveOutput:
        """[B, T] ids -> `AdaptiveOutput` with last_hidden_state [B, T, d]. Arguments: see `CausalLM.forward`."""
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        knobs = {"threshold": threshold, "min_steps": min_steps, "max_steps": max_steps, "capacity": capacity,
                 "selection": selection, "output_routing": output_routing}  # fmt: skip
        out, *_ = self.run(input_ids, attention_mask, position_ids, cache, inputs_embeds, knobs, extra)
        return AdaptiveOutput(
            last_hidden_state=out.hidden,
            depths=out.depths,
            expected_depths=out.expected_depths,
            compute=out.compute,
            balance=out.balance,
            routing=out.routing,
            cache=cache,
            signs=out.signs,
            executed=out.executed,
        )

    @torch.no_grad()
    def get_loop_depths(self, input_ids: Tensor, attention_mask: Tensor | None = None, **knobs) -> Tensor:
        """[B, T] ids -> [B, T] int, the loops each token runs (0 at pads). Knobs: threshold, min_steps, max_steps."""
        return CausalModel.forward(self, input_ids, attention_mask, **knobs).depths


class CausalLM(CausalModel, GenerationMixin):
    """Decoder and language-model head, tied to the embedding if `tie_word_embeddings`."""

    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}

    def add_head(self, config) -> None:
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def readout(self, h_Nd: Tensor) -> Tensor:
        """States after a loop -> logits, without coda."""
        return self.lm_head(self.stack.final_norm(h_Nd))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        threshold: float | Tensor | None = None,
        min_steps: int | None = None,
        max_steps: int | None = None,
        capacity: float | Tensor | None = None,
        selection: str | None = None,
        output_routing: bool = False,
        loss_weights: dict[str, float] | None = None,
        **extra,
    ) -> AdaptiveOutput:
        """[B, T] ids -> logits [B, T, V]; with labels [B, T] (-100: none), the loss.

        attention_mask: [B, past + T], 1 at tokens. position_ids: [B, T]; where they start again at 0 without a mask,
        another document begins and attention does not cross; such a call makes no cache, and refuses one. cache: a
        transformers cache, which this call extends.
        logits_to_keep: as in transformers. threshold (a number, or [B]), min_steps and max_steps: the depth knobs of
        this call, of looped models; capacity (a number, or [B]) or threshold, and selection: those of routed models,
        routing.py. loss_weights overrides the config's weights of the auxiliary terms.
        """
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and labels is None
            use_cache = use_cache and not _packed(position_ids, attention_mask)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        knobs = {"threshold": threshold, "min_steps": min_steps, "max_steps": max_steps, "capacity": capacity,
                 "selection": selection, "output_routing": output_routing}  # fmt: skip
        out, trajectory, reach, rotary = self.run(
            input_ids, attention_mask, position_ids, cache, inputs_embeds, knobs, extra
        )
        logits, losses, loss = None, None, None
        if labels is None or not (self.training and self.config.loss_chunk):
            logits = self.lm_head(slice_logits_to_keep(out.hidden, logits_to_keep))
            kept = torch.full_like(out.depths[:, 0], logits.numel() // logits.shape[-1] // len(out.depths))
        else:
            kept = torch.full_like(out.depths[:, 0], out.depths.shape[1])
        out.compute.add("head", kept, self.lm_head.weight.numel())
        if labels is not None:
            losses = self._losses(out, logits, labels, trajectory, reach, rotary, logits_to_keep)
            loss = self.weigh(losses, loss_weights)
        return AdaptiveOutput(
            loss=loss,
            logits=logits,
            losses=losses,
            last_hidden_state=out.hidden,
            depths=out.depths,
            expected_depths=out.expected_depths,
            compute=out.compute,
            balance=out.balance,
            routing=out.routing,
            cache=cache,
            signs=out.signs,
            executed=out.executed,
        )

    def token_losses(self, hidden_Md: Tensor, targets_M: Tensor) -> Tensor:
        """[M, d] what the head reads, [M] next tokens (-100: none) -> [M] losses in nats, 0 where there is none.

        With `loss_chunk`, that many tokens' logits at a time, made again in the backward pass.
        """

        def some(hidden, targets):
            return cross_entropies(self.lm_head(hidden), targets)

        size = self.config.loss_chunk
        if not size or len(hidden_Md) <= size:
            return some(hidden_Md, targets_M)
        pieces = zip(hidden_Md.split(size), targets_M.split(size), strict=True)
        return torch.cat([checkpoint(some, *piece, use_reentrant=False) for piece in pieces])

    def _losses(self, out, logits, labels, trajectory, reach, rotary, logits_to_keep) -> dict[str, Tensor]:
        """The terms at the head of this file."""
        if torch.is_tensor(logits_to_keep) or logits_to_keep:
            raise ValueError("labels need the logits of every token: leave logits_to_keep out.")
        config = self.config
        # a pad predicts nothing, not even the first token after it
        targets = F.pad(labels[:, 1:], (0, 1), value=-100).masked_fill(out.depths == 0, -100)
        count = (targets != -100).sum().clamp(min=1)
        losses = {}
        if trajectory is None:
            if logits is None:
                task = self.token_losses(out.hidden.flatten(0, 1), targets.flatten()).sum()
            else:
                task = cross_entropies(logits.flatten(0, 1), targets.flatten()).sum()
            losses["task"] = task / count
            if out.losses is not None:
                losses |= out.losses
            elif self.stack.policy.mixes:
                tokens = out.depths > 0
                mean = out.expected_depths[tokens].mean()
                losses["act"] = mean if config.depth_budget is None else F.relu(mean - config.depth_budget)
        else:
            losses |= self._trajectory_losses(out, logits, trajectory, targets, count, reach, rotary)
        return losses | self.auxiliary(out.balance)

    def _trajectory_losses(self, out, logits, trajectory, targets, count, reach, rotary) -> dict[str, Tensor]:
        """Losses that read several loops of a pass at full depth (training)."""
        config, policy, rows, states = self.config, self.stack.policy, trajectory.rows, trajectory.states
        targets_N = rows.pack(targets)
        real = targets_N != -100

        def at(h_Nd: Tensor) -> Tensor:
            out.compute.add("head", rows.per_sequence, self.lm_head.weight.numel())
            return self.token_losses(self.stack.read(h_Nd, rows, reach, rotary, out.compute), targets_N)

        if logits is None:
            last = self.token_losses(rows.pack(out.hidden), targets_N)
        else:
            last = cross_entropies(rows.pack(logits), targets_N)
        ponder, oracle = config.policy == "pondernet", config.policy == "exit_head" and bool(trajectory.asked)
        every = config.objective == "all" or ponder
        # a sampled depth: the pass itself ends there, or, run to the end for the oracle, the loss is taken there
        taken = len(states) - 1
        if oracle and config.objective == "sampled":
            taken = int(torch.randint(len(states), ()))
        earlier = []
        if every or oracle:
            for number, h_Nd in enumerate(states[:-1]):
                with torch.set_grad_enabled(torch.is_grad_enabled() and (every or number == taken)):
                    earlier.append(at(h_Nd))
        losses_NL = torch.stack([*earlier, last], -1)
        losses = {}
        if ponder:
            weights_NL = self._ponder_weights(trajectory)
            losses["task"] = (weights_NL * losses_NL).sum() / count
            losses["ponder"] = policy.divergence(weights_NL, config.ponder_prior).mean()
        elif every:
            losses["task"] = losses_NL.mean(-1).sum() / count
        else:
            losses["task"] = (losses_NL[:, taken] if earlier else last).sum() / count
        if oracle:
            logits = torch.stack([one.kept[0] for one in trajectory.asked], -1)
            labels = stop_labels(losses_NL.detach(), config.exit_labels, config.exit_margin)
            # the first question comes after `min_steps` loops
            labels = labels[:, -logits.shape[1] :]
            wrong = F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")
            losses["exit"] = wrong[real].mean() if bool(real.any()) else wrong.sum() * 0.0
        return losses

    def _ponder_weights(self, trajectory) -> Tensor:
        """[N, L] PonderNet's distribution over loops; loops below min_steps have none of it."""
        weights = trajectory.states[0].new_ones(len(trajectory.rows), 1)
        if trajectory.asked:
            weights = self.stack.policy.weights(trajectory.asked)
        return F.pad(weights, (len(trajectory.states) - weights.shape[1], 0))


def _packed(position_ids: Tensor | None, attention_mask: Any, past: int | Tensor = 0) -> bool:
    """Whether another document begins among the tokens of a call, or with its first one after `past` cached ones."""
    if position_ids is None or attention_mask is not None:
        return False
    if torch.compiler.is_compiling():
        # what a graph does must not depend on the positions' values
        return False
    # as transformers' masks tell documents apart
    if find_packed_sequence_indices(position_ids) is not None:
        return True
    return bool(past) and bool((position_ids[:, 0] == 0).any())


def cross_entropies(logits_MV: Tensor, targets_M: Tensor) -> Tensor:
    """[M] losses in nats, 0 where the target is -100; in float32 or wider."""
    logits_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
    return F.cross_entropy(logits_MV, targets_M, reduction="none", ignore_index=-100)


def stop_labels(losses_NL: Tensor, kind: str, margin: float) -> Tensor:
    """[N, L] losses after each loop -> [N, L-1] bool: stopping after loop l is right.

    "best_deeper": no deeper loop lowers the loss by more than `margin` nats; "next": the next one does not.
    """
    now, later = losses_NL[:, :-1], losses_NL[:, 1:]
    if kind == "best_deeper":
        later = later.flip(-1).cummin(-1).values.flip(-1)
    return later >= now - margin
