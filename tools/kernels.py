"""Counts the kernels of a training step and the bytes that they read and write, part by part, without a GPU.

    python -m tools.kernels --block=parallel    # GPT-2 with 124 M parameters, 12 sequences of 1024 tokens, other flags

Each part runs forward and backward in bfloat16, uncompiled, on tensors that have a shape but no memory. Each operation
that is no view counts as a kernel that reads its inputs and writes its results once. torch.compile makes fewer kernels
of a block, so a block's figures are an upper limit. The loss of a chunk counts as it is compiled: one kernel.
"""

import sys

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ops
from configurator import Config, parse
from data.errors import command, require, user_errors
from engine import optim
from engine.plan.costs import UninitializedModel
from model import Inputs, Shared
from tools.gpu_cases import GPT2


class Kernels(TorchDispatchMode):
    """Counts what runs inside: `n` kernels, which read and write so many bytes."""

    n = read = written = 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out, name = f(*args, **(kwargs or {})), f.name()
        if not f.is_view and not name.startswith(("prim::", "aten::empty", "aten::new_empty", "aten::_unsafe_view")):
            given = zip(f._schema.arguments, (*args, *(kwargs or {}).values()), strict=False)
            changed = [x for each, x in given if each.alias_info and each.alias_info.is_write and each.name != "grads"]
            read = tree_leaves(args[name.startswith(("aten::copy_", "aten::zero_", "aten::fill_")) :])
            if "embedding" in name:
                read = read[1:] if "backward" in name else [out, *read[1:]]  # as many rows as there are tokens
            self.add(read, {id(x): x for x in tree_leaves((changed, out))}.values())
        return out

    def add(self, read: list, written: list):
        """Count a kernel that reads and writes the tensors among these; an expanded one has the bytes of its memory."""
        of_read, of_written = (
            sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in each if isinstance(x, Tensor))
            for each in (read, written)
        )
        self.n, self.read, self.written = self.n + 1, self.read + of_read, self.written + of_written


def parts(cfg: Config) -> dict:
    """Name -> a function that computes a part, whose backward is counted if it returns a result."""
    B, T = cfg.batch_size, cfg.block_size
    rows = ops.equal_rows(B * T, ops.rows_at_once(cfg.loss_chunk, cfg.vocab_size, torch.device("cuda")))
    model = UninitializedModel(cfg, seed=0)
    optimizer, idx = optim.build(model, cfg), torch.zeros(B, T, dtype=torch.int64)
    for p in model.parameters():
        p.grad = torch.empty_like(p)  # of an earlier micro-step
    x = torch.empty(B, T, cfg.n_embd, dtype=torch.bfloat16, requires_grad=True)
    docs = (idx, idx, ops.boundaries(torch.zeros(B, 8, dtype=torch.int64), T)) if cfg.doc_mask else None
    inputs = Inputs(model.position_table(torch.arange(T), torch.float32), docs, None, None, Shared())
    takes_flash = ops.takes_flash
    ops.takes_flash = lambda _, *given: takes_flash("cuda", *given)

    def loss(kernels: Kernels) -> Tensor:
        of_chunk = lambda z, *_: kernels.add([z], [z]) or (torch.empty(()), torch.empty_like(z))  # noqa: E731
        ops.product_ = lambda out, a, b, add: kernels.add([a, b, *[out] * add], [out])  # as on CUDA
        given = model.norm(x).flatten(0, 1), *model.head_parameters(), idx.flatten()
        return ops.ChunkedCrossEntropy.apply(*given, (cfg.logit_softcap, rows, of_chunk, True))

    return {
        "embedding": lambda _: model.embed(idx, 0)[0], "a block": lambda _: model.blocks[0](x, inputs),
        "head and loss": loss, "optimizer": lambda _: optimizer.step(),
    }  # fmt: skip


def main(argv: list[str] | None = None):
    usual = f"{GPT2} --vocab_size=50304 --fp32_residual=False".split()
    with user_errors():
        cfg = parse(Config, usual + (sys.argv[1:] if argv is None else argv), __doc__)
        whole = cfg.tp == cfg.cp == cfg.ep == cfg.pp == 1 and cfg.objective != "seq2seq"
        plain = whole and cfg.activation_checkpoint == "none" and cfg.dtype == "bfloat16" and not cfg.fp8
        fact = "tools.kernels counts one stack of one rank in bfloat16, without fp8 and activation_checkpoint"
        require(plain, f"{fact}; leave out what asks for more")
    print(f"{'part':<16}{'kernels':>8}{'GB read':>9}{'written':>9}")
    with FakeTensorMode(allow_non_fake_inputs=True):
        for name, part in parts(cfg).items():
            with Kernels() as found:
                with torch.autocast("cpu", torch.bfloat16):
                    y = part(found)
                y is None or y.backward(torch.empty_like(y))
            print(f"{name:<16}{found.n:>8}{found.read / 1e9:>9.3f}{found.written / 1e9:>9.3f}", flush=True)


if __name__ == "__main__":
    command(main)
