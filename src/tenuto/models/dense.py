"""The plain Transformer (Vaswani et al. 2017): N distinct blocks, every token through all of them.

The yardstick of every claim. With `attention_experts` > 1 and one head it is the Mixture of Attention heads (MoA,
Zhang et al. 2022), whose base model stands in Table 1 of SUT.
"""

from functools import partial

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import EncoderDecoderCache

from .base import AdaptiveConfig, StackOutput
from .block import Block, Stack
from .cache import DecoderSlots
from .experts import Balance
from .heads import EncoderModel, SequenceClassifier
from .ledger import Ledger
from .rows import Rows
from .seq2seq import EncoderDecoder


@strict
class TransformerConfig(AdaptiveConfig):
    """`num_hidden_layers` blocks in an encoder, `num_decoder_layers` in a decoder."""

    model_type = "tenuto_transformer"

    num_hidden_layers: int = 6
    num_decoder_layers: int = 6

    def loss_weights(self) -> dict[str, float]:
        """Weights of the auxiliary losses by name."""
        return {self.balance_loss: self.balance_weight}


class TransformerStack(Stack):
    """Distinct blocks in a row."""

    # it says itself that it has none of them
    knobs = ("threshold", "min_steps", "max_steps", "capacity", "selection", "output_routing")
    cached = True

    def __init__(self, config, decoder: bool = False):
        super().__init__(config, decoder)
        steps = config.num_decoder_layers if decoder else config.num_hidden_layers
        self.blocks = nn.ModuleList(Block(config, decoder) for _ in range(steps))

    def forward(
        self,
        x_BTd: Tensor,
        mask_BT: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        output_routing: bool = False,
        cache: EncoderDecoderCache | None = None,
        **knobs,
    ) -> StackOutput:
        """[B, T, d] embedded tokens, `mask_BT` true at tokens -> `StackOutput`. It has no depth knobs.

        cache: of earlier tokens, which `mask_BT` counts too, [B, past + T]; this call extends it.
        """
        asked = sorted(name for name, value in knobs.items() if value is not None)
        if asked:
            raise ValueError(
                f"{', '.join(asked)}: a plain Transformer runs every layer for every token;"
                " depth knobs need a universal model (ut-*, sut-*)."
            )
        past = 0 if cache is None else cache.get_seq_length()
        slots = DecoderSlots(cache, len(self.blocks), len(self.blocks))
        rows = Rows.of(x_BTd, None if mask_BT is None else mask_BT[:, past:])
        mask_BT = None if rows.index is None and not past else mask_BT
        reach, memory_reach = self.reaches(rows.length, mask_BT, memory, memory_mask, past)
        ledger, balance, routing = Ledger(rows.batch), {}, []
        h_Nd = rows.pack(x_BTd)
        for step, block in enumerate(self.blocks, 1):
            kv = slots.write(step - 1, block.keys_values(h_Nd, rows, None))
            memory_kv, memory_views, made = None, None, False
            if memory is not None:
                memory_kv, made = slots.memory(step - 1, partial(block.memory_keys_values, memory))
                memory_views = memory_reach.views(rows)
            h_Nd, dispatches = block(h_Nd, rows, kv, reach.views(rows), memory_kv, memory_views)
            block.account(ledger, rows, rows, reach, memory, memory_reach, first=made)
            for name, dispatch in dispatches.items():
                if self.training or output_routing:
                    balance[f"{step}.{name}"] = Balance.of(dispatch, h_Nd.new_ones(len(rows)))
                if output_routing:
                    routing.append((step, name, rows.places, dispatch.experts, dispatch.gates))
        depths = rows.unpack(h_Nd.new_full((len(rows),), len(self.blocks)))
        return StackOutput(
            hidden=rows.unpack(self.final_norm(h_Nd)),
            depths=depths.long(),
            expected_depths=depths,
            balance=balance,
            routing=routing if output_routing else None,
            compute=ledger,
        )

    def token_macs(self) -> int:
        """MACs of one token through the stack by the papers' rule (no attention scores)."""
        return sum(block.token_macs() for block in self.blocks)


class TransformerModel(EncoderModel):
    """Bare encoder."""

    config_class, stack_class = TransformerConfig, TransformerStack


class TransformerForSequenceClassification(SequenceClassifier):
    """Encoder and classifier."""

    config_class, stack_class = TransformerConfig, TransformerStack


class TransformerForSeq2SeqLM(EncoderDecoder):
    """Encoder and decoder."""

    config_class, stack_class = TransformerConfig, TransformerStack
