"""What can never fit into the memory is refused in a line before it is allocated, and torch's error is a line too."""

import os
import resource
import time
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import evaluate
import ops
import sample
import train
from configurator import parse
from engine.config import Config
from engine.device import torch_errors
from engine.plan import memory
from engine.plan.estimate import Rank
from model import ModelConfig
from sample import SampleConfig
from tests.helpers import TINY, refused
from tools import lens

CPU = torch.device("cpu")
CGROUP = "proc/self/cgroup"


@pytest.mark.parametrize("layer,heads", [("c,p", 3 * 4), ("c/2,p;c+c/2,s", 2 * 2 + 6), ("c,p;p", 2 * 4)])
def test_sampling_keeps_the_keys_of_each_reader_of_the_context(layer, heads):
    flags = ModelConfig(n_layer=3, n_head=4, n_embd=64, vocab_size=99, block_size=32, block=layer)
    need = memory.bytes_of_sample(SampleConfig(max_new_tokens=19, dtype="float32"), flags)
    assert need == 4 * (20 * 2 * heads * 16 + 99)  # bytes, tokens, k and v, channels; logits


TOO_MUCH = [  # flags, and what the line must name
    (["--mlp_ratio=6e4", "--n_embd=512"], ["mlp_ratio=60000.0 (command line)", "--parallel=fsdp", "--plan=True"]),
    (["--vocab_size=2e9"], ["vocab_size=2000000000 (command line)", "needs at least ", " a process of this machine"]),
    (["--vocab_size=2e9", "--eval_only=True"], ["vocab_size=2000000000 (command line)"]),
    (["--block=c.own_slots", "--n_slot=2e9"], ["n_slot=2000000000 (command line)"]),
    (["--n_layer=40", "--n_embd=16384"], ["n_embd=16384 (command line)"]),
    (["--batch_size=2e9"], ["batch_size=2000000000 (command line): needs at least ", "make it smaller"]),
    (["--n_embd=2**31-2"], ["Storage size calculation overflowed; lower --batch_size"]),
]


MACHINE = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**22}  # 16 GiB: a larger one would begin to train some of them


@pytest.mark.parametrize("flags, words", TOO_MUCH, ids=str)
def test_too_much_is_refused_before_it_is_allocated(tiny_data, tmp_path, capsys, monkeypatch, flags, words):
    monkeypatch.setattr(os, "sysconf", MACHINE.get)
    started = time.process_time()
    argv = [*TINY, f"--dataset={tiny_data}", f"--out_dir={tmp_path / 'out'}", *flags]
    refused(train.main, argv, capsys, words)
    assert time.process_time() - started < 10
    assert not (tmp_path / "out").exists()


def test_the_data_s_vocabulary_is_refused_too(tmp_path, capsys):
    (tmp_path / "meta.json").write_text('{"vocab_size": 2000000000, "dtype": "uint32"}')
    for split in ("train", "val"):
        np.arange(999, dtype=np.uint16).tofile(tmp_path / f"{split}.bin")
    argv = [*TINY, f"--dataset={tmp_path}", f"--out_dir={tmp_path / 'out'}"]
    refused(train.main, argv, capsys, ["vocab_size=2000000000 "])


GROUPS = {  # /proc/self/cgroup: limits of cgroups below /sys/fs/cgroup, and which is the smallest of this process
    "0::/slurm/job_7/step_0": ({"slurm/job_7/memory.max": "6000", "slurm/job_7/step_0/memory.max": "max"}, 6000),
    "0::/a\n": ({"a/memory.max": "7000", "memory.max": "5000", "b/memory.max": "1"}, 5000),
    "0::/of/the/host": ({"memory.max": "4000\n"}, 4000),  # in a container, whose group is mounted as the root
    "5:cpu:/\n4:memory:/a/b": ({"memory/a/memory.limit_in_bytes": "3000", "cpu/memory.max": "x"}, 3000),
    "4:memory:/a": ({"memory/a/memory.limit_in_bytes": "9223372036854771712"}, 8000),
    "1:name=systemd:/": ({}, 8000),
}


@pytest.mark.parametrize("groups", GROUPS)
def test_a_process_has_the_memory_of_its_cgroups(groups, tmp_path, monkeypatch):
    """At most that of the machine, of 8000 bytes. Ranks share it, and each has its own limit of addresses."""
    limits, smallest = GROUPS[groups]
    for name, text in ({f"sys/fs/cgroup/{path}": limit for path, limit in limits.items()} | {CGROUP: groups}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4, "SC_PHYS_PAGES": 2000}.get)
    assert memory.host_memory(tmp_path) == smallest
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert memory.host_memory(tmp_path) == smallest // 6  # all are here, if nobody says otherwise
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert memory.host_memory(tmp_path) == smallest // 2
    monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_AS: (1000, -1)}.get)
    assert memory.host_memory(tmp_path) == 1000


@pytest.mark.parametrize("eval_only", [False, True])
def test_a_gpu_has_a_memory_of_its_own(monkeypatch, eval_only):
    """A run is refused exactly if it needs more; ranks on a CPU share the machine's."""
    cfg = parse(Config, ["--parallel=fsdp", "--vocab_size=50304", f"--eval_only={eval_only}"])
    rank = Rank(cfg, 2)
    needed = rank.parameters if eval_only else rank.states
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 2}.get(name, needed))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    memory.check_training(cfg, CPU, 2)
    for limit, words in ((needed, None), (needed - 1, r"^vocab_size=50304 \(command line\): .* the GPU can have")):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, n=limit: SimpleNamespace(total_memory=n))
        with pytest.raises(ValueError, match=words) if words else nullcontext():
            memory.check_training(cfg, torch.device("cuda"), 2)


def test_what_fits_on_several_ranks_is_not_refused(trained, tiny_data, tmp_path, pretended, capsys, monkeypatch):
    """Each of four ranks on this machine may have what a quarter of the model takes."""
    cfg = parse(Config, [*TINY, "--parallel=fsdp", "--gradient_accumulation_steps=4", "--vocab_size=257"])
    rank = Rank(cfg, 4, CPU)
    largest = {"train": 4 * rank.states, "evaluate": 4 * rank.parameters}
    monkeypatch.setattr("engine.settle.join", mock.Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr("engine.weights.ShardedModel", mock.Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr("engine.checkpoint.files.on_first_rank", lambda action: action())

    def give(name: str):
        monkeypatch.setattr(os, "sysconf", lambda key: largest[name] if key == "SC_PHYS_PAGES" else 1)

    give("train")
    flags = [*TINY, f"--dataset={tiny_data}", f"--out_dir={tmp_path / 'out'}", "--gradient_accumulation_steps=4"]
    with pytest.raises(KeyboardInterrupt):
        train.main([*flags, "--parallel=fsdp"])
    refused(train.main, flags, capsys, ["needs at least"])
    give("evaluate")
    flags = [f"--out_dir={trained}", "--device=cpu", "--batch_size=1"]
    with pytest.raises(KeyboardInterrupt):
        evaluate.main([*flags, "--parallel=fsdp"])
    dist.destroy_process_group()
    refused(evaluate.main, flags, capsys, ["needs at least"])


def test_trained_models_that_do_not_fit_are_refused(trained, capsys, monkeypatch):
    flags = [f"--out_dir={trained}", "--device=cpu"]
    line = refused(sample.main, [*flags, "--num_samples=2e9"], capsys, ["make it smaller"])
    assert line.startswith("error: num_samples=2000000000 (command line): needs at least "), line
    refused(evaluate.main, [*flags, "--batch_size=2e9"], capsys, ["error: batch_size=2000000000 (command line): needs"])
    monkeypatch.setattr(os, "sysconf", lambda name: 2**7)
    fragments = [f"error: out_dir={trained}/step_00000002: needs at least ", "; use a machine with more memory"]
    for program, more in ((sample, []), (evaluate, ["--batch_size=1"]), (lens, ["--start=a"])):
        refused(program.main, [*flags, *more], capsys, fragments)


@pytest.mark.parametrize("allocate, said", [
    (lambda *_: torch.empty(2**45), "can't allocate memory: you tried to allocate 140737488355328 bytes"),
    (lambda *_: np.empty(2**45), "Unable to allocate 256. TiB"),
])  # fmt: skip
def test_an_allocation_that_fails_is_a_line(allocate, said, tiny_data, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ops, "attention", allocate)
    argv = [*TINY, f"--dataset={tiny_data}", f"--out_dir={tmp_path / 'out'}"]
    assert refused(train.main, argv, capsys).startswith(f"error: {said}; lower --batch_size")
    flags = [f"--out_dir={trained}", "--device=cpu"]
    assert refused(sample.main, flags, capsys).startswith(f"error: {said}; lower --num_samples")
    assert refused(evaluate.main, flags, capsys).startswith(f"error: {said}; lower --batch_size")


def test_a_gpu_s_error_is_a_line(capsys):
    """Also from a pipeline's schedule, which wraps it. An error that has nothing to do with memory stays."""

    def fail():
        cause = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 79.1 GiB")
        with torch_errors("lower it"):
            raise RuntimeError("a stage fails") from cause

    refused(lambda _: fail(), [], capsys, ["error: out of memory; lower it"])
    with pytest.raises(SystemExit), torch_errors("lower it"):  # where other processes have nearly all of it
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    assert capsys.readouterr().err == "error: CUBLAS_STATUS_ALLOC_FAILED; lower it\n"
    with pytest.raises(RuntimeError, match="^other$"), torch_errors("lower it"):
        raise RuntimeError("other")
