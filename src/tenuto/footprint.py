"""Memory of one training step of a looped language model, computed; and measured, as far as a CPU shows it.

    total = weights + gradients + optimizer + max(activations + logits + working, the optimizer's temporaries)

weights, gradients and optimizer count every parameter once: a core that is looped L times has one copy, and the tied
head none of its own. `activations` and `logits` are what autograd keeps between forward and backward, `working` the
temporaries above it. All gradients are taken to exist while all activations do, which is an upper bound: a backward
pass frees the ones while it makes the others.

Kept of one token by one application of a layer, in the order of the forward (d model, f feed-forward, H query and G
key/value heads of width D; e bytes of a matrix product's operand, s of the residual stream; norm: below)

    keys and values    norm, its result for K and V         [norm] + d e
    queries            norm of the same, its result         [norm] + d e
    attention          q, k, v, result, logsumexp           (2 H D + 2 G D) e + 4 H
    its inner norm     of the branch's result               [norm]                               sandwich
    feed-forward       norm, its result                     [norm] + d e
                       gate, silu(gate), up, their product  4 f e          relu: f e, gelu: 2 f e
    its inner norm     of the branch's result               [norm]                               sandwich

residual sums, rotations and injection "add" keep nothing; cosines and sines are one pair of [N, D] for all layers.
On a GPU a norm keeps its input (the stream's once for the first two) and a scale; on a CPU `block.FusedRMS` keeps the
normed rows instead, so the first two keep one each: d more a layer. (In pure bf16 a CPU has PyTorch's composite: input
and normed rows in float32.)

"bf16-mixed" is autocast: stream and norms in float32; each matrix product keeps its own bf16 copy of the rows, and of
the weight: an `ExpertLinear`'s with every application (autocast remembers copies of plain parameters only, and this is
a view), an `nn.Linear`'s once.

With gradient checkpointing a layer's application keeps its input and, since `keys_values` runs outside of the block,
the norm, its result, keys and values of the first line; the rest is made again, one application at a time (in
`working`). With `loss_chunk` the logits are made again too, so many tokens at a time.

Assumed, not measured: a GPU's scaled_dot_product_attention keeps no T x T scores. PyTorch documents grouped-query
attention for its flash kernel, which has no float32, and for the plain formula: `math_attention` is the least that the
latter adds. Nothing here was run on a GPU; the CUDA context, fragmentation and the kernels' workspaces are an allowance
that the caller states.
"""

from __future__ import annotations

from typing import Any, Literal

Precision = Literal["fp32", "bf16", "bf16-mixed"]
Device = Literal["cpu", "cuda"]

GIB = 2**30
CARD, ALLOWANCE = 12 * GIB, GIB  # of which context, fragmentation and workspaces
LENGTH = 1024
TABLE = ("looped-100m", "dense-100m", "dense-400m", "looped-4m", "looped-1m")
# bytes of the residual stream and of the weights, and of a product's operands
_STREAM = {"fp32": 4, "bf16": 2, "bf16-mixed": 4}
_OPERAND = {"fp32": 4, "bf16": 2, "bf16-mixed": 2}
_EXPERT_LINEARS = ("query", "output", "up", "gate", "down")


def training_memory(
    config,
    batch: int,
    length: int,
    precision: Precision = "fp32",
    optimizer: Literal["adamw", "muon"] = "adamw",
    checkpointing: bool = False,
    loss_chunk: int | None = None,
    backprop_loops: int | None = None,
    device: Device = "cuda",
) -> dict[str, int]:
    """Bytes of one training step of a `LoopedConfig` on [batch, length] tokens, by part, and their `total`.

    loss_chunk and backprop_loops default to the config's. Refuses what the formulas do not cover (ValueError).
    `math_attention` is not in the total: see the head of this file.
    """
    _refuse(config, precision, optimizer, device)
    return _memory(
        config,
        _sizes(config),
        batch,
        length,
        precision,
        optimizer,
        checkpointing,
        loss_chunk,
        backprop_loops,
        device,
    )


def _memory(
    config,
    sizes: list[tuple[int, bool]],
    batch: int,
    length: int,
    precision: Precision,
    optimizer: str,
    checkpointing: bool,
    loss_chunk: int | None = None,
    backprop_loops: int | None = None,
    device: Device = "cuda",
) -> dict[str, int]:
    """As `training_memory`, with the weights' sizes known."""
    chunk = config.loss_chunk if loss_chunk is None else loss_chunk
    truncated = config.backprop_loops if backprop_loops is None else backprop_loops
    shape = _Shape(config, batch * length, precision, device, checkpointing, chunk, truncated)
    weights, state, step = _parameters(sizes, precision, optimizer)
    activations, logits, working = shape.activations(), shape.logits(), shape.working()
    scores = config.num_attention_heads * length * length * shape.operand * batch
    return {
        "weights": weights,
        "gradients": weights,
        "optimizer": state,
        "activations": activations,
        "logits": logits,
        "working": working,
        "total": 2 * weights + state + max(activations + logits + working, step),
        "math_attention": scores * (1 if checkpointing else shape.applications),
    }


class _Shape:
    """The sizes that the formulas at the head of this file are made of; N tokens."""

    def __init__(
        self, config, tokens: int, precision, device, checkpointing: bool, chunk: int, truncated: int | None
    ):
        self.config, self.tokens, self.precision, self.device = config, tokens, precision, device
        self.checkpointing, self.chunk = checkpointing, chunk if chunk < tokens else 0
        self.stream, self.operand = _STREAM[precision], _OPERAND[precision]
        self.mixed = precision == "bf16-mixed"
        self.loops = min(config.num_loops, truncated or config.num_loops)
        # objective "all" reads every loop's state: coda, final norm and head once for each
        self.readings = config.num_loops if config.objective == "all" else 1
        core, coda = self.loops * config.num_core_layers, self.readings * config.num_coda_layers
        self.applications = config.num_prelude_layers + core + coda

    def norm(self) -> int:
        """Of one token, the input apart where it is the stream's (`norm_input`)."""
        if self.device == "cuda":
            return 4
        if self.stream == 2:
            return 4 + 2 * 4 * self.config.hidden_size
        return self.stream * self.config.hidden_size + self.operand

    def norm_input(self) -> int:
        """Of one token: what a GPU's norm keeps besides."""
        return self.stream * self.config.hidden_size if self.device == "cuda" else 0

    def rows(self, products: int) -> int:
        """Of one token: a norm's result, kept for so many matrix products."""
        return self.operand * self.config.hidden_size * (products if self.mixed else 1)

    def keys_values(self) -> int:
        """Of one token: what a layer keeps of making keys and values."""
        return self.norm() + self.norm_input() + self.rows(2)

    def rest(self) -> int:
        """Of one token: what a layer keeps besides; the input of its first norm is in `keys_values`."""
        config, e = self.config, self.operand
        heads, narrow = (
            config.num_attention_heads * config.head_dim,
            config.num_key_value_heads * config.head_dim,
        )
        queries = self.norm() + self.rows(1)
        attention = (2 * heads + 2 * narrow) * e + 4 * config.num_attention_heads
        inner = self.norm() + self.norm_input() if config.norm_placement == "sandwich" else 0
        wide = {"swiglu": 4, "gelu": 2, "relu": 1}[config.activation] * config.intermediate_size * e
        gated = config.activation == "swiglu"
        feed_forward = self.norm() + self.norm_input() + self.rows(2 if gated else 1) + wide
        return queries + attention + inner + feed_forward + inner + self.masks()

    def masks(self) -> int:
        """Of one token: the dropouts' masks, bytes on a GPU and numbers on a CPU."""
        config, on_gpu = self.config, self.device == "cuda"
        kept = 2 * config.hidden_size * (1 if on_gpu else self.stream) if config.dropout else 0
        if config.activation_dropout:
            # and what they leave, which the last product reads
            kept += config.intermediate_size * ((1 if on_gpu else self.operand) + self.operand)
        return kept

    def layer(self) -> int:
        """Of one token: one application of a layer."""
        if not self.checkpointing:
            return self.keys_values() + self.rest()
        config, d = self.config, self.config.hidden_size
        # a GPU's norm has kept the input already; autocast rotates keys in float32
        own = 0 if self.device == "cuda" else self.stream * d
        key = self.stream if self.mixed and config.positions == "rotary" else self.operand
        return self.keys_values() + own + (key + self.operand) * config.num_key_value_heads * config.head_dim

    def injection(self) -> int:
        """Of one token: input injection and loop scale of all loops."""
        config, d = self.config, self.config.hidden_size
        injected = min(self.loops, config.num_loops - 1)
        kept = self.loops * self.stream * d if config.loop_scale else 0
        if config.input_injection == "concat":
            return kept + injected * 2 * d * self.operand
        if config.input_injection == "decay" and injected:
            # every h, and e once
            return kept + (injected + (self.device == "cpu")) * d * self.stream
        return kept

    def casts(self) -> int:
        """Autocast's bf16 copies of weights that the backward pass needs."""
        if not self.mixed:
            return 0
        config, d = self.config, self.config.hidden_size
        layers = config.num_prelude_layers + config.num_core_layers + config.num_coda_layers
        kept = layers * 2 * d * config.num_key_value_heads * config.head_dim * 2
        if not self.checkpointing:
            kept += self.applications * self.expert_linears() * 2
        if config.input_injection == "concat":
            kept += 2 * d * d * 2
        return kept + (0 if self.chunk else d * config.vocab_size * 2)

    def expert_linears(self) -> int:
        """Numbers in a layer's `ExpertLinear` weights."""
        config = self.config
        wide = (3 if config.activation == "swiglu" else 2) * config.intermediate_size
        return config.hidden_size * (2 * config.num_attention_heads * config.head_dim + wide)

    def activations(self) -> int:
        """What autograd keeps, logits apart."""
        config = self.config
        rotary = 2 * config.head_dim * self.stream if config.positions == "rotary" else 0
        once = rotary + 8  # next tokens
        # what the head reads; in chunks it is kept as it is, before autocast's copy
        read = self.norm() + self.norm_input()
        read += self.stream * config.hidden_size if self.chunk else self.rows(1)
        kept = once + self.applications * self.layer() + self.readings * read + self.injection()
        return self.tokens * kept + self.casts()

    def logits(self) -> int:
        """The log-probabilities that a reading's cross-entropy keeps, in float32."""
        return 0 if self.chunk else self.readings * self.tokens * self.config.vocab_size * 4

    def working(self) -> int:
        """The most that is alive besides: the head's or one layer's, and the gradient of the largest weight."""
        config, e, N = self.config, self.operand, self.tokens
        d, f, V = config.hidden_size, config.intermediate_size, config.vocab_size
        if self.chunk:
            # log-probabilities, their gradient, the logits' gradient; autocast's copy of the head's weight
            head = self.chunk * V * 12 + (2 * d * V if self.mixed else 0)
        else:
            # forward: logits twice (the output's and the loss's) and in float32; backward: the two gradients
            head = N * V * max(2 * e + (4 if e == 2 else 0), 8)
        # every loop's state waits for the loss
        head += N * d * self.stream * config.num_loops
        # gradients of the product, of both of its factors, of their common input and of the stream
        layer = N * (3 * f * e + d * (e + 2 * self.stream))
        if self.checkpointing:
            layer += N * self.rest() + (2 * self.expert_linears() if self.mixed else 0)
        return max(head, layer) + max(V * d, d * f) * self.stream


def memory_table(
    names: tuple[str, ...] = TABLE,
    length: int = LENGTH,
    optimizer: Literal["adamw", "muon"] = "adamw",
    card: int = CARD,
    allowance: int = ALLOWANCE,
) -> list[dict[str, Any]]:
    """For each preset, precision and checkpointing: the largest batch, a power of two up to 64, that a card holds.

    `training_memory` on a GPU must fit `card` less `allowance` bytes. Each row has the batch, 0 if not even one
    sequence fits (the figures are then those of one), its parts in bytes, and `batch_math`: the batch if attention
    kept its scores.
    """
    from .presets import preset

    rows = []
    for name in names:
        config = preset(name)
        _refuse(config, "fp32", optimizer, "cuda")
        sizes = _sizes(config)
        for precision in _STREAM:
            for checkpointing in (False, True):
                tried = {
                    batch: _memory(config, sizes, batch, length, precision, optimizer, checkpointing)
                    for batch in (1, 2, 4, 8, 16, 32, 64)
                }
                room = card - allowance
                batch = max((n for n, one in tried.items() if one["total"] <= room), default=0)
                quadratic = (n for n, one in tried.items() if one["total"] + one["math_attention"] <= room)
                row = {"name": name, "precision": precision, "checkpointing": checkpointing, "batch": batch}
                rows.append(row | {"batch_math": max(quadratic, default=0)} | tried[max(batch, 1)])
    return rows


def _refuse(config, precision: str, optimizer: str, device: str) -> None:
    """ValueError for what the formulas do not cover."""
    from .models import LoopedConfig

    if not isinstance(config, LoopedConfig):
        raise ValueError(
            f"Training memory is computed for LoopedConfig only, not for {type(config).__name__}."
        )
    for name, value, known in (
        ("precision", precision, tuple(_STREAM)), ("optimizer", optimizer, ("adamw", "muon")),
        ("device", device, ("cpu", "cuda")),
        ("policy", config.policy, ("fixed",)), ("mixer", config.mixer, ("attention",)),
        ("norm", config.norm, ("rmsnorm",)),
        ("norm_placement", config.norm_placement, ("pre", "sandwich")), ("ffn_experts", config.ffn_experts, (1,)),
        ("attention_experts", config.attention_experts, (1,)), ("memory_chunk", config.memory_chunk, (0,)),
        ("tie_word_embeddings", config.tie_word_embeddings, (True,)),
        ("relative_positions", config.relative_positions, ("none",)),
    ):  # fmt: skip
        if value not in known:
            raise ValueError(f"Training memory has no formula for {name}={value!r}; it knows {known}.")


def _sizes(config) -> list[tuple[int, bool]]:
    """Numbers in each weight, shared ones once, and whether Muon moves it."""
    import torch

    from .optim import parameter_groups
    from .presets import build

    with torch.device("meta"):
        model = build(config, "causal")
    model.tie_weights()
    return [
        (one.numel(), group["muon"])
        for group in parameter_groups(model, 1.0, 1.0, 0.0)
        for one in group["params"]
    ]


def _parameters(sizes: list[tuple[int, bool]], precision: Precision, optimizer: str) -> tuple[int, int, int]:
    """Bytes of the weights, of the optimizer's state, and of its temporaries during a step."""
    size = _STREAM[precision]
    weights = size * sum(numbers for numbers, _ in sizes)
    if optimizer == "adamw":
        # torch's, which takes all weights at once: a square root of each
        return weights, 2 * weights, weights
    once = size * sum(numbers for numbers, muon in sizes if muon)
    return weights, 2 * weights - once, 4 * size * max(numbers for numbers, _ in sizes)


def measured_saved_bytes(model, inputs: dict[str, Any], autocast: bool = False) -> dict[str, int]:
    """Runs `model(**inputs).loss` and its backward pass once, in training, and counts bytes; gradients are discarded.

    autocast: the forward in bfloat16 autocast.

    saved: storages handed to autograd for the backward pass (saved_tensors_hooks), each once; parameters, buffers and
    the inputs apart. alive: storages made in the forward that are still there when it is over, held by the loss:
    `saved`, and what checkpointing holds otherwise (keys and values). peak: the most alive at once, forward and
    backward, gradients of the weights included; scratch memory inside of a kernel is not seen.
    """
    import gc

    import torch
    from torch.autograd.graph import saved_tensors_hooks

    model.zero_grad(set_to_none=True)
    own = [*model.parameters(), *model.buffers(), *(one for one in inputs.values() if torch.is_tensor(one))]
    saved = {storage._cdata: 0 for storage in (tensor.untyped_storage() for tensor in own)}
    storages = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in saved:
            saved[storage._cdata] = storage.nbytes()
            # as long as it is held, no other storage has its address
            storages.append(storage)
        return tensor

    def forward():
        with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
            return model(**inputs).loss

    training, grad = model.training, torch.is_grad_enabled()
    model.train()
    try:
        with torch.enable_grad():
            # once for each figure: hooks that hold storages would hold what is counted as alive
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = forward()
            counted = sum(saved.values())
            del loss
            storages.clear()
            with _alive()(own) as alive:
                loss = forward()
                gc.collect()
                kept = alive.bytes()
                loss.backward()
                del loss
    finally:
        model.train(training)
        model.zero_grad(set_to_none=True)
        torch.set_grad_enabled(grad)
    return {"saved": counted, "alive": kept, "peak": alive.peak}


def _alive():
    """A mode that watches every storage made under it. (A function, so that torch is imported when needed.)"""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Alive(TorchDispatchMode):
        """Storages other than those of `own`; peak: the most bytes at the end of an operation."""

        def __init__(self, own):
            super().__init__()
            self.old = {tensor.untyped_storage()._cdata for tensor in own}
            self.storages, self.peak = {}, 0

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            result = operation(*args, **(kwargs or {}))
            for tensor in tree_leaves(result):
                if torch.is_tensor(tensor):
                    storage = tensor.untyped_storage()
                    if storage._cdata not in self.old:
                        self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            self.peak = max(self.peak, self.bytes())
            return result

        def bytes(self) -> int:
            """Alive now."""
            gone = [key for key, (storage, _) in self.storages.items() if storage.expired()]
            for key in gone:
                del self.storages[key]
            return sum(size for _, size in self.storages.values())

    return Alive
