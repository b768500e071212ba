"""The stack whose layers some tokens go around: N distinct blocks, of which the routed ones run on chosen tokens only.

    for each layer:
        not routed:   x <- block(x)                                                         every token
        routed:       scores of the tokens; the rule chooses                                routing.py
                      x <- x + scale * (block(x of the chosen) - x)                         the chosen
                      x <- x, or x + what a small net foresees                              the others

The architectures (mod.py, sdt.py, stt.py) say how a layer's router scores its tokens. With every token chosen and gates
of 1 (selection="dense") this is the plain dense decoder of the same blocks.
"""

from typing import Any, Literal

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn

from .attention import Reach, Rotary
from .base import AdaptiveConfig, StackOutput
from .block import Block, Stack
from .cache import RoutedSlots
from .causal import CausalLM
from .experts import Balance, Dispatch
from .heads import SequenceClassifier
from .ledger import Ledger
from .routing import CAPACITIES, Chosen, LayerRouter, Sight, Verdict, check_rule
from .rows import Rows
from .seq2seq import EncoderDecoder
from .surprise import Prior, foreseen_loss


@strict
class RoutedConfig(AdaptiveConfig):
    """Fields that the three routed architectures share."""

    activation: Literal["relu", "gelu", "swiglu"] = "swiglu"
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    norm_placement: Literal["post", "pre", "sandwich"] = "pre"
    dropout: float = 0.0
    positions: Literal["rotary", "sinusoidal", "none"] = "rotary"
    rope_parameters: dict | None = None
    max_position_embeddings: int = 2048
    scale_embeddings: bool = False  # by sqrt(d)
    use_cache: bool = True
    loss_chunk: int = 0  # tokens whose logits exist at a time in training; 0: all, and the output has them

    num_hidden_layers: int = 6  # L
    num_decoder_layers: int = 6  # of an encoder-decoder
    routed_layers: list[int] | None = None  # None: every second one, 1, 3, 5, ...
    capacity: float = 0.5  # gamma, share of the tokens that a routed layer takes
    selection: Literal["threshold", "running", "topk", "dense"] = "threshold"  # at inference
    score_window: int = 100  # of selection "running"
    protected_tokens: int = 0  # first tokens of a text that every layer takes
    scale: Literal["gate", "straight", "constant", "learned", "none"] = "gate"  # of a chosen token's change
    skipped: Literal["identity", "forecast"] = "identity"  # what the others get
    layer_capacities: list[float] | None = None  # of each routed layer, where the knob is at their mean
    forecast_width: float = 0.0625  # of the net for the skipped, over d
    prior_width: float = 0.0625  # f, of the net that surprise measures against, over d
    prior_weight: float = 0.05  # of the foreseeing nets' losses, mean over layers
    router_weight: float = 0.01  # of the causal routers' losses, mean over layers

    def __post_init__(self, **kwargs):
        if self.routed_layers is None:
            self.routed_layers = [*range(1, self.num_hidden_layers, 2)]
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}
        super().__post_init__(**kwargs)

    def validate_routing(self):
        """Routed layers exist and are not the first; shares are shares."""
        wrong = [one for one in self.routed_layers if not 0 < one < self.num_hidden_layers]
        if wrong or len(set(self.routed_layers)) < len(self.routed_layers):
            raise ValueError(
                f"routed_layers={self.routed_layers} must be different layers from 1 to num_hidden_layers - 1 ="
                f" {self.num_hidden_layers - 1}: every token runs layer 0."
            )
        for name in ("capacity", "prior_width", "forecast_width"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie above 0 and at most at 1.")
        shares = self.layer_capacities
        if shares is not None and (
            len(shares) != len(self.routed_layers) or not all(0 < one < 1 for one in shares)
        ):
            raise ValueError(
                f"layer_capacities={shares} must be one number between 0 and 1 for each of routed_layers ="
                f" {self.routed_layers}."
            )
        if self.protected_tokens < 0 or self.score_window < 1:
            raise ValueError(
                f"protected_tokens={self.protected_tokens} must be at least 0, score_window={self.score_window} at"
                " least 1."
            )
        if self.relative_positions != "none":
            raise ValueError(
                f"relative_positions={self.relative_positions!r} counts neighbours, which routed layers leave out; use"
                ' positions="rotary" or "sinusoidal".'
            )

    def share_of(self, layer: int, capacity: float | Tensor) -> float | Tensor:
        """A routed layer's own capacity where the knob is at `capacity`: on straight lines from 0 to 1, over
        `layer_capacities` where the knob is at their mean, so that the layers' mean is the knob everywhere.
        """
        if self.layer_capacities is None:
            return capacity
        own = self.layer_capacities[self.routed_layers.index(layer)]
        mean = sum(self.layer_capacities) / len(self.layer_capacities)
        # 1 - ..., lest rounding exceed it
        below, above = own * capacity / mean, 1 - (1 - own) * (1 - capacity) / (1 - mean)
        if torch.is_tensor(capacity):
            return torch.where(capacity <= mean, below, above)
        return below if capacity <= mean else above

    def loss_weights(self) -> dict[str, float]:
        """Weights of the auxiliary losses by name."""
        return {
            self.balance_loss: self.balance_weight,
            "prior": self.prior_weight,
            "forecast": self.prior_weight,
            "router": self.router_weight,
        }


class Pass:
    """One forward of a stack: what its tokens are and may read, and what it did for them."""

    def __init__(
        self, blocks: nn.ModuleList, every: Rows, reach: Reach, rotary: Rotary | None, slots: RoutedSlots,
        memory: tuple[Tensor, Reach] | None, routing: bool,
    ):  # fmt: skip
        self.blocks, self.every, self.reach, self.slots, self.memory = blocks, every, reach, slots, memory
        self.past = reach.length - every.length
        self.angles_N = None if rotary is None else rotary.of(every)
        self.ledger, self.balance, self.routing, self.signs = Ledger(every.batch), {}, [], {}
        self.losses: dict[str, list[Tensor]] = {}
        self.wants_routing, self.training = routing, blocks.training

    def position(self) -> Tensor:
        """[N] how many tokens of its text each row looks back on."""
        if self.reach.causal or self.reach.pairs is not None or self.past:
            return self.reach.readable(self.every) - 1
        counts = self.every.per_sequence
        starts = counts.cumsum(0) - counts
        return torch.arange(len(self.every), device=counts.device) - starts[self.every.sequence]

    def run_all(self, layer: int, x_Nd: Tensor) -> Tensor:
        """[N, d] -> [N, d]: a layer on every token."""
        kv = self.blocks[layer].keys_values(x_Nd, self.every, None, self.angles_N)
        kv = self.slots.write(layer, kv)
        out, dispatches = self._run(layer, x_Nd, self.every, kv, self.angles_N, self.reach)
        self.note(layer, dispatches, self.every.places, out)
        return out

    def watch_all(self, layer: int, x_Nd: Tensor, passed_on: bool) -> Tensor:
        """The same for a teacher to look at: its arithmetic is booked; keys, values and experts only if `passed_on`."""
        ledger, kv = self.ledger, self.blocks[layer].keys_values(x_Nd, self.every, None, self.angles_N)
        before = ledger.kv_bytes, dict(ledger.layer_kv_bytes)
        out, dispatches = self._run(layer, x_Nd, self.every, kv, self.angles_N, self.reach)
        if passed_on:
            self.note(layer, dispatches, self.every.places, out)
        else:
            ledger.kv_bytes, ledger.layer_kv_bytes = before
        return out

    def run_some(self, layer: int, x_Nd: Tensor, chosen: Chosen) -> Tensor:
        """[N, d] -> [n, d]: a layer on the chosen tokens."""
        x_nd = x_Nd.index_select(0, chosen.kept)
        angles = self.angles_N
        if angles is not None:
            angles = tuple(part.index_select(0, chosen.kept) for part in angles)
        kv, places = self.blocks[layer].keys_values(x_nd, chosen.rows, None, angles), chosen.places
        held = self.slots.routed(layer)
        if held is not None:
            kv, all_places = held.write(kv, chosen)
            places = all_places if self.past else places
        reach = chosen.reach(self.reach, places)
        out, dispatches = self._run(layer, x_nd, chosen.rows, kv, angles, reach)
        self.note(layer, dispatches, self.every.places[chosen.kept], out)
        return out

    def _run(
        self, layer: int, x_nd: Tensor, rows: Rows, kv, angles, reach: Reach
    ) -> tuple[Tensor, dict[str, Dispatch]]:
        block, memory = self.blocks[layer], (None, None)
        if self.memory is not None:
            memory = block.memory_keys_values(self.memory[0]), self.memory[1].views(rows)
        out, dispatches = block(x_nd, rows, kv, reach.views(rows), *memory, angles)
        block.account(self.ledger, rows, rows, reach, *(self.memory or (None, None)))
        return out, dispatches

    def note(self, layer: int, dispatches: dict[str, Dispatch], places_n: Tensor, out_nd: Tensor) -> None:
        """Where the experts' routers sent the tokens at `places_n` of the whole grid."""
        for name, dispatch in dispatches.items():
            if self.training or self.wants_routing:
                self.balance[f"{layer}.{name}"] = Balance.of(dispatch, out_nd.new_ones(len(out_nd)))
            if self.wants_routing:
                self.routing.append((layer, name, places_n, dispatch.experts, dispatch.gates))


class RoutedStack(Stack):
    """Blocks, and the routers of the routed ones by layer. Subclasses name the router."""

    router_class: type[LayerRouter]
    knobs = ("capacity", "threshold", "selection", "output_routing")

    def __init__(self, config, decoder: bool = False):
        super().__init__(config, decoder)
        cross = decoder and config.is_encoder_decoder
        layers = config.num_decoder_layers if cross else config.num_hidden_layers
        self.blocks = nn.ModuleList(Block(config, decoder, cross) for _ in range(layers))
        routed = [layer for layer in config.routed_layers if layer < layers]
        if config.layer_capacities is not None and len(routed) < len(config.routed_layers):
            raise ValueError(
                f"layer_capacities={config.layer_capacities} are of routed_layers={config.routed_layers}, of which a"
                f" stack of num_decoder_layers={layers} lacks some."
            )
        self.routers = nn.ModuleDict({str(layer): self.router_class(config) for layer in routed})

    def slots(self, cache: Any | None, extra: dict[str, Any]) -> RoutedSlots:
        """The cache of one call."""
        return RoutedSlots(self.config, cache)

    def walk(
        self,
        x_BTd: Tensor,
        mask_BT: Tensor | None,
        reach: Reach,
        rotary: Rotary | None,
        slots: RoutedSlots,
        memory: tuple[Tensor, Reach] | None = None,
        capacity: float | Tensor | None = None,
        threshold: float | Tensor | None = None,
        selection: str | None = None,
        output_routing: bool = False,
    ) -> StackOutput:
        """[B, T, d] embedded tokens, `mask_BT` true at tokens -> `StackOutput`.

        reach, rotary, slots: what may be read, positions, the cache. memory: an encoder's states and what of them may
        be read. capacity, threshold (numbers, or [B]) and selection: the knobs of this call, see routing.py.
        """
        cached = slots.cache is not None
        rule = check_rule(self.config, selection, capacity, threshold, self.training, cached, len(x_BTd))
        every = Rows.of(x_BTd, mask_BT)
        run = Pass(self.blocks, every, reach, rotary, slots, memory, output_routing)
        executed = torch.ones(len(every), len(self.blocks), dtype=torch.bool, device=every.device)
        position = run.position()
        passed_on = self.training and getattr(self.config, "trains_on", "gated") == "dense"
        before, x_Nd = None, every.pack(x_BTd)
        for layer in range(len(self.blocks)):
            run.ledger.layer = str(layer)
            router = self.routers[str(layer)] if str(layer) in self.routers else None
            if router is None or (rule.kind == "dense" and not cached):
                y_Nd = run.run_all(layer, x_Nd)
                before, x_Nd = (x_Nd, y_Nd), y_Nd
                continue
            held, verdict, executed_N = slots.routed(layer), None, executed[:, layer]
            sight = Sight(
                layer, x_Nd, before, every, position, {} if held is None else held.past,
                lambda layer=layer, x_Nd=x_Nd: run.watch_all(layer, x_Nd, passed_on), self.training,
                (output_routing or rule.by_teacher) and not cached,
            )  # fmt: skip
            if rule.kind != "dense" or router.remembers or "score" in sight.past:
                verdict = router.look(sight)
                run.ledger.add("router", every.per_sequence, router.row_macs)
                if self.training or sight.watch:
                    run.ledger.add("router", every.per_sequence, router.teacher_macs)
            if rule.kind != "dense":
                executed_N = rule.choose(router, verdict, sight)
                if self.training or rule.by_teacher:
                    router.learn(verdict, executed_N)
                if not self.training:
                    # what is only watched is no part of the loss
                    verdict.losses.clear()
            elif verdict is not None:
                # its cache holds chosen tokens, here all; later calls may choose, and go by what was seen
                if "score" in sight.past:
                    rule.remember(router, verdict.causal.detach(), sight)
                verdict = None
            executed[:, layer] = executed_N
            y_Nd = self._around(run, layer, x_Nd, Chosen(executed_N, every, run.past), verdict)
            if verdict is not None and (self.training or output_routing or rule.kind == "calibrate"):
                verdict.signs["capacity"] = executed_N.float().mean()
                run.signs |= {f"{layer}.{name}": value.detach() for name, value in verdict.signs.items()}
            before, x_Nd = (x_Nd, y_Nd), y_Nd
        run.ledger.layer = None
        if cached:
            for layer in self.routers:
                slots.routed(int(layer)).length += every.length
        depths_N = executed.sum(1)
        return StackOutput(
            hidden=every.unpack(self.final_norm(x_Nd)),
            depths=every.unpack(depths_N),
            expected_depths=every.unpack(depths_N.to(x_Nd.dtype)),
            balance=run.balance,
            routing=run.routing if output_routing else None,
            compute=run.ledger,
            losses={name: torch.stack(some).mean() for name, some in run.losses.items()},
            signs=run.signs,
            executed=every.unpack(executed),
        )

    def _around(self, run: Pass, layer: int, x_Nd: Tensor, chosen: Chosen, verdict: Verdict | None) -> Tensor:
        """[N, d] -> [N, d]: the layer for the chosen tokens, and what the others get."""
        if verdict is not None:
            for name, value in verdict.losses.items():
                run.losses.setdefault(name, []).append(value)
            if verdict.dense is not None and verdict.passes_dense:
                return verdict.dense
        router, kept = self.routers[str(layer)], chosen.kept
        forecast = router.forecast if verdict is not None else None
        y_Nd, foreseen_Nd = x_Nd, None
        if forecast is not None:
            foreseen_Nd = forecast(x_Nd)
            run.ledger.add("router", run.every.per_sequence, forecast.row_macs)
            y_Nd = x_Nd + foreseen_Nd
        if not len(chosen):
            return y_Nd
        out_nd, x_nd = run.run_some(layer, x_Nd, chosen), x_Nd.index_select(0, kept)
        if forecast is not None and self.training:
            if verdict.dense is not None:
                loss = foreseen_loss(verdict.dense - x_Nd, foreseen_Nd)
            else:
                loss = foreseen_loss(out_nd - x_nd, foreseen_Nd.index_select(0, kept))
            run.losses.setdefault("forecast", []).append(loss)
        if verdict is not None and verdict.scale is not None:
            scale = verdict.scale.index_select(0, kept).to(x_nd.dtype).unsqueeze(1)
            out_nd = x_nd + scale * (out_nd - x_nd)
        return out_nd if len(chosen) == len(x_Nd) else y_Nd.index_copy(0, kept, out_nd)

    def token_macs(self) -> int:
        """MACs of one token through all layers, scores not counted."""
        routers = sum(router.row_macs for router in self.routers.values())
        return sum(block.token_macs() for block in self.blocks) + routers

    def pair_macs(self) -> int:
        """MACs of one token against one earlier one, in all layers."""
        return sum(block.attention.pair_macs for block in self.blocks)


class RoutedDecoderStack(RoutedStack):
    """As a causal language model calls it."""

    def __init__(self, config):
        if config.positions == "sinusoidal":
            raise ValueError(
                'positions="sinusoidal" is for encoders and encoder-decoders; use positions="rotary" or "none" here.'
            )
        super().__init__(config, decoder=True)

    def forward(
        self, x_BTd: Tensor, mask_BT: Tensor | None, reach: Reach, rotary: Rotary | None, slots: RoutedSlots,
        readout: Any = None, **knobs: Any,
    ) -> tuple[StackOutput, None]:  # fmt: skip
        """See `walk`; no trajectory."""
        return self.walk(x_BTd, mask_BT, reach, rotary, slots, **knobs), None


class RoutedEncoderStack(RoutedStack):
    """As encoders and encoder-decoders call it: no cache, no rotary positions."""

    def forward(
        self, x_BTd: Tensor, mask_BT: Tensor | None = None, memory: Tensor | None = None,
        memory_mask: Tensor | None = None, **knobs: Any,
    ) -> StackOutput:  # fmt: skip
        """See `walk`."""
        if self.config.positions == "rotary":
            raise ValueError(
                'positions="rotary" is for causal language models; use positions="sinusoidal" here.'
            )
        length = x_BTd.shape[1]
        reach, memory_reach = self.reaches(length, mask_BT, memory, memory_mask)
        slots = RoutedSlots(self.config, None)
        return self.walk(
            x_BTd, mask_BT, reach, None, slots, None if memory is None else (memory, memory_reach), **knobs
        )


class Routed:
    """What every routed model with a head has besides: levels to calibrate, a schedule to follow."""

    def routers(self) -> dict[str, LayerRouter]:
        """Every router by the name that its signs begin with."""
        stacks = {"": "stack", "encoder.": "encoder", "decoder.": "decoder"}
        return {
            f"{prefix}{layer}": router
            for prefix, stack in stacks.items()
            if hasattr(self, stack)
            for layer, router in getattr(self, stack).routers.items()
        }

    @torch.no_grad()
    def calibrate(self, *, batch: int = 16, **inputs: Tensor) -> None:
        """Sets the layers' levels from a forward's inputs [R, ...]: at each capacity of `CAPACITIES`, the score that
        this share of the tokens reaches, layer by layer, the earlier layers choosing at that capacity too; the mean
        over batches.
        """
        was_training = self.training
        self.eval()
        routers = self.routers()
        levels = {name: torch.zeros(len(CAPACITIES), dtype=torch.float64) for name in routers}
        pieces = range(0, len(inputs["input_ids"]), batch)
        # logits are of no use here, and of a large vocabulary a good part of the work
        plain = {"use_cache": False, "logits_to_keep": 1} if isinstance(self, CausalLM) else {}
        for number, capacity in enumerate(CAPACITIES):
            for start in pieces:
                some = {name: value[start : start + batch] for name, value in inputs.items()}
                out = self(**some, **plain, capacity=capacity, selection="calibrate")
                for name, level in levels.items():
                    level[number] += float(out.signs[f"{name}.level"]) / len(pieces)
        for name, router in routers.items():
            router.levels.copy_(levels[name])
        self.train(was_training)

    def quantise_priors(self) -> None:
        """Int8 weights for the nets that foresee residuals, for inference on a CPU; such a model is not to be saved."""
        for module in [*self.modules()]:
            if isinstance(module, Prior):
                module.quantise()

    def schedule(self, share: float) -> None:
        """Tells the routers how far training is (0..1): scheduled inverse temperatures follow it."""
        for router in self.routers().values():
            if hasattr(router, "surprise"):
                router.surprise.schedule(share)


class RoutedCausalLM(Routed, CausalLM):
    """Decoder and language-model head."""


class RoutedClassifier(Routed, SequenceClassifier):
    """Encoder and classifier."""


class RoutedEncoderDecoder(Routed, EncoderDecoder):
    """Encoder and decoder, routed layers in both."""
