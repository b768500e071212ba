"""The cache of a decoder whose tokens stop at different depths, or go around layers, over transformers' caches.

A looped model has one slot for each layer and loop (a routed one holds the chosen tokens of a layer: `ChosenLayer`):

    0 .. P-1                      prelude
    P + (l-1) C + i               layer i of the core at loop l = 1..max_loops
    P + max_loops C + j           coda

Every token has its keys and values in every slot; those of the loops it did not run are copies of its last loop's.
So transformers' caches (dynamic, static, paged), beams, cropping and padding work as for any decoder, and a token
decoded later reads what it would have read in one pass.

A recurrent core (linear_attention.py) has in its slots one state each, which only the tokens that ran the loop wrote:
there is nothing to copy. A memory (memory.py) has one more slot, behind the coda's: `Carried`. Neither can be cropped
(assisted generation, prompt lookup), nor live in a static or a paged cache.

cache_slots="last" keeps one slot for each layer of the core: a later token reads at every loop what the earlier ones
wrote at their last. That is not what one pass computes; memory is 1/max_loops of the core's.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from .linear_attention import RecurrentState
from .memory import MemoryState
from .routing import NOWHERE, Chosen
from .rows import Rows

KV = tuple[Tensor, Tensor]  # each [B, T, H, D]


class GrowingLayer(DynamicLayer):
    """transformers' dynamic layer with room ahead: a new token's keys are written, the past is not copied each time.

    Half as much again is allocated when the room is used up. With gradients it concatenates, as its parent.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> KV:
        """[B, H, T, D] new keys and values -> all of them [B, H, K, D]."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            return super().update(key_states, value_states, *args, **kwargs)
        past = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._append("keys", past, key_states)
        self.values = self._append("values", past, value_states)
        return self.keys, self.values

    def _append(self, name: str, past: int, new: Tensor) -> Tensor:
        old, room = getattr(self, name), self.__dict__.get(f"{name}_room")
        total = past + new.shape[-2]
        # after reordering or repeating, the kept ones lie elsewhere
        inside = room is not None and old.data_ptr() == room.data_ptr() and old.shape[:2] == room.shape[:2]
        if not inside or room.shape[-2] < total:
            room = new.new_empty(*new.shape[:2], grown_to(total), new.shape[-1])
            if past:
                room[:, :, :past] = old
            self.__dict__[f"{name}_room"] = room
        room[:, :, past:total] = new
        return room[:, :, :total]


class Carried:
    """A layer of a transformers cache for a state that is neither keys and values nor of a fixed shape."""

    is_compileable = is_croppable = is_sliding = supports_early_init = False

    def __init__(self):
        self.state: MemoryState | None = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The sequences at `beam_idx`."""
        if self.state is not None:
            self.state = self.state.select(beam_idx.to(self.state.count.device))

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence `repeats` times."""
        if self.state is not None:
            sequences = torch.arange(len(self.state.count), device=self.state.count.device)
            self.reorder_cache(sequences.repeat_interleave(repeats))

    def reset(self) -> None:
        """As before the first token."""
        self.state = None

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what a chunk has been pooled into cannot be taken apart."""
        raise RuntimeError("A compressed memory (memory_chunk) cannot be cropped.")

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def offload(self) -> None:
        """Stays where it is: it is small."""

    prefetch = offload


class ChosenLayer:
    """A layer of a transformers cache that holds keys and values of the chosen tokens only (routing.py).

    keys, values [B, H, C, D] (C: allocated for the fullest sequence), places [B, C] int32: which token of its sequence
    each slot holds, ascending; used [B]: how many slots are written, where the next one goes. past: by name, what a
    router remembers [B, ...].
    """

    is_compileable = is_sliding = supports_early_init = False

    def __init__(self):
        self.keys = self.values = self.places = self.used = None
        self.past: dict[str, Tensor] = {}
        self.length = 0  # tokens seen, chosen or not

    def write(self, kv: KV, chosen: Chosen) -> tuple[KV, Tensor]:
        """New keys and values [B, Q, H, D] -> all that are held [B, K, H, D], and their places [B, K]."""
        new = [part.transpose(1, 2) for part in kv]
        if self.used is None:
            self.used = torch.zeros_like(chosen.counts)
        if self.keys is None and len(chosen):
            self.keys, self.values = (part[:, :, :0] for part in new)
            self.places = chosen.places[:, :0].int()
        if len(chosen):
            room = int((self.used + chosen.counts).max())
            rows = chosen.rows
            slots = (self.used[rows.sequence] + rows.position, rows.sequence)
            self.keys, self.values = (
                self._put(old, part, slots, rows, room)
                for old, part in ((self.keys, new[0]), (self.values, new[1]))
            )
            places = self._put(
                self.places[:, None, :, None], chosen.places.int()[:, None, :, None], slots, rows, room
            )
            self.places = places[:, 0, :, 0]
            self.used = self.used + chosen.counts
        return self.read()

    def read(self) -> tuple[KV, Tensor]:
        """All that are held."""
        most = int(self.used.max())
        return (
            tuple(part[:, :, :most].transpose(1, 2) for part in (self.keys, self.values)),
            self.places[:, :most].long(),
        )

    @staticmethod
    def _put(old: Tensor, new: Tensor, slots: tuple[Tensor, Tensor], rows: Rows, room: int) -> Tensor:
        if old.shape[2] < room:
            empty = 0 if old.is_floating_point() else NOWHERE
            grown = old.new_full((*old.shape[:2], grown_to(room), old.shape[3]), empty)
            grown[:, :, : old.shape[2]] = old
            old = grown
        elif torch.is_grad_enabled():
            old = old.clone()
        slot, sequence = slots
        old.transpose(1, 2)[sequence, slot] = rows.pack(new.transpose(1, 2))
        return old

    def get_seq_length(self) -> int:
        """Slots of the fullest sequence."""
        return 0 if self.used is None else int(self.used.max())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of a mask over the slots."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The sequences at `beam_idx`."""
        for name in ("keys", "values", "places", "used"):
            old = getattr(self, name)
            if old is not None:
                setattr(self, name, old.index_select(0, beam_idx.to(old.device)))
        self.past = {name: one.index_select(0, beam_idx.to(one.device)) for name, one in self.past.items()}

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence `repeats` times."""
        some = [one for one in (self.used, *self.past.values()) if one is not None]
        if some:
            sequences = torch.arange(len(some[0]), device=some[0].device)
            self.reorder_cache(sequences.repeat_interleave(repeats))

    def reset(self) -> None:
        """As before the first token."""
        self.__init__()

    @property
    def is_croppable(self) -> bool:
        """Not where a router remembers what it saw."""
        return not self.past

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove tokens of every sequence."""
        if self.past:
            raise RuntimeError(
                "A cache whose routers remember earlier tokens (SDT, STT, the running rule) cannot be cropped."
            )
        self.length += tokens_to_remove
        if self.places is not None:
            gone = self.places >= self.length
            self.places = self.places.masked_fill(gone, NOWHERE)
            self.used = (~gone).sum(1)

    def offload(self) -> None:
        """Stays where it is."""

    prefetch = offload

    @property
    def bytes_used(self) -> Tensor:
        """[B] bytes of the keys and values written."""
        if self.keys is None:
            return torch.zeros(()) if self.used is None else self.used
        return self.used * (2 * self.keys.shape[1] * self.keys.shape[3] * self.keys.element_size())


def grown_to(total: int) -> int:
    """Slots to allocate when `total` are needed and there is no room: half as many again."""
    return total + max(16, total // 2)


class Slots:
    """Reads and writes a transformers cache for one call; with no cache, a call sees its own tokens only.

    `extra` are the arguments that paged caches want back (indices of continuous batching).
    """

    def __init__(self, config, cache: Any | None, extra: dict[str, Any]):
        self.config, self.cache, self.extra = config, cache, extra
        self.per_loop = config.cache_slots == "loop"
        if cache is not None and not self.per_loop and not hasattr(cache, "layers"):
            raise ValueError('cache_slots="last" does not work with a paged cache (continuous batching).')
        if cache is not None and not self.per_loop and cache.is_compileable:
            raise ValueError('cache_slots="last" needs a dynamic cache, not a static one.')
        if isinstance(cache, DynamicCache):
            for number, layer in enumerate(cache.layers):
                if type(layer) is DynamicLayer and not layer.is_initialized:
                    cache.layers[number] = GrowingLayer()
        if cache is not None and config.carries:
            needs = f"mixer={config.mixer!r} and memory_chunk={config.memory_chunk} need"
            if not hasattr(cache, "layers") or cache.is_compileable:
                raise ValueError(
                    f"{needs} a dynamic cache, not a static or a paged one (continuous batching)."
                )
            if len(cache.layers) < config.num_hidden_layers:
                raise ValueError(f"{needs} a cache that knows the config: DynamicCache(config=model.config).")

    def prelude(self, layer: int) -> int:
        """Slot of a prelude layer."""
        return layer

    def core(self, layer: int, step: int) -> int:
        """Slot of a core layer at loop `step`."""
        first = self.config.num_prelude_layers + layer
        return first + (step - 1) * self.config.num_core_layers if self.per_loop else first

    def coda(self, layer: int) -> int:
        """Slot of a coda layer."""
        return self.config.num_hidden_layers - self.config.num_coda_layers + layer

    def write(self, slot: int, kv: KV | None) -> KV | RecurrentState | None:
        """This call's keys and values [B, T, H, D] into a slot -> all that may be read [B, K, H, D].

        A recurrent layer has none (None) -> the state before this call; None before the first.
        """
        if self.cache is None:
            return kv
        if kv is None:
            return self._state(slot)
        if not self.per_loop and self._is_core(slot):
            # written when the last loop is known (`fill`)
            layer = self.cache.layers[slot]
            if not layer.is_initialized or layer.keys.numel() == 0:
                return kv
            past = (layer.keys, layer.values)
            return tuple(torch.cat([old.transpose(1, 2), new], 1) for old, new in zip(past, kv, strict=True))
        return self._update(slot, kv)

    def keep(self, slot: int, state: RecurrentState | None) -> None:
        """A recurrent layer's state after this call into its slot."""
        if self.cache is not None and state is not None:
            # transformers has the convolution's past on the last axis
            self.cache.update_conv_state(state.conv.mT, slot)
            self.cache.update_recurrent_state(state.memory, slot)

    def memory(self) -> MemoryState | None:
        """The compressed memory before this call."""
        layers = [] if self.cache is None else self.cache.layers[self.config.num_hidden_layers :]
        return layers[0].state if layers else None

    def keep_memory(self, state: MemoryState) -> None:
        """The compressed memory after this call."""
        if self.cache is None:
            return
        if len(self.cache.layers) == self.config.num_hidden_layers:
            self.cache.layers.append(Carried())
        self.cache.layers[-1].state = state

    def fill(self, kv: list[KV | None], first: int) -> None:
        """The core's last keys and values of every layer into the slots of loops `first`..max_loops."""
        if self.cache is None:
            return
        for layer, one in enumerate(kv):
            if one is None:
                continue
            steps = range(first, self.config.max_loops + 1) if self.per_loop else (1,)
            for step in steps:
                self._update(self.core(layer, step), one)

    def _state(self, slot: int) -> RecurrentState | None:
        conv, memory = self.cache.get_conv_state(slot), self.cache.get_recurrent_state(slot)
        if conv is None:
            return None
        if torch.is_grad_enabled():
            # transformers writes the next state over this one, which the backward pass still needs
            conv, memory = conv.clone(), memory.clone()
        return RecurrentState(memory, conv.mT)

    def _is_core(self, slot: int) -> bool:
        first = self.config.num_prelude_layers
        return first <= slot < first + self.config.num_core_layers

    def _update(self, slot: int, kv: KV) -> KV:
        key, value = (part.transpose(1, 2) for part in kv)
        # a copy for each call: paged caches write into it
        key, value = self.cache.update(key, value, slot, kwargs=dict(self.extra))
        return key.transpose(1, 2), value.transpose(1, 2)


class DecoderSlots:
    """The cache of an encoder-decoder's decoder for one call; with no cache, a call sees its own tokens only.

    Self-attention has one slot for each layer, or each step of a tied block: as many as the first call's steps. What
    a token shows to the steps it did not run is in their slots too (`fill`), so decoding equals one pass over
    everything. Cross-attention has one slot for each block, written by the first call.
    """

    def __init__(self, cache: EncoderDecoderCache | None, steps: int, blocks: int):
        self.cache, self.steps = cache, 0
        if cache is None:
            return
        if not isinstance(cache, EncoderDecoderCache) or cache.is_compileable:
            raise ValueError(
                "An encoder-decoder needs an EncoderDecoderCache of two dynamic caches, got"
                f" {type(cache).__name__}{' of static ones' * isinstance(cache, EncoderDecoderCache)}."
            )
        own = cache.self_attention_cache
        if not cache.get_seq_length():
            own.layers = [GrowingLayer() for _ in range(steps)]
            cache.cross_attention_cache.layers = [DynamicLayer() for _ in range(blocks)]
            cache.is_updated = {}
        self.steps = len(own.layers)
        if steps > self.steps:
            raise ValueError(
                f"max_steps={steps} exceeds the cache's {self.steps} steps, those of the first call with it."
            )

    def write(self, slot: int, kv: KV) -> KV:
        """This call's keys and values [B, T, H, D] into a slot -> all that may be read [B, K, H, D]."""
        if self.cache is None:
            return kv
        key, value = (part.transpose(1, 2) for part in kv)
        key, value = self.cache.self_attention_cache.update(key, value, slot)
        return key.transpose(1, 2), value.transpose(1, 2)

    def fill(self, kv: KV, first: int) -> None:
        """The same keys and values into every slot from `first` on."""
        for slot in range(first, self.steps):
            self.write(slot, kv)

    def memory(self, slot: int, make: Callable[[], KV]) -> tuple[KV, bool]:
        """A block's cross-attention keys and values [B, S, H, D], and whether this call made them."""
        if self.cache is None:
            return make(), True
        cross, done = self.cache.cross_attention_cache, self.cache.is_updated
        made = not done.get(slot, False)
        if made:
            cross.update(*(part.transpose(1, 2) for part in make()), slot)
            done[slot] = True
        layer = cross.layers[slot]
        return (layer.keys.transpose(1, 2), layer.values.transpose(1, 2)), made


class RoutedSlots:
    """The cache of a stack whose routed layers hold the chosen tokens only (routing.py), for one call."""

    def __init__(self, config, cache: Any | None):
        self.cache = cache
        if cache is None:
            return
        if not hasattr(cache, "layers") or cache.is_compileable:
            raise ValueError(
                "Routed layers hold as many tokens as they chose and need a dynamic cache, not a static or a paged one"
                " (continuous batching)."
            )
        if len(cache.layers) < config.num_hidden_layers:
            raise ValueError(
                "Routed layers need a cache that knows the config: DynamicCache(config=model.config)."
            )
        for number, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer and not layer.is_initialized:
                cache.layers[number] = ChosenLayer() if number in config.routed_layers else GrowingLayer()

    def write(self, layer: int, kv: KV) -> KV:
        """This call's keys and values [B, T, H, D] of a layer that all tokens run -> all of them [B, K, H, D]."""
        if self.cache is None:
            return kv
        key, value = self.cache.update(*(part.transpose(1, 2) for part in kv), layer)
        return key.transpose(1, 2), value.transpose(1, 2)

    def routed(self, layer: int) -> ChosenLayer | None:
        """What a routed layer holds."""
        return None if self.cache is None else self.cache.layers[layer]
