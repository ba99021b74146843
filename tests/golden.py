"""Losses of 20 steps of every family, as they were computed once: a guard for whoever moves code without changing it.

    python -m tests.golden                # computes them again and writes tests/golden.json

A commit that changes them changes what the program computes, and says why. test_golden.py holds runs to them.
"""

import json
import platform
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import train
from data.tokenizer import ByteTokenizer
from data.writer import ShardWriter
from tests.families import FAMILIES
from tests.ranks import train_main

ROOT = Path(__file__).parent.parent
FILE = Path(__file__).with_suffix(".json")
SHAPE = [
    "--n_layer=2", "--n_head=4", "--n_embd=32", "--block_size=16", "--batch_size=4", "--gradient_accumulation_steps=2",
    "--eval_interval=10", "--eval_iters=2", "--warmup_iters=3", "--device=cpu", "--dtype=float64",
    "--compile=False", "--learning_rate=3e-3", "--always_save_checkpoint=False",
]  # fmt: skip


def prepare(folder: Path):
    """A data set that is the same on every machine: documents of words in an order without a library's randomness."""
    words, tokenizer = ["the cat ", "sat on ", "a mat. ", "dogs bark; ", "été "], ByteTokenizer()
    with ShardWriter(folder, tokenizer) as out:
        for i in range(24):
            text = "".join(words[(i * i + 3 * j * j + i * j // 2) % 7 % 5] for j in range(50))
            out.add("val" if i % 8 == 7 else "train", np.append(tokenizer.encode(text), tokenizer.eot))


def figures(data: Path, out_dir: Path, name: str, steps: int = 20) -> dict[str, list[float]]:
    """Losses and gradient norms of the first steps of a family's 20, and its evaluations' losses."""
    with mock.patch.object(train.Run, "save"):  # a checkpoint takes as long as the steps
        where = [f"--dataset={data}", f"--out_dir={out_dir}"]
        train_main([*SHAPE, *FAMILIES[name], *where, f"--max_iters={steps}", "--lr_decay_iters=20"])
    lines = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line or line["step"] % 10 == 0]  # without the end of fewer steps
    keys = ("loss", "grad_norm", "train_loss", "val_loss")
    return {key: [line[key] for line in lines if key in line] for key in keys}


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        prepare(data := Path(folder) / "data")
        found = {name: figures(data, Path(folder) / str(i), name) for i, name in enumerate(FAMILIES)}
    made = {"torch": torch.__version__, "machine": platform.machine(), "python": platform.python_version()}
    rounded = {name: {key: [round(x, 7) for x in xs] for key, xs in runs.items()} for name, runs in found.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(runs)}" for name, runs in rounded.items()]
    FILE.write_text(f'{{"made with": {json.dumps(made)},\n' + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
