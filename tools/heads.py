"""Heads of attention: one that is read as an MLP, and those that follow a known pattern. Also what experts read.

incoming, outgoing, hidden = contextual_mlp(model, idx, layer=2, head=0, position=17)
found = scores(model, batches, ["induction", "previous"])      # pattern -> scores of all heads, the best first
best = preferred(reads_of_tokens(model, experts, batches), expert=2, most=24)   # the tokens that it prefers

A pattern is a function of idx (B, T) that returns, for each query, the position of the token that the head would attend
to, or -1: (B, T). Its score is how much a head attends to that token.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import model as M
from data.errors import require
from ops import Mask, capped


def readers(block: M.Block) -> dict[str, M.Pool | M.Experts]:
    """The readers of a block, by the names that they have in its sums."""
    return {name: getattr(each, name) for each in block.sums for name in each.names}


def reader_of(model: M.Model, layer: int, reader: str) -> M.Pool | M.Experts:
    """The reader of this name in a layer; empty = the first one of the context. ValueError if there is none."""
    limit = model.cfg.n_layer
    require(0 <= layer < limit, f"layer={layer} must be in 0 .. {limit - 1}")
    found, usual = readers(model.blocks[layer]), next(iter(context_readers(model.blocks[layer])), "")
    require(reader or usual, f"reader='' means attention to the context, and layer {layer} has {', '.join(found)}")
    require((reader or usual) in found, f"reader={reader} is not in layer {layer}, which has {', '.join(found)}")
    return found[reader or usual]


def context_readers(block: M.Block) -> dict[str, M.Pool]:
    found = readers(block).items()
    return {name: pool for name, pool in found if isinstance(pool, M.Pool) and pool.reader.source == "context"}


# ---------------------------------------------------------------------------------------------------------------------
# A reader as an MLP

# Readers and positions that contextual_mlp computes; others are refused.
KNOWN = {M.Pool, M.ShapedPool, M.AttentionPosition, M.Rope, M.Alibi, M.TwoSidedAlibi}


@torch.no_grad()
def contextual_mlp(
    model: M.Model, idx: Tensor, layer: int, head: int, position: int, source: Tensor | None = None, reader: str = ""
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
    pool = reader_of(model, layer, reader)
    require(0 <= position < len(idx), f"position={position} must be in 0 .. {len(idx) - 1}")
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
    units = hidden_units(pool, x[0, position]) if pool.units else head_units(pool, x, inputs, head, position)
    _, outgoing, hidden = units
    error = (hidden @ outgoing - term(pool, x, inputs, head)[position]).norm()
    of_units = (hidden.abs() @ outgoing.abs()).norm()
    fact = f"computes something else than its units say, by {error / of_units:.2%} of what its units give"
    advice = f"{type(pool).__name__} has changed, so write its case into contextual_mlp"
    require(error <= math.sqrt(torch.finfo(x.dtype).eps) * of_units, f"layer={layer} head={head} {fact}; {advice}")
    return units


def linear_part(f: Callable[[Tensor], Tensor], n: int, like: Tensor) -> Tensor:
    """The matrix of an affine map of (1, T, n), whose rows are f(e) - f(0) for the unit vectors e: (..., n, channels).

    like    a tensor whose dtype and device f takes
    """
    y = f(torch.eye(n + 1, n, dtype=like.dtype, device=like.device)[None])
    return y[..., :-1, :] - y[..., -1:, :]


def hidden_units(pool: M.Pool, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """contextual_mlp of the hidden units of a p, for x (C,)."""
    hidden = M.activations(pool.phi, pool.rows, pool.up(x[None, None]))[0, 0]
    incoming = linear_part(pool.up, len(x), x)[0]  # (C, F), and of a gated kind (C, 2 F)
    if len(pool.rows) == 2:
        incoming = incoming.unflatten(1, (-1, 2, pool.rows[0]))[:, :, 0].flatten(1)
    down = lambda h: (pool.out or nn.Identity())(pool.down(h[None, None]))[0, 0]  # noqa: E731
    return incoming.T, torch.func.jacrev(down)(hidden).T, hidden  # linear_part would make an F x F matrix


def head_units(pool: M.Pool, x: Tensor, inputs: M.Inputs, head: int, position: int) -> tuple[Tensor, Tensor, Tensor]:
    """contextual_mlp of a head that reads tokens or slots, for x (1, T, C)."""
    D, H, T, context = pool.head_dim, pool.n_head, x.size(1), pool.reader.source == "context"
    q, k, v = pool.project(x, inputs)  # before norms and positions: q (1, H, T, D), k and v (1, heads, T or S, D)

    # The last row is the query, and the others are W_Q^T, whose products with the keys are the incoming weights.
    queries = linear_part(lambda e: pool.project(e, inputs)[0], x.size(2), x)  # (1, H, C, D)
    if isinstance(pool.q_norm, M.RMSNorm):
        normed = q[0, :, position] if isinstance(pool.q_norm, M.NormOfHeads) else q[0, head, position]
        gain = pool.q_norm.weight.view(-1, D).expand(H, D)[head]
        queries = queries * gain * (normed.square().mean() + pool.q_norm.eps).rsqrt()
    q = pool.q_norm(q)
    queries = torch.cat((queries, q[:, :, [position]]), dim=2) * pool.q_scale
    placed, lo, hi = queries, 0, k.size(2)
    _, k, v = pool.position(q, pool.k_norm(k), v, inputs.table if context else ())
    if context:
        table = pool.position.table(torch.tensor([position], device=x.device), q.dtype)
        placed, _, _ = pool.position(queries, queries, queries, table)
        lo, hi = (int(n[position]) for n in Mask(pool.causal, pool.window).reach(T, T, x.device))
    k, v = (each[0, head * each.size(1) // H, lo:hi] for each in (k, v))  # of what the query sees, each (S, E)
    if pool.reader.slots:
        slots = pool.position.slots(*pool.slots(k.dtype))
        k, v = (torch.cat((each[head * each.size(0) // H], y)) for each, y in zip(slots, (k, v), strict=True))
    n_slots = len(k) - (hi - lo)
    apart = n_slots if pool.reader.slots == "own_slots" else 0  # slots with a softmax of their own
    still, placed = queries[0, head], placed[0, head]
    scores = torch.cat((k[:apart, :D] @ still.T, k[apart:, :D] @ placed[:, :D].T)) / math.sqrt(D)  # (S, C + 1)
    content, bias = scores[:, -1], k[:, D:] @ placed[-1, D:] / math.sqrt(D)
    if context:
        own = n_slots + position - lo  # the unit of its own token, whose distance is 0
        bias -= bias[own].clone()
        if (slopes := pool.position.slopes(inputs.table)) is not None:
            bias[n_slots:] -= slopes[head] * (torch.arange(lo, hi, device=x.device) - position).abs()
    score = capped(content, pool.softcap) + bias
    hidden = torch.exp(score) if pool.phi is None else pool.phi(score[None], score.new_tensor([[hi - lo]]))[0]
    require(hidden.isfinite().all(), f"a score of head={head} is above 88 and overflows; no activations")
    Z = torch.cat([part.sum().expand_as(part) for part in hidden.tensor_split([apart])])
    Z = Z if pool.phi is None else torch.ones_like(Z)
    if isinstance(pool, M.ShapedPool):
        hidden = pool.beta[head] * hidden - pool.gamma[head] * Z * bias.softmax(0)
        hidden[own] += pool.alpha[head] * Z[own]
    W_O = linear_part(pool.out, H * D, x)[0, head * D : (head + 1) * D]  # (D, C)
    return scores[: len(v), :-1], v[:, :D] @ W_O / Z[:, None], hidden  # of a gated map, the scores of the gate


def term(pool: M.Pool, x: Tensor, inputs: M.Inputs, head: int) -> Tensor:
    """A head's term of the reader's output as the module itself computes it from x (1, T, C): (T, C). A p is one
    head."""

    def silence(_, args: tuple[Tensor]) -> Tensor:
        """All other heads in the first row of the batch, and all heads in the second."""
        y = torch.zeros_like(args[0])  # (2, T, H D)
        channels = slice(None) if pool.units else slice(head * pool.head_dim, (head + 1) * pool.head_dim)
        y[0, :, channels] = args[0][0, :, channels]
        return y

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


def without_padding(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows of a batch that have targets; the others fill it up."""
    return {name: x[(batch["targets"] >= 0).any(1)] for name, x in batch.items()}


@torch.no_grad()
def scores(model: M.Model, batches: Iterable[dict[str, Tensor]], patterns: list[str]) -> dict[str, list[Score]]:
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
            batch = without_padding(batch)
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


# ---------------------------------------------------------------------------------------------------------------------
# Experts


class Preferred(NamedTuple):
    """A token that an expert reads more often than it reads the mean token."""

    token: int
    reads: int  # occurrences of the token that the expert reads
    share: float  # of all occurrences of the token
    excess: float  # see `preferred`


@torch.no_grad()
def reads_of_tokens(model: M.Model, experts: M.Experts, batches: Iterable[dict[str, Tensor]]) -> Tensor:
    """How many occurrences of each token each expert reads, and in the last column how many there are: (V, E + 1).
    `experts` is a reader of the model's blocks. Rows of a batch without targets are padding."""
    E, own, chosen = model.cfg.n_expert, experts.choose, []
    reads = torch.zeros(model.cfg.vocab_size, E + 1, dtype=torch.int64)
    experts.choose = lambda p: chosen.append(own(p)) or chosen[-1]
    try:
        for batch in map(without_padding, batches):
            model(**batch)
            columns = F.pad(chosen.pop(), (0, 1), value=E)  # (N, k + 1)
            places = batch["idx"].flatten()[:, None] * (E + 1) + columns
            reads += places.flatten().bincount(minlength=reads.numel()).view_as(reads).cpu()
    finally:
        del experts.choose
    return reads


def preferred(reads: Tensor, expert: int, most: int) -> list[Preferred]:
    """The `most` tokens with the largest excess over 0, the largest first, for the result of reads_of_tokens.

    The excess of a token is the number of its occurrences that the expert reads, minus the number that it would read of
    any tokens: occurrences times the share of all tokens that the expert reads. So a token comes first that is frequent
    and that the expert reads more than others.
    """
    own, all_of = reads[:, expert].double(), reads[:, -1].double()
    excess = own - all_of * (own.sum() / all_of.sum())
    best = excess.argsort(descending=True, stable=True)[:most]
    numbers = best, reads[best, expert], own[best] / all_of[best], excess[best]
    return [Preferred(*row) for row in zip(*(x.tolist() for x in numbers), strict=True) if row[-1] > 0]
