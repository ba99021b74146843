"""Shows the units of a head of attention or of an MLP, the tokens that experts read, and heads of known patterns.

    python -m tools.lens --out_dir=out/x --start="class Reader:" --layer=1 --head=2            # at the last token
    python -m tools.lens --out_dir=out/x --start=FILE:text.py --layer=1 --head=2 --position=40 --out=head.png
    python -m tools.lens --out_dir=out/x --find=induction,previous                             # in the validation set
    python -m tools.lens --out_dir=out/x --layer=1 --reader=experts                            # in the validation set

The units of a head, read as an MLP, are its learned slots, then the tokens that the query sees. --reader=mlp shows the
hidden units of the layer's MLP in the same way, and any other reader of the layer by its name. The last column has the
tokens whose probability the unit raises most. --out draws the same rows, and needs matplotlib.

--find prints the heads with the highest scores: the attention that a query gives to the token of the pattern. A reader
with experts needs no text: the tokens are shown that each expert reads more often than others, and --expert shows one
expert's alone. docs/lens.md defines all columns. From Python, tools/heads.py gives the weights of all units.
"""

import importlib.util
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import model as M
from configurator import parse
from data.errors import command, require, user_errors
from data.loader import count_windows, eval_batches
from data.objective import open_with_objective
from data.tokenizer import Tokenizer
from engine.checkpoint import weights
from engine.device import resolve_device
from engine.plan import memory
from engine.text import prompt_ids, read_prompt
from ops import capped
from tools.curves import GREY, MATPLOTLIB, save
from tools.heads import PATTERN, contextual_mlp, preferred, reader_of, reads_of_tokens, scores

PROMOTED = 3  # tokens of each unit
QUALIFIES = 0.4  # the least score of a head that has a pattern
LISTED = 5  # heads of each pattern that are printed
IN_A_LINE = 8  # tokens of each expert, where all experts are shown
BARS = {  # field of a unit -> label, colour and number of ticks; the colours are legible on white and on black
    "share": ("share of all activations", "#3b82c4", 4),
    "incoming": ("norm of incoming weights", "#d1782f", 4),
    "outgoing": ("norm of outgoing weights", "#4f9d69", 2),
}


@dataclass
class LensConfig:
    """The flags of lens.py. ValueError names the flag, its value and the remedy."""

    # --- head
    out_dir: str = "out"  # the model: a training run, one of its checkpoints, ema:RUN, nanogpt:FILE or hf:DIR
    start: str = ""  # the text that the model reads, or FILE:path
    source: str = ""  # the text that the encoder of a seq2seq model reads
    layer: int = 0  # the layer of the head, counted from 0
    reader: str = ""  # attn, mlp, experts, slots, attn2 or another one of the layer; empty = the first of the context
    head: int = 0  # the head, counted from 0
    expert: int = -1  # the expert, counted from 0; -1 = a line for each
    position: int = -1  # the token that is the query, counted from 0; -1 = the last one
    units: int = 24  # the most units shown: those of the largest activations; or the most tokens of an expert
    out: str = ""  # picture to write, FILE.png or FILE.svg; empty = text only
    # --- validation set
    find: str = ""  # patterns of heads to find instead of reading one: induction, previous, or both with a comma
    dataset: str = ""  # data whose validation set is read; empty = the data that the model was trained on
    # --- machine
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps

    USED_WHEN: ClassVar = {
        **dict.fromkeys(("start", "layer", "reader", "units"), (lambda c: not c.find, "find=''")),
        **dict.fromkeys(("source", "head", "position", "out"), (lambda c: c.start and not c.find, "start")),
        "expert": (lambda c: not c.start and not c.find, "reader=experts"),
        "dataset": (lambda c: not c.start or c.find, "find or reader=experts"),
    }

    def __post_init__(self):
        require(self.out_dir != "", "out_dir='' is empty; give the folder of a run, such as out")
        require(0 < self.units < 1000, f"units={self.units} must be at least 1 and below 1000")
        require(self.position >= -1, f"position={self.position} must be at least 0, or -1 for the last token")
        unknown = sorted(set(self.find.split(",")) - PATTERN.keys()) if self.find else []
        require(not unknown, f"find={self.find} has no pattern {unknown and unknown[0]!r}; known: {', '.join(PATTERN)}")
        require(self.find or self.start or self.reader, "start='' is empty; give a text, or set find or reader=experts")
        require(not self.out or Path(self.out).suffix in (".png", ".svg"), f"out={self.out} must end in .png or .svg")
        there = importlib.util.find_spec("matplotlib") is not None
        require(there or not self.out, f"out={self.out} needs matplotlib; pip install -e .[plots]")


Promoted = list[tuple[str, float]]  # tokens and what a unit adds to their log p


class Unit(NamedTuple):
    """A hidden unit of a head; docs/lens.md defines its fields."""

    name: str  # its token and the token's position, or its slot
    activation: float
    share: float
    incoming: float
    outgoing: float
    promotes: Promoted


@torch.no_grad()
def read_head(
    model: M.Model, tokenizer: Tokenizer, idx: Tensor, layer: int, head: int, position: int,
    source: Tensor | None = None, most: int = 24, reader: str = "",
) -> tuple[list[Unit], int, Promoted]:  # fmt: skip
    """The `most` units with the largest shares of a head at one query, slots before tokens; the number of all units;
    and the tokens that all of them promote together. The other arguments are those of contextual_mlp."""
    final = []
    with model.norm.register_forward_pre_hook(lambda _, args: final.append(args[0][0, position])):
        incoming, outgoing, hidden = contextual_mlp(model, idx, layer, head, position, source, reader)
    pool = reader_of(model, layer, reader)
    slots = pool.slot_v.size(1) if pool.reader.slotted else 0
    parts = hidden.tensor_split([slots if pool.reader.slots == "own_slots" else 0])  # of one softmax each
    share = torch.cat([part / part.abs().sum().clamp(min=torch.finfo(part.dtype).tiny) for part in parts])
    rows = share.abs().argsort(descending=True, stable=True)[:most].sort().values
    added = torch.cat((hidden[rows, None] * outgoing[rows], (hidden @ outgoing)[None]))  # and all units together
    logits = F.linear(model.for_head(model.norm(final[-1])), *model.head_parameters()).cpu().double()
    both = logits, logits - added_logits(model, added, final[-1]).cpu().double()
    now, then = (capped(x, model.cfg.logit_softcap)[..., : tokenizer.vocab_size].log_softmax(-1) for x in both)
    gain, tokens = now - then, (now.exp() - then.exp()).topk(min(PROMOTED, then.size(1))).indices
    *promotes, together = [
        [(spelled(tokenizer, t), v) for t, v in zip(*each, strict=True) if v > 0]
        for each in zip(tokens.tolist(), gain.gather(1, tokens).tolist(), strict=True)
    ]
    text = source if pool.reader.source == "memory" else idx
    first = int(M.Mask(pool.causal, pool.window).reach(len(text), len(text), "cpu")[0][min(position, len(text) - 1)])
    names = [f"unit {i}" for i in range(len(hidden))] if pool.units else [f"slot {i}" for i in range(slots)]
    names += [f"{i} {spelled(tokenizer, int(text[i]))}" for i in range(first, first + len(hidden) - len(names))]
    numbers = (x[rows].tolist() for x in (hidden, share, incoming.norm(dim=1), outgoing.norm(dim=1)))
    names = [names[i] for i in rows.tolist()]
    return [Unit(*row) for row in zip(names, *numbers, promotes, strict=True)], len(hidden), together


def added_logits(model: M.Model, x: Tensor, stream: Tensor) -> Tensor:
    """What x (..., C) adds to the logits (..., V), if the last norm has the statistics of the final stream (C,)."""
    norm = model.norm
    gain, bias, both = getattr(norm, "weight", 1.0), getattr(norm, "bias", None), (x, stream)
    if isinstance(norm, nn.LayerNorm):
        both = [each - each.mean(-1, keepdim=True) for each in both]
    added, whole = (gain * each for each in both)
    scale = (norm(stream) - (0.0 if bias is None else bias)).norm() / whole.norm()
    return F.linear(model.for_head(scale * added), model.head_parameters()[0])


def spelled(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token in quotation marks, with escapes for what cannot be printed."""
    if token >= tokenizer.vocab_size:
        return f"<id {token}>"
    text = tokenizer.token_bytes[token].decode("utf-8", "backslashreplace")
    return "'" + "".join(c if c.isprintable() else repr(c)[1:-1] for c in text) + "'"


def promoted(tokens: Promoted) -> str:
    return "  ".join(f"{token} {value:+.3f}" for token, value in tokens)


def print_units(units: list[Unit], n_all: int):
    """Print a row for each unit, and a line on those that are left out."""
    width = max(len(unit.name) for unit in units)
    print(f"{'unit':{width}}  activation    share     |in|    |out|  promotes")
    for name, *numbers, promotes in units:
        columns = "{:10.4g}  {:7.4f}  {:7.4g}  {:7.4g}".format(*numbers)
        print(f"{name:{width}}  {columns}  {promoted(promotes)}")
    if len(units) < n_all:
        print(f"{n_all - len(units)} more units have smaller shares; --units={n_all} shows them")


def picture(units: list[Unit], title: str):
    """A matplotlib Figure with a row for each unit: bars of its share and of its norms, and the tokens it promotes."""
    import matplotlib
    from matplotlib.figure import Figure

    own = {"axes.spines.left": False, "axes.grid": False, "ytick.major.size": 0, "font.size": 9}
    with matplotlib.rc_context(MATPLOTLIB | own):
        figure = Figure(figsize=(10, 1.3 + 0.24 * len(units)), layout="constrained")
        axes = figure.subplots(1, 4, sharey=True, width_ratios=(3, 2, 2, 3.4))
    figure.suptitle(title, color=GREY, fontsize=11, parse_math=False)
    for axis, (field, (label, colour, ticks)) in zip(axes, BARS.items(), strict=False):
        axis.barh(range(len(units)), [getattr(unit, field) for unit in units], color=colour)
        axis.set_xlabel(label)
        axis.locator_params(axis="x", nbins=ticks)
        axis.xaxis.set_major_formatter("{x:g}")
    mono = {"family": "monospace", "fontsize": 9, "color": GREY, "parse_math": False}
    axes[0].set_yticks(range(len(units)), [unit.name for unit in units], **mono)
    axes[0].invert_yaxis()
    axes[3].spines["bottom"].set_visible(False)
    axes[3].tick_params(bottom=False, labelbottom=False)
    axes[3].set_xlabel("promotes: change of log p in nats")
    figure.align_xlabels(axes)
    for row, unit in enumerate(units):
        for column, (token, value) in enumerate(unit.promotes):
            text = f"{token if len(token) < 10 else token[:8] + '…'} {value:+.3f}"
            axes[3].text(column / PROMOTED, row, text, va="center", transform=axes[3].get_yaxis_transform(), **mono)
    return figure


def validation_set(
    cfg: LensConfig, flags: M.ModelConfig, tokenizer: Tokenizer, device: torch.device
) -> Iterable[dict[str, Tensor]]:
    """All windows of the validation set in batches, with a progress bar, after a line that says how many there are."""
    known = cfg.dataset or cfg.out_dir.partition(":")[0] not in weights.FOREIGN
    require(known, f"out_dir={cfg.out_dir} does not say its data; set dataset")
    data, objective, _ = open_with_objective(replace(flags, dataset=cfg.dataset or flags.dataset))
    same = data.tokenizer is None or data.tokenizer.hash == tokenizer.hash
    require(same, f"dataset={cfg.dataset or flags.dataset} has another tokenizer than the model; prepare it with that")
    stream = data.split("val")
    B = max(1, 2**13 // max(objective.lengths))  # 8192 tokens at once
    n = count_windows(stream, objective.block_size)
    print(f"{stream.name}: {n:,} windows of {objective.block_size} tokens")
    return tqdm(eval_batches(stream, objective, B, device=device), total=-(-n // B), unit=" batches", disable=None)


def show_experts(cfg: LensConfig, model: M.Model, tokenizer: Tokenizer, device: torch.device):
    """Print the tokens that one expert, or each, reads more than others; docs/lens.md defines the columns."""
    n, experts = model.cfg.n_expert, reader_of(model, cfg.layer, cfg.reader)
    require(-1 <= cfg.expert < n, f"expert={cfg.expert} must be in 0 .. {n - 1}, or -1 for all")
    reads = reads_of_tokens(model, experts, validation_set(cfg, model.cfg, tokenizer, device))
    load = (reads.sum(0) / reads[:, :-1].sum() * n).tolist()
    sys.stdout.reconfigure(errors="replace")  # for a terminal without Unicode
    if cfg.expert == -1:
        print("\nexpert   load  tokens, and the share of each that the expert reads")
        for expert in range(n):
            best = preferred(reads, expert, min(cfg.units, IN_A_LINE))
            shares = "  ".join(f"{spelled(tokenizer, each.token)} {each.share:.2f}" for each in best)
            print(f"{expert:6}  {load[expert]:5.3f}  {shares}")
        return
    rows = [(spelled(tokenizer, token), *row) for token, *row in preferred(reads, cfg.expert, cfg.units)]
    width = max([5, *(len(name) for name, *_ in rows)])
    print(f"\nexpert {cfg.expert}, whose load is {load[cfg.expert]:.3f} of the mean")
    print(f"{'token':{width}}      reads   share     excess")
    for name, count, share, excess in rows:
        print(f"{name:{width}}  {count:9,}  {share:.4f}  {excess:9,.0f}")


def find(cfg: LensConfig, model: M.Model, tokenizer: Tokenizer, device: torch.device):
    """Print the heads with the highest scores on the validation set, and how many of all heads have each pattern."""
    batches = validation_set(cfg, model.cfg, tokenizer, device)
    found = scores(model, batches, list(dict.fromkeys(cfg.find.split(","))))
    for pattern, heads in found.items():
        meaning = PATTERN[pattern].__doc__
        print(f"\n{pattern}: attention to {meaning[0].lower()}{meaning[1:]}")
        print("layer  head   score  equal weights")
        for score, even, layer, head, reader in heads[:LISTED]:
            print(f"{layer:5}  {head:4}  {score:.4f}         {even:.4f}" + f"  of {reader}" * (reader != "attn"))
        good = sum(each.score >= QUALIFIES for each in heads)
        best = f"The best is head {heads[0].head} of layer {heads[0].layer} with {heads[0].score:.4f}."
        print(f"Heads with {QUALIFIES} or more: {good} of {len(heads)}. {best}")


def main(argv: list[str] | None = None):
    with user_errors():
        cfg = parse(LensConfig, argv, doc=__doc__)
        device = resolve_device(cfg.device)
        path, model, tokenizer = weights.alone(
            cfg.out_dir, device, torch.float32, lambda flags: memory.check_weights(cfg, flags, device)
        )
        reader = None if cfg.find else reader_of(model, cfg.layer, cfg.reader)
        if cfg.find or isinstance(reader, M.Experts):
            require(not cfg.start, f"start={cfg.start!r}: experts are read on the validation set; leave it out")
            return (find if cfg.find else show_experts)(cfg, model, tokenizer, device)
        require(cfg.start, f"start='' is empty, and reader={cfg.reader} reads a text; give one")
        objective, limit = model.cfg.objective, model.cfg.block_size
        remedy = "leave it out" if cfg.source else "give the text that the encoder reads"
        fits = bool(cfg.source) == (objective == "seq2seq")
        require(fits, f"source={cfg.source!r} for a model of objective={objective}: {remedy}")

        def ids(name: str, text: str) -> Tensor:
            found = torch.tensor(prompt_ids(tokenizer, text), device=device)
            fact = f"{name} has {len(found)} tokens, more than block_size={limit}"
            require(len(found) <= limit, f"{fact}; shorten it")
            return found

        idx, source = ids("start", read_prompt(cfg.start)), ids("source", cfg.source) if cfg.source else None
        position = len(idx) - 1 if cfg.position == -1 else cfg.position
        of_head = cfg.layer, cfg.head, position, source, cfg.units, cfg.reader
        units, n, together = read_head(model, tokenizer, idx, *of_head)
    sys.stdout.reconfigure(errors="replace")  # for a terminal without Unicode
    query = f"{position} {spelled(tokenizer, int(idx[position]))}"
    reader = f"head {cfg.head}" + f" of {cfg.reader}" * bool(cfg.reader)
    reader = cfg.reader if units[0].name.startswith("unit") else reader  # hidden units belong to no head
    title = f"layer {cfg.layer}, {reader}, query {query}"
    print(f"{path}, {title}: {n} units, which together promote {promoted(together)}")
    print_units(units, n)
    if cfg.out:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # characters that the font lacks
            save(picture(units, title), cfg.out)


if __name__ == "__main__":
    command(main)
