"""A head of attention read as an MLP, and an MLP read as attention over learned keys: the hidden units of a reader.

    incoming, outgoing, hidden = contextual_mlp(model, idx, layer=2, head=0, position=17)

In the terms of an MLP, unit i has the incoming weights b_i, the activation h_i and the outgoing weights a_i. In the
terms of attention these are a key, a weight that is not normalised yet, and a value.

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
"""

import math

import torch
from torch import Tensor
from torch.func import jacfwd, jacrev

import model as M
from data.errors import require
from ops import Mask, capped

Pool = M.MultiHeadAttention | M.MLP
Units = tuple[Tensor, Tensor, Tensor]  # incoming, outgoing and hidden of each unit


def reader_of(model: M.Model, layer: int, reader: str) -> Pool:
    """The reader of this name in a layer; empty = the first one of the context. ValueError if there is none."""
    limit = model.cfg.n_layer
    require(0 <= layer < limit, f"layer={layer} must be in 0 .. {limit - 1}")
    found = {name: getattr(each, name) for each in model.blocks[layer].sums for name in each.names}
    pools = {name: pool for name, pool in found.items() if isinstance(pool, Pool) and not isinstance(pool, M.Experts)}
    if not reader:
        reader = next((name for name, pool in pools.items() if pool.reader.source == "context"), "")
        require(reader, f"layer {layer} has no attention to the context; name another reader: {', '.join(found)}")
    require(reader in pools, f"reader={reader} cannot be read in layer {layer}; it has {', '.join(pools)}")
    return pools[reader]


def visible(pool: Pool, position: int, n: int) -> tuple[int, int]:
    """The range [first, end) of the n tokens or slots of a pool that the query sees."""
    if pool.reader.source != "context":
        return 0, n
    first, end = Mask(pool.causal, pool.window).visible_range(n, n, torch.device("cpu"))
    return int(first[position]), int(end[position])


@torch.no_grad()
def contextual_mlp(
    model: M.Model, idx: Tensor, layer: int, head: int, position: int, source: Tensor | None = None, reader: str = ""
) -> Units:
    """A reader at one query as an MLP: incoming (S, C), outgoing (S, C), hidden (S,) of its S units.

    idx (T,) is the text, source (S,) the input of a seq2seq model's encoder, and x_t (C,) the normalised stream that
    the reader reads at t = position. `reader` is its name, such as attn or mlp; empty = the first one of the context.
    The hidden units of a p, such as the MLP, are its units, and `head` must be 0. b_i of a gated kind belongs to the
    gate. The model must be in eval mode. ValueError if layer, reader, head or position does not exist, if a score
    overflows, or if a head computes something else than its units.
    """
    pool = reader_of(model, layer, reader)
    require(0 <= position < len(idx), f"position={position} must be in 0 .. {len(idx) - 1}")
    heads = 1 if isinstance(pool, M.MLP) else pool.n_head
    require(0 <= head < heads, f"head={head} must be in 0 .. {heads - 1}")
    last = pool.down if isinstance(pool, M.MLP) else pool.out
    read = []  # what the reader reads of this text
    results = []  # what its last layer reads: hidden units, or the results of all heads
    with (
        pool.register_forward_pre_hook(lambda _, args: read.extend(args)),
        last.register_forward_pre_hook(lambda _, args: results.extend(args)),
    ):
        model.hidden(idx[None], memory=model.encode(None if source is None else source[None]))
    x, inputs = read
    y = results[0][0, position]  # (F,) or (H D,)
    if isinstance(pool, M.MLP):
        return hidden_units(pool, x[0, position], y)
    incoming, values, hidden = head_units(pool, x, inputs, head, position)
    channels = slice(head * pool.head_size, (head + 1) * pool.head_size)
    error = (hidden @ values - y[channels]).norm()
    of_units = (hidden.abs() @ values.abs()).norm()
    if error > math.sqrt(torch.finfo(x.dtype).eps) * of_units:
        fact = f"computes something else than its units say, by {error / of_units:.2%} of what its units give"
        advice = f"a flag of {type(pool).__name__}, or a change of it, needs a case in contextual_mlp"
        raise ValueError(f"layer={layer} head={head} {fact}; {advice}")
    W_O = jacfwd(pool.out)(y)[:, channels]  # (C, D)
    return incoming, values @ W_O.T, hidden


def hidden_units(pool: M.MLP, x: Tensor, hidden: Tensor) -> Units:
    """contextual_mlp of the hidden units (F,) of a p, for x (C,)."""
    incoming = jacfwd(pool.up)(x)  # (F, C), and of a gated kind (2 F, C)
    incoming = incoming.unflatten(0, (-1, len(pool.pieces), pool.pieces[0]))[:, 0].flatten(0, 1)
    outgoing = jacrev(lambda h: pool.out(pool.down(h)))(hidden).T  # jacfwd would make an F x F matrix
    return incoming, outgoing, hidden


def head_units(pool: M.MultiHeadAttention, x: Tensor, inputs: M.Inputs, head: int, position: int) -> Units:
    """Incoming (S, C), values / Z (S, D) and hidden (S,) of a head that reads tokens or slots, for x (1, T, C)."""
    context = pool.reader.source == "context"
    q, k, v = pool.project(x, inputs)  # before norms and positions: q (1, H, T, D), k and v (1, heads, T or S, D)
    queries = query_rows(pool, x[0, position], inputs, q[:, :, [position]])  # (1, H, C + 1, D)
    placed = queries
    if context:
        table = tuple(entry[..., position : position + 1, :] for entry in inputs.table)
        placed, _, _ = pool.position(queries, queries, queries, table)  # (1, H, C + 1, E)
    _, k, v = pool.position(pool.q_norm(q), pool.k_norm(k), v, inputs.table if context else ())
    first, end = visible(pool, position, k.size(2))
    n = end - first

    def of_head(y: Tensor) -> Tensor:
        """(heads, S, E) -> (S, E) of the head's group."""
        return y[head * len(y) // pool.n_head]

    keys, values = of_head(k[0])[first:end], of_head(v[0])[first:end]
    if pool.reader.slots == "joint_slots":
        slot_k, slot_v = pool.position.slots(*pool.slots(k.dtype))
        keys = torch.cat((of_head(slot_k), keys))
        values = torch.cat((of_head(slot_v), values))
    own = len(keys) - n + position - first if context else None
    parts = [units_of_keys(pool, head, keys, values, placed[0, head], n, own)]
    if pool.reader.slots == "own_slots":  # a softmax of their own, without positions
        slot_k, slot_v = pool.slots(k.dtype)
        parts.insert(0, units_of_keys(pool, head, of_head(slot_k), of_head(slot_v), queries[0, head]))
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def query_rows(pool: M.MultiHeadAttention, x: Tensor, inputs: M.Inputs, q: Tensor) -> Tensor:
    """W_Q^T of each head at x (C,), and as the last row the query q (1, H, 1, D), both with q's norm: (1, H, C + 1, D).
    Their products with the keys are the incoming weights and the scores."""
    W_Q = jacfwd(lambda x: pool.project(x[None, None], inputs)[0])(x)[:, :, 0].mT  # (1, H, C, D)
    if isinstance(pool.q_norm, M.RMSNorm):
        rms = (q.square().mean(-1, keepdim=True) + pool.q_norm.eps).sqrt()
        W_Q = W_Q * pool.q_norm.weight / rms
    return torch.cat((W_Q, pool.q_norm(q)), dim=2)


def units_of_keys(
    pool: M.MultiHeadAttention, head: int, keys: Tensor, values: Tensor, queries: Tensor, n: int = 0,
    own: int | None = None,
) -> Units:  # fmt: skip
    """The units of keys and values (S, E) with one normaliser: incoming (S, C), values / Z (S, D), hidden (S,), for
    queries (C + 1, E), see query_rows. The query sees n tokens, and `own` is the index of its own, if that is there."""
    D = pool.head_size
    scores = keys[:, :D] @ queries[:, :D].T / math.sqrt(D)  # (S, C + 1)
    bias = keys[:, D:] @ queries[-1, D:] / math.sqrt(D)  # of ALiBi's columns
    if own is not None:
        bias = bias - bias[own]  # a token's distance to itself is 0
    score = capped(scores[:, -1], pool.softcap) + bias
    if pool.phi is None:
        hidden = score.exp()
        Z = hidden.sum()
    else:
        hidden = pool.phi(score[None], score.new_tensor([[n]]))[0]
        Z = torch.ones_like(hidden[0])
    require(hidden.isfinite().all(), f"a score of head={head} is above 88 and overflows; no activations")
    if isinstance(pool, M.ShapedAttention):
        hidden = pool.beta[head] * hidden - pool.gamma[head] * Z * bias.softmax(0)
        hidden[own] += pool.alpha[head] * Z
    return scores[: len(values), :-1], values[:, :D] / Z, hidden  # of a gated map, the scores of the gate
