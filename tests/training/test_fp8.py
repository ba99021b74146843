"""Products in float8 against float64, within the rounding of the format; and runs with them against others."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from helpers import TINY, Operations
from ranks import launch
from torch._subclasses.fake_tensor import FakeTensorMode

from configurator import parse
from engine import fp8
from engine.config import Config
from engine.parallel import ranks as parallel
from engine.parallel.recomputation import recompute
from engine.parallel.sharded import ShardedModel
from model import Inputs, Model, ModelConfig

pytestmark = pytest.mark.usefixtures("in_this_process")  # with one thread, as the tensors are small

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# half a step relative to a number, half of the smallest step, and the largest number
FORMAT = {E4M3: (2.0**-4, 2.0**-10, 448), E5M2: (2.0**-3, 2.0**-17, 57344)}


@pytest.fixture(autouse=True)
def small_layers_too(monkeypatch):
    monkeypatch.setattr(fp8, "SMALL", (0, 0))


def bound(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The largest error of each number of x that is rounded when the largest of all becomes that of the format."""
    relative, absolute, largest = FORMAT[dtype]
    return torch.maximum(relative * x.abs(), absolute * x.abs().max() / largest) * (1 + 1e-6)


def product_bound(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """That of each number of a b^T, by the triangle inequality, and the rounding of a sum in float32. dtype is a's."""
    wide = (a.abs() + bound(a, dtype)) @ (b.abs() + bound(b, E4M3)).T
    return wide - a.abs() @ b.abs().T + a.size(1) * 2.0**-23 * wide


def rows(*shape: int) -> torch.Tensor:
    """Normal numbers, with rows and columns of different sizes, and some zeros."""
    x = torch.randn(shape, dtype=torch.float64) * 10 ** torch.randn(shape[0], 1).double()
    x[:, ::7] *= 1e-3
    x[:, ::11] = 0
    return x.float().double()


@pytest.mark.parametrize("dtype", FORMAT)
def test_numbers_are_rounded_as_the_format_says(dtype):
    def back(x: torch.Tensor) -> torch.Tensor:
        y, scale = fp8.rounded(x, dtype)
        assert y.dtype == dtype and y.is_contiguous() and scale.dtype == torch.float32 and scale.dim() == 0
        return y.double() * scale.double()

    x = torch.cat((rows(64, 96), torch.zeros(1, 96, dtype=torch.float64)))
    for turned in (x, x.t(), x[:1], 0 * x):
        found = back(turned.float())
        assert (found - turned).abs().le(bound(turned, dtype)).all()
        assert found.abs().max().item() == pytest.approx(turned.abs().max().item(), rel=1e-6)
    narrow = x.bfloat16()  # is divided in float32: rounding once is nearer than twice
    assert (back(narrow) - narrow.double()).abs().le(bound(narrow.double(), dtype)).all()
    for bad in (float("inf"), float("nan")):  # which the run must see
        x[3, 5] = bad
        assert not back(x.float())[3, 5].isfinite()


def test_products_and_gradients_are_those_of_float64_but_for_the_rounding_of_their_factors():
    torch.manual_seed(0)
    x, weight, grad = rows(32, 48), rows(64, 48), rows(32, 64)
    leaves = [t.float().requires_grad_() for t in (x, weight)]
    y = fp8.Product.apply(*leaves)
    dx, dw = torch.autograd.grad(y, leaves, grad.float())
    for got, a, b, dtype in ((y, x, weight, E4M3), (dx, grad, weight.T, E5M2), (dw, grad.T, x.T, E5M2)):
        exact, limit = a @ b.T, product_bound(a, b, dtype)
        error = (got.double() - exact).abs()
        assert error.le(limit).all(), (error / limit).max()
        assert error.max() > 1e-3 * limit.max()  # it was rounded at all


@pytest.mark.gpu
def test_products_of_a_device(device):
    """In bfloat16. CPUs err by 3.7 % with three bits of mantissa in both factors, by 6 % with two in the gradient."""
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no products in float8")
    torch.manual_seed(3)
    x, weight, grad = (torch.randn(shape, dtype=torch.float64) for shape in ((512, 768), (256, 768), (512, 256)))
    leaves = [t.to(device, torch.bfloat16).requires_grad_() for t in (x, weight)]
    y = fp8.Product.apply(*leaves)
    dx, dw = torch.autograd.grad(y, leaves, grad.to(y))
    for got, exact, error in ((y, x @ weight.T, 0.06), (dx, grad @ weight, 0.095), (dw, grad.T @ x, 0.095)):
        assert (got.cpu().double() - exact).norm() < error * exact.norm()


@contextmanager
def noting_products():
    """A list that receives the arguments of each call of torch._scaled_mm."""
    found = []

    def note(function, args, kwargs, _):
        if function is torch.ops.aten._scaled_mm.default:
            found.append((args, kwargs))

    with Operations(note):
        yield found


def test_a_gpu_takes_the_layouts_of_all_three_products():
    """torch checks them on tensors without memory as on a GPU: the first by rows, the second by columns."""
    x, weight = (torch.randn(shape).bfloat16().requires_grad_() for shape in ((32, 48), (64, 48)))
    with noting_products() as found:
        fp8.Product.apply(x, weight).sum().backward()
    assert len(found) == 3
    with FakeTensorMode():
        for args, kwargs in found:
            there = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in args[:4]]
            y = torch._scaled_mm(*there, *args[4:], **kwargs)
            assert y.dtype == torch.bfloat16 and y.shape == (args[0].size(0), args[1].size(1))


def small(**flags) -> Model:
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 16, "vocab_size": 32}
    return Model(ModelConfig(**sizes | flags), seed=0)


def test_the_layers_of_the_blocks_are_changed_and_no_others():
    model = small(n_expert=4, n_expert_shared=1, n_dense_layer=1, objective="seq2seq", bias=True)
    names = fp8.layers(model)
    left_out = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)} - names.keys()
    words = ("router", "experts.up", "experts.down")
    assert all(name == "head" or name.endswith(words) for name in left_out) and len(left_out) == 7
    assert {name.rpartition(".")[2] for name in names} == {"qkv", "q", "kv", "out", "up", "down"}


def config(*flags: str) -> Config:
    return parse(Config, [*TINY, "--n_embd=64", "--vocab_size=32", "--fp8=True", *flags])


def figures(*flags: str) -> list[float]:
    """The loss and the norm of the gradient of one step of two micro-batches, and how many products were in float8."""
    cfg = config(*flags)
    ranks = parallel.join(cfg)
    sharded, share = ShardedModel(cfg, ranks), 2 // ranks.data_size
    sharded.init_weights(cfg.seed)
    text = torch.randint(32, (2, 4, 17), generator=torch.Generator().manual_seed(0))
    mine = text[ranks.data_rank * share : (ranks.data_rank + 1) * share]
    parts = iter([{"idx": ids[:, :-1], "targets": ids[:, 1:]} for ids in mine])
    with noting_products() as found:
        loss = sharded.mean(sharded.backward(parts, share, torch.amp.GradScaler("cpu", enabled=False)))
    return [loss, sharded.clip(0.0).item(), len(found)]


LAYOUTS = {"ddp": [], "fsdp": ["--parallel=fsdp"], "tp": ["--tp=2"], "cp": ["--cp=2"], "pp": ["--pp=2"]}
LAYOUTS |= {"selective": ["--activation_checkpoint=selective"], "bias": ["--tp=2", "--bias=True"]}


def on_two_ranks(folder):
    fp8.SMALL = (0, 0)
    torch.save({name: figures(*flags) for name, flags in LAYOUTS.items()}, folder / f"{parallel.environment().rank}.pt")


def test_layouts(tmp_path):
    """Two ranks find the loss and the gradient of one process. With tp and bias, two layers of a block are changed."""
    launch(2, on_two_ranks, tmp_path, tmp_path)
    one, with_bias, exact = figures(), figures("--bias=True"), figures("--fp8=False")
    assert one[2] == 2 * 2 * 4 * 3 and exact[2] == 0 and abs(one[1] / exact[1] - 1) > 1e-5
    assert one[:2] == pytest.approx(exact[:2], rel=0.05)
    for rank in range(2):
        for name, (loss, norm, products) in torch.load(tmp_path / f"{rank}.pt").items():
            expected = with_bias if name == "bias" else one
            assert products >= 24 and loss == pytest.approx(expected[0], abs=1e-3), name
            assert norm == pytest.approx(expected[1], rel=0.01), name
            assert products == 24 or name != "bias"


def test_compiled_and_recomputed_blocks():
    """A block is one graph. Selective recomputation makes again every second product, and full all of them."""
    model, x = small(), torch.randn(4, 16, 64)
    fp8.apply(model, 16)
    block = model.blocks[0]

    def results(forward) -> list[torch.Tensor]:
        y = forward(x, Inputs())
        return [y, *torch.autograd.grad(y.square().sum(), [*block.parameters()])]

    plain, forward = results(block.forward), block.forward
    compiled = results(torch.compile(forward, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(compiled, plain)
    for kind, products in (("none", 12), ("selective", 14), ("full", 16)):
        block.forward = forward
        if kind != "none":
            recompute(block, kind)
        with noting_products() as found:
            torch.testing.assert_close(results(block.forward), plain)
        assert len(found) == products


def test_what_is_left_in_bfloat16(monkeypatch):
    """Sizes that are no multiples of 16; layers that gain nothing; micro-batches of 15 tokens."""
    model, x = small(n_embd=48, mlp_ratio=0.5), torch.zeros(1, 15, dtype=torch.int64)
    assert {name.rpartition(".")[2] for name in fp8.layers(model)} == {"qkv", "out"}
    with noting_products() as found:
        expected = model(x)
        assert fp8.apply(model, 15) == 0 and fp8.apply(model, 16) == 4
        assert torch.equal(model(x), expected) and not found
        model(torch.zeros(1, 16, dtype=torch.int64))
    assert len(found) == 4
    assert fp8.apply(small(n_embd=40), 16) == 0
    monkeypatch.undo()
    for n_embd, kinds in ((768, ""), (1024, ""), (1040, "qkv out up down"), (512, "up down")):
        flags = {"n_embd": n_embd, "mlp_ratio": 10.0 if n_embd == 512 else 4.0}
        with torch.device("meta"):
            found = fp8.layers(Model(ModelConfig(n_layer=1, n_head=8, vocab_size=32, **flags)))
        assert {name.rpartition(".")[2] for name in found} == set(kinds.split())


def test_what_does_not_fit_is_refused(monkeypatch):
    """Another dtype, and another device."""
    good = config("--dtype=bfloat16")
    fp8.check(good)
    with pytest.raises(ValueError, match="fp8=True does not go with dtype=float32"):
        fp8.check(config("--dtype=float32"))
    with pytest.raises(ValueError, match="and the device is CPU .*; leave fp8 out"):  # whose auto is float32
        fp8.check(config("--dtype=float32"), torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A40")
    for capability, refuses in (((8, 6), True), ((8, 9), False), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        with pytest.raises(ValueError, match="8.9 or later, and the device is A40;") if refuses else nullcontext():
            fp8.check(good, torch.device("cuda"))
