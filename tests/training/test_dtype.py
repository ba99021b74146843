"""How dtype=auto is resolved on a CPU: by the instructions of the first rank's, which checkpoints keep."""

import os
from types import SimpleNamespace

import pytest
import torch

import ops
import sample
import train
from configurator import parse
from engine import device
from engine.config import Config
from engine.device import resolve_dtype
from engine.parallel import ranks as parallel
from engine.parallel.ranks import agreed_dtype, check_scaler
from engine.step import is_finite
from ops import wide_stream
from tests.helpers import TINY, edit_state, figures, losses, state_of
from tests.ranks import launch, train_main

CPU, CUDA, MPS = (torch.device(kind) for kind in ("cpu", "cuda", "mps"))
INFINITE = torch.tensor(torch.inf)
SHORT = [flag for flag in TINY if not flag.startswith(("--dtype=", "--compile="))]  # both are auto
SHORT += ["--max_iters=2", "--eval_interval=2", "--warmup_iters=1", "--lr_decay_iters=4"]


@pytest.mark.parametrize("amx, avx512, limits, fast", [
    (True, True, [], True),
    (False, True, [], True),  # as AMD's Zen 4 and 5
    (False, False, [], False),
    (True, True, ["ONEDNN_MAX_CPU_ISA"], False),
    (True, True, ["ATEN_CPU_CAPABILITY"], False),
])  # fmt: skip
def test_auto_is_bfloat16_where_there_are_instructions(monkeypatch, amx, avx512, limits, fast):
    """Unless a variable keeps the libraries from using them."""
    for variable in ops.LIMITS:
        monkeypatch.delenv(variable, raising=False)
    for variable in limits:
        monkeypatch.setenv(variable, "AVX2")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    assert agreed_dtype("auto", CPU) == (torch.bfloat16 if fast else torch.float32)


def test_only_auto_on_a_cpu_asks_for_them(monkeypatch, trained, capsys):
    """An explicit dtype does not, nor do the checks of flags, a plan and sample.py, whose auto is float32 on a CPU."""
    monkeypatch.setattr(parallel, "fast_bfloat16", lambda: pytest.fail("asked"))
    for name in ("float32", "bfloat16"):
        assert agreed_dtype(name, CPU) == getattr(torch, name)
    assert agreed_dtype("auto", MPS) == resolve_dtype("auto", CPU) == torch.float32
    generations = [SimpleNamespace(major=8), SimpleNamespace(major=7)]  # of two GPUs, of which the second is older
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: generations[device.index])
    for index, dtype in enumerate((torch.bfloat16, torch.float16)):
        assert agreed_dtype("auto", torch.device("cuda", index)) == dtype
    parallel.check_flags(parse(Config, SHORT))
    train.main([*SHORT, "--plan=True", "--device=auto", "--vocab_size=257"])
    assert "of 989 TFLOP/s" in capsys.readouterr().out  # in bfloat16
    sample.main([f"--out_dir={trained}", "--max_new_tokens=3", "--device=cpu"])


@pytest.fixture
def go(run, tiny_data, tmp_path, monkeypatch):
    """go(fast, *flags) trains, and returns the stored dtype. fast: if the CPU has bfloat16, None if nobody asks."""

    def call(fast: bool | None, *flags: str, out: str = "out") -> str:
        monkeypatch.setattr(parallel, "fast_bfloat16", lambda: pytest.fail("asked") if fast is None else fast)
        train_main([*SHORT, f"--dataset={tiny_data}", f"--out_dir={tmp_path / out}", *flags])
        cfg = parse(Config, [str(tmp_path / out / "config.py")])
        stored = state_of(tmp_path / out)["flags"]
        assert cfg.compile is stored["compile"] is False
        assert cfg.dtype == stored["dtype"]
        return cfg.dtype

    return call


@pytest.mark.parametrize("fast, name", [(True, "bfloat16"), (False, "float32")])
def test_a_resume_keeps_the_dtype(go, tmp_path, fast, name):
    """Also on another CPU, and digit for digit, Muon included; the losses are those of the explicit flag."""
    muon = "--optimizer=muon"
    assert go(fast, muon) == name
    assert go(None, "--init_from=resume", "--max_iters=4") == name
    assert go(fast, muon, "--max_iters=4", out="whole") == name
    assert go(None, muon, "--max_iters=4", f"--dtype={name}", "--compile=False", out="named") == name
    resumed, whole, named = (figures(tmp_path / out) for out in ("out", "whole", "named"))
    assert resumed == whole == named
    assert len(whole) == 7


def test_the_stream_is_in_bfloat16_on_gpus_that_have_it(go, tmp_path):
    """Elsewhere in float32. A resume keeps the choice."""
    bf16 = torch.bfloat16
    fp16 = torch.float16
    choices = [("auto", CUDA, bf16), ("auto", CUDA, fp16), ("auto", CPU, bf16), (True, CUDA, bf16), (False, CPU, bf16)]
    assert [wide_stream(*choice) for choice in choices] == [False, True, True, True, False]
    flags = []
    for how in ([], ["--init_from=resume", "--max_iters=3"]):
        go(None if how else True, *how)
        stored_flags = state_of(tmp_path / "out")["flags"]
        flags.append(stored_flags["fp32_residual"])
        edit_state(tmp_path / "out", flags=stored_flags | {"fp32_residual": False})  # as on a GPU
    assert flags == [True, False]


@pytest.mark.parametrize("flag", ["--parallel=fsdp", "--tp=2", "--pp=2", "--ep=2"])
def test_layouts_without_a_scaler_are_refused(flag):
    """Each rank would find other overflows. An evaluation has no gradient."""
    cfg = parse(Config, [flag, "--n_expert=4"])
    with pytest.raises(ValueError, match="use bfloat16, or float32 on GPUs that do not have it"):
        check_scaler(cfg, 2, torch.float16)
    check_scaler(cfg, 2, torch.bfloat16)
    check_scaler(parse(Config, [flag, "--n_expert=4", "--eval_only=True"]), 2, torch.float16)


@pytest.mark.parametrize("scale, finite", [(2.0**-13, True), (2.0**-15, False)])
def test_a_scale_that_falls_without_end_is_not_finite(scale, finite):
    """The gradients overflow at every scale, so no update is made."""
    one_rank = SimpleNamespace(sum=lambda x: x)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    assert bool(is_finite(torch.ones(()), INFINITE, scaler, one_rank)) == finite
    assert not is_finite(INFINITE, INFINITE, scaler, one_rank)


def test_a_restart_keeps_the_dtype(go, tmp_path, monkeypatch, capsys):
    """torchrun starts the same command again, which says dtype=auto."""
    go(True, "--save_interval=1")
    before = losses(tmp_path / "out")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    (tmp_path / "out" / "latest").write_text("step_00000001\n")
    capsys.readouterr()
    assert go(None, "--save_interval=1") == "bfloat16"
    assert "1 x cpu, bfloat16;" in capsys.readouterr().out
    assert losses(tmp_path / "out") == before


def join_on_other_cpus():
    for fast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        parallel.fast_bfloat16 = lambda fast=fast: {"0": fast}[os.environ["RANK"]]  # no other rank's CPU is asked
        assert parallel.join(parse(Config, SHORT)).dtype == dtype


def test_all_ranks_have_the_dtype_of_the_first(tmp_path):
    launch(2, join_on_other_cpus, tmp_path)


@pytest.fixture
def switches(monkeypatch):
    """Settings of the process, which a run with deterministic=True changes."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    tf32 = torch.backends.cuda.matmul.allow_tf32
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled
    torch.backends.cuda.matmul.allow_tf32 = tf32


def test_a_deterministic_run_on_a_cpu(run, capsys, switches):
    """It has the numbers of any run; the flag is stored, and a resume may change it."""
    short = ["--max_iters=2", "--eval_interval=2"]
    plain = losses(run(*short, out="plain"))
    assert ", deterministic;" not in capsys.readouterr().out
    folder = run(*short, "--deterministic=True")
    assert losses(folder) == plain
    assert "1 x cpu, float32, deterministic;" in capsys.readouterr().out
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["NCCL_ALGO"] == "^NVLS,NVLSTree"
    run("--init_from=resume", "--max_iters=3")
    assert torch.are_deterministic_algorithms_enabled()
    run("--init_from=resume", "--max_iters=4", "--deterministic=False")
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("deterministic, said", [(False, "float32 (products in TF32)"), (True, "float32")])
def test_float32_on_cuda_is_tf32(monkeypatch, switches, deterministic, said):
    monkeypatch.setattr(parallel, "resolve_device", lambda *_: CUDA)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=9))
    ranks = parallel.join(Config(dtype="float32", deterministic=deterministic))
    assert device.precision(CUDA, ranks.dtype) == said
    assert device.precision(CPU, ranks.dtype) == "float32"
    assert device.precision(CUDA, torch.bfloat16) == "bfloat16"
