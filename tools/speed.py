"""The table of tools.bench: training and decoding of random tokens, with the parts of the commands."""

import itertools
import json
import math
import time
from contextlib import closing
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from torch.utils.benchmark import Timer

from configurator import parse
from data.errors import require
from data.loader import Loader
from data.lock import temporary_folder
from engine import optim, settle
from engine.config import Config
from engine.decode import generate
from engine.device import device_name, peak_flops, peak_memory_bytes, resolve_device, resolve_dtype
from engine.parallel import ranks as parallel
from engine.parallel.sharded import ShardedModel
from engine.plan import accounting
from model import Model
from tools.training_process import ROOT, TEMPORARY

CONFIGS = {  # name -> arguments of train.py, with the size of the vocabulary of the data that a file names
    "4L/128/T64/B12": "config/train_shakespeare_cpu.py --vocab_size=65",
    "6L/384/T256/B8": "config/train_shakespeare_char.py --batch_size=8 --dropout=0.0 --vocab_size=65",
    "4L/192/T256/B8": "config/pycode_standard.py --compile=auto --vocab_size=257",
    "124M": "config/train_gpt2.py --vocab_size=50304 --device=cuda",
}
ROUND = 3  # steps of a round
SECONDS = 5.0  # of all rounds


def random_data(folder: str | Path, tokens: int, vocab_size: int):
    for split in ("train", "val"):
        ids = np.random.default_rng(0).integers(vocab_size, size=tokens, dtype=np.uint16)
        ids.tofile(Path(folder, f"{split}.bin"))
    Path(folder, "meta.json").write_text(json.dumps({"vocab_size": vocab_size}))


def flags(name: str, dtype: str = "auto") -> Config:
    """The flags of a configuration, whose steps have one batch."""
    args = [arg if arg.startswith("--") else str(ROOT / arg) for arg in CONFIGS[name].split()]
    return parse(Config, [*args, "--gradient_accumulation_steps=1", f"--dtype={dtype}"])


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """The rate of a product of square matrices in FLOP/s. That of a CPU is small, as some CPUs emulate bfloat16."""
    n = 8192 if device.type == "cuda" else 1024
    torch.backends.cuda.matmul.allow_tf32 = True  # as in training
    x = torch.randn(n, n, device=device).to(dtype)  # a GPU multiplies ones faster
    timer = Timer("x @ x", globals={"x": x}, num_threads=torch.get_num_threads())
    return 2 * n**3 / timer.blocked_autorange(min_run_time=1.0).median


def ms_per_step(cfg: Config) -> float:
    """Train on random tokens for some seconds after the first steps; the median of the rounds of steps."""
    with temporary_folder(TEMPORARY) as cfg.dataset:
        random_data(cfg.dataset, 2048 * cfg.block_size, cfg.vocab_size)
        data, objective = settle.by_data(cfg)
        ranks = parallel.join(cfg)
        if ranks.compile:
            torch._dynamo.reset()  # the graphs of other configurations would count towards the limit of recompilations
        sharded = ShardedModel(cfg, ranks)
        sharded.init_weights(cfg.seed)
        optimizer = optim.build(sharded.model, cfg, sharded, ranks.dtype)
        scaler = torch.amp.GradScaler(enabled=False)
        loader = Loader(data.split("train"), objective, cfg.batch_size, seed=cfg.seed, device=ranks.device)

        def train():
            for _ in range(ROUND):
                sharded.backward(loader, cfg.gradient_accumulation_steps, scaler)
                sharded.clip(cfg.grad_clip)
                optimizer.step()
                sharded.model.zero_grad(set_to_none=True)
            getattr(torch, ranks.device.type).synchronize()

        timer = Timer("train()", globals={"train": train}, num_threads=torch.get_num_threads())
        with closing(loader):
            train()
            return 1000 * timer.blocked_autorange(min_run_time=SECONDS).median / ROUND


def training_row(name: str, dtype: str, peak: float) -> str:
    """The speed of training, and its share of `peak` in FLOP/s; of a GPU also its MFU and the most memory in GiB."""
    cfg = flags(name, dtype)
    device = resolve_device(cfg.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    ms = ms_per_step(cfg)
    flops = cfg.batch_size * accounting.flops(accounting.skeleton(cfg), cfg.block_size)
    tokens_per_s = 1000 * cfg.batch_size * cfg.block_size / ms
    row = f"{name:<26}{dtype:<9}{tokens_per_s:>12,.0f}{ms:>10.1f}{1000 * flops / ms / peak:>15.1%}"
    if device.type == "cuda":
        mfu = 1000 * flops / ms / (peak_flops(device, getattr(torch, dtype)) or math.nan)
        row += f"{mfu:>8.1%}{peak_memory_bytes(device) / 2**30:>8.2f}"
    return row


def decoding_row(name: str, batch: int) -> str:
    """Greedy decoding with random weights, of block_size tokens for each of `batch` samples."""
    cfg = flags(name)
    device = resolve_device(cfg.device)
    dtype = resolve_dtype("auto", device)  # as in sample.py
    model = Model(cfg, cfg.seed).to(device).eval()
    prompt = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        for n in (min(8, cfg.block_size), cfg.block_size):  # first a few tokens to warm up
            start = time.perf_counter()
            for tokens in generate(model, prompt, n, lambda logits: logits.argmax(dim=-1)):
                tokens.tolist()  # waits for the device, as in sample.py
            seconds = time.perf_counter() - start
    return f"{name:<26}{str(dtype)[6:]:<9}{batch * n / seconds:>12,.0f}{batch:>10}"


def table(only: str = ""):
    """Print a row of training for each configuration and dtype, and rows of decoding."""
    alone = parallel.environment().size == 1
    require(alone, "WORLD_SIZE is above 1, and tools.bench measures a single process; start it without torchrun")
    names = [name for name in CONFIGS if only in ("", name) and (name != "124M" or torch.cuda.is_available())]
    require(names, f"config={only} must be one of: {', '.join(CONFIGS)}; the last one needs a GPU with CUDA")
    device = resolve_device(flags(names[0]).device)
    about = f"torch {torch.__version__}; {torch.get_num_threads()} threads; {datetime.now():%Y-%m-%d %H:%M}"
    print(f"{device_name(device)}; {about}")
    dtypes = dict.fromkeys((parallel.agreed_dtype("auto", device), torch.float32))
    peaks = {str(dtype)[6:]: measured_peak(device, dtype) for dtype in dtypes}
    of_gpu = f"{'MFU':>8}{'GiB':>8}" if device.type == "cuda" else ""
    print(f"\n{'training':<26}{'dtype':<9}{'tokens/s':>12}{'ms/step':>10}{'share of peak':>15}{of_gpu}", flush=True)
    for name, dtype in itertools.product(names, peaks):
        print(training_row(name, dtype, peaks[dtype]), flush=True)
    print(f"\n{'decoding':<26}{'dtype':<9}{'tokens/s':>12}{'samples':>10}", flush=True)
    for name, batch in itertools.product(names, (1, 8)):
        print(decoding_row(name, batch), flush=True)
