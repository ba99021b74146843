"""Computes the MLP that equals a head of attention at one query; the context determines the weights of this MLP.

from lens import contextual_mlp
incoming, outgoing, hidden = contextual_mlp(model, idx, layer=2, head=0, position=17)
"""

import math

import torch
from torch import Tensor

import model as M
from model import require

# Heads and positions that contextual_mlp computes; others are refused.
KNOWN = {
    M.ContextPool, M.SlotPool, M.ShapedPool, M.AttentionPosition, M.Rope, M.LocalRope, M.Alibi, M.TwoSidedAlibi,
}  # fmt: skip


@torch.no_grad()
def contextual_mlp(
    model: M.Model, idx: Tensor, layer: int, head: int, position: int, source: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """A head at one query as an MLP with one unit per visible token: incoming (S, C), outgoing (S, C), hidden (S,).

    idx (T,) is the text, source (S,) the input of a seq2seq model's encoder, and x_t (C,) the normalised stream that
    the layer's self-attention reads at t = position. Then

        b_i = W_Q^T W_K x_i / sqrt(D)    hidden_i = exp(b_i . x_t)    a_i = W_O W_V x_i / Z    Z = sum of exp(b_i . x_t)

    and hidden @ outgoing is the head's term of the attention's output, before the output's bias, dropout, and a norm or
    gain of the block. The units are the slots of a joint pool, then the tokens that t sees.

        pos=rope            b_i is rotated back by the query's position
        pos=alibi           hidden_i = exp(b_i . x_t - slope |t - i|); slots have no such term
        bias                hidden_i = exp(b_i . x_t + c_i), where c_i comes from the bias of W_Q
        qk_norm             b_i includes the norms' gains and the RMS of this query
        attn_softcap=c      hidden_i = exp(c tanh(b_i . x_t / c))
        simplified blocks   hidden_i = beta exp(b_i . x_t) + Z (alpha [i = t] - gamma U_ti)

    The model must be in eval mode; a score above 88 overflows in float32. ValueError if layer, head or position does
    not exist, or if a class of the head or of its position is not in KNOWN.
    """
    cfg, D, H = model.cfg, model.cfg.head_size, model.cfg.n_head
    for name, value, limit in (("layer", layer, cfg.n_layer), ("head", head, H), ("position", position, len(idx))):
        require(0 <= value < limit, f"{name}={value} must be in 0 .. {limit - 1}")
    modules = model.blocks[layer].modules()
    heads = next((m for m in modules if isinstance(m, M.Heads) and not isinstance(m, M.MemoryPool)), None)
    require(heads is not None, f"contextual_mlp finds no attention to the context in layer {layer}")
    for part in (heads, heads.position):
        require(type(part) in KNOWN, f"contextual_mlp does not know {type(part).__name__}; write its case into lens.py")
    read = []
    with heads.register_forward_pre_hook(lambda _, args: read.extend(args)):
        model.hidden(idx[None], memory=model.encode(None if source is None else source[None]))
    x, inputs = read
    q, k, v = heads.project(x, inputs)  # before norms and positions: q (1, H, T, D), k and v (1, heads, T, D)

    scale = q.new_ones(D) / math.sqrt(D)
    if cfg.qk_norm:
        normed = q[0, :, position] if cfg.qk_norm_width == "model" else q[0, head, position]
        gain = heads.q_norm.weight.view(-1, D).expand(H, D)[head]
        scale *= gain * (normed.square().mean() + heads.q_norm.eps).rsqrt()
    q, k, v = heads.position(heads.q_norm(q), heads.k_norm(k), v, inputs.table)
    lo, hi = (int(x[position]) for x in M.Mask(heads.causal, heads.window).reach(len(idx), len(idx), idx.device))
    q, k, v = (x[0, head * x.size(1) // H] for x in (q, k, v))
    q, k, v = q[position], k[lo:hi], v[lo:hi]  # (E,), and what it sees, each (S, E)
    if isinstance(heads, M.SlotPool):
        slots = heads.position.slots(heads.k_norm(heads.slot_k), heads.slot_v)
        k, v = (torch.cat((x[head * x.size(0) // H], y)) for x, y in zip(slots, (k, v), strict=True))
    content, bias = (k[:, part] @ q[part] / math.sqrt(D) for part in (slice(D), slice(D, None)))
    own = len(k) - hi + position  # the unit of its own token, whose distance is 0
    bias -= bias[own].clone()
    if (slopes := heads.position.slopes(inputs.table)) is not None:
        bias[len(k) - hi + lo :] -= slopes[head] * (torch.arange(lo, hi, device=idx.device) - position).abs()
    hidden = torch.exp(M.capped(content, heads.softcap) + bias)
    Z = hidden.sum()
    if isinstance(heads, M.ShapedPool):
        hidden = heads.beta[head] * hidden - heads.gamma[head] * Z * bias.softmax(0)
        hidden[own] += heads.alpha[head] * Z

    keys = k[:, :D].expand(1, H, -1, -1)
    back, _, _ = heads.position(keys, keys, keys, heads.position.table(idx.new_tensor([-position]), k.dtype))
    group, member = divmod(head, H // cfg.kv_heads)  # a group of rows holds its query heads, then key and value
    into = heads.qk if isinstance(heads, M.ShapedPool) else heads.qkv
    W_Q = into.weight.unflatten(0, (cfg.kv_heads, -1))[group, member * D : (member + 1) * D]
    incoming = (back[0, head, :, :D] * scale) @ W_Q
    y = v.new_zeros(len(v), H, D)
    y[:, head] = v[:, :D]
    y = y.flatten(1)  # (S, C), in which a head's channels stand together
    return incoming, (heads.out(y) - heads.out(torch.zeros_like(y))) / Z, hidden
