"""What several tests share: a small data set, and train.py run in this process or under torchrun."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import jitter
import numpy as np
import pytest
import ranks
import torch
from hypothesis import settings

import train
from data.stream import Shard
from data.tokenizer import ByteTokenizer
from data.writer import ShardWriter
from engine import compilation

# The same examples in every run, so that a failure belongs to the change before it; --hypothesis-profile=random draws
# others.
settings.register_profile("fixed", derandomize=True)
settings.register_profile("random")
settings.load_profile("fixed")
ROOT = Path(__file__).parent.parent
compilation.use_private_folder()  # also for child processes, which read the variable that it sets
TINY = [
    "--n_layer=2", "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=4", "--gradient_accumulation_steps=2",
    "--max_iters=40", "--eval_interval=20", "--eval_iters=2", "--warmup_iters=5", "--learning_rate=1e-2",
    "--device=cpu", "--dtype=float32", "--compile=False",
]  # fmt: skip


def pytest_addoption(parser):
    parser.addoption("--jitter", metavar="SEED", type=int, help="round products in another way, see jitter.py")


def pytest_configure(config):
    if config.option.jitter is not None:
        os.environ[jitter.SEED] = str(config.option.jitter)
        paths = [str(ROOT / "tests" / "every_process"), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        jitter.start()


@pytest.fixture(autouse=True)
def without_jitter(request):
    with jitter.paused() if request.node.get_closest_marker("no_jitter") else nullcontext():
        yield


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    """Bytes of sentences that repeat with variations, 20 documents of training and 3 of validation."""
    folder, rng, tokenizer = tmp_path_factory.mktemp("tiny"), np.random.default_rng(0), ByteTokenizer()
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
def run(tiny_data, tmp_path, monkeypatch):
    """run(*flags) trains in this process, with --dtype=float64 too; returns the folder, which metrics() and the
    checkpoints are in."""
    monkeypatch.setattr(train, "peak_flops", lambda *_: 1e9)  # half a second each
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def call(*flags: str, out: str = "out") -> Path:
        ranks.train_main([*TINY, f"--dataset={tiny_data}", f"--out_dir={tmp_path / out}", *flags])
        return tmp_path / out

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield call
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def launch(tiny_data, tmp_path):
    """launch(2, *flags) trains in new processes under torchrun; returns (folder, finished process)."""

    def call(processes: int, *flags: str, out: str = "out") -> tuple[Path, subprocess.CompletedProcess]:
        flags = ["train.py", *TINY, f"--dataset={tiny_data}", f"--out_dir={tmp_path / out}", *flags]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        done = subprocess.run(
            [sys.executable, *torchrun, *flags],
            cwd=ROOT, capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return tmp_path / out, done

    return call


@pytest.fixture
def many(tiny_data, tmp_path):
    """many(2, ("a", flags), ("b", flags)) trains each on two ranks, one after the other in the same processes, in
    folders of these names; returns the folder around them."""

    def call(processes: int, *runs: tuple[str, list[str]]) -> Path:
        flags = [[*TINY, f"--dataset={tiny_data}", *each, f"--out_dir={tmp_path / name}"] for name, each in runs]
        ranks.launch(processes, ranks.train_runs, tmp_path, flags)
        return tmp_path

    return call


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


TIMES = {"tokens_per_s", "mfu", "ms_per_step", "peak_memory_bytes"}


def figures(folder: Path) -> list[dict]:
    """All that a run has logged but what measures time and memory."""
    return [{key: line[key] for key in line.keys() - TIMES} for line in metrics(folder)]


def losses(folder: Path) -> list[tuple]:
    """What must not depend on time or place: (step, loss, ...) of logged steps, (step, train, val) of evaluations."""
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "train_loss", "val_loss", "val_bpb")
    return [tuple(line[key] for key in keys if key in line) for line in metrics(folder)]


def distance(lines: list[tuple], exact: list[tuple]) -> float:
    """The largest difference of two runs' `losses`, relative to the second's. There are four steps at least."""
    assert len(lines) == len(exact) >= 4
    pairs = [pair for a, b in zip(lines, exact, strict=True) for pair in zip(a, b, strict=True)]
    assert all((a is None) == (b is None) for a, b in pairs)
    return max(abs(a - b) / (abs(b) or 1) for a, b in pairs if b is not None)


IN_FLOAT64 = "--dtype=float64"


def in_both(runs: dict[str, list[str]]) -> list[tuple[str, list[str]]]:
    """The flags of each run, by name, and the same for float64."""
    return [pair for name, flags in runs.items() for pair in ((name, flags), (f"{name}, wide", [*flags, IN_FLOAT64]))]


def assert_same_but_for_rounding(folder: Path, alone: dict[str, Callable[..., list[tuple]]]):
    """The `losses` of the runs in the folder, which `in_both` has named, are those that alone[name](*flags) has of one
    process.

    In float64 they agree to 1e-9. From these, float32 may differ ten times as much as the worst of these runs does in
    one process: how much that is depends on the CPU.
    """
    exact = {name: call(IN_FLOAT64) for name, call in alone.items()}
    usual = max(distance(call(), exact[name]) for name, call in alone.items())
    for name in alone:
        assert (error := distance(losses(folder / f"{name}, wide"), exact[name])) < 1e-9, f"{name}: {error} in float64"
        assert (error := distance(losses(folder / name), exact[name])) < 10 * usual, f"{name}: {error}, usual: {usual}"


def shards_of(*arrays: np.ndarray) -> list[Shard]:
    """Headerless files of these tokens, which are gone with the shards."""
    shards = []
    for array in arrays:
        with tempfile.NamedTemporaryFile() as f:
            array.tofile(f)
            f.flush()
            shards.append(Shard(np.memmap(Path(f.name), array.dtype, "r")))
    return shards


def read_all(stream) -> list[int]:
    """All tokens of a split."""
    out = np.full((1, len(stream)), -1)
    stream.read(np.array([0]), out)
    return out[0].tolist()


def assert_rounds_alike(got, plain, exact, what: str):
    """Tensors or lists of n numbers: got and plain are two computations of the same in bfloat16, exact is a finer one.

    Which numbers a kernel rounds, and how, differs between CPUs, so no fixed tolerance holds on all of them. But the
    errors of got must be of the order of plain's: at most three times as large, and a mean of n roundings more; and at
    least a hundredth, as those of another dtype would not be. A common factor that is smaller than the errors of the
    single numbers shows in the projection on exact, where roundings average out.
    """
    got, plain, exact = (torch.as_tensor(x).detach().double().flatten() for x in (got, plain, exact))
    unit, size, root = torch.finfo(torch.bfloat16).eps / 2, exact.norm(), len(exact) ** 0.5
    error, usual = ((x - exact).norm() / size for x in (got, plain))
    limit = 3 * usual + unit / root
    assert usual / 100 <= error <= limit, f"{what} errs by {error:.1e} of its size, bfloat16 explains {limit:.1e}"
    factor, limit = 1 + (got - plain) @ exact / size**2, unit + 4 * usual / root
    assert abs(factor - 1) <= limit, f"{what} is {factor:.4f} times what it should be, bfloat16 explains {limit:.4f}"


@pytest.fixture(scope="session")
def modules_cache(tmp_path_factory):
    """transformers copies the code that it runs into this folder. All tests share it, as the package in it is imported
    only once."""
    from transformers import dynamic_module_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.syspath_prepend("")  # so that sys.path is restored at the end
        yield
