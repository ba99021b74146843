"""The functions of ops.py against their equations, with every matrix materialised, and each choice of a kernel."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import ops
from ops import Mask, attention, attention_kernel
from tests.models import assert_same, documents, leaves, naive_attention


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 11, 140])
@pytest.mark.parametrize("docs", [False, True])
@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_attention_equals_naive_attention_under_every_mask(causal, window, docs, slots, softcap):
    """Few tokens, and several strips of them, whose documents and windows cross the strips; all queries or the last."""
    for length, of_queries in ((11, (11, 8, 3, 1)), (270, (270, 90))):
        q, k, v, *pair = leaves(*((2, heads, length, 2) for heads in (4, 2, 2)), *[(2, 5, 2)] * 2 * slots)
        pair = pair or None
        for queries in of_queries:
            last = q[:, :, -queries:]
            numbers = (documents(length)[:, -queries:], documents(length)) if docs else None
            got = attention(last, k, v, 2, Mask(causal, window, numbers), softcap, slots=pair)
            expected = naive_attention(last, k, v, window, softcap, causal, numbers, pair)
            assert_same(got, expected, (q, k, v, *(pair or ())))


@pytest.mark.parametrize("docs", [False, True])
def test_products_beyond_the_weights_that_are_kept(monkeypatch, docs):
    """Of 600 queries the last strips are computed again in the backward. In bfloat16, errors are those of rounding."""
    monkeypatch.setattr(ops, "FAST_BFLOAT16", True)
    length = 600
    q, k, v = leaves(*((2, heads, length, 8) for heads in (4, 2, 2)))
    numbers = (documents(length), documents(length)) if docs else None
    slots = None if docs else leaves(*[(2, 5, 8)] * 2)
    mask = Mask(docs=numbers)
    assert ops.takes_products(mask, length, length, True, torch.float64)
    again, expected = (naive_attention(q, k, v, 0, 0.0, True, numbers, slots) for _ in range(2))
    assert_same(attention(q, k, v, 8, mask, slots=slots), again, (q, k, v, *(slots or ())))
    rough = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    got = attention(*rough, 8, mask, slots=slots and tuple(x.bfloat16() for x in slots))
    assert got.dtype == torch.bfloat16
    direction = torch.randn_like(expected)
    ours = got, *torch.autograd.grad(got, rough, direction.bfloat16())
    exact = expected, *torch.autograd.grad(expected, (q, k, v), direction)
    for a, b in zip(ours, exact, strict=True):
        assert (a.double() - b).norm() < 0.02 * b.norm()


def test_gradients_of_products_are_summed_in_float32(monkeypatch):
    """Each query gives all keys that it sees the same weight, so the gradient of a slot's value is the sum of these."""
    monkeypatch.setattr(ops, "FAST_BFLOAT16", True)
    length = 2048
    q = torch.zeros(1, 1, length, 4, dtype=torch.bfloat16)
    slots = [torch.zeros(1, 1, 4, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    attention(q, q, q, 4, Mask(window=60), slots=slots).sum().backward()
    expected = sum(1 / (min(i + 1, 60) + 1) for i in range(length))
    assert slots[1].grad.mean().item() == pytest.approx(expected, rel=0.005)


def test_products_have_no_second_derivative():
    """As PyTorch's fused kernels have none. Without an error, a part of it would be missing."""
    q = torch.randn(1, 1, 200, 4, requires_grad=True)
    (dq,) = torch.autograd.grad(attention(q, q, q, 4, Mask(window=20)).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_products has no second derivative"):
        torch.autograd.grad(dq.square().sum(), q)


def test_the_weights_that_products_keep_get_no_gradients():
    q = torch.randn(1, 2, 200, 4, requires_grad=True)
    y = attention(q, q, q, 4, Mask(window=20))
    made = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            made.append(op)
            return op(*args, **(kwargs or {}))

    with Calls():
        y.backward(torch.ones_like(y))
    assert ops.attention_products_backward.default in made
    assert torch.ops.aten.zeros.default not in made


def test_products_are_one_operation_of_a_graph():
    q, k, v = leaves(*[(1, 2, 200, 4)] * 3)
    seen = []

    def backend(graph, inputs):
        seen.extend(node.target for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, 4, Mask(window=20)), backend=backend, fullgraph=True)
    assert_same(compiled(q, k, v), attention(q, k, v, 4, Mask(window=20)), (q, k, v))
    assert ops.attention_products in seen and torch.softmax not in seen
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, 4, Mask(window=20)), backend="aot_eager")
    assert_same(compiled(q, k, v), attention(q, k, v, 4, Mask(window=20)), (q, k, v))
    torch._dynamo.reset()


def test_a_strip_reads_no_keys_before_its_window():
    T, window, rows = 512, 10, 128
    read = []

    def attend(q, k, v, attn_mask):
        read.append(k.size(2))
        return v[:, :, : q.size(2)]

    q, k, v = leaves(*[(1, 1, T, 2)] * 3)
    with torch.no_grad():
        ops.strip_attention(attend, q, k, v, tuple(Mask(window=window)), 0, rows)
    assert read == [rows, *[rows + window - 1] * 3]


def test_dropout_in_attention_keeps_the_mean():
    """On CPU attention dropout takes the strips: its mean over draws is the attention without it."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 4, dtype=torch.float64) for _ in range(3))
    draws = torch.stack([attention(q, k, v, 4, Mask(), dropout=0.3) for _ in range(1500)])
    assert torch.allclose(draws.mean(0), attention(q, k, v, 4, Mask()), atol=0.1)
    assert draws.std(0).min() > 1e-3


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropped_elements(p):
    """They are a fraction p of all, independent of neighbours and of the next draw, and the mean stays."""
    torch.manual_seed(0)
    x = torch.rand(400, 999).add_(1).requires_grad_()
    torch.manual_seed(1)
    y, again = ops.dropped(x, p), ops.dropped(x, p).detach()
    kept = (y != 0).double()
    assert torch.allclose(y[y != 0].double(), x[y != 0].double() / kept.mean(), rtol=0.01)
    assert abs(kept.mean() - (1 - p)) < 4 * math.sqrt(p * (1 - p) / x.numel()) + 1 / 65536
    for other in (again != 0, *(kept.flatten().roll(n).view_as(kept) for n in (1, 2, 3, 4, 999))):
        both = (kept * other).mean() - (1 - p) ** 2
        assert abs(both) < 4 * (1 - p) / math.sqrt(x.numel()) + 2e-5
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)
    assert torch.allclose(x.grad * x.detach(), y.detach())
    torch.manual_seed(1)
    assert torch.equal(ops.dropped(x, p), y)
    assert torch.equal(ops.dropped(x, 0.0), x)
    assert ops.dropped(x.bfloat16(), p).dtype == torch.bfloat16
    assert ops.dropped(x, 0.999999).isfinite().all()


PLAIN = (270, 270)
PAST = (140, 270)
CPU = ("cpu", "float32", 8)
CUDA = ("cuda", "bfloat16", 8)
# Beside the table of test_gpu.py: kernel; queries and keys: of a text, or of its end; device, dtype, width of a head;
# mask and options
KERNEL = [
    ("full", (1, 270), CPU, {"window": 5}),
    ("full", PLAIN, CUDA, {"dropout": 0.1}),
    ("flash", PLAIN, CUDA, {"window": 100, "causal": False}),
    ("flash", PAST, CUDA, {"window": 100}),
    ("varlen", PAST, CUDA, {"docs": 4, "window": 100, "causal": False}),
    ("strips", PAST, CUDA, {"docs": 4, "window": 100, "slots": True}),
    ("varlen", PLAIN, CUDA, {"docs": 2**16}),  # one more than the documents, as a grid of CUDA has no more places
    ("strips", PLAIN, CUDA, {"docs": 2**16 + 1}),
    ("flash", PLAIN, CUDA, {"slots": True, "dropout": 0.1}),
    ("full", PLAIN, CUDA, {"slots": True, "causal": False}),
    ("strips", PLAIN, ("cuda", "float32", 8), {"docs": 4}),
    ("strips", PLAIN, CPU, {"causal": False, "docs": 4}),
    ("strips", (128, 128), CPU, {"window": 50}),
    ("strips", PAST, ("cpu", "float16", 8), {"window": 100}),
    ("products", PLAIN, CPU, {"causal": False, "window": 100}),
    ("products", PAST, CPU, {"docs": 4}),
    ("products", PLAIN, CPU, {"slots": True}),
    ("full", PLAIN, CPU, {}),
    ("strips", PAST, ("cuda", "bfloat16", 12), {}),
    ("naive", PAST, CPU, {"causal": False, "slots": True, "softcap": 2.0}),
]


@pytest.mark.parametrize(
    "fast, T, masked, expected",
    [
        (True, 256, False, True),
        (True, 513, False, False),
        (True, 513, True, True),
        (True, 128, False, False),
        (False, 256, False, False),
        (False, 256, True, False),
    ],
)
def test_a_cpu_with_fast_bfloat16_multiplies_in_it(monkeypatch, fast, T, masked, expected):
    monkeypatch.setattr(ops, "FAST_BFLOAT16", fast)
    assert ops.takes_products(Mask(), T, T, masked, torch.bfloat16) is expected
    assert not ops.takes_products(Mask(causal=False), T, T, masked, torch.bfloat16)


def two_layers(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
    """Two linear layers, of rows and weights that are not contiguous."""
    return ops.linear(ops.linear(x.flip(0), w, b).mT.contiguous().mT, w.mT)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape, bias", [((4, 256, 96), True), ((1024, 96), False)])
def test_onednn_multiplies_as_in_float64(monkeypatch, shape, bias, compiled):
    monkeypatch.setattr(ops, "FAST_ONEDNN", True)
    x, w, b = leaves(shape, (128, 96), (128,))
    given = (x, w, b) if bias else (x, w)
    absent = [None] * (not bias)
    expected = two_layers(*given, *absent)
    direction = torch.randn_like(expected)
    exact = expected, *torch.autograd.grad(expected, given, direction)
    narrow = [t.detach().float().requires_grad_() for t in given]
    assert ops.takes_onednn(*narrow[:2])
    run = torch.compile(two_layers) if compiled else two_layers
    got = run(*narrow, *absent)
    ours = got, *torch.autograd.grad(got, narrow, direction.float())
    for a, b in zip(ours, exact, strict=True):
        assert (a.double() - b).norm() < 1e-6 * b.norm()


def test_onednn_has_all_derivatives(monkeypatch):
    """The second one, also where the first one's incoming gradient is constant; those of torch.func; forward mode."""
    monkeypatch.setattr(ops, "FAST_ONEDNN", True)
    x = torch.randn(1024, 96, requires_grad=True)
    w = torch.randn(128, 96, requires_grad=True)
    (dx,) = torch.autograd.grad(ops.linear(x, w).sum(), x, create_graph=True)
    (dw,) = torch.autograd.grad(dx.square().sum(), w)
    assert torch.allclose(dw, 2 * 1024 * w.sum(0).expand_as(w), rtol=1e-4)
    of_func = torch.func.grad(lambda x: ops.linear(x, w).square().sum())(x)
    assert torch.allclose(of_func, 2 * (x @ w.T) @ w, rtol=1e-4, atol=1e-2)
    _, tangent = torch.func.jvp(lambda x: ops.linear(x, w), (x.detach(),), (x.detach(),))
    assert torch.allclose(tangent, x @ w.T, rtol=1e-4, atol=1e-4)


def test_products_refuse_forward_mode():
    """As PyTorch's kernels do, instead of giving a tangent of 0."""
    q = torch.randn(1, 1, 200, 4)
    with pytest.raises(NotImplementedError, match="forward AD"):
        torch.func.jvp(lambda q: attention(q, q, q, 4, Mask(window=20)), (q,), (q,))


@pytest.mark.parametrize("rows, dtype, autocast, taken", [
    (2**17, torch.float32, False, True),
    (2**17 - 1, torch.float32, False, False),
    (2**17, torch.float64, False, False),
    (2**17, torch.float32, True, False),
])  # fmt: skip
def test_onednn_is_for_much_work_in_float32(monkeypatch, rows, dtype, autocast, taken):
    x = torch.zeros(rows, 8, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        monkeypatch.setattr(ops, "FAST_ONEDNN", True)
        assert ops.takes_onednn(x, x[:8]) is taken
        monkeypatch.setattr(ops, "FAST_ONEDNN", False)
        assert not ops.takes_onednn(x, x[:8])


@pytest.mark.parametrize("maker, avx512, limited, fast", [
    ("AuthenticAMD", True, False, True),
    ("GenuineIntel", True, False, False),
    ("AuthenticAMD", False, False, False),
    ("AuthenticAMD", True, True, False),
])  # fmt: skip
def test_onednn_is_faster_on_an_amd_with_avx512(monkeypatch, maker, avx512, limited, fast):
    monkeypatch.setattr(ops, "limited", lambda: limited)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(ops.Path, "read_text", lambda path, errors: f"processor\t: 0\nvendor_id\t: {maker}\n")
    assert ops.fast_onednn() is fast


class Answer(Exception):
    """The kernel that attention would take."""


@pytest.mark.parametrize("kernel,lengths,where,options", KERNEL, ids=str)
def test_each_kernel_is_taken_when_the_table_says_so(monkeypatch, kernel, lengths, where, options):
    """On fake tensors, which may be on a GPU that is not there: attention goes no farther than the answer."""
    device, dtype, D = where
    softcap = options.get("softcap", 0.0)
    dropout = options.get("dropout", 0.0)
    docs = options.get("docs", 0)  # so many boundaries of documents

    def answer(*args):
        raise Answer(attention_kernel(*args))

    monkeypatch.setattr(ops, "attention_kernel", answer)
    with FakeTensorMode(), torch.no_grad():
        q, k = (torch.empty(1, 2, n, D, device=device, dtype=getattr(torch, dtype)) for n in lengths)
        numbers = None
        pair = None
        if docs:
            numbers = [torch.zeros(1, n, device=device, dtype=torch.int64) for n in lengths]
            starts = torch.zeros(1, docs - 1, device=device, dtype=torch.int64)
            numbers += [ops.boundaries(starts, n) for n in lengths]
        if "slots" in options:
            pair = (k.new_empty(2, 5, D),) * 2
        mask = Mask(options.get("causal", True), options.get("window", 0), numbers)
        with pytest.raises(Answer, match=f"^{kernel}$"):
            attention(q, k, k, D, mask, softcap, dropout, pair)


@pytest.mark.parametrize("dtype,masked,heads", [
    ("float32", False, 4),
    ("float16", False, 4),  # of GPUs that are too old for FlashAttention
    ("bfloat16", False, 2),
    ("bfloat16", True, 4),
])  # fmt: skip
def test_groups_are_copied_where_no_kernel_of_a_gpu_knows_them(monkeypatch, dtype, masked, heads):
    """On fake tensors, which may be on a GPU that is not there."""
    calls = []
    attention = lambda q, k, v, mask, **options: calls.append((k.size(1), v.size(1), options["enable_gqa"]))  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    with FakeTensorMode():
        q, k = (torch.empty(2, n, 32, 16, device="cuda", dtype=getattr(torch, dtype)) for n in (4, 2))
        ops.fused_attention(q, k, k, torch.empty(32, 32, device="cuda", dtype=torch.bool) if masked else None)
    assert calls == [(heads, heads, heads == 2)]


def test_cudnn_computes_only_self_attention_with_a_backward(monkeypatch):
    """Where the sizes repeat, and without dropout, whose rate it rounds."""
    seen = []
    sdpa = F.scaled_dot_product_attention

    def recorder(*args, **options):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return sdpa(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorder)
    q, k = torch.randn(2, 2, 3, 8, 16, requires_grad=True)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    cases = [(8, None, True, 0.0), (8, None, False, 0.0), (8, mask, True, 0.0), (1, None, True, 0.0)]
    for queries, m, grad, dropout in [*cases, (8, None, True, 0.2)]:
        with torch.set_grad_enabled(grad):
            causal = queries == 8 and m is None
            ops.fused_attention(q[:, :, -queries:], k, k, m, is_causal=causal, dropout_p=dropout)
        assert torch.backends.cuda.cudnn_sdp_enabled()
    assert seen == [True, False, False, False, False]


def test_the_compiled_loss_of_a_chunk():
    """With the real backend, and a softcap."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(8, 100)
    targets = torch.randint(-1, 100, (8,))
    exact = logits.double().requires_grad_()
    z = ops.capped(exact, 3.0)
    total = F.cross_entropy(z, targets, ignore_index=-1, reduction="sum")
    total.backward()
    with torch._inductor.config.patch(compile_threads=1):  # more of them begin with a process of their own
        found, slope = torch.compile(ops.chunk_loss, dynamic=False, fullgraph=True)(logits, targets, 3.0, True)
    assert found.item() == pytest.approx(total.item(), rel=1e-6)
    assert torch.allclose(slope.double(), exact.grad, atol=1e-6)


def test_chunks_have_one_size():
    """The fewest that divide the rows, below twice as many as are needed, so that one graph is compiled for all."""
    assert [ops.rows_at_once(12288, 0, 50304, torch.device(each)) for each in ("cpu", "cuda")] == [512, 4096]  # GPT-2
    for n, most in itertools.product(range(1, 60), repeat=2):
        rows = ops.rows_at_once(n, most, 64, torch.device("cpu"))
        assert rows <= most and (n % rows == 0 or rows == most) and -(-n // rows) < 2 * -(-n // most)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_16_bits_are_summed_in_float32(dtype):
    """A CPU converts each product; CUDA's own overload, seen on fake tensors, needs no copy."""
    a = torch.randn(3, 5).to(dtype)
    b = torch.randn(5, 4).to(dtype)
    out = torch.zeros(3, 4)
    called = []
    ops.add_product_(out, a, b)
    ops.add_product_(out, a, b)
    assert out.dtype == torch.float32 and torch.allclose(out, 2 * (a.float() @ b.float()), rtol=0.02, atol=0.02)

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            if "mm" in f.name():
                called.append((f.name(), [x.dtype for x in args if isinstance(x, torch.Tensor)], kwargs["out"] is out))
                return out
            return f(*args, **(kwargs or {}))

    with FakeTensorMode(), torch.device("cuda"):
        out = torch.empty(3, 4)
        a = torch.empty(3, 5, dtype=torch.bfloat16)
        b = torch.empty(5, 4, dtype=torch.bfloat16)
        with Recorder():
            ops.add_product_(out, a, b)
    dtypes = [torch.float32, torch.bfloat16, torch.bfloat16]
    assert called == [("aten::addmm.dtype_out", dtypes, True)]


@given(st.data())
@settings(max_examples=60)
def test_a_part_of_the_initial_weights_is_that_part_of_the_whole(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=3)))
    start = tuple(data.draw(st.integers(0, n)) for n in shape)
    size = tuple(data.draw(st.integers(0, n - a)) for n, a in zip(shape, start, strict=True))
    longer = (shape[0] + data.draw(st.integers(0, 3)), *shape[1:])  # as with padding
    whole = ops.normal("0 x", longer, (0,) * len(shape), shape, "cpu")
    part = whole[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
    assert torch.equal(ops.normal("0 x", shape, start, size, "cpu"), part)


def test_large_arrays_are_drawn_in_strips():
    whole = ops.normal("0 x", (300, 500), (0, 0), (300, 500), "cpu")  # 2^16 numbers at once
    assert torch.equal(torch.cat([ops.normal("0 x", (300, 500), (i, 0), (1, 500), "cpu") for i in range(300)]), whole)
