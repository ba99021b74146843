"""FSDP2 (arXiv:2304.11277): which parameters its ranks gather together, in which dtype, and which they keep whole.

shard(model, cfg, ranks)        # in place, after tensor parallelism, recomputation and compilation
"""

import warnings
from dataclasses import replace

import torch
import torch.nn as nn

from engine.config import Config
from engine.parallel.ranks import Ranks
from model import Block, Experts, Gain, LoadBalance, Model, ShapedAttention, stream_dtype


def kept_whole(part: nn.Module) -> list[nn.Parameter]:
    """The parameters that FSDP does not shard: gains of a block or of each head, and the biases of experts."""
    whole = []
    for module in part.modules():
        if isinstance(module, Gain | ShapedAttention | LoadBalance):
            whole += module.parameters(recurse=False)
    return whole


def shard(model: Model, cfg: Config, ranks: Ranks):
    """Apply FSDP2 to each block, to the ends of the model if they are not tied, and to the rest. Each is gathered at
    once. A stage of a pipeline may lack ends.

    In 16 bits, blocks and ends are gathered in the matmuls' dtype, and the rest in float32. Gains are not sharded
    (`kept_whole`): in bfloat16 they would move in steps of 2^-8. Experts that ranks divide are sharded over those with
    the same ones. Only blocks before the last one are freed after their forward, as the others are needed at once.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if cfg.tp > 1:  # the embedding's result, of tensor.scattered, is a view, which nothing changes in place
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    dims = ("replicate", "shard") if ranks.mesh["replicate"].size() > 1 else "shard"
    options = {"mesh": ranks.mesh[dims], "reshard_after_forward": False, "ignored_params": {*kept_whole(model)}}
    policy = MixedPrecisionPolicy()
    if ranks.dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=ranks.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in [m for m in model.modules() if isinstance(m, Block)]:
        freed = cfg.fsdp_reshard and (cfg.pp > 1 or block is not model.blocks[-1])
        chosen = options | {"mp_policy": policy, "reshard_after_forward": freed}
        for m in block.modules():
            if ranks.experts and isinstance(m, Experts):
                fully_shard([m.up, m.down], **chosen | {"mesh": ranks.experts[dims]})
        fully_shard(block, **chosen)
    if not cfg.tie_weights and isinstance(model.wte, nn.Embedding):
        with ranks.autocast():
            stream = stream_dtype(cfg, torch.empty(0, device=ranks.device))
        fully_shard(model.wte, mp_policy=replace(policy, output_dtype=stream), **options)
    if not cfg.tie_weights and isinstance(model.head, nn.Linear):
        model.head.forward = model.loss
        model.loss = lambda x, targets: model.head(x, targets)
        fully_shard([model.norm, model.head], mp_policy=policy, **options)
    fully_shard(model, **options)
