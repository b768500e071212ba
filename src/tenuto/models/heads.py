"""Input embeddings, the bare encoder and the classifier, over the stack of any architecture."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import sinusoidal_positions
from .base import AdaptiveOutput, AdaptivePreTrainedModel


def token_mask(ids_BT: Tensor, attention_mask: Tensor | None) -> Tensor | None:
    """[B, T] bool, true at tokens; None when every place is one."""
    if attention_mask is None:
        return None
    if attention_mask.shape != ids_BT.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)},"
            f" input_ids {tuple(ids_BT.shape)}: they must be the same."
        )
    mask = attention_mask.bool()
    if not mask.any(-1).all():
        raise ValueError("attention_mask leaves a sequence without any token.")
    return None if bool(mask.all()) else mask


class Embeddings(nn.Module):
    """sqrt(d) x token embedding + sinusoidal position (counted from the first token), then dropout."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, table: nn.Embedding, ids_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
        """[B, T] token ids -> [B, T, d]."""
        size = self.config.hidden_size
        x_BTd = table(ids_BT) * size**0.5
        if self.config.positions == "sinusoidal":
            codes_Td = sinusoidal_positions(ids_BT.shape[1], size, ids_BT.device).to(x_BTd.dtype)
            if mask_BT is None:
                x_BTd = x_BTd + codes_Td
            else:
                x_BTd = x_BTd + codes_Td[(mask_BT.cumsum(-1) - 1).clamp(min=0)]
        return self.dropout(x_BTd)


class EncoderModel(AdaptivePreTrainedModel):
    """Token ids -> states of every token. Subclasses name the architecture's config and stack."""

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embeddings = Embeddings(config)
        self.stack = self.stack_class(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embed_tokens = value

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        threshold: float | Tensor | None = None,
        min_steps: int | None = None,
        max_steps: int | None = None,
        output_routing: bool = False,
        **_,
    ) -> AdaptiveOutput:
        """[B, T] ids and mask (1 at tokens) -> `AdaptiveOutput` with last_hidden_state [B, T, d].

        threshold (a number, or [B]), min_steps and max_steps: the depth knobs of this call.
        """
        mask = token_mask(input_ids, attention_mask)
        out = self.stack(
            self.embeddings(self.embed_tokens, input_ids, mask),
            mask,
            threshold=threshold,
            min_steps=min_steps,
            max_steps=max_steps,
            output_routing=output_routing,
        )
        return AdaptiveOutput(
            last_hidden_state=out.hidden,
            depths=out.depths,
            expected_depths=out.expected_depths,
            compute=out.compute,
            balance=out.balance,
            routing=out.routing,
        )


def act_loss(expected_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
    """L_ACT: mean expected depth over tokens, pads left out."""
    return expected_BT.mean() if mask_BT is None else expected_BT[mask_BT].mean()


class SequenceClassifier(AdaptivePreTrainedModel):
    """Encoder, pooled state (first token or mean over tokens), linear classifier."""

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embeddings = Embeddings(config)
        self.stack = self.stack_class(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embed_tokens = value

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        threshold: float | Tensor | None = None,
        min_steps: int | None = None,
        max_steps: int | None = None,
        output_routing: bool = False,
        loss_weights: dict[str, float] | None = None,
        **_,
    ) -> AdaptiveOutput:
        """[B, T] ids -> logits [B, num_labels]; with labels [B], the loss.

        loss_weights overrides the config's weights of the auxiliary terms for this call (schedules use it).
        """
        mask = token_mask(input_ids, attention_mask)
        out = self.stack(
            self.embeddings(self.embed_tokens, input_ids, mask),
            mask,
            threshold=threshold,
            min_steps=min_steps,
            max_steps=max_steps,
            output_routing=output_routing,
        )
        logits = self.classifier(self._pool(out.hidden, mask))
        out.compute.add("head", torch.ones_like(out.depths[:, 0]), self.classifier.weight.numel())
        losses, loss = None, None
        if labels is not None:
            task = F.cross_entropy(logits, labels, label_smoothing=self.config.label_smoothing)
            losses = {"task": task, "act": act_loss(out.expected_depths, mask)}
            losses |= self.auxiliary(out.balance)
            loss = self.weigh(losses, loss_weights)
        return AdaptiveOutput(
            loss=loss,
            logits=logits,
            losses=losses,
            depths=out.depths,
            expected_depths=out.expected_depths,
            compute=out.compute,
            balance=out.balance,
            routing=out.routing,
        )

    def _pool(self, hidden_BTd: Tensor, mask_BT: Tensor | None) -> Tensor:
        if self.config.classifier_pooling == "mean":
            if mask_BT is None:
                return hidden_BTd.mean(1)
            return hidden_BTd.sum(1) / mask_BT.sum(1, keepdim=True)  # pads are zero
        if mask_BT is None:
            return hidden_BTd[:, 0]
        first = mask_BT.to(torch.int8).argmax(1)  # left padding moves it
        return hidden_BTd[torch.arange(len(first), device=first.device), first]
