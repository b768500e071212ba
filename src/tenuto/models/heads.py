"""Input embeddings, the bare encoder and the classifier, over the stack of any architecture."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .apart import Apart
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
    """sqrt(d) x (token + segment embedding) + sinusoidal position (from the first token), then dropout."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        segments = config.type_vocab_size
        self.segments = nn.Embedding(segments, config.hidden_size) if segments else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        table: nn.Embedding,
        ids_BT: Tensor,
        mask_BT: Tensor | None,
        segments_BT: Tensor | None = None,
        past: int = 0,
    ) -> Tensor:
        """[B, T] token ids (and segment numbers) -> [B, T, d]; `past` tokens came before, which the mask counts too."""
        size = self.config.hidden_size
        x_BTd = table(ids_BT)
        if self.segments is not None and segments_BT is not None:
            x_BTd = x_BTd + self.segments(segments_BT)
        x_BTd = x_BTd * size**0.5
        if self.config.positions == "sinusoidal":
            length = past + ids_BT.shape[1]
            codes_Kd = sinusoidal_positions(length, size, ids_BT.device).to(x_BTd.dtype)
            if mask_BT is None:
                x_BTd = x_BTd + codes_Kd[past:]
            else:
                x_BTd = x_BTd + codes_Kd[(mask_BT.cumsum(-1) - 1).clamp(min=0)[:, past:]]
        return self.dropout(x_BTd)


class EncoderModel(AdaptivePreTrainedModel):
    """Token ids -> states of every token. Subclasses name the architecture's config and stack."""

    def __init__(self, config):
        if config.is_encoder_decoder:
            raise ValueError("This config is an encoder-decoder's; load it with AutoModelForSeq2SeqLM.")
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embeddings = Embeddings(config)
        self.stack = self.stack_class(config)
        self.add_head(config)
        self.post_init()

    def add_head(self, config) -> None:
        """What a subclass puts on top of the stack, before the weights are initialised."""

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
        **unknown,
    ) -> AdaptiveOutput:
        """[B, T] ids and mask (1 at tokens) -> `AdaptiveOutput` with last_hidden_state [B, T, d].

        threshold (a number, or [B]), min_steps and max_steps: the depth knobs of this call; capacity (the same as
        threshold) and selection: those of routed models, routing.py.
        """
        self.refuse(unknown)
        mask, apart = token_mask(input_ids, attention_mask), None
        if self.config.encode_apart:
            if output_routing:
                raise ValueError("output_routing has no places in the row with encode_apart.")
            apart = Apart(input_ids, mask, token_type_ids)
            input_ids, mask, token_type_ids = apart.ids, apart.mask, None
            threshold, capacity = apart.knob(threshold), apart.knob(capacity)
        knobs = {"threshold": threshold, "min_steps": min_steps, "max_steps": max_steps, "capacity": capacity,
                 "selection": selection, "output_routing": output_routing}  # fmt: skip
        embedded = self.embeddings(self.embed_tokens, input_ids, mask, token_type_ids)
        out = self.stack(embedded, mask, **self.knobs_of(self.stack, knobs))
        if apart is not None:
            for name in ("hidden", "depths", "expected_depths", "executed"):
                setattr(out, name, apart.back(getattr(out, name)))
            out.compute = out.compute.paired()
        return AdaptiveOutput(
            last_hidden_state=out.hidden,
            depths=out.depths,
            expected_depths=out.expected_depths,
            compute=out.compute,
            balance=out.balance,
            routing=out.routing,
            losses=out.losses,
            signs=out.signs,
            executed=out.executed,
        )


def act_loss(expected_BT: Tensor, mask_BT: Tensor | None) -> Tensor:
    """L_ACT: mean expected depth over tokens, pads left out."""
    return expected_BT.mean() if mask_BT is None else expected_BT[mask_BT].mean()


class SequenceClassifier(EncoderModel):
    """Encoder, pooled states, classifier.

    Pooling "first" takes the first token, "mean" the mean over tokens; a linear map follows. "pair" takes u and v,
    the first tokens of segments 0 and 1, and gives [u, v, u*v, |u-v|] to a layer of width 2d (Mou et al. 2016).
    """

    def add_head(self, config) -> None:
        size, wide = config.hidden_size, 2 * config.hidden_size
        layers = [nn.Linear(size, config.num_labels)]
        if config.classifier_pooling == "pair":
            layers = [nn.Linear(4 * size, wide), nn.GELU(), nn.Linear(wide, config.num_labels)]
        self.classifier = nn.Sequential(*layers)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
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
        """[B, T] ids -> logits [B, num_labels]; with labels [B], the loss.

        loss_weights overrides the config's weights of the auxiliary terms for this call (schedules use it).
        """
        out = super().forward(
            input_ids,
            attention_mask,
            token_type_ids,
            threshold,
            min_steps,
            max_steps,
            capacity,
            selection,
            output_routing,
            **unknown,
        )
        mask = token_mask(input_ids, attention_mask)
        logits = self.classifier(self._pool(out.last_hidden_state, mask, token_type_ids))
        cost = sum(part.weight.numel() for part in self.classifier if isinstance(part, nn.Linear))
        out.compute.add("head", torch.ones_like(out.depths[:, 0]), cost)
        losses, loss = None, None
        if labels is not None:
            smoothing = self.config.label_smoothing if self.training else 0.0
            task = F.cross_entropy(logits, labels, label_smoothing=smoothing)
            losses = {"task": task, "act": act_loss(out.expected_depths, mask)}
            losses |= self.auxiliary(out.balance) | (out.losses or {})
            loss = self.weigh(losses, loss_weights)
        return AdaptiveOutput(**{**out, "loss": loss, "logits": logits, "losses": losses})

    def _pool(self, hidden_BTd: Tensor, mask_BT: Tensor | None, segments_BT: Tensor | None) -> Tensor:
        pooling = self.config.classifier_pooling
        if pooling == "mean":
            if mask_BT is None:
                return hidden_BTd.mean(1)
            return hidden_BTd.sum(1) / mask_BT.sum(1, keepdim=True)  # pads are zero
        batch = torch.arange(len(hidden_BTd), device=hidden_BTd.device)
        # left padding moves the first token
        first = 0 if mask_BT is None else mask_BT.to(torch.int8).argmax(1)
        u_Bd = hidden_BTd[batch, first]
        if pooling == "first":
            return u_Bd
        if segments_BT is None:
            raise ValueError('classifier_pooling="pair" needs token_type_ids: 0 and 1 for the two sentences.')
        second = segments_BT == 1 if mask_BT is None else (segments_BT == 1) & mask_BT
        if not second.any(-1).all():
            raise ValueError('classifier_pooling="pair" needs a token of segment 1 in every sequence.')
        v_Bd = hidden_BTd[batch, second.to(torch.int8).argmax(1)]
        return torch.cat([u_Bd, v_Bd, u_Bd * v_Bd, (u_Bd - v_Bd).abs()], dim=-1)
