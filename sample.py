"""Sample from a trained model.

    python sample.py --out_dir=out/x                                 # from end-of-text, or from a newline without one
    python sample.py --out_dir=out/x --start="def main(" --num_samples=4
    python sample.py --out_dir=out/x --start=FILE:prompt.txt --temperature=0
    python sample.py --out_dir=out/x/step_00001000 --top_p=0.95 --stop=$'\\n\\n'
    python sample.py --out_dir=nanogpt:ckpt.pt --start="To be"       # nanoGPT's weights; also hf:DIR, Hugging Face's
    python sample.py --out_dir=out/bert --start="def f_____(self):" --blank=_            # masked: a token each
    python sample.py --out_dir=out/t5 --start="for <mask> in range(<mask>):"             # seq2seq: a span each
    python sample.py --out_dir=out/numbers_seq2seq --start="forty-two"                   # seq2seq of pairs: the target

The logits are divided by the temperature, then top_k, top_p and min_p in this order each remove tokens, as in Hugging
Face's generate. Samples go to stdout, everything else to stderr; on a terminal the first one appears while it is made.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it silently, as Ctrl-C does
    from engine import start

    start()

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Literal

import torch
from torch import Tensor

from configurator import parse
from data.errors import command, require, say, user_errors
from data.objective import objective_of
from data.tokenizer import Tokenizer
from engine import weights
from engine.config import Config
from engine.decode import finite, generate
from engine.device import resolve_device, resolve_dtype, torch_errors
from engine.plan import memory
from engine.prompts import Sample, check_id, prompt_ids, read_prompt
from flags import Flags, refuse
from model import Model

Chooser = Callable[[Tensor], Tensor]  # logits (B, V) -> tokens (B,)
UNUSED = {  # objective, or target of a seq2seq model of pairs -> flags that have no effect
    "causal": ["blank"],
    "masked": ["stop", "max_new_tokens"],
    "seq2seq": ["stop"],
    "target": ["blank"],
}
SEPARATOR = "\n---------------\n"


@dataclass
class SampleConfig(Flags):
    # --- sample
    out_dir: str = "out"  # the model: a training run, RUN/best, RUN/step_N, ema:RUN, nanogpt:FILE or hf:DIR
    start: str = ""  # the prompt, or FILE:path; empty = end-of-text, or a newline where there is none
    blank: str = "<mask>"  # [blank!=''] text in the prompt that marks a missing token (masked) or span (seq2seq)
    num_samples: int = 1  # [>0] samples of the same prompt, generated in one batch
    max_new_tokens: int = 500  # [>0] largest length of a sample; end-of-text or `stop` ends it earlier
    stop: str = ""  # text before which a sample ends; empty = only end-of-text ends it
    seed: int = 1337  # the same seed gives the same samples
    # --- distribution
    temperature: float = 0.8  # 0 = the most likely token, as for targets without these flags; above 1 flatter
    top_k: int = 200  # [temperature>0] keeps the k most likely tokens, 0 = all
    top_p: float = 1.0  # [>0] [<=1] [temperature>0] keeps the most likely tokens of this total (arXiv:1904.09751)
    min_p: float = 0.0  # [<=1] [temperature>0] least share of the largest probability (arXiv:2407.01082)
    # --- machine
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matrix products; auto on a CPU = float32


def distribution(logits: Tensor, cfg: SampleConfig) -> Tensor:
    """Probabilities (B, V), up to a factor per row, from logits (B, V) by temperature > 0, top_k, top_p and min_p. Each
    filter sees the tokens that the one before it has kept, in the order of Hugging Face's generate."""
    scaled = logits / cfg.temperature
    if 0 < cfg.top_k < logits.size(-1):
        least = logits.topk(cfg.top_k, sorted=False).values.amin(-1, keepdim=True)
        scaled = scaled.masked_fill(logits < least, -torch.inf)
    p = torch.softmax(scaled, dim=-1)
    if cfg.top_p < 1:
        ordered, index = p.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered  # total probability of all more likely tokens
        over = (before >= cfg.top_p * ordered.sum(-1, keepdim=True)) & (before > 0)  # the most likely token stays
        p = p.scatter(-1, index, ordered.masked_fill(over, 0))
    if cfg.min_p > 0:
        p = p.masked_fill(p < cfg.min_p * p.amax(dim=-1, keepdim=True), 0)
    return p


def choose(logits: Tensor, cfg: SampleConfig, generator: torch.Generator) -> Tensor:
    """Samples the next tokens (B,) from logits (B, V)."""
    if cfg.temperature < 1e-6:  # the logits divided by it may not be finite
        return logits.argmax(dim=-1)
    return torch.multinomial(distribution(logits, cfg), 1, generator=generator)[:, 0]


def read_ids(cfg: SampleConfig, kind: str, flags: Config, tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids of the prompt, with the mask or the next sentinel in place of each blank. `kind` is a key of SAMPLER."""
    if kind == "causal":
        return prompt_ids(tokenizer, prompt)
    flag = f"start={prompt[:40]!r}"
    limit = flags.block_size
    if kind == "target":
        tokens = [*prompt_ids(tokenizer, prompt), tokenizer.eot]
    else:
        V = tokenizer.vocab_size
        blanks = [V] * limit
        if kind == "seq2seq":
            blanks = list(range(V, V + objective_of(flags, V, tokenizer.eot).extra_ids - 1))
        first, *others = prompt.split(cfg.blank)
        require(others, f"{flag} has no blank to fill; write {cfg.blank} for missing text, or set --blank")
        most = len(blanks)
        require(len(others) <= most, f"{flag} has more blanks than the model knows, {most}; fill some first")
        tokens = tokenizer.encode(first).tolist()
        for i, piece in zip(blanks, others, strict=False):
            tokens += [i, *tokenizer.encode_rest(piece).tolist()]
    require(len(tokens) <= limit, f"{flag} becomes {len(tokens)} tokens, more than block_size={limit}; shorten it")
    return tokens


def continue_text(cfg: SampleConfig, model: Model, tokenizer: Tokenizer, prompt: str, idx: Tensor, choose: Chooser):
    """Prints samples that continue the prompt, or of a seq2seq model of pairs its targets."""
    source = None
    if model.cfg.objective == "seq2seq":
        source = idx
        idx = torch.full_like(source[:, :1], tokenizer.eot)
        prompt = ""
    samples = [Sample(cfg.stop) for _ in idx]
    shown = sys.stdout.isatty()  # the first sample, while it is written
    if shown:
        print(prompt, end="", flush=True)
    V = tokenizer.vocab_size  # the embedding may be padded to more rows
    tokens = generate(model, idx, cfg.max_new_tokens, lambda x: choose(x[:, :V]), source)
    for n, token in enumerate(tokens, start=1):
        for sample, t in zip(samples, token.tolist(), strict=True):
            if sample.ended:
                continue
            over = t in tokenizer.ends
            fresh = sample.add(b"" if over else tokenizer.token_bytes[t], last=over or n == cfg.max_new_tokens)
            if shown and sample is samples[0]:
                print(fresh, end="", flush=True)
        if all(sample.ended for sample in samples):
            break
    texts = [prompt + sample.text for sample in samples]
    if shown:
        texts[0] = ""
    print(SEPARATOR.join(texts))
    return n * len(samples)


@torch.no_grad()
def fill_masks(cfg: SampleConfig, model: Model, tokenizer: Tokenizer, prompt: str, idx: Tensor, choose: Chooser):
    """Prints the prompt with a token in each blank, not end-of-text; the blank of the most certain token is next."""
    V = tokenizer.vocab_size  # also the id of the mask
    rows = torch.arange(len(idx))
    blanks = (idx[0] == V).nonzero()[:, 0]
    for _ in blanks:
        logits = finite(model.logits(model.hidden(idx)[:, blanks]))[..., :V]  # (B, blanks, V)
        if tokenizer.eot is not None:
            logits[..., tokenizer.eot] = -torch.inf
        certainty = logits.softmax(-1).amax(-1).masked_fill(idx[:, blanks] != V, -1)  # (B, blanks)
        best = certainty.argmax(-1)  # (B,)
        idx[rows, blanks[best]] = choose(logits[rows, best])
    print(SEPARATOR.join(tokenizer.decode(row.cpu()) for row in idx))
    return len(rows) * len(blanks)


def fill_spans(cfg: SampleConfig, model: Model, tokenizer: Tokenizer, prompt: str, source: Tensor, choose: Chooser):
    """Prints the prompt with a text in each blank. max_new_tokens limits all blanks of a sample together."""
    V = tokenizer.vocab_size
    end = V + int((source[0] >= V).sum())  # the sentinel after that of the last blank
    span = torch.full_like(source[:, :1], V)  # (B, 1), the sentinel of the blank that is being filled

    def draw(logits: Tensor) -> Tensor:  # any token except end-of-text, or the next sentinel
        ids = torch.arange(logits.size(1), device=logits.device)
        never = (ids >= V) & (ids != (span + 1).clamp(max=end)) | (ids == tokenizer.eot)
        token = choose(logits.masked_fill(never, -torch.inf))
        span.copy_(span.maximum(token[:, None]))
        return token

    written = []
    for token in generate(model, span.clone(), cfg.max_new_tokens, draw, source):
        written.append(token)
        if (span == end).all():
            break
    first, *others = prompt.split(cfg.blank)
    texts = []
    for row in torch.stack(written, dim=1).tolist():
        fills = [[]]
        for token in row:
            if token < V:
                fills[-1].append(token)
            elif len(fills) <= token - V:  # the last sentinel may be drawn again
                fills.append([])
        text = first
        for fill, piece in zip_longest(fills[: len(others)], others, fillvalue=[]):
            decode = tokenizer.decode_rest if text else tokenizer.decode
            text += decode(fill) + piece
        texts.append(text)
    print(SEPARATOR.join(texts))
    return len(written) * len(source)


# objective or target -> a function that prints samples, and returns the number of tokens of all together
SAMPLER = {"causal": continue_text, "masked": fill_masks, "seq2seq": fill_spans, "target": continue_text}


def main(argv: list[str] | None = None):
    with user_errors(), torch_errors("lower --num_samples or --max_new_tokens, or use a machine with more memory"):
        cfg = parse(SampleConfig, argv, doc=__doc__)
        prompt = read_prompt(cfg.start)
        device = resolve_device(cfg.device)
        dtype = resolve_dtype(cfg.dtype, device)
        path, model, tokenizer = weights.load_model(cfg.out_dir, device, dtype)
        memory.check_sampling(cfg, model.cfg, device)
        kind = "target" if model.cfg.objective == "seq2seq" and model.cfg.pairs is True else model.cfg.objective
        for name in cfg.sources.keys() & UNUSED[kind]:
            refuse(cfg, name, f"has no effect on a model of objective={model.cfg.objective}; leave it out")
        if kind == "target" and not cfg.sources.keys() & {"temperature", "top_k", "top_p", "min_p"}:
            cfg.temperature = 0.0
        ids = read_ids(cfg, kind, model.cfg, tokenizer, prompt)
        check_id("the prompt", max(ids), model.cfg.vocab_size)
        idx = torch.tensor([ids], device=device).repeat(cfg.num_samples, 1)
        generator = torch.Generator(device).manual_seed(cfg.seed)
        started = time.perf_counter()
        choose_next = partial(choose, cfg=cfg, generator=generator)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            n_tokens = SAMPLER[kind](cfg, model, tokenizer, prompt, idx, choose_next)
        sys.stdout.flush()  # if it fails, the error is the only output
        seconds = time.perf_counter() - started
        said = f"{path}, {model.n_params():,} parameters, on {device}: {n_tokens} tokens in {seconds:.2f} s"
        say(f"{said}, {n_tokens / seconds:.1f} tokens per second")


if __name__ == "__main__":
    command(main)
