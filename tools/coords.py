"""Coordinate check of muP (arXiv:2203.03466, appendix D.1): do activations keep their size as the model grows wider?

    python -m tools.coords config/train_pycode.py --optimizer=adamw --learning_rate=0.01 --n_layer=2 --block_size=64

trains models of widths 64 to 512 for four steps on the same random tokens, with --mup_base_width=64 and without. For
each kind of layer it prints the mean |x - x_0| of its result x, where x_0 is that before the first step, and the slope
of its logarithm against that of the width: near 0 with muP. The picture goes to out_dir/coords.png. With --head_dim,
n_head and n_kv_head are those of width 64 and grow with it; otherwise heads grow.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from configurator import COMMAND_LINE, Config, parse
from data.errors import command, require, user_errors
from engine import optim
from model import Model, Sum
from tools import curves

WIDTHS = 64, 128, 256, 512
STEPS = 4
VOCAB = 64


def of_width(cfg: Config, width: int, base: int) -> Config:
    """The flags of a model of this width, whose heads grow in number or in size."""
    n = width // WIDTHS[0] if cfg.head_dim else 1
    heads = {"n_head": n * cfg.n_head, "n_kv_head": n * cfg.n_kv_head}
    return replace(cfg, n_embd=width, mup_base_width=base, vocab_size=VOCAB, **heads)


def results(model: Model, idx: torch.Tensor) -> dict[str, torch.Tensor]:
    """Kind of layer -> the results of all its layers, for idx (B, T)."""
    found: dict[str, list] = {}
    layers = [("embedding", model.wte), ("last norm", model.norm)]
    layers += [(name, getattr(m, name)) for m in model.modules() if isinstance(m, Sum) for name in m.names]
    hooks = [
        module.register_forward_hook(lambda _, args, y, kind=kind: found.setdefault(kind, []).append(y.detach()))
        for kind, module in layers
    ]
    logits = model(idx, **({"source": idx} if model.encoder else {})).detach()
    for hook in hooks:
        hook.remove()
    return {kind: torch.cat([y.flatten() for y in ys]) for kind, ys in found.items()} | {"logits": logits.flatten()}


def moved(cfg: Config) -> dict[str, float]:
    """Kind of layer -> the mean |x - x_0| after STEPS steps."""
    model = Model(cfg, seed=cfg.seed)
    optimizer = optim.build(model, cfg)
    idx = torch.randint(VOCAB, (cfg.batch_size, cfg.block_size), generator=torch.Generator().manual_seed(cfg.seed))
    before = results(model, idx)
    for _ in range(STEPS):
        optimizer.set_lr(cfg.learning_rate)
        model.zero_grad()
        model(idx, idx.roll(-1, 1), **({"source": idx} if model.encoder else {})).backward()
        optimizer.step()
    return {kind: (x - before[kind]).abs().mean().item() for kind, x in results(model, idx).items()}


def check(cfg: Config, base: int, widths: Iterable[int]) -> dict[str, tuple[list[float], float]]:
    """Kind of layer -> its mean |x - x_0| at each width, and the slope of their logarithms."""
    rows = [moved(of_width(cfg, width, base)) for width in widths]
    sizes = {kind: [row[kind] for row in rows] for kind in rows[0]}
    return {kind: (y, float(np.polyfit(np.log(list(widths)), np.log(y), 1)[0])) for kind, y in sizes.items()}


def main(argv: list[str] | None = None):
    with user_errors():
        cfg = parse(Config, argv, __doc__)
        unread = "n_embd mup_base_width vocab_size device dtype".split()
        own = [name for name in unread if cfg.sources.get(name) == COMMAND_LINE]
        require(not own, f"tools.coords sets {', '.join(own)} itself, in float32 on the CPU; leave it out")
        curves.require_matplotlib()
        found = {name: check(cfg, base, WIDTHS) for name, base in (("without muP", 0), ("with muP", WIDTHS[0]))}
        print("".join(f"{title:>11}" for title in ("", *map(str, WIDTHS), "slope")))
        panels, x = {}, np.array(WIDTHS, dtype=float)
        for name, kinds in found.items():
            print(name)
            for kind, (y, slope) in kinds.items():
                print(f"{kind:>11}" + "".join(f"{each:11.4f}" for each in y) + f"{slope:11.2f}")
            panels[name] = [
                curves.Line(kind, x, np.array(y), np.array(y), np.array(y), colour, "-o")
                for (kind, (y, _)), colour in zip(kinds.items(), curves.COLOURS, strict=False)
            ]
        out = str(Path(cfg.out_dir) / "coords.png")
        options = curves.PlotConfig(log="xy", out=out)
        curves.save(curves.draw(panels, "width", "mean |x - x_0|", options), out)
    print(f"wrote {out}")


if __name__ == "__main__":
    command(main)
