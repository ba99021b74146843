"""Heads of attention: one that is read as an MLP, and those that follow a known pattern.

incoming, outgoing, hidden = contextual_mlp(model, idx, layer=2, head=0, position=17)
found = scores(model, batches, ["induction", "previous"])      # pattern -> scores of all heads, the best first

A pattern is a function of idx (B, T) that returns, for each query, the position of the token that the head would attend
to, or -1: (B, T). Its score is how much a head attends to that token.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import model as M
from data.errors import require
from model import Model
from ops import Mask, capped

QUALIFIES = 0.4  # the least score of a head that has a pattern
LISTED = 5  # heads of each pattern that are printed


def self_attention(block: M.Block) -> M.Pool | None:
    """The reader of the context in a block, if there is one."""
    return next((m for m in block.modules() if isinstance(m, M.Pool) and m.reader.source == "context"), None)


# ---------------------------------------------------------------------------------------------------------------------
# A head as an MLP

# Heads and positions that contextual_mlp computes; others are refused.
KNOWN = {
    M.Pool, M.ShapedPool, M.AttentionPosition, M.Rope, M.LocalRope, M.Alibi, M.TwoSidedAlibi,
}  # fmt: skip


@torch.no_grad()
def contextual_mlp(
    model: Model, idx: Tensor, layer: int, head: int, position: int, source: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """A head at one query as an MLP with one unit per visible token: incoming (S, C), outgoing (S, C), hidden (S,).

    idx (T,) is the text, source (S,) the input of a seq2seq model's encoder, and x_t (C,) the normalised stream that
    the layer's self-attention reads at t = position. Then

        b_i = W_Q^T W_K x_i / sqrt(D)    hidden_i = exp(b_i . x_t)    a_i = W_O W_V x_i / Z    Z = sum of exp(b_i . x_t)

    and hidden @ outgoing is the head's term of the attention's output, before the output's bias, dropout, and a norm or
    gain of the block. The units are the slots of a joint pool, then the tokens that t sees. Slots with
    a softmax of their own have their own Z, and their b_i is not rotated.

        pos=rope            b_i is rotated back by the query's position
        pos=alibi           hidden_i = exp(b_i . x_t - slope |t - i|); slots have no such term
        bias                hidden_i = exp(b_i . x_t + c_i), where c_i comes from the bias of W_Q
        qk_norm             b_i includes the norms' gains and the RMS of this query
        attn_softcap=c      hidden_i = exp(c tanh(b_i . x_t / c))
        simplified blocks   hidden_i = beta exp(b_i . x_t) + Z (alpha [i = t] - gamma U_ti)

    The model must be in eval mode. ValueError if layer, head or position does not exist, if a class of the head or of
    its position is not in KNOWN, if a score overflows, or if the head computes something else than its units.
    """
    cfg, D, H = model.cfg, model.cfg.head_size, model.cfg.n_head
    for name, value, limit in (("layer", layer, cfg.n_layer), ("head", head, H), ("position", position, len(idx))):
        require(0 <= value < limit, f"{name}={value} must be in 0 .. {limit - 1}")
    heads = self_attention(model.blocks[layer])
    require(heads is not None, f"contextual_mlp finds no attention to the context in layer {layer}")
    for part in (heads, heads.position):
        require(type(part) in KNOWN, f"contextual_mlp does not know {type(part).__name__}; write its case there")
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
    q = heads.q_norm(q)
    still = q[0, head, position]  # the query without its position, for slots with a softmax of their own
    q, k, v = heads.position(q, heads.k_norm(k), v, inputs.table)
    lo, hi = (int(x[position]) for x in M.Mask(heads.causal, heads.window).reach(len(idx), len(idx), idx.device))
    q, k, v = (x[0, head * x.size(1) // H] for x in (q, k, v))
    q, k, v = q[position], k[lo:hi], v[lo:hi]  # (E,), and what it sees, each (S, E)
    if heads.reader.slots:
        slots = heads.position.slots(heads.k_norm(heads.slot_k), heads.slot_v)
        k, v = (torch.cat((x[head * x.size(0) // H], y)) for x, y in zip(slots, (k, v), strict=True))
    content, bias = (k[:, part] @ q[part] / math.sqrt(D) for part in (slice(D), slice(D, None)))
    apart = len(k) - hi + lo if heads.reader.slots == "own_slots" else 0  # slots with their own softmax
    content[:apart] = k[:apart, :D] @ still / math.sqrt(D)
    own = len(k) - hi + position  # the unit of its own token, whose distance is 0
    bias -= bias[own].clone()
    if (slopes := heads.position.slopes(inputs.table)) is not None:
        bias[len(k) - hi + lo :] -= slopes[head] * (torch.arange(lo, hi, device=idx.device) - position).abs()
    hidden = torch.exp(capped(content, heads.softcap) + bias)
    require(hidden.isfinite().all(), f"a score of layer={layer} head={head} is above 88 and overflows; no activations")
    Z = torch.cat([part.sum().expand_as(part) for part in hidden.tensor_split([apart])])
    if isinstance(heads, M.ShapedPool):
        hidden = heads.beta[head] * hidden - heads.gamma[head] * Z * bias.softmax(0)
        hidden[own] += heads.alpha[head] * Z[own]

    keys = k[:, :D].expand(1, H, -1, -1)
    back, _, _ = heads.position(keys, keys, keys, heads.position.table(idx.new_tensor([-position]), k.dtype))
    back = torch.cat((keys[:, :, :apart], back[:, :, apart:, :D]), dim=2)
    group, member = divmod(head, H // cfg.kv_heads)  # a group of rows holds its query heads, then key and value
    into = heads.qk if isinstance(heads, M.ShapedPool) else heads.qkv
    W_Q = into.weight.unflatten(0, (cfg.kv_heads, -1))[group, member * D : (member + 1) * D]
    incoming = (back[0, head] * scale) @ W_Q
    y = v.new_zeros(len(v), H, D)
    y[:, head] = v[:, :D]
    y = y.flatten(1)  # (S, C), in which a head's channels stand together
    outgoing = (heads.out(y) - heads.out(torch.zeros_like(y))) / Z[:, None]
    error = (hidden @ outgoing - term(heads, x, inputs, head)[position]).norm()
    of_units = (hidden.abs() @ outgoing.abs()).norm()
    require(
        error <= math.sqrt(torch.finfo(x.dtype).eps) * of_units,
        f"layer={layer} head={head} computes something else than its units say, by {error / of_units:.2%} of what its "
        f"units give; {type(heads).__name__} has changed, so write its case into contextual_mlp",
    )
    return incoming, outgoing, hidden


def term(heads: M.Pool, x: Tensor, inputs: M.Inputs, head: int) -> Tensor:
    """A head's term of the attention's output as the module itself computes it from x (1, T, C): (T, C)."""

    def silence(_, args: tuple[Tensor]) -> Tensor:
        """All other heads in the first row of the batch, and all heads in the second."""
        y = args[0].unflatten(-1, (-1, heads.head_dim)).clone()  # (2, T, H, D)
        y[1], y[0, :, :head], y[0, :, head + 1 :] = 0, 0, 0
        return y.flatten(2)

    with heads.out.register_forward_pre_hook(silence):
        alone, nothing = heads.forward(x.expand(2, -1, -1), inputs)  # hooks have had their turn
    return alone - nothing


# ---------------------------------------------------------------------------------------------------------------------
# Patterns


def previous(idx: Tensor) -> Tensor:
    """The token before the query."""
    return torch.arange(-1, idx.size(1) - 1, device=idx.device).expand_as(idx)


def induction(idx: Tensor) -> Tensor:
    """The token after the latest earlier occurrence of the query's token, unless it is the query or the one before."""
    order = idx.argsort(dim=1, stable=True)  # equal tokens stand together, in the order of the text
    ordered = idx.gather(1, order)
    earlier = torch.where(ordered[:, 1:] == ordered[:, :-1], order[:, :-1], -2)
    key = torch.full_like(idx, -2).scatter_(1, order[:, 1:], earlier) + 1
    return key.masked_fill(key >= previous(idx), -1)


PATTERN: dict[str, Callable[[Tensor], Tensor]] = {"induction": induction, "previous": previous}


class Score(NamedTuple):
    """The mean attention of a head to the tokens of a pattern, and that of a head with equal weights."""

    score: float
    even: float
    layer: int
    head: int


def attention_to(keys: Tensor, attend: Callable, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """The weights of keys (P, B, T) in Heads.attend's result, (P, B, H, T), and 0 where a key is -1.

    attend is linear in the values. So it is called with columns of the identity matrix in their place, which give the
    weights of as many keys, and once with zeros, which give the part of the slots. No T x T tensor is made.
    """
    S, E = v.shape[2:]
    zeros, found = attend(q, k, torch.zeros_like(v), mask), 0.0
    for first, columns in enumerate(torch.eye(S, -(-S // E) * E, dtype=v.dtype, device=v.device).split(E, dim=1)):
        weights = attend(q, k, columns.expand_as(v).contiguous(), mask) - zeros  # (B, H, T, E)
        place = (keys - first * E)[:, :, None].expand(-1, -1, q.size(1), -1)  # (P, B, H, T)
        each = weights.expand(len(keys), *weights.shape).gather(-1, place.clamp(0, E - 1)[..., None])[..., 0]
        found = found + each * ((place >= 0) & (place < E))
    return found


@torch.no_grad()
def scores(model: Model, batches: Iterable[dict[str, Tensor]], patterns: list[str]) -> dict[str, list[Score]]:
    """The scores of all heads for each pattern, the best first. Rows of a batch without targets are padding."""
    layers = {i: heads for i, block in enumerate(model.blocks) if (heads := self_attention(block))}
    H, P = model.cfg.n_head, len(patterns)
    total = torch.zeros(model.cfg.n_layer, P, H + 1, dtype=torch.float64)
    count = torch.zeros(P, dtype=torch.int64)

    def watch(layer: int, attend: Callable, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        lo, hi = mask.reach(q.size(2), k.size(2), q.device)  # (T,) or (B, T)
        even = ((keys >= lo) & (keys < hi)) / (hi - lo)  # (P, B, T)
        weights = torch.cat((attention_to(keys, attend, q, k, v, mask), even[:, :, None]), dim=2)  # (P, B, H + 1, T)
        total[layer] += weights.sum((1, 3)).cpu()
        return attend(q, k, v, mask)

    with ExitStack() as undo:
        for layer, heads in layers.items():
            heads.attend = partial(watch, layer, heads.attend)
            undo.callback(heads.__delattr__, "attend")
        for batch in batches:
            batch = {name: x[(batch["targets"] >= 0).any(1)] for name, x in batch.items()}
            docs = batch.get("docs", torch.zeros_like(batch["idx"]))
            ids = batch["idx"] + docs * model.cfg.vocab_size  # equal tokens of two documents are not the same
            keys = torch.stack([PATTERN[name](ids) for name in patterns])  # (P, B, T)
            docs = docs.expand_as(keys)
            keys = keys.where(docs.gather(2, keys.clamp(min=0)) == docs, -1)
            count += (keys >= 0).sum((1, 2)).cpu()
            model(**batch)
    mean = (total / count.clamp(min=1)[:, None]).tolist()
    each = {
        name: [
            Score(x, mean[layer][i][H], layer, head) for layer in layers for head, x in enumerate(mean[layer][i][:H])
        ]
        for i, name in enumerate(patterns)
    }
    return {name: sorted(found, reverse=True) for name, found in each.items()}


def print_scores(pattern: str, heads: list[Score]):
    """Print the heads with the highest scores, and how many of all heads have the pattern."""
    meaning = PATTERN[pattern].__doc__
    print(f"\n{pattern}: attention to {meaning[0].lower()}{meaning[1:]}")
    print("layer  head   score  equal weights")
    for score, even, layer, head in heads[:LISTED]:
        print(f"{layer:5}  {head:4}  {score:.4f}         {even:.4f}")
    good = sum(each.score >= QUALIFIES for each in heads)
    best = f"The best is head {heads[0].head} of layer {heads[0].layer} with {heads[0].score:.4f}."
    print(f"Heads with {QUALIFIES} or more: {good} of {len(heads)}. {best}")
