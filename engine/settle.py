"""Settles what the flags of a run leave open. After parsing, they change here alone, in two calls:

    data, objective = by_data(cfg)     # sets vocab_size=0 and pairs=auto, and what pairs need
    ranks = by_machine(cfg)            # sets dtype=auto, fp32_residual=auto and compile=auto

The first one ends a run before it looks at out_dir if its data are wrong, and plans and evaluations need no other. The
second one asks all ranks, which join only then.
"""

from dataclasses import replace

import torch

from data import DATA
from data.dataset import DataSet, open_data
from data.objective import PAIRS, Objective, objective_of
from engine.config import Config
from engine.parallel.compilation import is_compiled
from engine.parallel.ranks import Ranks, join
from flags import refuse
from ops import wide_stream

AUTO = {"dtype", "compile", "fp32_residual"}  # flags whose `auto` becomes the machine's choice, which a resume keeps


def by_data(cfg: Config) -> tuple[DataSet, Objective]:
    """(the data, the objective). The ids of the objective's own tokens follow those of the data. Sets vocab_size and
    pairs, and with pairs doc_mask and doc_positions, so that a pair is computed as if it were alone."""
    data = open_data(cfg.dataset, DATA, cfg.vocab_size, cfg.verify_data)
    if cfg.pairs == "auto":
        cfg.pairs = data.pairs
    if cfg.pairs:
        check_pairs(cfg, data)
        cfg.doc_mask = True
        cfg.doc_positions = cfg.pos in ("learned", "sinusoidal")
        cfg.__post_init__()  # refuses what does not go with them
    if not data.meta and cfg.objective != "causal":
        fact = "the objective adds ids to those of the data, which do not record their number"
        refuse(cfg, "objective dataset", f'{fact}; write {{"vocab_size": N}} into a meta.json beside the shards')
    data_ids = data.meta.get("vocab_size", cfg.vocab_size)
    objective = objective_of(cfg, data_ids, data.eot)
    if cfg.pairs:
        data = replace(data, pack=objective.pack)
    needed = data_ids + objective.extra_ids
    if cfg.vocab_size == 0:
        cfg.vocab_size = needed
        if needed > 1024:
            cfg.vocab_size = -(-needed // 64) * 64  # large matrix products are faster with such sizes
    if cfg.vocab_size < needed:
        fact = f"has no room for the {needed} ids of the data and objective={cfg.objective}"
        remedy = f"set it to {needed} or more, or leave objective, corrupt_ratio and span_length out"
        refuse(cfg, "vocab_size", f"{fact}; {remedy}")
    return data, objective


def check_pairs(cfg: Config, data: DataSet):
    """ValueError if the data are no pairs, or if flags do not go with pairs."""
    if not data.pairs:
        refuse(cfg, "pairs dataset", "the data have no mask of targets; prepare them with --pairs, or set pairs=False")
    if cfg.objective not in PAIRS:
        refuse(cfg, "objective dataset", "the data are pairs; set objective to causal or seq2seq, or pairs=False")
    for name in {"corrupt_ratio", "span_length"} & cfg.given:
        refuse(cfg, name, f"has no effect on dataset={cfg.dataset}, which holds pairs; leave it out")


def by_machine(cfg: Config, earlier: dict | None = None) -> Ranks:
    """Join the other ranks, with the compilation of this run. Every rank calls this function. If torchrun has started
    a run again, `earlier` has the flags of its checkpoint, and cfg becomes that of a resume."""
    if earlier:
        cfg.init_from = "resume"
        for name in AUTO:
            if getattr(cfg, name) == "auto":
                setattr(cfg, name, earlier[name])
    ranks = join(cfg)
    ranks = replace(ranks, compile=is_compiled(cfg, ranks))
    if cfg.compile == "auto":  # True keeps its value, so that a resume on another machine is compiled again
        cfg.compile = ranks.compile
    by_device(cfg, ranks.device, ranks.dtype)
    return ranks


def by_device(cfg: Config, device: torch.device, dtype: torch.dtype):
    """Sets the dtype of matrix products and, if it is auto, that of the stream."""
    cfg.dtype = str(dtype)[6:]  # without "torch."
    cfg.fp32_residual = wide_stream(cfg.fp32_residual, device, dtype)
