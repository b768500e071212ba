"""The looped language model: prelude, a core iterated under a depth policy, coda; a causal decoder.

    h_0 = prelude(embed(tokens))
    for loop l = 1 .. L:
        every token still running asks its policy about h_{l-1}                           (from l = 2)
        z   <- inject(h_{l-1}, h_0)                                                       (from l = 2)
        for each layer of the core:
            its K, V of the tokens still running are written; a token that stopped keeps those of its last loop
            z <- layer(z)                                             for the tokens still running only
        h_l <- h_{l-1} + g_l * (z - h_{l-1})     loop_scale; without it h_l = z
        s_l <- what the policy makes of h_1..h_l                                          halting.py
    logits = head(norm(coda(s of each token at the last loop it ran)))

A stopped token costs nothing more and shows every later loop the keys and values of its last one (`last_executed`):
so the rule holds for cores of several layers and whatever changes with the loop. A cache has one slot for each layer
and loop; a stopped token's keys and values are copied into the slots of the loops it did not run, hence a later
token reads at loop l exactly what it would have read in one pass over everything: cached decoding equals the full
forward for every policy and threshold. With num_loops = 1 this is the plain dense decoder of the same block.

The core's body can be exchanged:

    mixer="gla", "gated_delta"      linear attention instead of attention (linear_attention.py). Each loop and layer has
                                    its own recurrent state, which the tokens that run the loop write and read; one that
                                    stopped neither writes to nor decays the states of later loops.
    ffn_experts=E                   experts instead of one feed-forward (experts.py)
    memory_chunk=C                  besides, cross-attention to a compressed memory of earlier chunks (memory.py)

Prelude and coda always attend: so every token has the whole text at hand, whatever the core keeps of it.

inject   none  h      add  h + e      concat  W [h, e], W = [I, I] at the start (Geiping et al. 2025)
         decay  a * h + b * e, a = exp(-softplus(w)) < 1 elementwise (Parcae, 2604.12946)          with e = h_0
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.masking_utils import create_masks_for_generate

from .attention import Reach, Rotary
from .base import AdaptiveConfig, StackOutput
from .block import LoopBlock, norm
from .cache import Slots
from .causal import CausalLM, CausalModel
from .documents import Documents
from .experts import Balance
from .halting import POLICIES, RULES, Fixed, HaltState, check_knobs
from .ledger import Ledger
from .memory import Memory, Recall
from .rows import Rows
from .universal import Leavers

POLICY = Literal[
    "fixed", "stick_breaking", "act", "depth_router", "pondernet", "exit_head", "latent", "second_difference",
    "kl", "margin",
]  # fmt: skip


@strict
class LoopedConfig(AdaptiveConfig):
    """Prelude, core x loops, coda. `num_loops=1` is the plain dense decoder."""

    model_type = "tenuto_looped"

    num_attention_heads: int = 8
    activation: Literal["relu", "gelu", "swiglu"] = "swiglu"
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    norm_placement: Literal["post", "pre", "sandwich"] = "sandwich"
    dropout: float = 0.0
    positions: Literal["rotary", "none"] = "rotary"
    rope_parameters: dict | None = None
    max_position_embeddings: int = 2048
    scale_embeddings: bool = True  # by sqrt(d)
    use_cache: bool = True

    num_prelude_layers: int = 1
    num_core_layers: int = 1
    num_coda_layers: int = 1
    num_loops: int = 4  # L
    max_loops: int | None = None  # slots of the cache; None: num_loops
    input_injection: Literal["none", "add", "concat", "decay"] = "add"
    loop_scale: bool = False

    mixer: Literal["attention", "gla", "gated_delta"] = "attention"  # of the core; prelude and coda attend
    conv_size: int = 4  # tokens that a linear mixer's convolution sees; 0: none
    memory_chunk: int = 0  # C, tokens that are compressed together; 0: no memory
    memory_slots: int = 1  # m, what a chunk leaves

    policy: POLICY = "fixed"
    halt_threshold: float = 0.999
    halt_bias: float = -3.0
    min_steps: int = 1
    act_weight: float = 0.0  # of the mean depth, per token
    depth_budget: float | None = None  # mean depth below which act_weight asks for nothing more
    ponder_weight: float = 0.01  # of KL(a || prior)
    ponder_prior: float | None = 0.2  # rate of the geometric prior; None: uniform
    exit_labels: Literal["best_deeper", "next"] = "best_deeper"
    exit_margin: float = 0.0  # nats that a deeper loop must save
    exit_weight: float = 1.0

    objective: Literal["policy", "all", "sampled"] = "policy"  # which loops the task's loss is taken at
    backprop_loops: int | None = None  # truncated back-propagation: gradients through the last loops only
    loss_chunk: int = 0  # tokens whose logits exist at a time in training; 0: all, and the output has them
    cache_slots: Literal["loop", "last"] = "loop"  # "last": one slot a layer, overwritten: smaller, not exact

    def __post_init__(self, **kwargs):
        # a saved config has the two that `derive` works out; another depth may be asked for
        kwargs = {
            name: value for name, value in kwargs.items() if name not in ("num_hidden_layers", "layer_types")
        }
        self.max_loops = self.num_loops if self.max_loops is None else self.max_loops
        self.derive()
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """A config from its dictionary; fields given beside it count before others are worked out from them."""
        fields = {name: kwargs.pop(name) for name in [*kwargs] if name in cls.__dataclass_fields__}
        return super().from_dict({**config_dict, **fields}, **kwargs)

    def derive(self) -> None:
        """What follows from other fields: slots of the cache, and their kinds."""
        if self.max_loops < self.num_loops:
            raise ValueError(f"max_loops={self.max_loops} is below num_loops={self.num_loops}; give both.")
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}
        # transformers sizes caches by this name
        loops = self.max_loops if self.cache_slots == "loop" else 1
        self.num_hidden_layers = self.num_prelude_layers + self.num_core_layers * loops + self.num_coda_layers
        if self.mixer != "attention":
            # and makes them by these
            attend, mix = ["full_attention"], ["linear_attention"]
            core = mix * (self.num_core_layers * loops)
            self.layer_types = attend * self.num_prelude_layers + core + attend * self.num_coda_layers

    def validate_depth(self):
        """Loops, steps and thresholds must make sense together."""
        if (
            self.num_core_layers < 1
            or self.num_loops < 1
            or min(self.num_prelude_layers, self.num_coda_layers) < 0
        ):
            raise ValueError(
                f"num_core_layers={self.num_core_layers} and num_loops={self.num_loops} must be at least 1."
            )
        if not 1 <= self.min_steps <= self.num_loops:
            raise ValueError(f"min_steps={self.min_steps} must lie between 1 and num_loops={self.num_loops}.")
        if not 0.0 <= self.halt_threshold <= 1.0:
            raise ValueError(f"halt_threshold={self.halt_threshold} must lie between 0 and 1.")
        if self.act_weight and self.policy not in MIXING:
            raise ValueError(
                f"act_weight={self.act_weight} needs one of policy={', '.join(MIXING)}; got {self.policy!r}."
            )
        if self.objective != "policy" and self.policy in (*MIXING, "pondernet"):
            raise ValueError(
                f"objective={self.objective!r} does not go with policy={self.policy!r}: it has its own."
            )
        if self.policy in ("kl", "margin") and self.num_coda_layers:
            raise ValueError(
                f"policy={self.policy!r} reads predictions after every loop and needs num_coda_layers=0,"
                f" got {self.num_coda_layers}."
            )
        if self.backprop_loops is not None and self.backprop_loops < 1:
            raise ValueError(f"backprop_loops={self.backprop_loops} must be at least 1.")
        if self.input_injection == "none" and (self.backprop_loops or self.num_loops) < self.num_loops:
            # nor would embeddings without a prelude, as what the first loop reads
            raise ValueError(
                f"backprop_loops={self.backprop_loops} is below num_loops={self.num_loops} and needs input_injection:"
                ' with "none" nothing before the first loop gets a gradient.'
            )

    def validate_body(self):
        """A recurrent core needs attention around it, a memory its own sizes; both carry state in a plain cache."""
        if self.mixer != "attention" and self.num_prelude_layers + self.num_coda_layers < 1:
            raise ValueError(
                f"mixer={self.mixer!r} needs num_prelude_layers or num_coda_layers of at least 1, layers that attend:"
                " a cache counts its tokens there."
            )
        if self.mixer != "attention" and self.cache_slots == "last":
            raise ValueError(f'mixer={self.mixer!r} has a state for each loop and needs cache_slots="loop".')
        if self.conv_size < 0 or self.memory_chunk < 0 or self.memory_slots < 1:
            raise ValueError(
                f"conv_size={self.conv_size} and memory_chunk={self.memory_chunk} must be at least 0,"
                f" memory_slots={self.memory_slots} at least 1."
            )
        if self.memory_chunk and self.attention_experts > 1:
            raise ValueError(
                f"memory_chunk={self.memory_chunk} needs attention_experts=1, got {self.attention_experts}: its"
                " cross-attention has no experts."
            )

    @property
    def carries(self) -> bool:
        """Whether a cache carries more than keys and values."""
        return self.mixer != "attention" or self.memory_chunk > 0

    def loss_weights(self) -> dict[str, float]:
        """Weights of the auxiliary losses by name."""
        return {
            self.balance_loss: self.balance_weight,
            "act": self.act_weight,
            "ponder": self.ponder_weight,
            "exit": self.exit_weight,
        }


FIXED = Fixed()
MIXING = ("stick_breaking", "act", "depth_router")


class Injection(nn.Module):
    """What a loop reads of its own last state and of the prelude's."""

    def __init__(self, config):
        super().__init__()
        self.kind, size = config.input_injection, config.hidden_size
        if self.kind == "concat":
            self.linear = nn.Linear(2 * size, size, bias=False)
            self.linear.starts_as_sum = True
        elif self.kind == "decay":
            self.rate = nn.Parameter(torch.empty(size))
            self.gain = nn.Parameter(torch.empty(size))
            # a = 0.9 and b = 1 at the start
            self.starts_at = {"rate": -2.2, "gain": 1.0}

    @property
    def row_macs(self) -> int:
        """MACs of one row."""
        return self.linear.weight.numel() if self.kind == "concat" else 0

    def forward(self, h_Nd: Tensor, e_Nd: Tensor) -> Tensor:
        """Rows' states and prelude outputs -> input of the core."""
        if self.kind == "none":
            return h_Nd
        if self.kind == "add":
            return h_Nd + e_Nd
        if self.kind == "concat":
            return self.linear(torch.cat([h_Nd, e_Nd], dim=-1))
        return torch.exp(-F.softplus(self.rate)) * h_Nd + self.gain * e_Nd


@dataclass
class Trajectory:
    """Every loop of a pass at full depth. states: h_1..h_R, each [N, d]. asked: the policy after h_1..h_{R-1}."""

    rows: Rows
    states: list[Tensor]
    asked: list[HaltState]


class LoopedStack(nn.Module):
    """The loop above."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        body = {"mixer": config.mixer, "memory": config.memory_chunk > 0}
        self.prelude = nn.ModuleList(LoopBlock(config) for _ in range(config.num_prelude_layers))
        self.core = nn.ModuleList(LoopBlock(config, **body) for _ in range(config.num_core_layers))
        self.coda = nn.ModuleList(LoopBlock(config) for _ in range(config.num_coda_layers))
        self.memory = Memory(config, norm(config)) if config.memory_chunk else None
        self.injection = Injection(config)
        self.scale = None
        if config.loop_scale:
            self.scale = nn.Parameter(torch.empty(config.num_loops, config.hidden_size))
            self.starts_at = {"scale": 1.0}
        self.policy = POLICIES[config.policy](config)
        self.final_norm = nn.Identity() if config.norm_placement == "post" else norm(config)
        self.drafts = False  # whether the knobs of a call are a deeper model's

    knobs = ("threshold", "min_steps", "max_steps", "output_routing")

    def slots(self, cache: Any | None, extra: dict[str, Any]) -> Slots:
        """The cache of one call."""
        return Slots(self.config, cache, extra)

    def forward(
        self,
        x_BTd: Tensor,
        mask_BT: Tensor | None,
        reach: Reach,
        rotary: Rotary | None,
        slots: Slots,
        threshold: float | Tensor | None = None,
        min_steps: int | None = None,
        max_steps: int | None = None,
        output_routing: bool = False,
        readout: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[StackOutput, Trajectory | None]:
        """[B, T, d] embedded tokens, `mask_BT` true at tokens -> `StackOutput`, and in training the trajectory.

        reach, rotary: what the queries may read, and where they stand. slots: the cache. threshold: a number, or [B]
        one for each sequence; min_steps, max_steps: bounds of the depth; all default to the config's. readout maps
        rows' states to logits (policies kl and margin).
        """
        config, policy = self.config, self.policy
        if self.training and policy.inference_only:
            policy = FIXED
        threshold, min_steps, max_steps = self._knobs(threshold, min_steps, max_steps, len(x_BTd), slots)
        every = Rows.of(x_BTd, mask_BT)
        ledger, balance, routing = Ledger(every.batch), {}, []

        documents = Documents(every, reach, cached=slots.cache is not None)

        def run(
            block: LoopBlock, name: str, step: int, z_Nd: Tensor, rows: Rows, kv, slot: int,
            weight: Tensor | None = None, recall: Recall | None = None,
        ):  # fmt: skip
            """One layer on live rows, at loop `step`; returns states and the K/V buffers of this call's tokens."""
            angles = None if rotary is None else rotary.of(rows)
            kv = block.keys_values(z_Nd, rows, kv, angles)
            z_Nd, dispatches, state = block(
                z_Nd, rows, slots.write(slot, kv), reach, documents, recall, angles
            )
            slots.keep(slot, state)
            block.account(ledger, rows, reach, documents, recall)
            for part, dispatch in dispatches.items():
                key = f"{name}.{part}"
                if self.training or output_routing:
                    used = Balance.of(dispatch, z_Nd.new_ones(len(rows)) if weight is None else weight)
                    balance[key] = balance[key] + used if key in balance else used
                if output_routing:
                    routing.append((step, key, rows.places, dispatch.experts, dispatch.gates))
            return z_Nd, kv

        h_Nd = every.pack(x_BTd)
        for i, block in enumerate(self.prelude):
            h_Nd, _ = run(block, f"prelude.{i}", 0, h_Nd, every, None, slots.prelude(i))
        recalls = [None] * len(self.core)
        if self.memory is not None:
            layers = [block.cross for block in self.core]
            recalls, kept = self.memory(h_Nd, every, layers, slots.memory(), documents, ledger)
            slots.keep_memory(kept)

        rows, e_Nd, s_Nd, kv = every, h_Nd, h_Nd, [None] * len(self.core)
        state, leavers = policy.start(h_Nd), Leavers(rows)
        ledger.add("halting", rows.per_sequence, policy.start_macs)
        collect = self.training and not policy.skips_in_training
        states, asked_after = [], []
        grad, learning = torch.is_grad_enabled(), max_steps
        if self.training and config.backprop_loops is not None:
            learning = config.backprop_loops
        for step in range(1, max_steps + 1):
            may_stop = policy.asks(step, threshold, min_steps)
            if may_stop or (policy.watches and 1 < step and min_steps < max_steps):
                ledger.add("halting", rows.per_sequence, policy.row_macs)
                if policy.heads:
                    ledger.add(
                        "head", rows.per_sequence, policy.heads * config.hidden_size * config.vocab_size
                    )
                asked = policy.ask(state, h_Nd, step - 1, readout)
                if collect:
                    asked_after.append(asked)
                elif may_stop:
                    go_on = policy.go_on(asked, rows.value_of(threshold))
                    if not go_on.all():
                        stopped, kept = (~go_on).nonzero().squeeze(1), go_on.nonzero().squeeze(1)
                        # `state`, not `asked`: what was left before the last question stays on the last step
                        leavers.add(rows, stopped, s_Nd, policy.expected_depth(state, step - 1), step - 1)
                        rows, asked = rows.select(kept), asked.select(kept)
                        e_Nd, h_Nd, s_Nd = (part.index_select(0, kept) for part in (e_Nd, h_Nd, s_Nd))
                state = asked
            if not len(rows):
                break
            with torch.set_grad_enabled(grad and step > max_steps - learning):
                z_Nd = h_Nd
                if step > 1:
                    z_Nd = self.injection(h_Nd, e_Nd)
                    ledger.add("linear", rows.per_sequence, self.injection.row_macs)
                for i, block in enumerate(self.core):
                    # experts are balanced over what each row's step weighs in the end
                    weight = state.log_left.exp() if policy.mixes else None
                    z_Nd, kv[i] = run(
                        block, f"core.{i}", step, z_Nd, rows, kv[i], slots.core(i, step), weight, recalls[i]
                    )
                if self.scale is None:
                    h_Nd = z_Nd
                else:
                    h_Nd = h_Nd + self.scale[min(step, len(self.scale)) - 1] * (z_Nd - h_Nd)
            s_Nd = policy.combine(state, h_Nd)
            if collect:
                states.append(h_Nd)
        # the loops that nobody ran: tokens yet to come read there what the stopped ones show
        slots.fill(kv, first=step if not len(rows) else max_steps + 1)
        leavers.add(rows, None, s_Nd, policy.expected_depth(state, max_steps), max_steps)
        s_BTd, depths, expected = leavers.grids(nn.Identity())
        y_Nd = every.pack(s_BTd)
        for i, block in enumerate(self.coda):
            y_Nd, _ = run(block, f"coda.{i}", 0, y_Nd, every, None, slots.coda(i))
        out = StackOutput(
            hidden=every.unpack(self.final_norm(y_Nd)),
            depths=depths,
            expected_depths=expected,
            balance=balance,
            routing=routing if output_routing else None,
            compute=ledger,
        )
        return out, Trajectory(every, states, asked_after) if collect else None

    def read(self, h_Nd: Tensor, rows: Rows, reach: Reach, rotary: Rotary | None, ledger: Ledger) -> Tensor:
        """States after any loop of every token -> what the head reads: coda and final norm, no cache; booked."""
        for block in self.coda:
            angles = None if rotary is None else rotary.of(rows)
            kv = block.keys_values(h_Nd, rows, None, angles)
            h_Nd, _, _ = block(h_Nd, rows, kv, reach, None, angles=angles)
            block.account(ledger, rows, reach, None, None)
        return self.final_norm(h_Nd)

    def _knobs(
        self, threshold: Any, min_steps: int | None, max_steps: int | None, batch: int, slots: Slots
    ) -> tuple[float | Tensor, int, int]:
        """The call's knobs, the config's where the call has none; ValueError when they make no sense."""
        config = self.config
        for name, value in (("threshold", threshold), ("min_steps", min_steps)):
            if value is not None and config.policy == "fixed":
                raise ValueError(
                    f'{name} has nothing to set with policy="fixed": every token runs every loop.'
                )
        threshold = config.halt_threshold if threshold is None else threshold
        if self.drafts:
            # `generate` calls a drafter with the knobs of the model it drafts for
            max_steps, min_steps = (
                one if one is None else min(one, config.num_loops) for one in (max_steps, min_steps)
            )
        if max_steps is None:
            max_steps = config.num_loops
            # while an exit head learns, every loop is run: its labels look at all that is deeper
            learns = config.policy == "exit_head" and (min_steps or config.min_steps) < max_steps
            if self.training and config.objective == "sampled" and not learns:
                max_steps = int(torch.randint(1, config.num_loops + 1, ()))
            # a minimum above the depth of this pass means all of it
            min_steps = min(config.min_steps if min_steps is None else min_steps, max_steps)
        min_steps = min(config.min_steps, max_steps) if min_steps is None else min_steps
        if slots.cache is not None and max_steps > config.max_loops:
            raise ValueError(
                f"max_steps={max_steps} exceeds the cache's max_loops={config.max_loops}; raise it in the config."
            )
        check_knobs(threshold, min_steps, max_steps, batch)
        return threshold, min_steps, max_steps

    def token_macs(self) -> int:
        """MACs of one token through all loops: nobody stops, scores not counted."""
        config = self.config
        core = sum(block.token_macs() for block in self.core)
        once = sum(block.token_macs() for block in (*self.prelude, *self.coda))
        asking = (config.num_loops - 1) * (self.policy.row_macs + self.injection.row_macs)
        if self.memory is not None:
            once += self.memory.token_macs([block.cross for block in self.core])
        return once + config.num_loops * core + self.policy.start_macs + asking

    def pair_macs(self) -> int:
        """MACs of one token against one earlier one, in all layers and loops."""
        once = sum(block.attention.pair_macs for block in (*self.prelude, *self.coda))
        return once + self.config.num_loops * sum(block.attention.pair_macs for block in self.core)


class LoopedModel(CausalModel):
    """Bare decoder."""

    config_class, stack_class = LoopedConfig, LoopedStack


class LoopedForCausalLM(CausalLM):
    """Decoder and language-model head."""

    config_class, stack_class = LoopedConfig, LoopedStack

    @staticmethod
    def create_masks_for_generate(config, attention_mask: Tensor | None = None, **inputs: Any) -> Any:
        """Masks for a static cache; a model that carries state gets the plain one, and then refuses the cache."""
        if config.carries:
            return attention_mask
        return create_masks_for_generate(config=config, attention_mask=attention_mask, **inputs)

    def draft(self, loops: int) -> "LoopedForCausalLM":
        """The same weights with at most `loops` loops: the assistant of `generate(..., assistant_model=...)`.

        Greedy assisted generation gives the tokens of plain greedy generation: the full model verifies each. Bounds of
        the depth that such a call has are the full model's; the draft runs at most its own loops.
        """
        if not 1 <= loops <= self.config.num_loops:
            raise ValueError(f"loops={loops} must lie between 1 and num_loops={self.config.num_loops}.")
        settings = {"num_loops": loops, "max_loops": loops, "min_steps": min(self.config.min_steps, loops)}
        config = type(self.config).from_dict({**self.config.to_dict(), **settings})
        with torch.device("meta"):
            drafter = type(self)(config)
        for name in ("embed_tokens", "lm_head"):
            setattr(drafter, name, getattr(self, name))
        for name in ("prelude", "core", "coda", "memory", "injection", "scale", "policy", "final_norm"):
            setattr(drafter.stack, name, getattr(self.stack, name))
        drafter.rotary, drafter.stack.drafts = self.rotary, True
        drafter.generation_config = self.generation_config
        return drafter.train(self.training)


__all__ = ["RULES", "LoopedConfig", "LoopedForCausalLM", "LoopedModel"]
