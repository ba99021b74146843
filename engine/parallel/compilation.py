"""Decides whether a run is compiled, compiles its model, and chooses where the kernels are kept.

docs/performance.md says what is compiled, and what that gives.
"""

import hashlib
import os
import platform
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn

from engine.config import Config
from engine.parallel.ranks import Ranks, on_every_rank
from model import ExpertLinear, MultiHeadAttention, Stack
from ops import linear_by_linear, strip_attention

MOST_IN_STRIPS = 1024  # tokens; each strip of attention is compiled for itself, in seconds
GRAPHS = 64  # most graphs of one function: each kind of block has one for training and one for evaluation
FOLDER = "TORCHINDUCTOR_CACHE_DIR"
CHOSEN = os.environ.get(FOLDER)  # by the user; read now: torch sets the variable when dynamo is imported


def is_compiled(cfg: Config, ranks: Ranks) -> bool:
    """Whether the run is compiled, if its flags ask for it. Every rank calls this function. Where torch.compile does
    not work on one of them, the run goes on without it."""
    if cfg.eval_only and ranks.device.type == "cpu" and "compile" not in cfg.given:
        return False  # one evaluation takes less time than the compilation that a checkpoint's flag asks for
    return ranks.compile and works(ranks)


def works(ranks: Ranks) -> bool:
    """Whether torch.compile works on every rank's device. Prints what is done, and the cause if it does not work."""
    if ranks.rank == 0 and ranks.device.type == "cpu":
        time = "15 to 60 seconds, or about 5 with the kernels of an earlier run"
        print(f"compiling for this CPU before the first step: {time}; --compile=False leaves it out", flush=True)
    try:
        on_every_rank(partial(try_compiler, ranks.device))
    except ValueError as error:
        if ranks.rank == 0:
            fact = "torch.compile does not work here, so this run is not compiled and takes longer"
            print(f"warning: {fact}: {error}, or leave it out with --compile=False", flush=True)
        return False
    return True


def try_compiler(device: torch.device):
    """Compile a small kernel for the device and call it. ValueError if that fails, as without Python's headers, or in
    a folder that cannot be written."""
    try:
        choose_folder()
        graph = torch.fx.symbolic_trace(lambda x: x + 1)
        x = torch.ones(64, device=device)
        torch._inductor.compile(graph, [x])(x)
    except Exception as error:  # of many classes, and whichever it is, the run can do without
        lines = str(error).splitlines()
        of_compiler = [line for line in lines if "error: " in line]  # of which the first one tells most
        of_process = [line for line in lines if "Error: " in line]  # in a traceback, whose last line tells most
        cause = [*of_compiler, *reversed(of_process), *filter(None, lines), type(error).__name__][0]
        # The CPU's kernels are in C++, and CUDA's need a C compiler to be started.
        compiler, variable = ("g++", "CXX") if device.type == "cpu" else ("gcc", "CC")
        remedy = f"install {compiler} and Python's headers, or name a compiler in the variable {variable}"
        remedy += f" or a folder for kernels, without a blank in its path, in {FOLDER}"
        raise ValueError(f"{cause:.200}; {remedy}") from error


def compile_model(model: nn.Module, parts: Sequence[nn.Module], inside: bool = False):
    """Compile each part, in place, and the loss of a chunk. A part is a block, or a stack for one graph of its blocks.
    With `inside`, `recompute` may be applied to blocks afterwards."""
    choose_folder()
    config = torch._dynamo.config
    config.optimize_ddp = False  # in DDP's forward it would cut each block into pieces; our graphs are small already
    config.skip_fwd_side_effects_in_bwd_under_checkpoint = True  # recomputation need not repeat them
    config.recompile_limit = max(config.recompile_limit, GRAPHS)
    torch._functorch.config.graphsafe_rng_functionalization = False  # no checkpoint has its generators
    torch._inductor.config.deterministic = torch.are_deterministic_algorithms_enabled()  # no choices by timings
    if model.cfg.block_size > MOST_IN_STRIPS and model.cfg.activation_checkpoint == "none":  # which needs whole graphs
        reason = f"attention in strips of queries, with block_size above {MOST_IN_STRIPS}"
        strips = torch.compiler.disable(strip_attention, reason=reason)
        for heads in (module for module in model.modules() if isinstance(module, MultiHeadAttention)):
            heads.strips = strips
    loop = torch.compiler.disable(linear_by_linear, reason="a product for each expert, whose rows differ in number")
    for experts in (module for module in model.modules() if isinstance(module, ExpertLinear)):
        experts.loop = loop
    for part in parts:
        if isinstance(part, Stack):
            part.through_blocks = torch.compile(part.through_blocks)
        elif inside:
            part.forward = torch.compile(part.forward)
        else:
            part.compile()
    model.chunk_loss = torch.compile(model.chunk_loss, dynamic=False)


def choose_folder():
    """Make torch.compile keep its kernels in the user's cache, unless the user has chosen a folder. That of torch is
    below /tmp and has a name that others can guess, and torch loads what is there without asking who has made it."""
    if not CHOSEN:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        os.environ[FOLDER] = str(Path(caches, "superblock", "inductor", kind_of_kernels()))


def kind_of_kernels() -> str:
    """The name of a folder whose kernels run here. Machines may share a home, and torch.compile, which compiles with
    -march=native, looks neither at the CPU's instructions nor at ATEN_CPU_CAPABILITY. So the name has both, and the
    versions of torch and Python."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    instructions = {line for line in lines if line.startswith(("flags", "Features"))}  # the same line for each core
    python = sys.implementation.cache_tag
    kind = hashlib.sha256(repr((python, platform.machine(), sorted(instructions))).encode()).hexdigest()[:8]
    return f"torch{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}-{kind}"
