"""What a device computes, against float64 on the CPU: attention, models, losses, optimizers, compiled runs, FSDP,
layouts, checkpoints and decoding.

    python -m pytest -m gpu --device=cuda     # on a machine with a GPU; make gpu also measures the speed
    python -m pytest -m gpu                   # on this CPU: a rehearsal, most of which is in make test
"""

import itertools
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from configurator import parse
from data.loader import document_starts
from engine import optim
from engine.config import Config
from engine.decode import generate
from engine.parallel.fsdp import shard
from engine.parallel.ranks import Ranks, make_mesh
from engine.parallel.sharded import local
from model import Model
from ops import Mask, attention, boundaries
from tests.families import BLOCKS, FAMILIES, OBJECTIVES
from tests.helpers import distance, losses
from tests.models import documents, jitter, naive_attention, spy_on_kernels

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
SHORT = ["--max_iters=4", "--eval_interval=4", "--warmup_iters=1", "--log_interval=1"]  # on a GPU, auto is 10
SMALL = ["--n_layer=2", "--n_head=4", "--n_embd=64", "--block_size=32", "--vocab_size=61"]
# bfloat16 has 8 bits, and CPUs stay within 2.2 * 2^-8. If a derivative has a step, as ReLU's has, rounding moves some
# inputs across the step, so whole models err more.
FLOAT32 = 1e-4
BFLOAT16 = 8 * 2**-8
LIMIT = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
LIMIT_OF_MODELS = {torch.float32: FLOAT32, torch.bfloat16: 4 * BFLOAT16}
each_dtype = pytest.mark.parametrize("dtype", LIMIT, ids=str)


def assert_near(got: dict[str, Tensor], exact: dict[str, Tensor], limit: float):
    """Each tensor's error is below `limit` times its norm, or times 1 % of the largest norm if that is more."""
    sizes = {name: x.detach().norm().item() for name, x in exact.items()}
    smallest = 0.01 * max(sizes.values())
    for name, x in exact.items():
        difference = got[name].detach().cpu().double() - x.detach()
        error = difference.norm().item() / max(sizes[name], smallest)
        assert error < limit, f"{name} errs by {error:.1e} of its size; {limit:.1e} is allowed"


USUAL = {"causal": True, "window": 0, "docs": False, "slots": 0, "queries": 160, "softcap": 0.0}  # of 160 keys
ATTENTION = {  # case -> (its kernel on a CPU, on CUDA in float32 and on CUDA in bfloat16; what differs from USUAL)
    "causal": ("full full full", {}),
    "all keys": ("full full full", {"causal": False}),
    "last token": ("full full full", {"queries": 1}),
    "window": ("products strips flash", {"window": 50}),
    "after a cache": ("strips strips flash", {"queries": 60}),
    "documents": ("products strips varlen", {"docs": True}),
    "documents in a window": ("products strips varlen", {"docs": True, "window": 50, "causal": False}),
    "slots": ("products strips flash", {"slots": 6}),
    "slots and documents": ("products strips strips", {"slots": 6, "docs": True}),
    "softcap": ("naive naive naive", {"softcap": 2.0, "window": 50}),
}


@each_dtype
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_equals_the_equations(name, heads, dtype, device, monkeypatch):
    """Results and gradients of each kernel, for 4 heads of queries and so many heads of keys."""
    kernels, options = ATTENTION[name]
    case = SimpleNamespace(**USUAL | options)
    S = 160
    D = 16
    docs = None
    known = None
    if case.docs:
        docs = (documents(S), documents(S))
        ends = boundaries(document_starts({"docs": docs[0]})["doc_starts"], S)
        known = tuple(x.to(device) for x in (*docs, ends, ends))
    torch.manual_seed(0)
    shapes = {"q": (2, 4, case.queries, D), "k": (2, heads, S, D), "v": (2, heads, S, D)}
    if case.slots:
        shapes |= {"slot_k": (heads, case.slots, D), "slot_v": (heads, case.slots, D)}
    exact = {x: torch.randn(shape).to(dtype).double().requires_grad_() for x, shape in shapes.items()}
    given = {x: leaf.detach().to(device, dtype).requires_grad_() for x, leaf in exact.items()}
    q, k, v, *slots = exact.values()
    expected = naive_attention(q, k, v, case.window, case.softcap, causal=case.causal, docs=docs, slots=slots or None)
    q, k, v, *slots = given.values()
    used = spy_on_kernels(monkeypatch)
    y = attention(q, k, v, D, Mask(case.causal, case.window, known), case.softcap, slots=slots or None)
    on_cpu, in_float32, in_bfloat16 = kernels.split()
    if device != CPU:
        assert used == [in_float32 if dtype == torch.float32 else in_bfloat16]
    elif dtype == torch.float32:  # in bfloat16, the CPU's instructions decide
        assert used == [on_cpu]
    weight = torch.randn(y.shape).to(dtype)
    expected.backward(weight.double())
    y.backward(weight.to(device))
    found = {"y": y} | {x: leaf.grad for x, leaf in given.items()}
    of_equations = {"y": expected} | {x: leaf.grad for x, leaf in exact.items()}
    assert_near(found, of_equations, LIMIT[dtype])


def both(device: torch.device, *flags: str) -> tuple[Model, dict[str, Tensor], Model, dict[str, Tensor]]:
    """A model in float64 on the CPU and a batch; and both on the device, the model in float32."""
    model = Model(parse(Config, [*SMALL, *flags]), seed=0).double()
    V = model.cfg.vocab_size
    T = model.cfg.block_size
    torch.manual_seed(1)
    jitter(model)  # at the initial point, some gradients are zero
    batch = {"idx": torch.randint(V, (2, T)), "targets": torch.randint(-1, V, (2, T))}
    if model.encoder:
        batch["source"] = torch.randint(V, (2, T // 2))
    if model.cfg.doc_mask:
        batch["docs"] = documents(T)
        batch |= document_starts(batch)
    given = {name: x.to(device) for name, x in batch.items()}
    return model, batch, deepcopy(model).to(device, torch.float32), given


def gradients(model: Model) -> dict[str, Tensor]:
    return {name: local(p.grad) for name, p in model.named_parameters()}


def results(model: Model, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits, loss and the gradient of every parameter."""
    with torch.no_grad():
        logits = model(**{name: x for name, x in batch.items() if name != "targets"})
    loss = model(**batch)
    loss.backward()
    return {"logits": logits, "loss": loss} | gradients(model)


def decoded(model: Model, batch: dict[str, Tensor]) -> Tensor:
    """The logits of decoding with a cache, from the fourth token on. The text is given, as rounding could change it."""
    idx = batch["idx"]
    text = iter(idx.T[4:])
    logits = []

    def choose(x: Tensor) -> Tensor:
        logits.append(x.clone())
        return next(text)

    list(generate(model, idx[:, :4], idx.size(1) - 4, choose, batch.get("source")))
    return torch.stack(logits, 1)


MODELS = {f"{block}; {kind}": FAMILIES[f"{block}; {kind}; adamw"] for block in BLOCKS for kind in OBJECTIVES}
MODELS["convolution, values of tokens; causal"] = ["--block=parallel", "--conv=4", "--value_embedding=True"]
MODELS["convolution, documents; causal"] = ["--block=standard", "--conv=4", "--doc_mask=True"]
REHEARSED = [name for name in MODELS if "standard" in name or "causal" in name]  # on a CPU: each block and objective
NAMES = [name if name in REHEARSED else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


@each_dtype
@pytest.mark.parametrize("name", NAMES)
def test_models(name, dtype, device):
    model, batch, there, given = both(device, *MODELS[name])
    exact = results(model, batch)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        got = results(there, given)
        if not model.cfg.doc_mask:
            got["decoded"] = decoded(there, given)
            exact["decoded"] = exact["logits"][:, 3:-1]
    assert_near(got, exact, LIMIT_OF_MODELS[dtype])


@pytest.mark.parametrize("flags", ["", "--logit_softcap=3.0 --loss_chunk=14"])
def test_the_loss_of_a_large_vocabulary(flags, device):
    """In chunks, against PyTorch's cross entropy of all logits."""
    model, batch, there, given = both(device, "--vocab_size=3001", *flags.split())
    loss = F.cross_entropy(model(batch["idx"]).flatten(0, 1), batch["targets"].flatten(), ignore_index=-1)
    loss.backward()
    assert_near(results(there, given), {"loss": loss} | gradients(model), FLOAT32)


@pytest.mark.parametrize("optimizer, dtype, limit", [
    ("adamw", torch.float32, FLOAT32),
    ("muon", torch.float32, FLOAT32),
    ("muon", torch.bfloat16, BFLOAT16),
])  # fmt: skip
def test_three_updates_of_an_optimizer(optimizer, dtype, limit, device):
    def updates(model: Model, dtype: torch.dtype) -> dict[str, Tensor]:
        torch.manual_seed(3)
        before = deepcopy(model)
        steps = optim.build(model, model.cfg, dtype=dtype)
        for number in range(3):
            for p in model.parameters():
                p.grad = torch.randn(p.shape).to(p)
            steps.set_lr(0.01 * (number + 1))
            steps.step()
        pairs = zip(model.named_parameters(), before.parameters(), strict=True)
        return {name: after.detach() - p.detach() for (name, after), p in pairs}

    model, _, there, _ = both(device, "--mlp=swiglu", "--bias=True", f"--optimizer={optimizer}")
    assert_near(updates(there, dtype), updates(model, torch.float64), limit)


@pytest.mark.slow  # where a CPU rehearses; make gpu takes these too
@pytest.mark.parametrize("block", BLOCKS)
def test_a_compiled_run(block, device, run, monkeypatch):
    """Its losses are those of an uncompiled run in float64 on the CPU, but for rounding that the steps amplify."""
    if device == CPU:  # graphs alone: kernels would take minutes, and have their own tests
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    flags = [*FAMILIES[f"{block}; causal; adamw"], "--n_embd=32", *SHORT]
    there = run(*flags, f"--device={device}", "--compile=True", "--deterministic=True", out="compiled")
    assert distance(losses(there), losses(run(*flags, "--dtype=float64", out="exact"))) < 1e-3


def test_fsdp_on_one_rank(device):
    """A group of one rank, which gathers and reduces through NCCL, or gloo on a CPU."""
    model, batch, there, given = both(device, "--tie_weights=False")
    backend = "gloo" if device == CPU else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = make_mesh(model.cfg, device, torch.zeros(1, 1, 1, 1, dtype=torch.int64), "pp replicate shard tp")
        shard(there, model.cfg, Ranks(0, 1, device, torch.float32, False, mesh=mesh))
        assert_near(results(there, given), results(model, batch), FLOAT32)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("layout", ["", "--parallel=fsdp", "--tp=2", "--cp=2", "--pp=2"])
def test_layouts_on_two_gpus(layout, device, run, many):
    if torch.cuda.device_count() < 2 or device == CPU:
        pytest.skip("needs two GPUs; test_layouts has the layouts on CPUs")
    flags = [*SHORT, *layout.split(), f"--device={device}", "--deterministic=True"]
    found = losses(many(2, ("two", flags), saved=False) / "two")
    assert distance(found, losses(run(*SHORT, "--dtype=float64"))) < 1e-3


def test_checkpoints_go_there_and_back(device, run):
    """A resume on the device is digit for digit; one on the other device is but for rounding."""
    flags = [*SHORT, "--optimizer=muon", "--lr_decay_iters=8", "--deterministic=True"]
    found = {}
    for first, then in itertools.product({CPU, device}, repeat=2):
        out = f"{first}, {then}"
        run(*flags, "--max_iters=4", f"--device={first}", out=out)
        found[first, then] = losses(run(*flags, "--max_iters=8", f"--device={then}", "--init_from=resume", out=out))
    assert found[device, device] == losses(run(*flags, "--max_iters=8", f"--device={device}", out="once"))
    assert all(distance(each, found[CPU, CPU]) < FLOAT32 for each in found.values())


@pytest.mark.slow  # where a CPU rehearses
def test_a_compiled_run_that_was_stopped_draws_the_same_dropout(device, run, monkeypatch):
    """Also in layers that the backward computes again."""
    if device == CPU:
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    flags = [*SHORT, "--dropout=0.2", "--activation_checkpoint=full", "--compile=True", f"--device={device}"]
    flags += ["--deterministic=True", "--lr_decay_iters=4"]
    run(*flags, "--max_iters=2", out="parts")
    parts = run(*flags, "--init_from=resume", out="parts")
    assert losses(parts) == losses(run(*flags, out="once"))
