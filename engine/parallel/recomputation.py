"""Recomputation of a block's results in its backward, which saves their memory (arXiv:1604.06174).

recompute(block, "selective")       in place; before torch.compile and FSDP
"""

import torch
import torch.nn as nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ops import product_of_onednn

aten = torch.ops.aten
# Experts' products are not among these, because they are too large.
MATMULS = {aten.mm.default, aten.addmm.default, aten.bmm.default, product_of_onednn.default}
# Other operations whose results selective recomputation keeps, because they are slow. A CPU's attention_products is not
# one of them, because it also returns weights, which would take more memory than recomputation saves.
KEPT = {
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._flash_attention_forward.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def recompute(block: nn.Module, kind: str):
    """Make the block's backward recompute the forward's results instead of keeping them. If `kind` is full, all; if it
    is selective, all except those of KEPT and of every second matrix product."""
    forward = block.forward
    options = {"context_fn": selective_contexts} if kind == "selective" else {}

    def recomputed(*args, **kwargs):  # not a partial of checkpoint, which torch.compile would skip
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    block.forward = recomputed


def selective_contexts() -> tuple:
    """The contexts of a block's forward and of its recomputation, which keep what `recompute` says: of the products the
    first, third, ..., because the results of the others are usually only added to the stream."""
    products = {False: 0, True: 0}  # so far, in the forward and in the recomputation

    def policy(context, op, *args, **kwargs) -> CheckpointPolicy:
        products[context.is_recompute] += op in MATMULS
        kept = op in KEPT or op in MATMULS and products[context.is_recompute] % 2
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
