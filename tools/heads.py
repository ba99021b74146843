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


def readers(block: M.Block) -> dict[str, M.Pool]:
    """The readers of a block, by the names that they have in its sums."""
    return {name: getattr(each, name) for each in block.sums for name in each.names}


def context_readers(block: M.Block) -> dict[str, M.Pool]:
    found = readers(block).items()
    return {name: pool for name, pool in found if isinstance(pool, M.Pool) and pool.reader.source == "context"}


# ---------------------------------------------------------------------------------------------------------------------
# A reader as an MLP

# Readers and positions that contextual_mlp computes; others are refused.
KNOWN = {
    M.Pool, M.ShapedPool, M.AttentionPosition, M.Rope, M.LocalRope, M.Alibi, M.TwoSidedAlibi,
}  # fmt: skip


@torch.no_grad()
def contextual_mlp(
    model: Model,
    idx: Tensor,
    layer: int,
    head: int,
    position: int,
    source: Tensor | None = None,
    reader: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """A reader at one query as an MLP: incoming (S, C), outgoing (S, C), hidden (S,) of its S units.

    idx (T,) is the text, source (S,) the input of a seq2seq model's encoder, and x_t (C,) the normalised stream that
    the reader reads at t = position. `reader` is its name, such as attn or mlp; empty = the first one of the context.
    A head of attention has a unit for each visible token:

        b_i = W_Q^T W_K x_i / sqrt(D)    hidden_i = exp(b_i . x_t)    a_i = W_O W_V x_i / Z    Z = sum of exp(b_i . x_t)

    and hidden @ outgoing is the head's term of the reader's output, before the output's bias, dropout, and a norm or
    gain of the block. The units are the slots, then the tokens that t sees. Slots beside the context with a softmax of
    their own have their own Z, and their b_i is not rotated.

        pos=rope            b_i is rotated back by the query's position
        pos=alibi           hidden_i = exp(b_i . x_t - slope |t - i|); slots have no such term
        bias                hidden_i = exp(b_i . x_t + c_i), where c_i comes from the bias of W_Q
        qk_norm             b_i includes the norms' gains and the RMS of this query
        attn_softcap=c      hidden_i = exp(c tanh(b_i . x_t / c))
        .relu and others    hidden_i is the map of the score, with its normaliser, and Z = 1
        simplified blocks   hidden_i = beta exp(b_i . x_t) + Z (alpha [i = t] - gamma U_ti)

    The hidden units of a p, such as the MLP, are its units, and `head` must be 0. b_i of a gated kind belongs to the
    gate. The model must be in eval mode. ValueError if layer, reader, head or position does not exist, if a class of
    the reader or of its position is not in KNOWN, if a score overflows, or if the reader computes something else than
    its units.
    """
    for name, value, limit in (("layer", layer, model.cfg.n_layer), ("position", position, len(idx))):
        require(0 <= value < limit, f"{name}={value} must be in 0 .. {limit - 1}")
    found, usual = readers(model.blocks[layer]), next(iter(context_readers(model.blocks[layer])), "")
    require(reader or usual, f"contextual_mlp finds no attention to the context in layer {layer}")
    pool = found.get(reader or usual)
    require(pool is not None, f"reader={reader} is not in layer {layer}, which has {', '.join(found)}")
    for part in (pool, getattr(pool, "position", M.AttentionPosition(model.cfg))):
        require(type(part) in KNOWN, f"contextual_mlp does not know {type(part).__name__}; write its case there")
    for flag in ("attn_diff", "attn_gate", "attn_sink", "value_residual"):
        value = getattr(model.cfg, flag)
        usual = pool.reader.source != "context" or value in (False, "none")
        require(usual, f"contextual_mlp does not know {flag}={value}; take a model without it, or write its case there")
    heads = 1 if pool.units else pool.n_head
    require(0 <= head < heads, f"head={head} must be in 0 .. {heads - 1}")
    read = []
    with pool.register_forward_pre_hook(lambda _, args: read.extend(args)):
        model.hidden(idx[None], memory=model.encode(None if source is None else source[None]))
    x, inputs = read
    if pool.units:
        incoming, outgoing, hidden = hidden_units(pool, x[0, position])
    else:
        incoming, outgoing, hidden = head_units(pool, x, inputs, head, position)
    error = (hidden @ outgoing - term(pool, x, inputs, head)[position]).norm()
    of_units = (hidden.abs() @ outgoing.abs()).norm()
    require(
        error <= math.sqrt(torch.finfo(x.dtype).eps) * of_units,
        f"layer={layer} head={head} computes something else than its units say, by {error / of_units:.2%} of what its "
        f"units give; {type(pool).__name__} has changed, so write its case into contextual_mlp",
    )
    return incoming, outgoing, hidden


def hidden_units(pool: M.Pool, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """contextual_mlp of the hidden units of a p, for x (C,)."""
    hidden, groups = pool.hidden(x[None, None] if pool.q is None else pool.q(x[None, None]))[0, 0], 1
    incoming, outgoing = pool.up.weight, pool.down.weight
    if isinstance(pool.up, M.GroupedLinear):
        groups = pool.up.groups
        outgoing = outgoing.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)  # (F, C / groups)
    else:
        outgoing = outgoing.T
    if len(pool.rows) == 2:
        incoming = incoming.unflatten(0, (-1, 2, pool.rows[0]))[:, 0].flatten(0, 1)
    slices = torch.eye(groups, dtype=x.dtype, device=x.device).repeat_interleave(len(hidden) // groups, dim=0)
    incoming, outgoing = ((slices[:, :, None] * w[:, None]).flatten(1) for w in (incoming, outgoing))  # each (F, C)
    return incoming, outgoing if pool.out is None else pool.out(outgoing) - pool.out(torch.zeros_like(outgoing)), hidden


def head_units(pool: M.Pool, x: Tensor, inputs: M.Inputs, head: int, position: int) -> tuple[Tensor, Tensor, Tensor]:
    """contextual_mlp of a head that reads tokens or slots, for x (1, T, C)."""
    D, H, T, context = pool.head_dim, pool.n_head, x.size(1), pool.reader.source == "context"
    q, k, v = pool.project(x, inputs)  # before norms and positions: q (1, H, T, D), k and v (1, heads, T or S, D)
    kv_heads = k.size(1)

    scale = q.new_ones(D) / math.sqrt(D)
    if isinstance(pool.q_norm, M.RMSNorm):
        normed = q[0, :, position] if isinstance(pool.q_norm, M.NormOfHeads) else q[0, head, position]
        gain = pool.q_norm.weight.view(-1, D).expand(H, D)[head]
        scale *= gain * (normed.square().mean() + pool.q_norm.eps).rsqrt()
    q = pool.q_norm(q)
    still = q[0, head, position]  # the query without its position, for slots with a softmax of their own
    q, k, v = pool.position(q, pool.k_norm(k), v, inputs.table if context else ())
    lo, hi = 0, k.size(2)
    if context:
        lo, hi = (int(n[position]) for n in Mask(pool.causal, pool.window).reach(T, T, x.device))
    q, k, v = (each[0, head * each.size(1) // H] for each in (q, k, v))
    q, k, v = q[position], k[lo:hi], v[lo:hi]  # (E,), and what it sees, each (S, E)
    if pool.reader.slots:
        slots = pool.position.slots(pool.k_norm(pool.slot_k), pool.slot_v)
        k, v = (torch.cat((each[head * each.size(0) // H], y)) for each, y in zip(slots, (k, v), strict=True))
    content, bias = (k[:, part] @ q[part] / math.sqrt(D) for part in (slice(D), slice(D, None)))
    apart = len(k) - hi + lo if pool.reader.slots == "own_slots" else 0  # slots with their own softmax
    content[:apart] = k[:apart, :D] @ still / math.sqrt(D)
    if context:
        own = len(k) - hi + position  # the unit of its own token, whose distance is 0
        bias -= bias[own].clone()
    if context and (slopes := pool.position.slopes(inputs.table)) is not None:
        bias[len(k) - hi + lo :] -= slopes[head] * (torch.arange(lo, hi, device=x.device) - position).abs()
    score = capped(content, pool.softcap) + bias
    hidden = torch.exp(score) if pool.phi is None else pool.phi(score[None], score.new_tensor([[hi - lo]]))[0]
    require(hidden.isfinite().all(), f"a score of head={head} is above 88 and overflows; no activations")
    Z = torch.cat([part.sum().expand_as(part) for part in hidden.tensor_split([apart])])
    Z = Z if pool.phi is None else torch.ones_like(Z)
    if isinstance(pool, M.ShapedPool):
        hidden = pool.beta[head] * hidden - pool.gamma[head] * Z * bias.softmax(0)
        hidden[own] += pool.alpha[head] * Z[own]

    keys = k[: len(v), :D].expand(1, H, -1, -1)  # of a gated map, those of the gate
    back = keys
    if context:
        table = pool.position.table(torch.tensor([-position], device=x.device), k.dtype)
        back, _, _ = pool.position(keys, keys, keys, table)
        back = torch.cat((keys[:, :, :apart], back[:, :, apart:, :D]), dim=2)
    incoming = (back[0, head] * scale) @ query_matrix(pool, x.size(-1), kv_heads, head)
    y = v.new_zeros(len(v), H, D)
    y[:, head] = v[:, :D]
    y = y.flatten(1)  # (S, H D), in which a head's channels stand together
    return incoming, (pool.out(y) - pool.out(torch.zeros_like(y))) / Z[:, None], hidden


def query_matrix(pool: M.Pool, C: int, kv_heads: int, head: int) -> Tensor:
    """W_Q of a head, (D, C); of the identity if the stream itself is the query."""
    D, into = pool.head_dim, pool.qk if isinstance(pool, M.ShapedPool) else pool.qkv
    if into is not None:  # a group of rows holds its query heads, then key and value
        group, member = divmod(head, pool.n_head // kv_heads)
        return into.weight.unflatten(0, (kv_heads, -1))[group, member * D : (member + 1) * D]
    W_Q = pool.kv.weight.new_ones(C).diag() if pool.reader.query == "stream" else pool.q.weight
    return W_Q[head * D : (head + 1) * D]


def term(pool: M.Pool, x: Tensor, inputs: M.Inputs, head: int) -> Tensor:
    """A head's term of the reader's output as the module itself computes it from x (1, T, C): (T, C). A p is one
    head."""
    D = 0 if pool.units else pool.head_dim

    def silence(_, args: tuple[Tensor]) -> Tensor:
        """All other heads in the first row of the batch, and all heads in the second."""
        y = args[0].unflatten(-1, (-1, D or args[0].size(-1))).clone()  # (2, T, H, D)
        y[1], y[0, :, :head], y[0, :, head + 1 :] = 0, 0, 0
        return y.flatten(2)

    with (pool.down if pool.units else pool.out).register_forward_pre_hook(silence):
        alone, nothing = pool.forward(x.expand(2, -1, -1), inputs)  # hooks have had their turn
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
    reader: str = "attn"


def attention_to(keys: Tensor, attend: Callable, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """The weights of keys (P, B, T) in Pool.attend's result, (P, B, H, T), and 0 where a key is -1.

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
    P = len(patterns)
    pools = {(i, name): pool for i, block in enumerate(model.blocks) for name, pool in context_readers(block).items()}
    total = {place: torch.zeros(P, pool.n_head + 1, dtype=torch.float64) for place, pool in pools.items()}
    count = torch.zeros(P, dtype=torch.int64)

    def watch(place: tuple[int, str], attend: Callable, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        lo, hi = mask.reach(q.size(2), k.size(2), q.device)  # (T,) or (B, T)
        even = ((keys >= lo) & (keys < hi)) / (hi - lo)  # (P, B, T)
        weights = torch.cat((attention_to(keys, attend, q, k, v, mask), even[:, :, None]), dim=2)  # (P, B, H + 1, T)
        total[place] += weights.sum((1, 3)).cpu()
        return attend(q, k, v, mask)

    with ExitStack() as undo:
        for place, pool in pools.items():
            pool.attend = partial(watch, place, pool.attend)
            undo.callback(pool.__delattr__, "attend")
        for batch in batches:
            batch = {name: x[(batch["targets"] >= 0).any(1)] for name, x in batch.items()}
            docs = batch.get("docs", torch.zeros_like(batch["idx"]))
            ids = batch["idx"] + docs * model.cfg.vocab_size  # equal tokens of two documents are not the same
            keys = torch.stack([PATTERN[name](ids) for name in patterns])  # (P, B, T)
            docs = docs.expand_as(keys)
            keys = keys.where(docs.gather(2, keys.clamp(min=0)) == docs, -1)
            count += (keys >= 0).sum((1, 2)).cpu()
            model(**batch)
    found = {name: [] for name in patterns}
    for (layer, reader), sums in total.items():
        for name, (*heads, even) in zip(patterns, (sums / count.clamp(min=1)[:, None]).tolist(), strict=True):
            found[name] += (Score(score, even, layer, head, reader) for head, score in enumerate(heads))
    return {name: sorted(each, reverse=True) for name, each in found.items()}


def print_scores(pattern: str, heads: list[Score]):
    """Print the heads with the highest scores, and how many of all heads have the pattern."""
    meaning = PATTERN[pattern].__doc__
    print(f"\n{pattern}: attention to {meaning[0].lower()}{meaning[1:]}")
    print("layer  head   score  equal weights")
    for score, even, layer, head, reader in heads[:LISTED]:
        print(f"{layer:5}  {head:4}  {score:.4f}         {even:.4f}" + f"  of {reader}" * (reader != "attn"))
    good = sum(each.score >= QUALIFIES for each in heads)
    best = f"The best is head {heads[0].head} of layer {heads[0].layer} with {heads[0].score:.4f}."
    print(f"Heads with {QUALIFIES} or more: {good} of {len(heads)}. {best}")
