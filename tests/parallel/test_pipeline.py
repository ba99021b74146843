"""Pipelines of real processes (gloo) against one process that runs the whole model, micro-batch by micro-batch.

Both are in float64, unless the products are in bfloat16.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import assert_rounds_alike
from ranks import launch
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from engine.parallel.pipeline import Chunk, Pipeline, check, keep_stages
from engine.parallel.stages import layers, passes
from model import Model, ModelConfig

B, T, V, STEPS = 2, 12, 31, 2
SMALL = {"n_layer": 3, "n_head": 4, "n_embd": 16, "block_size": T, "vocab_size": V}
MODERN = {"pos": "rope", "norm": "rmsnorm", "mlp": "swiglu", "attention": "gqa", "n_kv_head": 2, "qk_norm": True}
CASES = {  # name -> (ranks of a pipeline, pipelines, micro-batches of each, model flags, what is done to the model)
    "standard": (2, 1, 2, {"loss_chunk": 5, "bias": True}, ""),
    "superblock": (2, 1, 3, MODERN | {"block": "superblock", "tie_weights": False}, ""),
    "joint pool": (2, 1, 2, MODERN | {"block": "superblock", "layer": "c.own_slots", "mlp": "gelu"}, ""),
    "simplified": (2, 1, 3, {"block": "simplified", "pos": "alibi", "norm_placement": "none"}, ""),
    "simplified_parallel": (2, 1, 2, {"block": "simplified_parallel", "pos": "none", "tie_weights": False}, ""),
    "parallel": (2, 1, 2, {"block": "parallel", "pos": "sinusoidal", "window": 5, "doc_mask": True}, ""),
    "masked": (2, 1, 2, {"objective": "masked", "norm_placement": "post", "logit_softcap": 3.0}, ""),
    "recomputed": (2, 1, 2, MODERN, "recompute"),
    "compiled": (2, 1, 2, MODERN, "compile"),
    "bfloat16": (2, 1, 2, {"norm_placement": "sandwich"}, "bfloat16"),
    "bfloat16 stream": (2, 1, 2, {"fp32_residual": False, "tie_weights": False}, "bfloat16"),
    "four stages": (4, 1, 4, MODERN | {"n_layer": 5}, ""),
    "four stages of shards": (4, 1, 5, {"n_layer": 4}, "shard"),
    "pipelines of shards": (2, 2, 2, {"n_layer": 3, "bias": True}, "shard"),
    "shards of superblocks": (2, 2, 3, MODERN | {"block": "superblock", "tie_weights": False}, "shard"),
    "chunks": (2, 1, 2, {"n_layer": 5, "bias": True, "n_embd": 24}, ""),
    "chunks in turns": (2, 1, 4, MODERN | {"n_layer": 6, "tie_weights": False, "doc_mask": True}, "recompute"),
    "compiled chunks": (2, 1, 2, MODERN | {"n_layer": 4}, "compile"),
    "chunks in bfloat16": (2, 1, 2, {"n_layer": 4, "fp32_residual": False, "tie_weights": False}, "bfloat16"),
    "chunks of four": (4, 1, 4, MODERN | {"n_layer": 9}, ""),
    "chunks of shards": (2, 2, 4, {"n_layer": 7, "bias": True}, "shard"),
    "chunks of untied shards": (2, 2, 2, MODERN | {"n_layer": 6, "tie_weights": False}, "shard"),
}
CHUNKS = {name: 3 if name.endswith("turns") else 2 for name in CASES if "chunks" in name}  # -> stages of a rank


def build(flags: dict, extra: str) -> Model:
    torch.manual_seed(1)
    model = Model(ModelConfig(**SMALL | flags)).to(torch.get_default_dtype())
    with torch.no_grad():  # zeros and ones would hide mistakes
        for p in model.parameters():
            p += 0.05 * torch.randn_like(p)
    for block in model.blocks:
        if extra == "recompute":
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if extra == "compile":
            block.compile(backend="eager")
    return model


@contextmanager
def dtype_of(name: str) -> Iterator[torch.dtype]:
    """The dtype of the case's parameters, in which all tensors are made meanwhile."""
    torch.set_default_dtype(torch.float32 if CASES[name][-1] == "bfloat16" else torch.float64)
    yield torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)


def autocast(extra: str):
    return torch.autocast("cpu", torch.bfloat16) if extra == "bfloat16" else nullcontext()


def batch(flags: dict, number: int, size: int = B) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    idx, targets = torch.randint(V, (2, size, T), generator=generator)
    targets[:, :2] = -1
    docs = {"docs": torch.arange(T).expand(size, T) // 4} if flags.get("doc_mask") else {}
    return {"idx": idx, "targets": targets} | docs


def named_grads(model: Model) -> dict[str, torch.Tensor]:
    return {name: whole(p.grad) for name, p in model.named_parameters()}


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x.clone()


def adamw(model: Model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)


def reference(name: str, exact: bool = False) -> dict:
    """The same run in one process, a loop over all micro-batches of all pipelines, neither compiled nor recomputed;
    exact: all of it in float64."""
    _, pipelines, n_micro, flags, extra = CASES[name]
    model, n = build(flags, ""), pipelines * n_micro
    if exact:
        model, extra = model.double(), ""
    optimizer, losses, evaluations, grads = adamw(model), [], [], {}
    for step in range(STEPS):
        if step in (0, STEPS - 1):
            evaluations += evaluate(lambda each: model(**each), model, name, partial(autocast, extra))
        losses.append(0.0)
        for i in range(n):
            with autocast(extra):
                loss = model(**batch(flags, step * n + i)) / n
            loss.backward()
            losses[-1] += loss.item()
        grads = grads or named_grads(model)  # of the first step
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad(set_to_none=True)
    return {"losses": losses, "evaluations": evaluations, "grads": grads}


def evaluate(loss, model: Model, name: str, context=nullcontext) -> list[float]:
    """Losses of a batch of the usual size, of a smaller and of a larger one. Compiled blocks have three of the usual
    size: each new size would take seconds."""
    flags, extra = CASES[name][3:]
    sizes = (B, B, B) if extra == "compile" else (B, 1, 5)
    model.eval()
    with torch.no_grad(), context():
        losses = [loss(batch(flags, 10_000 + size, size)).item() for size in sizes]
    model.train()
    return losses


def pipelined(name: str) -> dict:
    """What one rank of the case's pipelines computes."""
    stages, pipelines, n_micro, flags, extra = CASES[name]
    mesh = dist.init_device_mesh("cpu", (stages, pipelines), mesh_dim_names=("pp", "dp"))
    replica, stage = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    model = build(flags, extra)
    chunks = CHUNKS.get(name, 1)
    elsewhere = keep_stages(model, stage, stages, chunks)
    if extra == "shard":
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    layout = {"gradient_accumulation_steps": n_micro, "batch_size": B, "tp": 1, "cp": 1, "pp": stages}
    cfg = SimpleNamespace(**vars(model.cfg), **layout, pp_chunks=chunks)
    device = torch.device("cpu")
    ranks = SimpleNamespace(mesh=mesh, device=device, autocast=partial(autocast, extra), data_size=1)
    pipeline = Pipeline(model, cfg, ranks)
    of_tensor, sent = dist.P2POp, set()

    def recorded(op, tensor, *args, **kwargs):
        sent.update([tensor.dtype] * (tensor.dim() > 1))  # some versions connect the ranks with a number
        return of_tensor(op, tensor, *args, **kwargs)

    dist.P2POp = recorded
    optimizer, losses, evaluations, grads = adamw(model), [], [], {}
    for step in range(STEPS):
        evaluations += evaluate(pipeline.loss, model, name) if step in (0, STEPS - 1) else []
        first = (step * pipelines + replica) * n_micro
        loss = pipeline.backward([batch(flags, first + i) for i in range(n_micro)])
        assert not loss.requires_grad
        dist.all_reduce(loss)
        losses.append(loss.item() / pipelines)  # of ranks before the last stage it is 0
        grads = grads or named_grads(model)  # of the first step
        owned = [name for name, _ in model.named_parameters() if name not in elsewhere]
        squares = sum(whole(model.get_parameter(name).grad).square().sum() for name in owned)
        dist.all_reduce(squares, group=mesh.get_group("pp"))
        for p in model.parameters():
            p.grad *= min(1.0, 1.0 / (squares.sqrt().item() + 1e-6))
        optimizer.step()
        model.zero_grad(set_to_none=True)
    named, dist.P2POp = dict(model.named_parameters()), of_tensor
    return {
        "stage": stage, "sent": sent, "losses": losses, "evaluations": evaluations, "grads": grads,
        "wte": whole(named["wte.weight"].detach()) if "wte.weight" in named else None,
        "owned": owned,
    }  # fmt: skip


def work(names: list[str], folder: Path):
    dist.init_process_group("gloo")
    for name in names:
        with dtype_of(name):
            torch.save(pipelined(name), folder / f"{name} {dist.get_rank()}.pt")


@pytest.mark.parametrize("processes", [2, 4])
def test_pipelines_compute_what_one_process_does(processes, tmp_path):
    """Losses of two steps, evaluations, gradients; every name is on one stage, that of a tied weight on both ends."""
    names = [name for name, (stages, pipelines, *_) in CASES.items() if stages * pipelines == processes]
    launch(processes, work, tmp_path, names, tmp_path)
    for name in names:
        stages, pipelines, _, flags, extra = CASES[name]
        together = [torch.load(tmp_path / f"{name} {rank}.pt") for rank in range(processes)]
        with dtype_of(name) as dtype:
            alone, counted = reference(name), []
        for rank in together:
            counted += rank["owned"]
            assert rank["sent"] == {torch.bfloat16 if flags.get("fp32_residual") is False else dtype}, name
            if rank["stage"] < stages - 1:
                assert rank["evaluations"] == [0.0] * 6, name
            if extra == "bfloat16":
                assert_same_in_bfloat16(rank, alone, reference(name, exact=True), stages)
                continue
            assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-9), name
            if rank["stage"] == stages - 1:
                assert rank["evaluations"] == pytest.approx(alone["evaluations"], rel=1e-9), name
            for each, grad in rank["grads"].items():
                torch.testing.assert_close(grad, alone["grads"][each], rtol=0, atol=1e-10, msg=f"{name}: {each}")
        assert sorted(counted) == sorted([*alone["grads"]] * pipelines), name
        ends = [rank["wte"] for rank in together if rank["stage"] in (0, stages - 1)]
        if flags.get("tie_weights", True):
            assert len(ends) == 2 * pipelines and all(torch.equal(end, ends[0]) for end in ends), name
        else:
            assert [end is None for end in ends] == [rank["stage"] > 0 for rank in together], name


def assert_same_in_bfloat16(rank: dict, alone: dict, exact: dict, stages: int):
    """Each gradient of the first step, all of them together, losses, and on the last stage evaluations."""
    for each, grad in rank["grads"].items():
        assert_rounds_alike(grad, alone["grads"][each], exact["grads"][each], each)
    together = (torch.cat([run["grads"][each].flatten() for each in rank["grads"]]) for run in (rank, alone, exact))
    assert_rounds_alike(*together, "the gradient")
    for each in ("losses", "evaluations") if rank["stage"] == stages - 1 else ("losses",):
        assert_rounds_alike(rank[each], alone[each], exact[each], each)


def test_blocks_are_spread_evenly_and_a_later_stage_begins_with_the_stream():
    for n_layer, ranks, chunks, sizes in (
        (5, 4, 1, [2, 1, 1, 1]), (6, 4, 1, [2, 1, 2, 1]), (4, 2, 1, [2, 2]), (3, 3, 1, [1, 1, 1]), (7, 2, 2, [4, 3]),
    ):  # fmt: skip
        found = []
        for rank in range(ranks):
            model = build({"n_layer": n_layer, "dropout": 0.5}, "")
            keep_stages(model, rank, ranks, chunks)
            found.append(len(model.blocks))
            x = torch.randn(B, T, 16)
            for blocks in layers(n_layer, rank, ranks, chunks)[rank == 0 :]:
                again, t = Chunk(model, blocks, 1, nullcontext).embed(x, 3)
                assert again is x and t.tolist() == list(range(3, 3 + T))  # no second dropout
        assert found == sizes
    assert layers(7, 0, 2, 2) == [range(2), range(4, 6)] and layers(7, 1, 2, 2) == [range(2, 4), range(6, 7)]


@pytest.mark.parametrize("ranks, chunks, n_micro", [(2, 1, 2), (4, 1, 5), (2, 2, 2), (2, 3, 4), (4, 2, 4), (3, 2, 9)])
def test_passes_are_those_of_the_schedule(ranks, chunks, n_micro):
    """In PyTorch's own list of each rank's actions, which it writes for a tiny model."""
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        mine = [i * ranks + rank for i in range(chunks)]
        stages = [PipelineStage(torch.nn.Identity(), i, ranks * chunks, torch.device("cpu")) for i in mine]
        if chunks == 1:
            order = Schedule1F1B(stages[0], n_micro)._get_pipeline_order()[rank]
        else:
            order = ScheduleInterleaved1F1B(stages, n_micro).pipeline_order[rank]
        dist.destroy_process_group()
        order = [a for a in order if a and a.microbatch_index is not None]  # without waits and reductions
        actions = [(mine.index(a.stage_index), a.computation_type.name == "FORWARD") for a in order]
        assert [*passes(rank, ranks, chunks, n_micro)] == actions


def test_what_cannot_be_cut_is_refused():
    def cut(pp: int, n_micro: int, chunks: int = 1, **flags):
        check(SimpleNamespace(**vars(ModelConfig(**SMALL | flags)), pp=pp, pp_chunks=chunks), n_micro)

    cut(3, 3)
    with pytest.raises(ValueError, match="pp=4 .* n_layer=3; set pp to 3"):
        cut(4, 4)
    with pytest.raises(ValueError, match="pp=3 .* gradient_accumulation_steps leaves 2 .* at least 2 times as many"):
        cut(3, 2)
    cut(2, 4, 2, n_layer=4)
    with pytest.raises(ValueError, match="pp=2 times pp_chunks=2 .* n_layer=3; set pp_chunks to 1"):
        cut(2, 2, 2)
    with pytest.raises(ValueError, match="pp_chunks=2 needs a multiple of pp=2 .* leaves 3 .* to 2 times as many"):
        cut(2, 3, 2, n_layer=4)
    with pytest.raises(ValueError, match="pp=2 .* objective=seq2seq"):
        cut(2, 2, objective="seq2seq")


def test_micro_batches_of_unequal_numbers_of_documents():
    """What the schedule gets has one width, and a row's missing documents begin at its end."""
    given = {}
    schedule = SimpleNamespace(step=lambda idx, **more: given.update(more))
    model = SimpleNamespace(parameters=list)
    stage = SimpleNamespace(
        model=model, rank=0, n_ranks=2, schedule=schedule, device=torch.device("cpu"), _sum_tied=lambda: None
    )
    idx = torch.zeros(1, 5, dtype=torch.int64)
    batches = [{"idx": idx, "targets": idx, "docs": idx, "doc_starts": torch.tensor([x])} for x in ([0], [0, 2, 4, 5])]
    Pipeline.backward(stage, batches)
    assert given["doc_starts"].tolist() == [[0, 5, 5, 5], [0, 2, 4, 5]] and given["docs"].shape == (2, 5)
