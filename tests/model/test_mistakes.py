"""The known mistakes of much copied transformer code, which this model must not have: a test for each.

A test states what must hold as a check, runs it on every variant that could get it wrong, then puts the mistake into
the model and sees the same check fail. Where a check has equations of its own for each block, position or kind of
heads, it skips those that it does not know, and says so.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import model as M
import ops
from model import Inputs, Model, ModelConfig
from ops import Mask

SIZE = dict(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=29)
C, V = SIZE["n_embd"], SIZE["vocab_size"]
OBJECTIVES = ["causal", "masked", "seq2seq"]
REFUSED = [("alibi", "masked"), ("alibi", "seq2seq")]  # encoders see both ways
SHAPED = ["simplified", "simplified_parallel"]


def build(**flags) -> Model:
    """In float64 and far from its initial point, where parts of it are zero or cancel."""
    model = at_its_start(**flags)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn_like(p)
    return model


def at_its_start(**flags) -> Model:
    torch.manual_seed(1)
    return Model(ModelConfig(**SIZE | flags)).double().eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(2))


def inputs(objective: str, T: int = 9, S: int = 11) -> dict[str, Tensor]:
    """A text, and for an encoder a source of another length."""
    return dict(idx=tokens(2, T)) | (dict(source=tokens(2, S).flip(0)) if objective == "seq2seq" else {})


def calls(model: Model, kind: type | tuple[type, ...], given: dict[str, Tensor]) -> list[tuple]:
    """(module, arguments, result) of every module of a kind, in the order of the model's forward."""
    seen = []
    hooks = [
        m.register_forward_hook(lambda m, args, out: seen.append((m, args, out)))
        for m in model.modules()
        if isinstance(m, kind)
    ]
    model(**given)
    for hook in hooks:
        hook.remove()
    assert len(seen) == len(hooks) > 0
    return seen


def close(got: Tensor, expected: Tensor, tolerance: float = 1e-9) -> bool:
    """NaN is close to nothing."""
    return got.shape == expected.shape and torch.allclose(got, expected, rtol=tolerance, atol=tolerance)


def assert_caught(check, *args):
    with pytest.raises(AssertionError):
        check(*args)


def skip_unless(known: bool, what: str, where: str):
    if not known:
        pytest.skip(f"{what} is not known here; write its case into {where}")


# ---- what is visible, by looking


def visible(T: int, S: int, causal: bool, window: int = 0, docs: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """(T, S), pair by pair; docs are the numbers (T,) of the queries and (S,) of the keys."""
    sees = torch.zeros(T, S, dtype=torch.bool)
    for i, j in itertools.product(range(T), range(S)):
        future, far = causal and j > i, bool(window) and abs(i - j) >= window
        sees[i, j] = not future and not far and (docs is None or bool(docs[0][i] == docs[1][j]))
    return sees


def influence(f, x: Tensor) -> Tensor:
    """(T, S), whether row t of f's result (., T, .) moves when token s of x, ids (1, S) or a stream (1, S, C), does."""
    S = x.size(1)
    changed, each = torch.cat([x] * (S + 1)), torch.arange(S)
    changed[each + 1, each] = x[0] + 1 if x.is_floating_point() else (x[0] + 1) % V
    out = f(changed)
    difference = (out[1:] - out[:1]).abs().amax(-1).T
    assert ((difference < 1e-12) | (difference > 1e-9)).all(), "neither the same nor another number"
    return difference > 1e-9


# ---- padding masks made as 0 * -inf, or that leave a row of -inf: NaN


def ragged(lengths: list[int], width: int) -> tuple[Tensor, Tensor]:
    """Texts of these lengths filled up with any tokens to (B, width), and document numbers: 1 for padding."""
    return tokens(len(lengths), width), (torch.arange(width) >= torch.tensor(lengths)[:, None]).long()


def check_padding(objective: str, flags: dict, masked: bool = True):
    """A padded batch is as good as its texts one by one: logits of real tokens, loss, every gradient; nothing is NaN.

    masked=False: without document numbers, since a causal mask hides padding that comes last.
    """
    model, texts, sources = build(objective=objective, **flags), [11, 5, 1], [4, 9, 1]
    idx, docs = ragged(texts, 13)
    targets = tokens(3, 14)[:, 1:].masked_fill(docs.bool(), -1)
    given, alone = dict(docs=docs) if masked else {}, [{} for _ in texts]
    if objective == "seq2seq":
        source, source_docs = ragged(sources, 10)
        given = dict(docs=torch.zeros_like(idx), source=source, source_docs=source_docs)
        alone = [dict(source=source[i : i + 1, :m]) for i, m in enumerate(sources)]
    logits, loss = model(idx, **given), model(idx, targets, **given)
    assert logits.isfinite().all() and loss.isfinite()
    single = [model(idx[i : i + 1, :n], **alone[i])[0] for i, n in enumerate(texts)]
    for i, n in enumerate(texts):
        assert close(logits[i, :n], single[i])
    expected = F.cross_entropy(torch.cat(single), torch.cat([targets[i, :n] for i, n in enumerate(texts)]))
    assert close(loss, expected)
    got, wanted = (torch.autograd.grad(each, list(model.parameters())) for each in (loss, expected))
    for (name, _), a, b in zip(model.named_parameters(), got, wanted, strict=True):
        assert close(a, b), name


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("flags", [
    {"pos": "rope"},
    {"pos": "alibi", "window": 3},
    {"attn_softcap": 2.0, "window": 4},
    {"block": "parallel", "attention": "mqa", "qk_norm": True},
    {"block": "simplified", "pos": "rope", "window": 3},
    {"block": "simplified_parallel", "pos": "alibi"},
    {"block": "superblock", "layer": "c.own_slots", "n_slot": 3},
], ids=str)  # fmt: skip
def test_padding_makes_no_nan(objective, flags):
    if (flags.get("pos"), objective) in REFUSED:
        flags = flags | {"pos": "learned"}
    check_padding(objective, flags)
    if objective == "causal":
        check_padding(objective, flags, masked=False)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_padding_as_a_product_is_caught(objective, monkeypatch):
    def times_infinity(q, k, v, attn_mask, attend):
        return attend(q, k, v, attn_mask=((~attn_mask) * -math.inf).to(q.dtype))

    strips = ops.strip_attention
    monkeypatch.setattr(
        ops, "strip_attention", lambda f, *args: strips(lambda *a, attn_mask: times_infinity(*a, attn_mask, f), *args)
    )
    assert_caught(check_padding, objective, {"pos": "rope"})


def test_padding_that_sees_nothing_is_caught(monkeypatch):
    """The NaN is the padding's own, but 0 times NaN in the backward is everybody's."""
    reach = ops.Mask.reach

    def blind(self, T, S, device):
        lo, hi = reach(self, T, S, device)
        return lo, hi if self.docs is None else torch.where(self.docs[0] == 1, lo, hi)

    monkeypatch.setattr(ops.Mask, "reach", blind)
    assert_caught(check_padding, "masked", {"attn_softcap": 2.0})


# ---- RoPE that is declared but never applied to q and k, ALiBi that is never added to the scores


def naive_heads(heads: M.Heads, x: Tensor, inputs: Inputs, pos: str, causal: bool) -> Tensor:
    """From the papers' formulas: RoPE as complex numbers, ALiBi as a matrix. There is a key for every query head."""
    q, k, v = heads.project(x, inputs)
    H, T, D = q.shape[1:]
    S, angle = k.size(2), 10000.0 ** (-torch.arange(D // 2, dtype=torch.float64) / (D // 2))

    def as_complex(x: Tensor) -> Tensor:
        turn = torch.outer(torch.arange(x.size(2)), angle if pos == "rope" else 0 * angle)
        return torch.complex(x[..., : D // 2], x[..., D // 2 :]) * torch.exp(1j * turn)

    scores = (as_complex(q) @ as_complex(k).conj().mT).real / math.sqrt(D)
    bias = torch.zeros(H, T, S, dtype=torch.float64)
    if pos == "alibi":
        distance = (torch.arange(T)[:, None] - torch.arange(S)).abs()
        bias = bias - torch.stack([2 ** (-8 * (h + 1) / H) * distance for h in range(H)])
    bias = bias.masked_fill(~visible(T, S, causal), -math.inf)
    y = (scores + bias).softmax(-1) @ v
    if isinstance(heads, M.ShapedAttention):
        alpha, beta, gamma = (gain[:, None, None] for gain in (heads.alpha, heads.beta, heads.gamma))
        y = alpha * v + beta * y - gamma * bias.softmax(-1) @ v
    return heads.out(y.transpose(1, 2).flatten(2))


def check_positions(pos: str, objective: str, block: str):
    """What all heads make of q, k and v in a forward of the model; cross-attention has no positions."""
    model = build(pos=pos, objective=objective, block=block)
    for heads, (x, given), out in calls(model, M.Heads, inputs(objective)):
        if heads.reader.units:
            continue
        known = type(heads) in (M.Attention, M.CrossAttention, M.ShapedAttention)
        skip_unless(known, f"{type(heads).__name__} of block={block}", "naive_heads")
        cross, encoder = heads.reader.source == "memory", model.encoder and heads in list(model.encoder.modules())
        causal = not (cross or encoder or objective == "masked")
        assert close(out, naive_heads(heads, x, given, "none" if cross else pos, causal))


@pytest.mark.parametrize("block", list(M.BLOCK))
@pytest.mark.parametrize(
    "pos, objective", [("rope", "causal"), ("rope", "masked"), ("rope", "seq2seq"), ("alibi", "causal")]
)
def test_positions_are_applied(pos, objective, block):
    check_positions(pos, objective, block)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("block", ["standard", "simplified"])
def test_positions_never_applied_are_caught(objective, block, monkeypatch):
    turned = M.Rope.forward
    for mistake in (
        lambda self, q, k, v, table: (q, k, v),  # declared, and no more
        lambda self, q, k, v, table: (turned(self, q, k, v, table)[0], k, v),  # applied to q alone
    ):
        monkeypatch.setattr(M.Rope, "forward", mistake)
        assert_caught(check_positions, "rope", objective, block)
    monkeypatch.setattr(M.Rope, "forward", turned)
    table = M.Rope.table
    monkeypatch.setattr(M.Rope, "table", lambda self, t, dtype: table(self, 0 * t, dtype))  # all at position 0
    assert_caught(check_positions, "rope", objective, block)
    if objective == "causal":
        monkeypatch.setattr(M.Alibi, "forward", M.AttentionPosition.forward)
        assert_caught(check_positions, "alibi", objective, block)


ORDERED = {"learned": True, "sinusoidal": True, "rope": True, "alibi": True, "none": False}


def check_order(pos: str, objective: str):
    """The last logits, when two early tokens of the text, or of what the encoder reads, change places."""
    skip_unless(pos in ORDERED, f"pos={pos}", "ORDERED")
    model, given = build(pos=pos, objective=objective, n_layer=1), inputs(objective)
    swap = [1, 0, *range(2, 9)]
    for name in given:
        moved = given | {name: torch.cat((given[name][:, swap], given[name][:, 9:]), dim=1)}
        difference = (model(**moved) - model(**given))[:, -1].abs().amax(-1)
        assert (difference > 1e-6).all() if ORDERED[pos] else (difference < 1e-12).all(), name


@pytest.mark.parametrize("pos, objective", [
    (pos, objective) for pos in M.POSITION for objective in OBJECTIVES if (pos, objective) not in REFUSED
])  # fmt: skip
def test_order_matters_only_with_positions(pos, objective):
    check_order(pos, objective)


# ---- the centring matrix of shaped attention, not masked like the attention that it centres: the future leaks


DOCS = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 2]])
MASKS = list(itertools.product([True, False], [0, 1, 4], [None, DOCS]))


def check_centring_matrix():
    """uniform_attention of the identity is the matrix itself, of equal weights on what is visible."""
    T = DOCS.size(1)
    eye = torch.eye(T, dtype=torch.float64)[None, None]
    for causal, window, docs in MASKS:
        mask = Mask(causal, window, docs if docs is None else (docs, docs))
        got = ops.uniform_attention(eye, eye, eye, T, mask)[0, 0]
        sees = visible(T, T, causal, window, docs if docs is None else (docs[0], docs[0])).double()
        assert close(got, sees / sees.sum(1, keepdim=True), 1e-12)


def check_nothing_leaks(block: str, pos: str):
    """Through a whole layer: a token reaches just the rows that see it, in a text alone and behind a source."""
    idx, source, T = tokens(1, DOCS.size(1)), tokens(1, 5), DOCS.size(1)
    for objective, window, docs in itertools.product(OBJECTIVES, [0, 1, 4], [None, DOCS]):
        if (pos, objective) in REFUSED:
            continue
        model = build(objective=objective, block=block, pos=pos, window=window, n_layer=1)
        given = {} if docs is None else dict(docs=docs.expand(T + 1, -1))
        if objective == "seq2seq":
            given["source"] = source.expand(T + 1, -1)
            if docs is not None:
                given["source_docs"] = torch.tensor([[0, 0, 1, 2, 2]]).expand(T + 1, -1)
        reached = influence(lambda x, f=model, given=given: f(x, **given), idx)
        sees = visible(T, T, objective != "masked", window, docs if docs is None else (docs[0], docs[0]))
        assert torch.equal(reached, sees), f"{objective} {window=} {docs=}"


@pytest.mark.parametrize("pos", ["none", "alibi"])
@pytest.mark.parametrize("block", SHAPED)
def test_the_centring_matrix_is_masked(block, pos):
    check_centring_matrix()
    check_nothing_leaks(block, pos)


@pytest.mark.parametrize("mistake", [{"causal": False}, {"window": 0}, {"docs": None}], ids=str)
def test_an_unmasked_centring_matrix_is_caught(mistake, monkeypatch):
    uniform = ops.uniform_attention
    monkeypatch.setattr(
        ops,
        "uniform_attention",
        lambda q, k, v, D, mask, *strips: uniform(q, k, v, D, mask._replace(**mistake), *strips),
    )
    assert_caught(check_centring_matrix)
    for block, pos in itertools.product(SHAPED, ["none", "alibi"]):
        assert_caught(check_nothing_leaks, block, pos)


# ---- a "post-norm" that is a pre-norm


Readers = dict[str, Callable[[Tensor], Tensor]]


def n(s: Tensor) -> Tensor:
    return F.layer_norm(s, (C,))


def crossed(read: Readers, s: Tensor) -> Tensor:
    return n(s + read["cross"](s)) if "cross" in read else s


def standard(read: Readers, s: Tensor, sums: list[M.Sum]) -> Tensor:
    s = crossed(read, n(s + read["attn"](s)))
    return n(s + read["mlp"](s))


def parallel(read: Readers, s: Tensor, sums: list[M.Sum]) -> Tensor:
    s = crossed(read, s)
    return n(s + read["attn"](s) + read["mlp"](s))


def simplified(read: Readers, s: Tensor, sums: list[M.Sum]) -> Tensor:
    s = crossed(read, n(sums[0].gain.weight * read["attn"](s)))
    return n(sums[-1].skip.weight * s + sums[-1].gain.weight * read["mlp"](s))


def simplified_parallel(read: Readers, s: Tensor, sums: list[M.Sum]) -> Tensor:
    s, (g_attn, b_ff) = crossed(read, s), (gain.weight for gain in sums[-1].gains)
    return n(g_attn * read["attn"](s) + b_ff * read["mlp"](s))


def superblock(read: Readers, s: Tensor, sums: list[M.Sum]) -> Tensor:
    """By default, the memory has a sum of its own behind the one of the context and the MLP."""
    if len(sums[0].names) == 1:
        return standard(read, s, sums)
    return crossed(read, n(s + read["attn"](s) + read["mlp"](s)))


POST_NORM = {  # every block written out with the norm behind every sum, whose own weights are 1
    "standard": standard,
    "parallel": parallel,
    "simplified": simplified,
    "simplified_parallel": simplified_parallel,
    "superblock": superblock,
}


def check_post_norm(block: str, objective: str, **flags):
    """Every block of the model, encoder's included; behind the last one the head reads the stream as it is."""
    skip_unless(block in POST_NORM, f"block={block}", "POST_NORM")
    model = build(block=block, objective=objective, norm_placement="post", pos="none", **flags)
    for norm in model.modules():
        if isinstance(norm, torch.nn.LayerNorm):
            torch.nn.init.ones_(norm.weight)
    given = inputs(objective)
    every = calls(model, M.Block, given)
    for layer, (s, others), out in every:
        read = {name: partial(getattr(each, name), inputs=others) for each in layer.sums for name in each.names}
        assert close(out, POST_NORM[block](read, s, layer.sums))
    assert close(model(**given), every[-1][2] @ model.head.weight.T)
    if model.encoder:
        assert close(model.encode(given["source"]), every[SIZE["n_layer"] - 1][2])


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("block", list(M.BLOCK))
def test_post_norm_stands_behind_the_sum(block, objective):
    check_post_norm(block, objective)
    if block == "superblock":
        check_post_norm(block, objective, layer="c,p")


@pytest.mark.parametrize("block", list(M.BLOCK))
def test_pre_norm_by_the_name_of_post_norm_is_caught(block, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(M.PLACEMENT, "post", M.PLACEMENT["pre"])
        assert_caught(check_post_norm, block, "causal")
    init = M.Sum.__init__

    def swapped(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.before, self.total = self.total, self.before

    monkeypatch.setattr(M.Sum, "__init__", swapped)  # which leaves no norm before the head
    for objective in OBJECTIVES:
        assert_caught(check_post_norm, block, objective)


# ---- a query that starts at zero, until an initialisation of everything overwrites it


def check_zero_queries(block: str, objective: str, flags: dict):
    """Shaped attention starts as the identity, in encoder and decoder; keys start as usual, and W_Q does learn."""
    model, given = at_its_start(block=block, objective=objective, **flags), inputs(objective)
    for attn, (x, _), out in calls(model, M.ShapedAttention, given):
        _, groups, (n, _) = attn.qk.fused
        q, k = attn.qk.weight.unflatten(0, (groups, -1)).split([n, attn.qk.weight.size(0) // groups - n], dim=1)
        assert (q == 0).all() and 0.015 < k.std() < 0.025
        assert close(out, x, 1e-12)
    model(targets=given["idx"], **given).backward()
    for attn in (m for m in model.modules() if isinstance(m, M.ShapedAttention)):
        _, groups, (n, _) = attn.qk.fused
        assert attn.qk.weight.grad.unflatten(0, (groups, -1))[:, :n].abs().amax(-1).min() > 0


@pytest.mark.parametrize("flags", [
    {"pos": "rope", "qk_norm": True},
    {"pos": "learned", "bias": True, "simplified_value_proj": "all"},
    {"window": 3, "attention": "gqa", "n_kv_head": 2},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("block", SHAPED)
def test_zero_queries_stay_zero(block, objective, flags):
    check_zero_queries(block, objective, flags)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("block", SHAPED)
def test_a_later_initialisation_is_caught(block, objective, monkeypatch):
    init = Model.init_weights
    for kind in (M.Linear, M.NearIdentity):  # queries, and the matrix beside a value's or output's identity

        def again(self, seed, kind=kind):
            init(self, seed)
            for m in self.modules():
                if type(m) is kind:
                    torch.nn.init.normal_(m.weight, std=0.02)

        monkeypatch.setattr(Model, "init_weights", again)
        assert_caught(check_zero_queries, block, objective, {"pos": "rope"})
