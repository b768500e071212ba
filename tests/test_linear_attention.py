"""Linear attention against the recurrence written token by token, whole, in pieces and ragged."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from tenuto.models import linear_attention as room
from tenuto.models.linear_attention import (
    LinearAttention,
    RecurrentState,
    chunks,
    gated_delta_rule,
    gated_linear_attention,
    unit,
)

KINDS = ["gla", "gated_delta"]
double = torch.float64


def naive(kind, q, k, v, beta, log_decay, state=None):
    """Eq. 1-3 for each sequence, head and token; the memory after the last."""
    (S, T, H, D), E = q.shape, v.shape[-1]
    memories, outputs = [], []
    for s in range(S):
        for h in range(H):
            memory = torch.zeros(D, E, dtype=q.dtype) if state is None else state[s, h]
            for t in range(T):
                key, a = k[s, t, h], log_decay[s, t, h].exp()
                if kind == "gla":
                    memory = a * memory + torch.outer(key, v[s, t, h])
                else:
                    b = beta[s, t, h]
                    erase = torch.eye(D, dtype=q.dtype) - b * torch.outer(key, key)
                    memory = a * (erase @ memory) + b * torch.outer(key, v[s, t, h])
                outputs.append(memory.T @ q[s, t, h])
            memories.append(memory)
    y = torch.stack(outputs).view(S, H, T, E).transpose(1, 2)
    return y, torch.stack(memories).view(S, H, D, E)


def fast(kind, q, k, v, beta, log_decay, state=None, **options):
    """The room's function of that kind."""
    if kind == "gla":
        return gated_linear_attention(q, k, v, log_decay, state, **options)
    return gated_delta_rule(q, k, v, beta, log_decay, state, **options)


def inputs(length, decay="usual", S=2, H=2, D=4, E=3, dtype=double):
    """q, k (of length 1), v, beta, log a and a state, all leaves with a gradient."""
    q, k, v = (torch.randn(S, length, H, size, dtype=dtype) for size in (D, D, E))
    log_decay = -torch.rand(S, length, H, dtype=dtype)
    if decay == "none":
        log_decay = torch.zeros_like(log_decay)
    elif decay == "strong":
        log_decay = torch.full_like(log_decay, -50.0)
    elif decay == "mixed":
        log_decay = torch.where(torch.rand_like(log_decay) < 0.2, -50.0, log_decay)
    beta = torch.rand(S, length, H, dtype=dtype)
    state = torch.randn(S, H, D, E, dtype=dtype)
    return [part.requires_grad_() for part in (q, F.normalize(k, dim=-1), v, beta, log_decay, state)]


def gradients(outputs, parts):
    """Gradients of a fixed random combination of the outputs."""
    generator = torch.Generator().manual_seed(1)
    total = sum((out * torch.randn(out.shape, generator=generator, dtype=double)).sum() for out in outputs)
    return torch.autograd.grad(total, parts, allow_unused=True, materialize_grads=True)


def config(kind="gated_delta", conv_size=4, **fields):
    """What the mixer reads of a config."""
    base = {"hidden_size": 12, "num_attention_heads": 2, "head_dim": 4, "norm_eps": 1e-5}
    return SimpleNamespace(**base | {"mixer": kind, "conv_size": conv_size} | fields)


def mixer(kind, conv_size=4, **fields):
    """A mixer in float64, its convolution and decays as at the start."""
    return LinearAttention(config(kind, conv_size, **fields)).double()


def prefix(counts, length):
    """[S, T] bool, the first `counts` places of each row."""
    return torch.arange(length) < torch.tensor(counts)[:, None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "length, decay", [(1, "usual"), (63, "usual"), (64, "strong"), (65, "none"), (130, "mixed")]
)
def test_chunked_equals_token_by_token(kind, length, decay):
    """Values and gradients, with a state to start from, at lengths around the chunk of 64 and the default's."""
    parts = inputs(length, decay, S=1)
    expected = naive(kind, *parts)
    wanted = gradients(expected, parts)
    for options in ({}, {"chunk": 64}):
        actual = fast(kind, *parts, **options)
        assert_close(actual, expected, atol=1e-10, rtol=1e-10)
        assert_close(gradients(actual, parts), wanted, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length, chunk", [(1, 4), (3, 4), (7, 3), (8, 4), (9, 1)])
def test_without_a_state_and_any_chunk(kind, length, chunk):
    """None stands for zeros; a chunk of one token is the recurrence."""
    parts = inputs(length)[:-1]
    assert_close(fast(kind, *parts, chunk=chunk), naive(kind, *parts), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 3])
def test_gradcheck(kind, length):
    """Against finite differences, the state's gradient included."""
    parts = inputs(length, S=1, H=1, D=2, E=2)
    assert torch.autograd.gradcheck(lambda *parts: fast(kind, *parts, chunk=2), parts)


def test_unit_gradcheck_and_kernel():
    """The written-out derivative, zero vector included, and PyTorch's kernel that GPUs take."""
    x = torch.randn(3, 4, dtype=double)
    x[0] = 0
    assert torch.autograd.gradcheck(lambda x: unit(x, 1e-2), x.requires_grad_())
    assert_close(unit(x, 0.1), F.rms_norm(x, (4,), eps=0.1 / 4) / 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", ["usual", "none", "strong", "mixed"])
def test_float32(kind, decay):
    """Finite everywhere and close to float64; the bound of mixed decays is that of their sum over a chunk."""
    parts = inputs(200, decay, D=8, E=8)
    exact = fast(kind, *parts)
    narrow = [part.detach().float().requires_grad_() for part in parts]
    actual = fast(kind, *narrow)
    bound = 2e-4 if decay == "mixed" else 2e-5
    for one, other in zip(actual, exact, strict=True):
        assert one.dtype == torch.float32
        assert_close(one.double(), other, atol=bound, rtol=bound)
    grads = torch.autograd.grad(
        sum(part.sum() for part in actual), narrow, materialize_grads=True, allow_unused=True
    )
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_widened(kind):
    """bfloat16 in, bfloat16 out, a float32 memory; autocast changes nothing inside."""
    parts = [part.detach().bfloat16() for part in inputs(40)]
    with torch.autocast("cpu", torch.bfloat16):
        y, memory = fast(kind, *parts)
    wide = fast(kind, *(part.float() for part in parts))
    assert (y.dtype, memory.dtype) == (torch.bfloat16, torch.float32)
    assert_close(memory, wide[1])
    assert_close(y, wide[0].bfloat16())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [1, 20, 64, 69])
def test_two_pieces_equal_one(kind, cut):
    """The memory is handed on; values and gradients."""
    parts = inputs(70)
    *tokens, state = parts
    whole = fast(kind, *parts)
    first, between = fast(kind, *(part[:, :cut] for part in tokens), state)
    second, last = fast(kind, *(part[:, cut:] for part in tokens), between)
    pieces = torch.cat([first, second], 1), last
    assert_close(pieces, whole, atol=1e-10, rtol=1e-10)
    assert_close(gradients(pieces, parts), gradients(whole, parts), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_equals_each_alone(kind):
    """Invalid places, here with holes too, are absent: output 0, no gradient, memory of the valid ones."""
    parts = inputs(70, S=4)
    valid = prefix([70, 33, 1, 0], 70)
    valid[0, 10:15] = False
    y, memory = fast(kind, *parts, valid_ST=valid)
    assert y[~valid].eq(0).all()
    for grad in gradients((y, memory), parts)[:-1]:
        assert grad[~valid].eq(0).all()
    for s in range(3):
        alone = fast(kind, *(part[s : s + 1, valid[s]] for part in parts[:-1]), parts[-1][s : s + 1])
        assert_close((y[s : s + 1, valid[s]], memory[s : s + 1]), alone, atol=1e-10, rtol=1e-10)
    assert memory[3].equal(parts[-1][3])
    step = fast(kind, *(part[:, :1] for part in parts[:-1]), parts[-1], valid_ST=valid[:, :1])
    assert step[1][3].equal(parts[-1][3]) and step[0][3].eq(0).all()


def naive_mixer(module, x_Td):
    """Eq. 8-12 of one sequence in plain Python: [T, d] -> [T, d] and the memory."""
    heads, size, delta = module.heads, module.head_dim, module.delta
    qkv = [torch.cat([module.query(x), module.key(x), module.value(x)]) for x in x_Td]
    mixed = qkv
    if module.conv_size:
        mixed = []
        for t in range(len(x_Td)):
            total = torch.zeros_like(qkv[0])
            for back in range(min(module.conv_size, t + 1)):
                total = total + module.conv[:, 0, module.conv_size - 1 - back] * qkv[t - back]
            mixed.append(F.silu(total))
    q, k, v = (part.view(1, -1, heads, size) for part in torch.stack(mixed).chunk(3, -1))
    if delta:
        q, k = (part / (part.norm(dim=-1, keepdim=True).square() + 1e-6).sqrt() for part in (q, k))
    else:
        q = q / size**0.5
    log_decay = -module.log_rate.exp() * F.softplus(module.decay(x_Td) + module.decay_bias)
    beta = module.beta(x_Td).sigmoid().unsqueeze(0) if delta else None
    y, memory = naive("gated_delta" if delta else "gla", q, k, v, beta, log_decay.unsqueeze(0))
    out = []
    for x, heads_of_t in zip(x_Td, y[0], strict=True):
        normed = [
            head / (head.square().mean() + module.norm.eps).sqrt() * module.norm.weight for head in heads_of_t
        ]
        out.append(module.output(torch.cat(normed) * F.silu(module.gate(x))))
    return torch.stack(out), memory


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("conv_size, length", [(0, 5), (1, 1), (4, 1), (4, 3), (4, 34)])
def test_mixer_equals_its_equations(kind, conv_size, length):
    """Values, and gradients of the input and of every weight."""
    module = mixer(kind, conv_size)
    with torch.no_grad():
        module.norm.weight.uniform_(0.5, 2)
    x = torch.randn(2, length, 12, dtype=double, requires_grad=True)
    y, state = module(x)
    rows = [naive_mixer(module, row) for row in x]
    expected = torch.stack([row[0] for row in rows]), torch.cat([row[1] for row in rows])
    assert_close((y, state.memory), expected, atol=1e-10, rtol=1e-10)
    parts = [x, *module.parameters()]
    actual, wanted = gradients((y, state.memory), parts), gradients(expected, parts)
    assert_close(actual, wanted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("conv_size", [0, 1, 4])
def test_mixer_in_ragged_pieces_equals_once(kind, conv_size):
    """The convolution sees the last valid tokens, be they of the piece before or of the one before that."""
    module = mixer(kind, conv_size)
    pieces = [[40, 2, 1, 0], [1, 1, 0, 1], [0, 2, 30, 5]]
    tokens = [torch.randn(sum(counts), 12, dtype=double) for counts in zip(*pieces, strict=True)]
    outputs, taken, state = [[] for _ in tokens], [0] * 4, None
    for counts in pieces:
        # the padding is noise: nothing of it may be seen
        x = torch.randn(4, max(counts), 12, dtype=double)
        for s, count in enumerate(counts):
            x[s, :count] = tokens[s][taken[s] : taken[s] + count]
            taken[s] += count
        valid = prefix(counts, max(counts))
        y, state = module(x, valid, state)
        assert y[~valid].eq(0).all()
        for s, count in enumerate(counts):
            outputs[s].append(y[s, :count])
    for s, sequence in enumerate(tokens):
        once, after = module(sequence.unsqueeze(0))
        assert_close(torch.cat(outputs[s]), once[0], atol=1e-10, rtol=1e-10)
        assert_close(vars(state.select(torch.tensor([s]))), vars(after), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_mixer_token_by_token_with_beams(kind):
    """Decoding with the state reordered equals the reordered sequences run at once."""
    module = mixer(kind)
    x = torch.randn(3, 9, 12, dtype=double)
    order = torch.tensor([2, 2, 0])
    state = None
    for t in range(5):
        _, state = module(x[:, t : t + 1], None, state)
    state = state.select(order)
    assert isinstance(state, RecurrentState)
    outputs = []
    for t in range(5, 9):
        y, state = module(x[order, t : t + 1], None, state)
        outputs.append(y)
    assert_close(torch.cat(outputs, 1), module(x[order])[0][:, 5:], atol=1e-10, rtol=1e-10)


def test_valid_must_be_a_prefix():
    """A hole in the middle is a caller's mistake."""
    with pytest.raises(RuntimeError, match="prefix"):
        mixer("gla")(torch.randn(1, 3, 12, dtype=double), torch.tensor([[True, False, True]]))


@pytest.mark.parametrize("kind", KINDS)
def test_mixer_in_lower_precision(kind):
    """float32 beside float64; bfloat16 weights and autocast run, forward and backward, the memory in float32."""
    module = mixer(kind)
    x = torch.randn(2, 70, 12, dtype=double)
    exact = module(x)[0]
    module = module.float()
    assert_close(module(x.float())[0].double(), exact, atol=1e-4, rtol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = module(x.float())
    y.sum().backward()
    assert state.memory.dtype == torch.float32
    assert_close(y.double(), exact, atol=0.05, rtol=0.05)
    y, state = module.bfloat16()(x.bfloat16())
    assert (y.dtype, state.memory.dtype) == (torch.bfloat16, torch.float32)
    assert_close(y.double(), exact, atol=0.1, rtol=0.1)


def counted(run):
    """MACs as PyTorch counts them, and those of triangular solves, for which it has no formula."""
    solves = []

    def solve(matrix, right, *args, out_shape=None, **kwargs):
        *batch, rows, columns = right
        solves.append(torch.Size(batch).numel() * columns * rows * (rows - 1) // 2)
        return 0

    with FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten.linalg_solve_triangular: solve}
    ) as counter:
        run()
    return counter.get_total_flops() // 2, sum(solves)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [room.CHUNK, 3 * room.CHUNK, 1, 7, 2 * room.CHUNK + 5])
def test_macs_are_those_counted(kind, length):
    """2 FLOPs = 1 MAC, to the last one, padding of the last chunk included; the solve by its definition."""
    module = LinearAttention(config(kind))
    macs, solved = counted(lambda: module(torch.randn(3, length, 12)))
    if length == 1:
        assert macs + solved == 3 * (module.row_macs + module.state_macs)
        return
    number, size = chunks(length)
    assert number * size == length or length % room.CHUNK
    assert macs + solved == 3 * (length * module.row_macs + number * size * module.mixing_macs(size))
    heads = module.heads * module.head_dim
    assert solved == (3 * number * size * (size - 1) * heads if kind == "gated_delta" else 0)


def test_kernels_are_an_option(monkeypatch):
    """Without flash-linear-attention there is no kernel, and that is no error."""
    monkeypatch.setitem(sys.modules, "fla", None)  # nor where it is installed
    assert room._kernel(True) is None and room._kernel(False) is None
