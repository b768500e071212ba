"""The Universal Transformer (Dehghani et al. 2019): one block, iterated, for each token as long as it needs.

The loop below is the algorithm of SUT (arXiv 2310.07096, section 2.4) with ordinary or sparse blocks:

    for step l = 1 .. L:
        every token still running asks its halting net about h_{l-1}                           (from l = 2)
        K, V  <- s_{l-1} of the tokens that ran step l-1: those still running, and once more, for good,
                 those that have just stopped
        h_l   <- block(queries h_{l-1}, keys and values K, V)         for the tokens still running only
        s_l   <- expected state                                       halting.py, Eq. 2
    output: s of each token at the last step it ran

A stopped token costs nothing more, and shows the others its final s (`final_state`). The masked form, which
computes everything and selects, gives the same outputs and gradients; the tests hold one against the other.
kv_source="hidden", an ablation of the paper, takes K, V from h instead of s.
A decoder's cache has one slot for each step; what a stopped token shows goes into the slots of all steps it did not
run, so that a later token reads what one pass would have given.
With input injection the token's own embedding is added to every later step's input, to s for keys and values too. It
does not change with the step, so a stopped token's keys and values do not either, and the rule holds.
"""

from typing import Literal

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import EncoderDecoderCache

from .base import AdaptiveConfig, StackOutput
from .block import Block, Stack
from .cache import DecoderSlots
from .experts import Balance
from .halting import POLICIES, check_knobs
from .heads import EncoderModel, SequenceClassifier
from .ledger import Ledger
from .rows import Rows
from .seq2seq import EncoderDecoder


@strict
class UniversalTransformerConfig(AdaptiveConfig):
    """One block, `num_loops` times in an encoder, another `num_decoder_loops` times in a decoder."""

    model_type = "tenuto_universal"
    # transformers sizes caches by this name: unique layers x loops
    attribute_map = {"num_hidden_layers": "num_loops"}

    num_loops: int = 6  # L
    num_decoder_loops: int = 6
    input_injection: Literal["none", "add"] = "none"
    kv_source: Literal["state", "hidden"] = "state"  # of a step's keys and values: s or h of the step before
    relative_positions: Literal["window", "t5", "geometric", "none"] = "none"
    copy_gate: float | None = None  # where its bias starts; None: no gate (geometric.py)

    policy: Literal["fixed", "stick_breaking"] = "stick_breaking"
    halt_threshold: float = 0.999
    halt_bias: float = 0.0  # added to the halt logit: 0 as published, -3 for a deep start
    min_steps: int = 1
    act_weight: float = 0.0  # of L_ACT, per token

    def validate_depth(self):
        """Steps and thresholds must make sense together."""
        if not 1 <= self.min_steps <= self.num_loops:
            raise ValueError(f"min_steps={self.min_steps} must lie between 1 and num_loops={self.num_loops}.")
        if not 0.0 <= self.halt_threshold <= 1.0:
            raise ValueError(f"halt_threshold={self.halt_threshold} must lie between 0 and 1.")
        if self.relative_positions == "geometric" and self.num_attention_heads % 2:
            raise ValueError(
                f'num_attention_heads={self.num_attention_heads} must be even with relative_positions="geometric":'
                " half of the heads look to each side."
            )
        if self.policy == "fixed" and self.act_weight:
            raise ValueError(
                f'act_weight={self.act_weight} has nothing to weigh with policy="fixed":'
                " every token runs every step."
            )
        if self.policy == "fixed" and self.kv_source == "hidden":
            raise ValueError('kv_source="hidden" differs in nothing with policy="fixed", under which s is h.')

    def loss_weights(self) -> dict[str, float]:
        """Weights of the auxiliary losses by name."""
        return {self.balance_loss: self.balance_weight, "act": self.act_weight}


class UniversalStack(Stack):
    """One block iterated under a depth policy."""

    knobs = ("threshold", "min_steps", "max_steps", "output_routing")
    cached = True

    def __init__(self, config, decoder: bool = False):
        super().__init__(config, decoder)
        self.steps = config.num_decoder_loops if decoder else config.num_loops
        self.block = Block(config, decoder)
        self.policy = POLICIES[config.policy](config)

    def forward(
        self,
        x_BTd: Tensor,
        mask_BT: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        threshold: float | Tensor | None = None,
        min_steps: int | None = None,
        max_steps: int | None = None,
        output_routing: bool = False,
        cache: EncoderDecoderCache | None = None,
    ) -> StackOutput:
        """[B, T, d] embedded tokens, `mask_BT` true at tokens -> `StackOutput`.

        cache: of earlier tokens, which `mask_BT` counts too, [B, past + T]; this call extends it. threshold: a number,
        or [B] one for each sequence; min_steps, max_steps: bounds of the depth. All default to the config's;
        max_steps may exceed it.
        """
        threshold, min_steps, max_steps = self._knobs(threshold, min_steps, max_steps, len(x_BTd))
        past = 0 if cache is None else cache.get_seq_length()
        slots = DecoderSlots(cache, max_steps, blocks=1)
        rows = Rows.of(x_BTd, None if mask_BT is None else mask_BT[:, past:])
        mask_BT = None if rows.index is None and not past else mask_BT
        policy, block = self.policy, self.block
        reach, memory_reach = self.reaches(rows.length, mask_BT, memory, memory_mask, past)
        memory_kv, made = None, False
        if memory is not None:
            memory_kv, made = slots.memory(0, lambda: block.memory_keys_values(memory))
        ledger, balance, routing, leavers = Ledger(rows.batch), {}, [], Leavers(rows)

        x_Nd = h_Nd = s_Nd = rows.pack(x_BTd)
        state, kv = policy.start(h_Nd), None
        for step in range(1, max_steps + 1):
            # the rows that ran the step before: their s is new; all others' keys and values stand already
            kv_rows, kv_Nd = rows, self._input(self._shown(h_Nd, s_Nd), x_Nd, step)
            if policy.asks(step, threshold, min_steps):
                ledger.add("halting", rows.per_sequence, policy.row_macs)
                asked = policy.ask(state, h_Nd, step - 1)
                go_on = policy.go_on(asked, rows.value_of(threshold))
                if not go_on.all():
                    stopped, kept = (~go_on).nonzero().squeeze(1), go_on.nonzero().squeeze(1)
                    # `state`, not `asked`: what was left before the last question stays on the last step
                    leavers.add(rows, stopped, s_Nd, policy.expected_depth(state, step - 1), step - 1)
                    rows, asked = rows.select(kept), asked.select(kept)
                    x_Nd, h_Nd, s_Nd = (part.index_select(0, kept) for part in (x_Nd, h_Nd, s_Nd))
                    if cache is None:
                        # a sequence without a live token left has nobody to read its keys and values
                        read = (rows.per_sequence > 0)[kv_rows.sequence].nonzero().squeeze(1)
                        kv_rows, kv_Nd = kv_rows.select(read), kv_Nd.index_select(0, read)
                state = asked
            if not len(rows):
                break
            kv = block.keys_values(kv_Nd, kv_rows, kv)
            memory_views = memory_reach.views(rows) if memory is not None else None
            h_Nd, dispatches = block(
                self._input(h_Nd, x_Nd, step), rows, slots.write(step - 1, kv), reach.views(rows), memory_kv,
                memory_views,
            )  # fmt: skip
            s_Nd = policy.combine(state, h_Nd)
            block.account(ledger, rows, kv_rows, reach, memory, memory_reach, first=made and step == 1)
            for name, dispatch in dispatches.items():
                if self.training or output_routing:
                    used = Balance.of(dispatch, state.log_left.exp())
                    balance[name] = balance[name] + used if name in balance else used
                if output_routing:
                    routing.append((step, name, rows.places, dispatch.experts, dispatch.gates))
        # the steps that nobody ran: tokens yet to come read there what the stopped ones show
        ran = max_steps if len(rows) else step - 1
        if ran < slots.steps:
            if len(rows):
                kv_rows, kv_Nd = rows, self._input(self._shown(h_Nd, s_Nd), x_Nd, max_steps + 1)
            block.attention.account_kv(ledger, kv_rows)
            slots.fill(block.keys_values(kv_Nd, kv_rows, kv), first=ran)
        leavers.add(rows, None, s_Nd, policy.expected_depth(state, max_steps), max_steps)
        hidden, depths, expected = leavers.grids(self.final_norm)
        return StackOutput(
            hidden=hidden,
            depths=depths,
            expected_depths=expected,
            balance=balance,
            routing=routing if output_routing else None,
            compute=ledger,
        )

    def _knobs(
        self, threshold: float | Tensor | None, min_steps: int | None, max_steps: int | None, batch: int
    ) -> tuple[float | Tensor, int, int]:
        """The call's knobs, the config's where the call has none; ValueError when they make no sense."""
        for name, value in (("threshold", threshold), ("min_steps", min_steps)):
            if value is not None and self.config.policy == "fixed":
                raise ValueError(
                    f'{name} has nothing to set with policy="fixed": every token runs every step.'
                )
        threshold = self.config.halt_threshold if threshold is None else threshold
        min_steps = self.config.min_steps if min_steps is None else min_steps
        if max_steps is None:
            # a minimum above the stack's own depth means all of it: one call serves encoder and decoder
            max_steps, min_steps = self.steps, min(min_steps, self.steps)
        check_knobs(threshold, min_steps, max_steps, batch)
        return threshold, min_steps, max_steps

    def _shown(self, h_Nd: Tensor, s_Nd: Tensor) -> Tensor:
        """What the next step's keys and values are made of."""
        return h_Nd if self.config.kv_source == "hidden" else s_Nd

    def _input(self, states_Nd: Tensor, x_Nd: Tensor, step: int) -> Tensor:
        """What a step reads: the states, from step 2 on with the embedding injected if the config says so."""
        return states_Nd + x_Nd if step > 1 and self.config.input_injection == "add" else states_Nd

    def token_macs(self) -> int:
        """MACs of one token through all steps by the papers' rule: nobody stops, scores not counted."""
        return self.steps * self.block.token_macs() + (self.steps - 1) * self.policy.row_macs


class Leavers:
    """Collects what tokens leave the loop with and lays it out as grids."""

    def __init__(self, rows: Rows):
        self.rows, self.parts = rows, []

    def add(self, rows: Rows, which: Tensor | None, states: Tensor, expected: Tensor, steps: int):
        """The rows at `which` [n] (None: all) leave after `steps` steps."""
        places = rows.places
        if which is not None:
            places, states, expected = (part.index_select(0, which) for part in (places, states, expected))
        self.parts.append((places, states, expected, torch.full_like(places, steps)))

    def grids(self, norm: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        """Normed states [B, T, d], depths [B, T] (int) and expected depths [B, T]; zero at pads."""
        places, states, expected, depths = (torch.cat(part) for part in zip(*self.parts, strict=True))
        if len(self.parts) > 1 or self.rows.index is not None:
            rows = Rows(places, self.rows.batch, self.rows.length, self.rows.device)
        else:
            rows = self.rows
        return rows.unpack(norm(states)), rows.unpack(depths), rows.unpack(expected)


class UniversalTransformerModel(EncoderModel):
    """Bare encoder."""

    config_class, stack_class = UniversalTransformerConfig, UniversalStack


class UniversalTransformerForSequenceClassification(SequenceClassifier):
    """Encoder and classifier."""

    config_class, stack_class = UniversalTransformerConfig, UniversalStack


class UniversalTransformerForSeq2SeqLM(EncoderDecoder):
    """Encoder and decoder, halting in both."""

    config_class, stack_class = UniversalTransformerConfig, UniversalStack
