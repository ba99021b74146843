"""FSDP2 (arXiv:2304.11277): which parameters its ranks gather together, in which dtype, and which they keep whole.

shard(model, cfg, ranks)        # in place, after tensor parallelism, recomputation and compilation
"""

from dataclasses import replace

import torch
import torch.nn as nn

from engine.parallel.ranks import Ranks
from model import Block, Experts, Gain, LoadBalance, Model, ShapedAttention, stream_dtype


def kept_whole(part: nn.Module) -> list[nn.Parameter]:
    """The parameters that FSDP does not shard: gains of a block or of each head, and the biases of experts."""
    whole = []
    for module in part.modules():
        if isinstance(module, Gain | ShapedAttention | LoadBalance):
            whole += module.parameters(recurse=False)
    return whole


def fsdp_units(model: Model) -> dict[str, list[nn.Module]]:
    """What FSDP gathers at once: each block, the ends of the model if they are not tied, and the rest, which is last.
    A stage of a pipeline may lack ends."""
    units: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Block):
            units[name] = [module]
    if not model.cfg.tie_weights:
        if isinstance(model.wte, nn.Embedding):
            units["wte"] = [model.wte]
        if isinstance(model.head, nn.Linear):
            units["head"] = [model.norm, model.head]
    units["root"] = [model]
    return units


def shard(model: Model, cfg, ranks: Ranks):
    """Apply FSDP2 to each of `fsdp_units`.

    In 16 bits, blocks and ends are gathered in the matmuls' dtype, and the rest in float32. Gains are not sharded
    (`kept_whole`): in bfloat16 they would move in steps of 2^-8. Experts that ranks divide are sharded over those with
    the same ones. Only blocks before the last one are freed after their forward, as the others are needed at once.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dims = ("replicate", "shard") if ranks.mesh["replicate"].size() > 1 else "shard"
    options = {"mesh": ranks.mesh[dims], "ignored_params": {*kept_whole(model)}}
    if cfg.fsdp_offload:
        options = {"mesh": ranks.mesh[dims], "offload_policy": CPUOffloadPolicy(ranks.device.type == "cuda")}
    policy = MixedPrecisionPolicy()
    if ranks.dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=ranks.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    with ranks.autocast():
        stream = stream_dtype(cfg, torch.empty(0, device=ranks.device))
    for unit, modules in fsdp_units(model).items():
        chosen = options | {"mp_policy": policy, "reshard_after_forward": False}
        if unit == "root":
            chosen["mp_policy"] = MixedPrecisionPolicy()
        elif unit == "wte":
            chosen["mp_policy"] = replace(policy, output_dtype=stream)
        elif unit == "head":
            model.head.forward = model.loss
            model.loss = lambda x, targets: model.head(x, targets)
        else:
            [block] = modules
            if cfg.pp > 1 or block is not model.blocks[-1]:
                chosen["reshard_after_forward"] = cfg.fsdp_reshard
            for m in block.modules():
                if ranks.experts and isinstance(m, Experts):
                    fully_shard([m.up, m.down], **chosen | {"mesh": ranks.experts[dims]})
        fully_shard(modules, **chosen)
