"""Encoder-decoder over the stacks of any architecture: the training forward, and one-token answers.

Depth policies work in both stacks, each with its own halting net. Keys and values of cross-attention are made from
the encoder's final states; a tied decoder block makes them once for all its steps.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import AdaptiveOutput, AdaptivePreTrainedModel
from .heads import Embeddings, act_loss, token_mask


class EncoderDecoder(AdaptivePreTrainedModel):
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

    def shift_right(self, labels_BT: Tensor) -> Tensor:
        """[B, T] labels -> decoder inputs: `<bos>` and the labels but the last; -100 becomes a pad."""
        start = labels_BT.new_full((len(labels_BT), 1), self.config.bos_token_id)
        shifted = torch.cat([start, labels_BT[:, :-1]], dim=1)
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id)

    def forward(
        self,
        input_ids: Tensor,
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
        **unknown,
    ) -> AdaptiveOutput:
        """[B, S] source ids, [B, T] target ids -> logits [B, T, V]; with labels [B, T] (-100: none), the loss."""
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
        knobs = self.knobs_of(self.encoder, knobs)
        self.refuse(unknown)
        mask = token_mask(input_ids, attention_mask)
        target_mask = token_mask(decoder_input_ids, decoder_attention_mask)
        source = self.encoder(
            self.embeddings(self.embed_tokens, input_ids, mask, token_type_ids), mask, **knobs
        )
        target = self.decoder(
            self.embeddings(self.embed_tokens, decoder_input_ids, target_mask),
            target_mask,
            memory=source.hidden,
            memory_mask=mask,
            **knobs,
        )
        logits = self.lm_head(target.hidden)
        compute = source.compute.merge(target.compute)
        places = torch.full_like(target.depths[:, 0], logits.shape[1])
        compute.add("head", places, self.lm_head.weight.numel())
        balance = {f"{side}.{name}": value
                   for side, out in (("encoder", source), ("decoder", target))
                   for name, value in out.balance.items()}  # fmt: skip
        losses, loss = None, None
        if labels is not None:
            task = F.cross_entropy(
                logits.flatten(0, 1),
                labels.flatten(),
                ignore_index=-100,
                label_smoothing=self.config.label_smoothing,
            )
            act = act_loss(source.expected_depths, mask)
            act = act + act_loss(target.expected_depths, target_mask)
            losses = {"task": task, "act": act, **self.auxiliary(balance)}
            if source.losses is not None:
                losses |= {name: (value + target.losses[name]) / 2 for name, value in source.losses.items()}
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
            signs={f"{side}.{name}": value
                   for side, out in (("encoder", source), ("decoder", target))
                   for name, value in (out.signs or {}).items()},
        )  # fmt: skip
