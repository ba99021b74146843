"""Shows the hidden units of a head of attention, read as an MLP, or of an MLP, read as attention to learned keys.

    python -m tools.lens --out_dir=out/x --start="class Reader:" --layer=1 --head=2            # at the last token
    python -m tools.lens --out_dir=out/x --start=FILE:text.py --layer=1 --head=2 --position=40 --out=head.png
    python -m tools.lens --out_dir=out/x --start="class Reader:" --layer=1 --reader=mlp

The units of a head are its learned slots, then the tokens that the query sees. The last column has the tokens whose
probability the unit raises most. docs/lens.md defines all columns. --out draws the same rows, and needs matplotlib.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import model as M
from configurator import parse
from data.errors import command, printable, reason, require, user_errors
from data.files import user_path
from data.tokenizer import Tokenizer
from engine import weights
from engine.config import Config
from engine.device import resolve_device
from engine.prompts import check_id, prompt_ids, read_prompt
from flags import Flags, refuse
from tools.curves import GREY, MATPLOTLIB, require_matplotlib, save
from tools.heads import contextual_mlp, reader_of, visible

PROMOTED = 3  # tokens of each unit
BARS = {  # field of a unit -> label, colour and number of ticks; the colours are legible on white and on black
    "share": ("share of all activations", "#3b82c4", 4),
    "incoming": ("norm of incoming weights", "#d1782f", 4),
    "outgoing": ("norm of outgoing weights", "#4f9d69", 2),
}


@dataclass
class LensConfig(Flags):
    # --- lens
    out_dir: str = "out"  # the model: a training run, RUN/best, RUN/step_N, ema:RUN, nanogpt:FILE or hf:DIR
    start: str = ""  # the text that the model reads, or FILE:path
    source: str = ""  # the text that the encoder of a seq2seq model reads
    layer: int = 0  # the layer of the head, counted from 0
    reader: str = ""  # attn, mlp, slots, attn2 or another one of the layer; empty = the first of the context
    head: int = 0  # the head, counted from 0
    position: int = -1  # [any] the token that is the query, counted from 0; -1 = the last one
    units: int = 24  # [>0] [<1000] the most units shown: those of the largest activations
    out: str = ""  # picture to write, FILE.png or FILE.svg; empty = text only
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps

    def __post_init__(self):
        super().__post_init__()
        require(self.start, "--start is missing; give a text, such as --start='class Reader:'")
        require(not self.out or Path(self.out).suffix in (".png", ".svg"), f"out={self.out} must end in .png or .svg")


Promoted = list[tuple[str, float]]  # tokens and what a unit adds to their log p


class Unit(NamedTuple):
    """A hidden unit of a reader; docs/lens.md defines its fields."""

    name: str  # the position and the text of its token, or the number of a slot or of a hidden unit
    activation: float
    share: float
    incoming: float
    outgoing: float
    promotes: Promoted


@torch.no_grad()
def read_units(
    model: M.Model, tokenizer: Tokenizer, idx: Tensor, layer: int, head: int, position: int,
    source: Tensor | None = None, most: int = 24, reader: str = "",
) -> tuple[list[Unit], int, Promoted]:  # fmt: skip
    """The `most` units with the largest shares of a reader at one query, slots before tokens; the number of all units;
    and the tokens that all of them promote together. The other arguments are those of contextual_mlp."""
    streams = []  # what the last norm reads
    with model.norm.register_forward_pre_hook(lambda _, args: streams.append(args[0])):
        incoming, outgoing, hidden = contextual_mlp(model, idx, layer, head, position, source, reader)
    pool = reader_of(model, layer, reader)
    slots = pool.slot_v.size(1) if pool.reader.slotted else 0
    apart = slots if pool.reader.slots == "own_slots" else 0  # units with a normaliser of their own
    least = torch.finfo(hidden.dtype).tiny  # instead of 0 / 0
    share = torch.cat([F.normalize(part, p=1, dim=0, eps=least) for part in hidden.tensor_split([apart])])
    rows = share.abs().argsort(descending=True, stable=True)[:most].sort().values
    parts = torch.cat((hidden[rows, None] * outgoing[rows], (hidden @ outgoing)[None]))  # all units together come last
    *promotes, together = promoted(model, tokenizer, parts, streams[-1][0, position])
    if isinstance(pool, M.MLP):
        names = [f"unit {i}" for i in range(len(hidden))]
    else:
        text = source if pool.reader.source == "memory" else idx
        first, _ = visible(pool, position, len(text))
        names = [f"slot {i}" for i in range(slots)]
        names += [f"{first + i} {spelled(tokenizer, int(text[first + i]))}" for i in range(len(hidden) - slots)]
    columns = hidden[rows], share[rows], incoming[rows].norm(dim=1), outgoing[rows].norm(dim=1)
    shown = zip(rows.tolist(), *(column.tolist() for column in columns), promotes, strict=True)
    return [Unit(names[i], *fields) for i, *fields in shown], len(hidden), together


def promoted(model: M.Model, tokenizer: Tokenizer, parts: Tensor, stream: Tensor) -> list[Promoted]:
    """For each part (n, C) of the final stream (C,): the tokens that lose most without it, and the change of log p."""

    def log_p(x: Tensor) -> Tensor:
        return model.logits(model.norm(x)).cpu().double()[..., : tokenizer.vocab_size].log_softmax(-1)

    now = log_p(stream)
    without = log_p(stream - parts)
    tokens = (now.exp() - without.exp()).topk(min(PROMOTED, len(now))).indices
    gains = (now - without).tolist()
    return [
        [(spelled(tokenizer, token), gain[token]) for token in ids if gain[token] > 0]
        for gain, ids in zip(gains, tokens.tolist(), strict=True)
    ]


def spelled(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token in quotation marks, with escapes for what cannot be printed."""
    if token >= tokenizer.vocab_size:
        return f"<id {token}>"
    return f"'{printable(tokenizer.token_bytes[token].decode('utf-8', 'backslashreplace'))}'"


def listed(tokens: Promoted) -> str:
    return "  ".join(f"{token} {value:+.3f}" for token, value in tokens)


def print_units(units: list[Unit], n_all: int):
    """Print a row for each unit, and a line on those that are left out."""
    width = max(len(unit.name) for unit in units)
    print(f"{'unit':{width}}  activation    share     |in|    |out|  promotes")
    for name, *numbers, promotes in units:
        columns = "{:10.4g}  {:7.4f}  {:7.4g}  {:7.4g}".format(*numbers)
        print(f"{name:{width}}  {columns}  {listed(promotes)}")
    if len(units) < n_all:
        print(f"{n_all - len(units)} more units have smaller shares; --units={n_all} shows them")


def picture(units: list[Unit], title: str):
    """A matplotlib Figure with a row for each unit: bars of its share and of its norms, and the tokens it promotes."""
    import matplotlib
    from matplotlib.figure import Figure

    own = {"axes.spines.left": False, "axes.grid": False, "ytick.major.size": 0, "font.size": 9}
    with matplotlib.rc_context(MATPLOTLIB | own):
        figure = Figure(figsize=(10, 1.3 + 0.24 * len(units)), layout="constrained")
        *bars, tokens = figure.subplots(1, 4, sharey=True, width_ratios=(3, 2, 2, 3.4))
    figure.suptitle(title, color=GREY, fontsize=11, parse_math=False)
    for axes, (field, (label, colour, ticks)) in zip(bars, BARS.items(), strict=True):
        axes.barh(range(len(units)), [getattr(unit, field) for unit in units], color=colour)
        axes.set_xlabel(label)
        axes.locator_params(axis="x", nbins=ticks)
        axes.xaxis.set_major_formatter("{x:g}")
    mono = {"family": "monospace", "fontsize": 9, "color": GREY, "parse_math": False}
    bars[0].set_yticks(range(len(units)), [unit.name for unit in units], **mono)
    bars[0].invert_yaxis()
    tokens.spines["bottom"].set_visible(False)
    tokens.tick_params(axis="x", colors="none")  # they still take their place, so that labels are aligned
    tokens.set_xlabel("promotes: change of log p in nats")
    for row, unit in enumerate(units):
        for column, (token, value) in enumerate(unit.promotes):
            short = token if len(token) < 10 else token[:8] + "…"
            place = {"va": "center", "transform": tokens.get_yaxis_transform()}
            tokens.text(column / PROMOTED, row, f"{short} {value:+.3f}", **place, **mono)
    return figure


def read_texts(cfg: LensConfig, flags: Config, tokenizer: Tokenizer) -> tuple[list[int], list[int] | None]:
    """The ids of the text and of the encoder's text. In a model of pairs, end-of-text begins the target and ends the
    source, as in training."""
    text = prompt_ids(tokenizer, read_prompt(cfg.start))
    source = None
    if flags.objective == "seq2seq":
        require(cfg.source, "--source is missing; give the text that the encoder reads")
        source = prompt_ids(tokenizer, cfg.source)
        if flags.pairs is True:
            text = [tokenizer.eot, *text]
            source = [*source, tokenizer.eot]
    elif cfg.source:
        refuse(cfg, "source", f"a model of objective={flags.objective} has no encoder; leave it out")
    limit = flags.block_size
    for name, ids in (("start", text), ("source", source or [])):
        require(len(ids) <= limit, f"{name}: {len(ids)} tokens do not fit in block_size={limit}; shorten it")
        check_id(name, max(ids, default=0), flags.vocab_size)
    return text, source


def main(argv: list[str] | None = None):
    with user_errors():
        cfg = parse(LensConfig, argv, doc=__doc__)
        if cfg.out:
            require_matplotlib()
        device = resolve_device(cfg.device)
        path, model, tokenizer = weights.load_model(cfg.out_dir, device, torch.float32)
        text, source_text = read_texts(cfg, model.cfg, tokenizer)
        idx = torch.tensor(text, device=device)
        source = None
        if source_text is not None:
            source = torch.tensor(source_text, device=device)
        position = len(idx) - 1 if cfg.position == -1 else cfg.position
        of_reader = cfg.layer, cfg.head, position, source, cfg.units, cfg.reader
        try:
            units, n, together = read_units(model, tokenizer, idx, *of_reader)
        except (AttributeError, LookupError, TypeError, RuntimeError) as error:  # of a reader that somebody has changed
            raise ValueError(f"reader={cfg.reader} was changed ({reason(error)}); add it to tools/heads.py") from None
        query = spelled(tokenizer, int(idx[position]))
        title = f"layer {cfg.layer}, {cfg.reader or 'context'}, head {cfg.head}, query {position} {query}"
        print(printable(f"{path}, {title}: {n} units, which together promote {listed(together)}"))
        print_units(units, n)
        if cfg.out:
            save(picture(units, title), user_path(cfg.out))


if __name__ == "__main__":
    command(main)
