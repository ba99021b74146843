"""Estimates of memory before a run: below what runs really take, and not far; what cannot fit is refused in a line."""

import os
import re
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import TINY, refused
from ranks import launch, train_runs

import evaluate
import sample
import train
from configurator import parse
from engine import device
from engine.config import Config
from engine.plan import memory
from engine.plan.estimate import Rank
from model import ModelConfig
from sample import SampleConfig

GIB = 2**30
CPU = torch.device("cpu")


SHAPE = ["--n_embd=128", "--block_size=256", "--gradient_accumulation_steps=1", "--max_iters=2", "--eval_iters=1"]
SHAPES = {  # flags, and how many times the estimate a run may take
    "activations": (["--n_layer=4", "--batch_size=8", "--vocab_size=2048"], 3),
    "evaluated": (["--n_layer=1", "--vocab_size=65536", "--batch_size=1", "--eval_only=True"], 8),
}


def measure(flags: list[str], file: Path):
    """train.py with these flags; the file then has what Linux says about the process."""
    train_runs([flags])
    file.write_text(Path("/proc/self/status").read_text())


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="measures as Linux does")
def test_a_run_takes_more_and_not_much_more(tiny_data, tmp_path):
    def peak(name: str, flags: list[str]) -> int:
        flags = [*TINY, *SHAPE, "--warmup_iters=0", f"--dataset={tiny_data}", f"--out_dir={tmp_path / name}", *flags]
        launch(1, measure, tmp_path, flags, tmp_path / f"{name}.status")
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", (tmp_path / f"{name}.status").read_text())[1])

    peaks = {name: peak(name, flags) for name, (flags, _) in SHAPES.items()}
    peaks["least"] = peak("least", ["--block_size=16", "--n_embd=16", "--eval_only=True"])
    for name, (flags, factor) in SHAPES.items():
        cfg = parse(Config, [*TINY, *SHAPE, *flags])
        rank = Rank(cfg, 1, CPU)
        if not cfg.eval_only:
            rank.measure()
        estimated = sum(memory.need_of(rank, "parameters", not cfg.eval_only).values())
        assert estimated > 30 * 2**20
        assert estimated <= peaks[name] - peaks["least"] <= factor * estimated, name


@pytest.mark.parametrize("layer,heads", [("c,p", 3 * 4), ("c/2,p;c+c/2,s", 2 * 2 + 6), ("c,p;p", 2 * 4)])
def test_sampling_keeps_the_keys_of_each_reader_of_the_context(layer, heads):
    flags = ModelConfig(n_layer=3, n_head=4, n_embd=64, vocab_size=99, block_size=32, block="superblock", layer=layer)
    need = memory.sampling_need(SampleConfig(num_samples=3, max_new_tokens=19, dtype="float32"), flags)
    assert need["samples"] == 3 * 4 * (20 * 2 * heads * 16 + 99)  # sequences, bytes, tokens, k and v, channels; logits


def test_the_machine_is_what_the_least_limit_leaves(tmp_path, monkeypatch):
    whole = device.machine_memory()
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 2**28 < whole
    files = {
        "/proc/self/cgroup": "4:memory:/a/b\n1:cpu:/a\n0::/c/d\n",
        "/proc/meminfo": "MemTotal: 9999999 kB\nSwapTotal: 2048 kB\n",
        "/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": str(2**63 - 4096),
        "/sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(300 * 2**20),
        "/sys/fs/cgroup/c/d/memory.max": "max",
        "/sys/fs/cgroup/c/memory.max": str(200 * 2**20),
    }

    def read(path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(device.Path, "read_text", read)
    for gone, expected in ((None, 202), ("/sys/fs/cgroup/c/memory.max", 302)):
        files.pop(gone, None)
        assert device.machine_memory() == expected * 2**20
    del files["/sys/fs/cgroup/memory/a/memory.limit_in_bytes"]
    assert device.machine_memory() == pages + 2 * 2**20
    monkeypatch.setattr(device, "machine_memory", lambda: 8 * GIB)
    assert device.process_memory(4) == 2 * GIB


TOO_MUCH = [  # flags, and what the line must name
    (["--batch_size=1e9"], ["batch_size=1000000000 (command line)", "activations", "make it smaller"]),
    (["--batch_size=2**31-1", "--eval_only=True"], ["batch_size=2147483647 (command line)", "make it smaller"]),
    (["--n_layer=2e9"], ["n_layer=2000000000 (command line)"]),
    (["--mlp_ratio=1e308", "--mlp=swiglu"], ["mlp_ratio=1e+308 (command line)"]),
    (["--mlp_ratio=6e4", "--n_embd=512"], ["mlp_ratio=60000.0 (command line)", "parameters", "--plan=True"]),
    (["--vocab_size=2e9"], ["vocab_size=2000000000 (command line)", "--parallel=fsdp"]),
    (["--n_embd=2**28", "--block=superblock", "--n_group=2**28"], ["n_group=268435456 (command line)"]),
    (["--block=superblock", "--layer=c.own_slots", "--n_slot=2e9"], ["n_slot=2000000000 (command line)"]),
    (["--n_layer=40", "--n_embd=16384"], ["n_embd=16384 (command line)"]),
]


@pytest.mark.parametrize("flags, words", TOO_MUCH, ids=str)
def test_too_much_is_refused_before_it_is_allocated(tiny_data, tmp_path, capsys, flags, words):
    started = time.process_time()
    argv = [*TINY, f"--dataset={tiny_data}", f"--out_dir={tmp_path / 'out'}", *flags]
    refused(train.main, argv, capsys, words)
    assert time.process_time() - started < 10 and not (tmp_path / "out").exists()


def test_long_texts_are_measured_and_refused_in_seconds():
    flags = ["--block_size=2**24", "--doc_mask=True", "--pos=rope", "--attn_softcap=30.0", "--batch_size=1"]
    cfg = parse(Config, [*flags, "--vocab_size=256", "--dtype=float32", "--n_layer=4"])
    started = time.process_time()
    with pytest.raises(ValueError, match=r"block_size=16777216 \(command line\).* needs at least .*activations"):
        memory.check_training(cfg, CPU, 1)
    assert time.process_time() - started < 20


def test_a_block_that_cannot_be_measured_may_fit(monkeypatch):
    """Such as one of the user's own, which fake tensors do not compute."""
    cfg = parse(Config, ["--batch_size=64", "--block_size=4096", "--vocab_size=256"])
    monkeypatch.setattr(memory, "process_memory", lambda ranks: 2 * GIB)
    with pytest.raises(ValueError, match=r"^batch_size=64 .* activations"):
        memory.check_training(cfg, CPU, 1)
    monkeypatch.setattr(Rank, "trace", mock.Mock(side_effect=NotImplementedError))
    memory.check_training(cfg, CPU, 1)


def test_the_data_s_vocabulary_is_refused_too(tmp_path, capsys):
    (tmp_path / "meta.json").write_text('{"vocab_size": 2000000000, "dtype": "uint32"}')
    for split in ("train", "val"):
        np.arange(999, dtype=np.uint16).tofile(tmp_path / f"{split}.bin")
    argv = [*TINY, f"--dataset={tmp_path}", f"--out_dir={tmp_path / 'out'}"]
    refused(train.main, argv, capsys, ["vocab_size=2000000000 "])


def test_a_gpu_has_a_memory_of_its_own(monkeypatch):
    cfg = parse(Config, ["--parallel=fsdp", "--batch_size=64", "--vocab_size=50304"])
    rank = Rank(cfg, 2)
    rank.measure()
    needed = sum(memory.need_of(rank, "parameters", training=True).values())
    monkeypatch.setattr(memory, "process_memory", lambda ranks: 0)
    for limit, words in ((needed, None), (needed - 1, r"^batch_size=64 \(command line\) .* the GPU can have")):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, n=limit: SimpleNamespace(total_memory=n))
        with pytest.raises(ValueError, match=words) if words else nullcontext():
            memory.check_training(cfg, torch.device("cuda"), 2)


def test_trained_models_that_do_not_fit_are_refused(trained, capsys, monkeypatch):
    flags = [f"--out_dir={trained}", "--device=cpu"]
    line = refused(sample.main, [*flags, "--num_samples=2e9"], capsys, ["most of it for samples", "make it smaller"])
    assert line.startswith("error: num_samples=2000000000 (command line): needs at least "), line
    monkeypatch.setattr(memory, "process_memory", lambda ranks: 2**14)
    fragments = [f"error: out_dir='{trained}' (command line): needs at least ", "; use a machine with more memory"]
    refused(sample.main, flags, capsys, [*fragments, "for weights"])
    refused(evaluate.main, [*flags, "--batch_size=1"], capsys, fragments)
