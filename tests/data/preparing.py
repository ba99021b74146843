"""What several tests share about data: documents, which of them validate, and errors of one line."""

import argparse
import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.dataset import open_data
from data.tokenizer import ByteTokenizer, GPT2Tokenizer, train_bpe
from data.writer import ShardWriter
from tests.helpers import read_all
from tests.oracle import splitmix

WORDS = ["the", "cat", "naïve", "猫", "don't", "12345", "(a)", "\U0001f600", "def f(x):", "  ", "\t", "<|endoftext|>"]


def texts(n: int, seed: int = 0) -> list[str]:
    """n documents without blank lines, some of one word, some longer than a small job."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.choice([1, 5, 40]))).strip() or "x" for _ in range(n)]


def validates(number: int, fraction: float) -> bool:
    return splitmix(number) / 2**64 < fraction


def args(out, tokenizer="byte", **flags) -> argparse.Namespace:
    default = {"val_fraction": 0.2, "field": "text", "shard_tokens": 1000, "threads": 2, "documents": "file"}
    default |= {"shards": 0, "pairs": None, "separator": ""}
    return argparse.Namespace(out=str(out), tokenizer=tokenizer, **default | flags)


def write_set(folder, train=range(200), val=range(100, 150), tokenizer=None, **options) -> Path:
    """Two splits of these ids, which are bytes without a tokenizer, each of one document."""
    with ShardWriter(folder, tokenizer or ByteTokenizer(), **options) as out:
        out.add("train", np.array(train))
        out.add("val", np.array(val))
    return Path(folder)


def write_text(folder, tokenizer, text: str) -> Path:
    ids = tokenizer.encode(text)
    return write_set(folder, ids, ids, tokenizer)


def write_records(path: Path, records: list[dict]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=7)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != ".lock"}


def tokens_of(folder: Path, split: str) -> list[int]:
    return read_all(open_data(folder, verify=True).split(split))


def splits_of(folder: Path) -> dict[str, list[int]]:
    return {split: tokens_of(folder, split) for split in ("train", "val")}


def gpt2_of_other_merges(texts: list[str]) -> GPT2Tokenizer:
    """GPT-2's tokenizer with merges of these texts, which need no network."""
    tokenizer = GPT2Tokenizer()
    tokenizer.merges = [tuple(pair) for pair in json.loads(train_bpe(texts, 700).content)["model"]["merges"]]
    tokenizer.eot = 256 + len(tokenizer.merges)
    tokenizer.vocab_size = tokenizer.eot + 1
    return tokenizer


def error(call, *arguments, kind=ValueError, **keywords) -> str:
    """Calls and returns the message of the error, which must be of this kind, and one line with a remedy."""
    with pytest.raises(kind) as e:
        call(*arguments, **keywords)
    message = str(e.value)
    assert "\n" not in message and "; " in message, message
    return message
