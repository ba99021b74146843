"""Sample from a trained model.

    python sample.py --out_dir=out/x                                 # from end-of-text, or from a newline without one
    python sample.py --out_dir=out/x --start="def main(" --num_samples=4
    python sample.py --out_dir=out/x --start=FILE:prompt.txt --temperature=0
    python sample.py --out_dir=out/x/step_00001000 --top_p=0.95 --stop="\\n\\n"

Samples go to stdout, everything else to stderr. On a terminal the first one appears while it is written.
"""

import codecs
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Literal

import torch
from torch import Tensor

from configurator import Config, parse, require, user_errors
from data.tokenizer import from_spec
from engine import checkpoint
from engine.parallel import resolve_device, resolve_dtype
from model import Model


@dataclass
class SampleConfig:
    """What to sample, and how. ValueError names the flag, its value and the remedy."""

    # --- sample
    out_dir: str = "out"  # of the training run; its latest checkpoint, or one checkpoint's own directory
    start: str = ""  # the prompt, or FILE:path; empty = end-of-text, or a newline where there is none
    num_samples: int = 1  # samples of the same prompt, written together as one batch
    max_new_tokens: int = 500  # length of each sample, less where it ends by itself
    stop: str = ""  # a sample ends before this text; it always ends at end-of-text
    seed: int = 1337  # same seed, same samples
    # --- distribution
    temperature: float = 0.8  # below 1 sharper, above 1 flatter, 0 = always the likeliest token
    top_k: int = 200  # only the k likeliest tokens, 0 = all
    top_p: float = 1.0  # only the likeliest tokens that together have this probability (arXiv:1904.09751)
    min_p: float = 0.0  # only tokens at least this fraction as likely as the likeliest (arXiv:2407.01082)
    # --- machine
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matrix multiplications

    def __post_init__(self):
        for name, least in (("num_samples", 1), ("max_new_tokens", 1), ("top_k", 0), ("seed", 0)):
            value = getattr(self, name)
            require(least <= value < 2**31, f"{name}={value} must be at least {least} and below {2**31}")
        require(
            self.temperature == 0 or self.temperature >= 1e-6,
            f"temperature={self.temperature} must be 0 (always the likeliest token) or at least 1e-06",
        )
        require(0 < self.top_p <= 1, f"top_p={self.top_p} must be in (0, 1]; 1 keeps every token")
        require(0 <= self.min_p <= 1, f"min_p={self.min_p} must be in [0, 1]; 0 keeps every token")


def choose(logits: Tensor, cfg: SampleConfig, generator: torch.Generator) -> Tensor:
    """The next tokens (B,), drawn from logits (B, V) as the flags say; min_p and top_p see what temperature left."""
    if cfg.temperature == 0:
        return logits.argmax(dim=-1)
    scaled = logits / cfg.temperature
    if 0 < cfg.top_k < logits.size(-1):
        least = logits.topk(cfg.top_k).values[:, -1:]
        scaled = scaled.masked_fill(logits < least, -torch.inf)
    p = torch.softmax(scaled, dim=-1)
    if cfg.min_p > 0:
        p = p.masked_fill(p < cfg.min_p * p.amax(dim=-1, keepdim=True), 0)
    if cfg.top_p < 1:
        ordered, index = p.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered  # probability of everything likelier
        over = (before >= cfg.top_p * ordered.sum(-1, keepdim=True)) & (before > 0)  # the likeliest always stays
        p = p.scatter(-1, index, ordered.masked_fill(over, 0))
    return torch.multinomial(p, 1, generator=generator)[:, 0]


def load(cfg: SampleConfig, device: torch.device):
    """The checkpoint's model in evaluation mode, and its tokenizer."""
    path = checkpoint.find(cfg.out_dir)
    state = checkpoint.read_state(path, {"flags": dict, "tokenizer": (dict, NoneType)})
    require(
        state["tokenizer"] is not None,
        f"{path} was trained on data without a tokenizer; give its meta.json a tokenizer and resume for one step",
    )
    tokenizer = from_spec(state["tokenizer"], path)
    model = Model(parse(Config, [], base=lambda _: (state["flags"], str(path))))
    checkpoint.load(path, {f"model.{name}": p.detach() for name, p in model.named_parameters()})
    print(f"{path}: {model.n_params():,} parameters, on {device}", file=sys.stderr)
    return model.to(device).eval(), tokenizer


def read_prompt(start: str) -> str:
    if not start.startswith("FILE:"):
        return start
    try:
        return Path(start[5:]).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"start={start} is no UTF-8 text ({error}); convert it, such as with iconv") from None
    except OSError as error:
        raise ValueError(f"start={start} cannot be read ({error.strerror}); give the path of a text file") from None


class Sample:
    """One growing sample: bytes come in, complete characters go out, until end-of-text or `stop`."""

    def __init__(self, stop: str):
        self.text, self.stop, self.ended = "", stop, False
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, piece: bytes, last: bool) -> str:
        """The text that is now certain to belong to the sample and was not before."""
        sure = self.sure()
        self.text += self.decoder.decode(piece, final=last)
        if self.stop and self.stop in self.text:
            self.text, self.ended = self.text[: self.text.index(self.stop)], True
        self.ended |= last
        return self.text[sure : self.sure()]

    def sure(self) -> int:
        """Characters that cannot turn out to be the beginning of `stop`."""
        held = 0 if self.ended else len(self.stop) - 1
        overlaps = (n for n in range(held, 0, -1) if self.text.endswith(self.stop[:n]))
        return len(self.text) - next(overlaps, 0)


def main(argv: list[str] | None = None):
    with user_errors():
        cfg = parse(SampleConfig, argv, doc=__doc__)
        prompt = read_prompt(cfg.start)
        device = resolve_device(cfg.device)
        dtype = resolve_dtype(cfg.dtype, device)
        model, tokenizer = load(cfg, device)
        ids = tokenizer.encode(prompt or ("\n" if tokenizer.eot is None else ""))
    tokens = ids.tolist() or [tokenizer.eot]
    idx = torch.tensor([tokens] * cfg.num_samples, device=device)
    generator = torch.Generator(device).manual_seed(cfg.seed)
    samples = [Sample(cfg.stop) for _ in range(cfg.num_samples)]

    def draw(logits: Tensor) -> Tensor:  # the embedding may have more rows than the vocabulary
        return choose(logits[:, : tokenizer.vocab_size], cfg, generator)

    sys.stdout.reconfigure(errors="replace")  # a prompt may be no UTF-8, a terminal may know less than Unicode
    live = sys.stdout.isatty()
    if live:
        print(prompt, end="", flush=True)
    started, n = time.perf_counter(), 0
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        for n, token in enumerate(model.generate(idx, cfg.max_new_tokens, draw), start=1):  # noqa: B007
            for i, (sample, t) in enumerate(zip(samples, token.tolist(), strict=True)):
                if not sample.ended:
                    over = t == tokenizer.eot or n == cfg.max_new_tokens
                    fresh = sample.add(b"" if t == tokenizer.eot else tokenizer.token_bytes[t], last=over)
                    if live and i == 0:
                        print(fresh, end="", flush=True)
            if all(sample.ended for sample in samples):
                break
    seconds = time.perf_counter() - started
    for sample in samples[live:]:
        print(("\n---------------\n" if live or sample is not samples[0] else "") + prompt + sample.text, end="")
    print()
    made = n * cfg.num_samples
    print(f"{made} tokens in {seconds:.2f} s: {made / seconds:.1f} tokens per second", file=sys.stderr)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGPIPE):  # Ctrl-C and `| head` end it without a word
        signal.signal(number, signal.SIG_DFL)
    main()
