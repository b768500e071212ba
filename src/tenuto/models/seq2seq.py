"""Encoder-decoder over the stacks of any architecture: the training forward, and generation.

Depth policies work in both stacks, each with its own halting net. Keys and values of cross-attention are made from
the encoder's final states; a tied decoder block makes them once for all its steps.

`generate` is transformers': it encodes the source once and decodes with a cache (cache.py, `DecoderSlots`), which
gives what one pass over everything would. Of each call's output, `decoder_depths` are the new tokens' and `compute`
what the call computed; the encoder's stand in what `encode` returns, which `generate` takes as `encoder_outputs`.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin
from transformers.modeling_utils import slice_logits_to_keep

from .base import AdaptiveOutput, AdaptivePreTrainedModel
from .heads import Embeddings, act_loss, token_mask


class SourceReader:
    """The encoder as `generate` calls it: with token ids, and with arguments that it has no use for."""

    def __init__(self, model: "EncoderDecoder"):
        self.model = model

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        threshold: float | Tensor | None = None,
        min_steps: int | None = None,
        max_steps: int | None = None,
        capacity: float | Tensor | None = None,
        selection: str | None = None,
        output_routing: bool = False,
        encoder_threshold: float | Tensor | None = None,
        **ignored,
    ) -> AdaptiveOutput:
        """See `EncoderDecoder.encode`."""
        threshold = threshold if encoder_threshold is None else encoder_threshold
        knobs = {"threshold": threshold, "min_steps": min_steps, "max_steps": max_steps, "capacity": capacity,
                 "selection": selection, "output_routing": output_routing}  # fmt: skip
        return self.model.encode(input_ids, attention_mask, token_type_ids, **knobs)

    __call__ = forward


class EncoderDecoder(AdaptivePreTrainedModel, GenerationMixin):
    """Token ids -> token ids. Source, target and output embeddings are one matrix (`tie_word_embeddings`)."""

    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}

    def __init__(self, config):
        config = copy.deepcopy(config)  # the caller's may serve another head
        config.is_encoder_decoder = True
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embeddings = Embeddings(config)
        self.encoder = self.stack_class(config)
        self.decoder = self.stack_class(config, decoder=True)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def get_encoder(self, modality: str | None = None) -> SourceReader:
        """What `generate` calls once for each source."""
        return SourceReader(self)

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **knobs: Any,
    ) -> AdaptiveOutput:
        """[B, S] source ids -> the encoder's states, depths, ledger and the rest. Knobs: those of `forward`."""
        mask = token_mask(input_ids, attention_mask)
        embedded = self.embeddings(self.embed_tokens, input_ids, mask, token_type_ids)
        out = self.encoder(embedded, mask, **self.knobs_of(self.encoder, knobs))
        return AdaptiveOutput(
            last_hidden_state=out.hidden,
            depths=out.depths,
            expected_depths=out.expected_depths,
            compute=out.compute,
            balance=out.balance,
            routing=out.routing,
            losses=out.losses,
            signs=out.signs,
        )

    def _begun(self, cache: EncoderDecoderCache | None, use_cache: bool | None) -> EncoderDecoderCache | None:
        """The cache of this call, an empty one if it begins."""
        if cache is None and not use_cache:
            return None
        if not self.decoder.cached:
            raise ValueError(f"{type(self).__name__} generates without a cache: give use_cache=False.")
        return EncoderDecoderCache(DynamicCache(), DynamicCache()) if cache is None else cache

    def shift_right(self, labels_BT: Tensor) -> Tensor:
        """[B, T] labels -> decoder inputs: `<bos>` and the labels but the last; -100 becomes a pad."""
        start = labels_BT.new_full((len(labels_BT), 1), self.config.bos_token_id)
        shifted = torch.cat([start, labels_BT[:, :-1]], dim=1)
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        threshold: float | Tensor | None = None,
        min_steps: int | None = None,
        max_steps: int | None = None,
        capacity: float | Tensor | None = None,
        selection: str | None = None,
        output_routing: bool = False,
        loss_weights: dict[str, float] | None = None,
        encoder_outputs: AdaptiveOutput | None = None,
        cache: EncoderDecoderCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        encoder_threshold: float | Tensor | None = None,
        **unknown,
    ) -> AdaptiveOutput:
        """[B, S] source ids, [B, T] target ids -> logits [B, T, V]; with labels [B, T] (-100: none), the loss.

        The knobs are those of both stacks; encoder_threshold, if given, takes threshold's place in the encoder.
        encoder_outputs: from `encode`, in place of input_ids. cache: of earlier target tokens, which this call extends;
        decoder_attention_mask is then [B, past + T]. use_cache begins one. logits_to_keep: as in transformers.
        """
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("An encoder-decoder needs labels or decoder_input_ids.")
            decoder_input_ids = self.shift_right(labels)
            if decoder_attention_mask is None:
                # every place after the last label is padding; a row without labels keeps its first place
                ahead = (labels != -100).flip(1).cumsum(1).flip(1) > 0
                decoder_attention_mask = torch.cat([torch.ones_like(ahead[:, :1]), ahead[:, 1:]], 1)
        knobs = {"threshold": threshold, "min_steps": min_steps, "max_steps": max_steps, "capacity": capacity,
                 "selection": selection, "output_routing": output_routing}  # fmt: skip
        self.refuse(unknown)
        source = encoder_outputs
        if source is None:
            own = knobs if encoder_threshold is None else {**knobs, "threshold": encoder_threshold}
            source = self.encode(input_ids, attention_mask, token_type_ids, **own)
        memory = source.last_hidden_state
        mask = token_mask(memory[..., 0], attention_mask)
        cache = self._begun(cache, use_cache)
        past = 0 if cache is None else cache.get_seq_length()
        everything = decoder_input_ids.new_empty(len(decoder_input_ids), past + decoder_input_ids.shape[1])
        target_mask = token_mask(everything, decoder_attention_mask)
        target = self.decoder(
            self.embeddings(self.embed_tokens, decoder_input_ids, target_mask, past=past),
            target_mask,
            memory=memory,
            memory_mask=mask,
            **({} if cache is None else {"cache": cache}),
            **self.knobs_of(self.decoder, knobs),
        )
        logits = self.lm_head(slice_logits_to_keep(target.hidden, logits_to_keep))
        compute = target.compute if encoder_outputs is not None else source.compute.merge(target.compute)
        places = torch.full_like(target.depths[:, 0], logits.shape[1])
        compute.add("head", places, self.lm_head.weight.numel())
        balance = {f"{side}.{name}": value
                   for side, out in (("encoder", source), ("decoder", target))
                   for name, value in (out.balance or {}).items()}  # fmt: skip
        losses, loss = None, None
        if labels is not None:
            if logits.shape[1] < labels.shape[1]:
                raise ValueError("labels need the logits of every token: leave logits_to_keep out.")
            task = F.cross_entropy(
                logits.flatten(0, 1),
                labels.flatten(),
                ignore_index=-100,
                label_smoothing=self.config.label_smoothing if self.training else 0.0,
            )
            act = act_loss(source.expected_depths, mask)
            act = act + act_loss(target.expected_depths, target_mask)
            losses = {"task": task, "act": act, **self.auxiliary(balance)}
            if source.losses is not None:
                # means over each side's routed layers, weighed by how many those are
                sides = [
                    (side, len(stack.routers))
                    for side, stack in ((source, self.encoder), (target, self.decoder))
                ]
                total = sum(count for _, count in sides)
                for side, count in sides:
                    for name, value in side.losses.items():
                        losses[name] = losses.get(name, 0.0) + value * (count / total)
            loss = self.weigh(losses, loss_weights)
        return AdaptiveOutput(
            loss=loss,
            logits=logits,
            losses=losses,
            last_hidden_state=target.hidden,
            depths=source.depths,
            expected_depths=source.expected_depths,
            decoder_depths=target.depths,
            decoder_expected_depths=target.expected_depths,
            compute=compute,
            balance=balance,
            routing={"encoder": source.routing, "decoder": target.routing} if output_routing else None,
            cache=cache,
            signs={f"{side}.{name}": value
                   for side, out in (("encoder", source), ("decoder", target))
                   for name, value in (out.signs or {}).items()},
        )  # fmt: skip
