"""Which runs are compiled on a CPU, where their kernels are kept, and how a run goes on without a compiler."""

import os
from collections import Counter
from contextlib import contextmanager
from functools import partial, partialmethod
from unittest.mock import Mock

import pytest
import torch

import ops
import train
from configurator import parse
from engine import settle
from engine.config import Config
from engine.parallel import compilation
from engine.parallel import ranks as parallel
from engine.parallel.compilation import choose_folder, is_compiled, kind_of_kernels, try_compiler
from engine.parallel.recomputation import recompute
from model import Block, Model, ModelConfig, Stack
from tests.families import FAMILIES
from tests.helpers import TINY, losses, state_of, steps_of
from tests.ranks import launch, train_main

ALONE = parallel.Ranks(0, 1, torch.device("cpu"), torch.float32, False)
FLAGS = [flag for flag in TINY if not flag.startswith("--compile=")]  # with compile=auto
SIZES = ["--n_layer=2", "--n_head=4", "--n_embd=64", "--block_size=32", "--vocab_size=61"]
SHORT = ["--max_iters=2", "--eval_interval=2", "--eval_iters=1", "--warmup_iters=1", "--lr_decay_iters=8"]
COMPILING = "compiling for this CPU"
FAILS = "warning: torch.compile does not work here"


@pytest.mark.parametrize("works", [True, False])
@pytest.mark.parametrize("flag", ["auto", True, False])
@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps"])
def test_auto_compiles_on_gpus(monkeypatch, works, flag, kind):
    """Nothing is compiled where torch.compile does not work; the flag True stays what it is then."""
    monkeypatch.setattr(compilation, "works", lambda ranks: works)
    monkeypatch.setattr(parallel, "resolve_device", lambda *_: torch.device(kind))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Mock(major=9))
    cfg = Config(compile=flag, dtype="float32")
    wanted = kind == "cuda" if flag == "auto" else flag
    compiled = settle.by_machine(cfg).compile
    assert compiled is (works and wanted)
    assert cfg.compile is (compiled if flag == "auto" else flag)


def test_a_resume_keeps_the_compilation(tiny_data, tmp_path, monkeypatch, capsys, in_this_process):
    """Unless a flag replaces it; on a CPU, an evaluation alone is compiled only by a flag of its own."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(compilation, "try_compiler", lambda device: None)

    def go(*flags: str) -> str:
        train_main([*FLAGS, *SHORT, "--n_layer=1", f"--dataset={tiny_data}", f"--out_dir={tmp_path / 'out'}", *flags])
        return capsys.readouterr().out

    first, second, *_ = go("--compile=True").splitlines()
    assert state_of(tmp_path / "out")["flags"]["compile"] is True
    assert first.startswith(COMPILING)
    assert ", compiled;" in second
    assert ", compiled;" in go("--init_from=resume", "--max_iters=3")
    assert COMPILING not in go("--init_from=resume", "--eval_only=True")
    said = go("--init_from=resume", "--max_iters=4", "--compile=auto")
    assert COMPILING not in said
    assert ", compiled" not in said
    assert state_of(tmp_path / "out")["flags"]["compile"] is False
    assert ", compiled" not in go("--init_from=resume", "--max_iters=5")


def compile_on_two_ranks():
    cfg = parse(Config, [*FLAGS, "--dtype=float32", "--compile=True"])
    ranks = parallel.join(cfg)
    for works in ("11", "10", "01"):

        def attempt(device, works=works):
            if works[ranks.rank] == "0":
                raise ValueError(f"no compiler on rank {ranks.rank}")

        compilation.try_compiler = attempt
        assert is_compiled(cfg, ranks) == (works == "11")


def test_all_ranks_do_the_same(tmp_path):
    """A rank without a compiler keeps all of them from compiling."""
    launch(2, compile_on_two_ranks, tmp_path)
    first, other = ((tmp_path / f"rank {rank}").read_text() for rank in range(2))
    assert first.count(COMPILING) == 3
    assert first.count(FAILS) == 2
    assert "no compiler on rank 1" in first
    assert COMPILING not in other
    assert FAILS not in other


def test_a_run_without_a_compiler_is_not_compiled(run, tiny_data, tmp_path, capsys):
    """It says so in a line and has the losses of compile=False. Where compile=True was a flag, it stays the flag."""
    eager = steps_of(run(*SHORT, "--max_iters=3", out="eager"))
    capsys.readouterr()
    flags = [*FLAGS, *SHORT, f"--dataset={tiny_data}", f"--out_dir={tmp_path / 'out'}"]
    with torch._inductor.config.patch("cpp.cxx", ["/no/such/compiler"]):  # monkeypatch would delete the name at its end
        train_main([*flags, "--compile=True"])
        train_main([*flags, "--init_from=resume", "--max_iters=3"])
        train_main([*flags, "--init_from=resume", "--eval_only=True"])  # which a stored flag does not compile
    out, err = capsys.readouterr()
    warnings = [line for line in out.splitlines() if line.startswith(FAILS)]
    assert len(warnings) == 2 and len(set(warnings)) == 1 and err == "", out
    assert "/no/such/compiler" in warnings[0]
    assert "install g++" in warnings[0]
    assert "variable CXX" in warnings[0]
    assert ", compiled" not in out
    assert state_of(tmp_path / "out")["flags"]["compile"] is True
    assert steps_of(tmp_path / "out") == eager


@pytest.mark.parametrize("output, cause", [
    ("CppCompileError: C++\n\nOutput:\nx.cpp:3: fatal error: Python.h: No\n", "x.cpp:3: fatal error: Python.h"),
    ("Traceback:\n  in f\nNotADirectoryError: [Errno 20] Not a directory\nset a variable", "NotADirectoryError: "),
])  # fmt: skip
def test_the_cause_is_the_compiler_s_own_line(output, cause, monkeypatch):
    monkeypatch.setattr(torch._inductor, "compile", Mock(side_effect=RuntimeError(output)))
    with pytest.raises(ValueError, match=f"^{cause}.*; install g[+][+].* without a blank in its path, in "):
        try_compiler(ALONE.device)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_long_texts_in_strips_are_not_compiled(recompute, run, monkeypatch):
    """Each strip would be a graph of its own size. But recomputation needs whole graphs, so there they are compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(compilation, "try_compiler", lambda device: None)
    monkeypatch.setattr(compilation, "MOST_IN_STRIPS", 15)
    strips = ops.strip_attention
    flags = ["--n_layer=1", "--doc_mask=True", *SHORT, "--max_iters=1", "--eval_interval=1"]
    flags += [f"--activation_checkpoint={recompute}"]
    expected = losses(run("--compile=False", *flags))
    assert losses(run("--compile=True", *flags, out="compiled")) == expected
    assert ops.strip_attention is strips  # which other models in this process compute with
    breaks = [*torch._dynamo.utils.counters["graph_break"]]
    assert len(breaks) == (recompute == "none")
    assert all("strips of queries, with block_size above 15" in each for each in breaks)
    torch._dynamo.reset()


@contextmanager
def noting_graphs(calls: Counter):
    """The graphs that are made, and run as they are; `calls` counts their calls with autograd and without."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)

        def compiled(*args):
            calls[torch.is_grad_enabled()] += 1
            return graph(*args)

        return compiled

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=backend))
        patch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend=backend))
        yield graphs
    torch._dynamo.reset()


def results(model: Model, parts: list[torch.nn.Module], batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Loss and gradients, with these parts compiled."""
    if parts:
        compilation.compile_model(model, parts)
        model.chunk_loss = ops.chunk_loss
    model.zero_grad()
    loss = model(**batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def test_every_block_runs_as_compiled_code(run, monkeypatch):
    """Nine layers, more than a function may have graphs, share those of the first step, as chunks of the loss do."""
    calls = Counter()
    log = train.Run.log
    made = []
    monkeypatch.setattr(compilation, "try_compiler", lambda device: None)
    monkeypatch.setattr(train.Run, "log", lambda run, *args: made.append(len(graphs)) or log(run, *args))
    flags = ["--block=c.own_slots+p", "--pos=alibi", "--window=5"]
    flags += ["--n_layer=9", "--dropout=0.1", "--loss_chunk=24", "--max_iters=2"]
    with noting_graphs(calls) as graphs:
        torch._dynamo.utils.counters.clear()
        run(*flags, "--compile=True", "--eval_interval=2")
    steps = 2 * 2
    evaluations = 2 * 2 * 2  # of two micro-batches; of two splits in two batches
    chunks = 4  # of 16 of the 64 tokens, as all are equal
    assert calls == {True: steps * 9, False: evaluations * 9 + (steps + evaluations) * chunks}
    assert not torch._dynamo.utils.counters["graph_break"]
    assert made == [len(graphs)] * 2


@pytest.mark.parametrize("how", ["none", "selective"])
def test_layers_of_experts_share_a_graph(how):
    """Also where the grouped kernel and recomputation meet; loss and gradients are as uncompiled."""
    sizes = dict(n_layer=3, n_head=2, n_embd=32, block_size=16, vocab_size=29, pos="rope", norm="rmsnorm")
    model = Model(ModelConfig(**sizes, n_expert=4, router_balance="none"), seed=1)
    idx = torch.randint(29, (2, 16), generator=torch.Generator().manual_seed(0))
    for block in model.blocks if how != "none" else ():
        recompute(block, how)
    with noting_graphs(Counter()) as graphs, torch.autocast("cpu", torch.bfloat16):
        expected, *found = (results(model, parts, {"idx": idx, "targets": idx}) for parts in ([], [*model.blocks], []))
    assert len(graphs) == 1
    for ours in found:  # the second of which finds the graphs
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0.02)


@pytest.mark.parametrize("kind, block, more", [
    (Block, "standard", "--window=5"), (Stack, "superblock, joint pool", "--qk_norm=True"),
])  # fmt: skip
def test_a_stack_can_be_one_graph(kind, block, more):
    """As on a single GPU. The encoder has a graph of its own, and the source may be of another length."""
    model = Model(parse(Config, [*SIZES, *FAMILIES[f"{block}; seq2seq; adamw"], "--n_encoder_layer=1", more]), seed=1)
    idx = torch.randint(61, (2, 32), generator=torch.Generator().manual_seed(0))
    batch = {"idx": idx, "targets": idx, "source": idx[:, :16]}
    with noting_graphs(Counter()) as graphs:
        expected = results(model, [], batch)
        ours = results(model, [part for part in model.modules() if isinstance(part, kind)], batch)
    torch.testing.assert_close(ours, expected)
    assert len(graphs) == 2  # of both kinds of blocks, or of both stacks


def test_the_folder_of_the_kernels(tmp_path, monkeypatch):
    """In the user's cache, or where the user has chosen."""
    monkeypatch.setattr(compilation, "CHOSEN", None)
    monkeypatch.setenv(compilation.FOLDER, "default")  # as torch does
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    choose_folder()
    assert os.environ[compilation.FOLDER] == str(tmp_path / "superblock" / "inductor" / kind_of_kernels())
    monkeypatch.setattr(compilation, "CHOSEN", "mine")
    monkeypatch.setenv(compilation.FOLDER, "mine")
    choose_folder()
    assert os.environ[compilation.FOLDER] == "mine"
