"""Evaluate a trained model on data or on a text.

    python evaluate.py --out_dir=out/x                                # on the validation set that it was trained with
    python evaluate.py --out_dir=out/x --dataset=pycode --split=train --eval_iters=100
    python evaluate.py --out_dir=out/numbers_seq2seq --answers=answers.jsonl   # of pairs: exact matches
    python evaluate.py --out_dir=out/x/step_00001000 --file=text.txt --json=True
    python evaluate.py --out_dir=nanogpt:ckpt.pt --dataset=shakespeare_char       # nanoGPT's weights; also hf:DIR
    torchrun --standalone --nproc_per_node=2 evaluate.py --out_dir=out/x

The loss is the mean of -log p over the tokens, in nats, and the perplexity is its exponential. Bits per byte are the
sum of -log2 p over the tokens, divided by the bytes of their text, so they compare models with different tokenizers.
Nothing is written to a file but --answers.

A data set is read in windows of block_size tokens, as `train.py --eval_only=True` reads it; a model of the objectives
masked or seq2seq restores the same tokens in each. A text is encoded with the model's own tokenizer and may have any
length: its windows of block_size tokens follow one another without overlap, and each token but the first, which is <s>
if the tokenizer puts one before a text, is predicted once. Tasks such as hellaswag are lm-eval's: docs/interchange.md.
"""

if __name__ == "__main__":
    from engine import start

    start()

import json
import math
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from configurator import parse
from data.dataset import TokenStream
from data.errors import command, fail, printable, require, user_errors
from data.files import new_file, user_path
from data.loader import eval_batches
from engine import settle, weights
from engine.config import Config
from engine.device import resolve_device, resolve_dtype, torch_errors
from engine.evaluation import answer, byte_lengths, mean_loss
from engine.parallel.connection import launched
from engine.parallel.ranks import Ranks, join, leave
from engine.plan import memory
from engine.plan.estimate import Rank
from engine.prompts import check_id, read_text, text_batches
from engine.weights import StoredModel
from flags import Flags, refuse

LARGEST_TEXT = 2**28  # bytes


@dataclass
class EvaluateConfig(Flags):
    # --- model
    out_dir: str = "out"  # the model: a training run, RUN/best, RUN/step_N, ema:RUN, nanogpt:FILE or hf:DIR
    # --- text
    dataset: str = ""  # [file=''] folder under data/, a path or a mixture; empty = the model's own
    split: Literal["val", "train"] = "val"  # [file=''] part of the data set
    eval_iters: int = 0  # [file=''] batches of the data set, drawn at random, and the first answers; 0 = all
    file: str = ""  # text file (UTF-8) to evaluate instead of a data set
    block_size: int = 0  # tokens of context, at most the model's; 0 = the model's
    # --- pairs
    answers: str = ""  # [file=''] file for the model's answers to the sources of pairs; adds their exact matches
    # --- output
    json: bool = False  # print one JSON object instead of a line or a table
    # --- machine
    batch_size: int = 8  # [>0] sequences at once on each rank
    parallel: Literal["ddp", "fsdp"] = "ddp"  # ddp: ranks of torchrun hold copies of the model, fsdp: shards
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matrix products; auto on a CPU = float32


class Evaluated(NamedTuple):
    """What is evaluated: its name, batches, the bytes of each token or why they are not known; pairs for --answers."""

    name: str
    batches: Iterable[dict[str, Tensor]]
    token_bytes: Tensor | None
    why_no_bytes: str = ""
    pairs: TokenStream | None = None


def of_text(cfg: EvaluateConfig, flags: Config, ranks: Ranks, found: StoredModel, text: str) -> Evaluated:
    """The text of cfg.file, encoded with the tokenizer of the model."""
    require(flags.objective == "causal", f"file={cfg.file} needs a model of objective=causal; use a data set")
    tokenizer = found.tokenizer()
    ids = torch.from_numpy(tokenizer.encode_first(text))
    require(len(ids) > 1, f"file={cfg.file} has {len(ids)} tokens, and the first is not predicted; give more text")
    check_id(f"file={cfg.file}", int(ids.max()), flags.vocab_size)
    batches = text_batches(ids, flags.block_size, cfg.batch_size, ranks.data_rank, ranks.data_size, ranks.device)
    lost = tokenizer.lost(text, ids.numpy()) / (len(ids) - 1)
    return Evaluated(cfg.file, batches, torch.from_numpy(tokenizer.byte_lengths).to(ranks.device) + lost)


def of_data(cfg: EvaluateConfig, flags: Config, ranks: Ranks, found: StoredModel) -> Evaluated:
    """The split of the data set, in the windows that train.py evaluates."""
    known = cfg.dataset or "dataset" in found.flags
    require(known, f"out_dir={cfg.out_dir} does not say its data; set --dataset=NAME or --file=TEXT")
    data, objective = settle.by_data(flags)
    found.check_tokenizer(data.tokenizer, flags.dataset)
    stream = data.split(cfg.split)
    batches = eval_batches(
        stream, objective, cfg.batch_size, cfg.eval_iters, ranks.data_rank, ranks.data_size, flags.seed, ranks.device
    )
    fact = f"answers={cfg.answers} needs pairs, and dataset={flags.dataset} is trained on as text"
    require(flags.pairs or not cfg.answers, f"{fact}; leave answers out, or prepare pairs (docs/data.md)")
    pairs = stream if cfg.answers else None
    return Evaluated(stream.name, batches, *byte_lengths(flags, data, stream, ranks), pairs)


def evaluate(
    cfg: EvaluateConfig, ranks: Ranks, machine: dict[str, Any], text: str, found: StoredModel, file: BinaryIO | None
) -> dict:
    """The figures of a model on a data set, or on `text` if cfg.file is set. With cfg.answers, the answers go to
    `file`. Every rank calls it."""
    flags = found.config(**machine)
    limit = flags.block_size
    if cfg.block_size > limit:
        refuse(cfg, "block_size", f"is more than the model's {limit}; lower it, or leave it out")
    shorter = replace(flags, block_size=cfg.block_size or limit)
    shorter.sources = cfg.sources  # for errors about block_size and batch_size
    memory.check_batch(Rank(shorter, ranks.size, ranks.device))
    part = of_text(cfg, shorter, ranks, found, text) if cfg.file else of_data(cfg, shorter, ranks, found)
    sharded = found.load(replace(shorter, block_size=limit), ranks)  # pairs have settled flags of the model
    loss = mean_loss(sharded, part.batches, part.token_bytes)
    if not math.isfinite(loss.nats):
        fail(f"the loss of {found.path} is {loss.nats}, over {loss.targets:,} tokens; use an earlier checkpoint", 1)
    figures = {
        "model": str(found.path), "data": part.name, "loss": loss.nats,
        "perplexity": math.inf if loss.nats > 709 else math.exp(loss.nats), "bits_per_byte": loss.bits,
        "tokens": loss.targets, "bytes": loss.n_bytes or None, "note": part.why_no_bytes,
    }  # fmt: skip
    if part.pairs is not None:
        n = cfg.eval_iters * cfg.batch_size
        with ranks.autocast():
            figures["exact_match"] = answer(sharded.model, found.tokenizer(), part.pairs, cfg.batch_size, n, file)
    return figures


def line(figures: dict) -> str:
    """The figures in one line for people."""
    text = "{model} on {data}: loss {loss:.4f} nats per token"
    if figures["bits_per_byte"] is not None:
        text += ", {bits_per_byte:.4f} bits per byte"
    text += ", perplexity {perplexity:.4g}, over {tokens:,} tokens"
    if "exact_match" in figures:
        text += "; {exact_match:.2%} exact matches"
    return printable(text.format(**figures))


def main(argv: list[str] | None = None):
    with user_errors(), torch_errors("lower --batch_size or --block_size, or use a machine with more memory"):
        cfg = parse(EvaluateConfig, argv, doc=__doc__)
        _, local_rank, size, _ = launched()
        text = read_text("file", cfg.file, LARGEST_TEXT) if cfg.file else ""
        dtype = str(resolve_dtype(cfg.dtype, resolve_device(cfg.device, local_rank)))[6:]
        machine = {
            "device": cfg.device, "dtype": dtype, "compile": False, "parallel": cfg.parallel, "eval_only": True,
            "batch_size": cfg.batch_size, "init_from": f"checkpoint:{cfg.out_dir}",
        }  # fmt: skip
        ranks = join(Config(**machine))
        if cfg.dataset:
            machine |= {"dataset": cfg.dataset, "pairs": "auto"}
        require(size == 1 or not cfg.answers, "answers are written by one process; start it without torchrun")
        answers = nullcontext()
        if cfg.answers:
            answers = new_file(user_path(cfg.answers), b'{"source": ')  # a place that cannot be written is refused now
        with answers as file:
            figures = weights.read(cfg.out_dir, lambda found: evaluate(cfg, ranks, machine, text, found, file))
    if ranks.rank == 0:
        show(cfg, figures)
    leave()


def show(cfg: EvaluateConfig, figures: dict):
    """Print the figures, for programs as one JSON object, or for people."""
    note = figures.pop("note", "")
    if note:
        print(note, file=sys.stderr)
    plain = json.loads(json.dumps(figures), parse_constant=lambda word: None)  # JSON has no nan and inf
    print(json.dumps(plain) if cfg.json else line(figures))


if __name__ == "__main__":
    command(record(main))  # record: torchrun reports the error of the rank that failed first
