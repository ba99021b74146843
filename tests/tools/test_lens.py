"""lens.py: heads with weights set by hand, whose numbers are computed here, choices of experts that a loop over tokens
makes, and the command on runs of two steps."""

import importlib.util
import math
import operator
from collections import Counter

import pytest
import torch
from helpers import refused
from test_contextual import ATTENTION, BLOCKS, sharp, text
from test_model import build
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model as M
from data.tokenizer import ByteTokenizer, CharTokenizer
from data.writer import ShardWriter
from engine.checkpoint import weights
from tools import lens
from tools.heads import (
    Preferred,
    attention_to,
    context_readers,
    induction,
    preferred,
    previous,
    reads_of_tokens,
    scores,
)  # fmt: skip
from tools.lens import Unit, read_head

V, T = 6, 12  # of the model set by hand
REPEATED = torch.tensor([3, 1, 4, 0, 5, 2] * 2)  # each token once, then all of them again


@torch.no_grad()
def by_hand(strength: float) -> M.Model:
    """Two layers of one head. The stream holds the token, the position and what layer 0 writes: the token before.

    Layer 0 gives the score `strength` to the token before the query and 0 to the others. Layer 1 gives it to tokens
    that follow a token equal to the query's, as far as layer 0 has found it, and copies them to the logits.
    """
    C = V + T + V
    net = M.Model(M.ModelConfig(
        n_layer=2, n_head=1, n_embd=C, block_size=T, vocab_size=V, norm="none", norm_placement="none", tie_weights=False
    )).double().eval()  # fmt: skip
    for p in net.parameters():
        p.zero_()
    token, position, before = torch.eye(C, dtype=torch.float64).split((V, T, V))  # rows that read a part of the stream
    net.wte.weight[:], net.pos.wpe.weight[:] = token, position
    net.head.weight[:] = token
    first, second = (context_readers(block)["attn"] for block in net.blocks)
    scale = strength * math.sqrt(C)
    q, k, v = first.qkv.weight.view(3, C, C).unbind()
    q[: T - 1], k[: T - 1] = scale * position[1:], position[:-1]  # position t - 1 of a key matches t of the query
    v[:V] = token
    first.out.weight[:, :V] = before.T
    q, k, v = second.qkv.weight.view(3, C, C).unbind()
    q[:V], k[:V], v[:V] = scale * token, before, token
    second.out.weight[:, :V] = token.T
    return net


def pattern_scores(net: M.Model, idx: torch.Tensor, *patterns: str, **batch) -> dict:
    """(layer, head) -> score, for each pattern."""
    found = scores(net, [{"idx": idx, "targets": torch.zeros_like(idx)} | batch], list(patterns))
    return {name: {(each.layer, each.head): each for each in heads} for name, heads in found.items()}


def test_the_patterns_by_hand():
    idx = torch.tensor([[7, 8, 7, 9, 9, 9, 8, 7], [1, 2, 3, 1, 2, 3, 1, 2]])
    assert previous(idx).tolist() == [[-1, 0, 1, 2, 3, 4, 5, 6]] * 2
    # 7 at 2: its successor is the token before the query. 9 at 4 and 5: it is the query itself.
    assert induction(idx).tolist() == [[-1, -1, -1, -1, -1, -1, 2, 3], [-1, -1, -1, 1, 2, 3, 4, 5]]


def test_induction_is_what_loops_find():
    torch.manual_seed(0)
    idx = torch.randint(4, (50, 30))
    for row, found in zip(idx.tolist(), induction(idx).tolist(), strict=True):
        for t, key in enumerate(found):
            earlier = [j for j in range(t) if row[j] == row[t]]
            expected = earlier[-1] + 1 if earlier and earlier[-1] + 1 < t - 1 else -1
            assert key == expected


@pytest.mark.parametrize("strength", [2.0, 40.0])
def test_scores_of_heads_by_hand(strength):
    net, e = by_hand(strength), math.exp(strength)
    found = pattern_scores(net, REPEATED[None], "previous", "induction")
    before = [e / (e + t) for t in range(1, T)]  # of t + 1 visible tokens, one has the score, the others 0
    assert found["previous"][0, 0].score == pytest.approx(sum(before) / len(before), rel=1e-6)
    assert found["previous"][0, 0].even == pytest.approx(sum(1 / (t + 1) for t in range(1, T)) / (T - 1), rel=1e-6)

    # What layer 0 tells a key about the token before it: the weights of that token among all that it sees, the first
    # token sees only itself.
    share = torch.zeros(T, V, dtype=torch.float64)
    for t in range(T):
        for j in range(t + 1):
            share[t, REPEATED[j]] += (e if j == t - 1 else 1) / (e + t if t else 1)
    expected = []
    for t in range(V, T):
        weights = torch.exp(strength * share[: t + 1, REPEATED[t]])
        expected.append((weights[t - V + 1] / weights.sum()).item())
    assert found["induction"][1, 0].score == pytest.approx(sum(expected) / V, rel=1e-6)
    even = sum(1 / (t + 1) for t in range(V, T)) / V
    assert found["induction"][1, 0].even == pytest.approx(even, rel=1e-6)
    if strength == 40:
        # Five queries have one such key. The copy of token 0 has two, because token 0 sees only itself.
        assert found["induction"][1, 0].score == pytest.approx(5.5 / 6) and found["induction"][0, 0].score < 1e-9


def test_a_previous_token_head_of_alibi():
    """Without queries and keys, the weights are those of ALiBi alone: exp(-m d) over its sum."""
    net = build(pos="alibi", n_layer=1)
    with torch.no_grad():
        net.blocks[0].sums[0].attn.qkv.weight.zero_()
    idx = text(net)[None]
    found = pattern_scores(net, idx, "previous")["previous"]
    for head in range(4):
        m = 2.0 ** (-8 * (head + 1) / 4)
        each = [math.exp(-m) / sum(math.exp(-m * d) for d in range(t + 1)) for t in range(1, idx.size(1))]
        assert found[0, head].score == pytest.approx(sum(each) / len(each), rel=1e-6)


@pytest.mark.parametrize("extra", [{}, {"window": 4}, {"attn_softcap": 0.5}, {"objective": "masked"}], ids=str)
@pytest.mark.parametrize("pos", ["rope", "alibi"])
@pytest.mark.parametrize("block", BLOCKS, ids=lambda flags: ",".join(map(str, flags.values())))
def test_weights_are_the_activations_of_the_units(block, pos, extra):
    """Two ways to the same numbers: the model's own attention on an identity matrix, and contextual_mlp."""
    net = sharp(**block, pos=pos, **ATTENTION[1], **extra)
    idx, layer, position, seen = text(net), 1, 9, {}
    keys = torch.arange(len(idx))[:, None, None].expand(-1, 1, len(idx))  # every key of every query
    heads = context_readers(net.blocks[layer])["attn"]
    own = heads.attend
    heads.attend = lambda *given: seen.update(weights=attention_to(keys, own, *given)) or own(*given)
    with torch.no_grad():
        net.hidden(idx[None])
    del heads.attend
    for head in range(4):
        _, _, hidden = lens.contextual_mlp(net, idx, layer, head, position)
        apart = heads.slot_v.size(1) if heads.reader.slots == "own_slots" else 0
        Z = hidden[apart:].sum()
        if isinstance(heads, M.ShapedPool):
            Z = Z / (heads.alpha + heads.beta - heads.gamma)[head]
        weights = seen["weights"][:, 0, head, position]  # (S,)
        visible = (hidden / Z)[heads.slot_v.size(1) if heads.reader.slots else 0 :]
        lo = max(0, position - 3) if net.cfg.window else 0
        assert torch.allclose(weights[lo : lo + len(visible)], visible, rtol=1e-9, atol=1e-12)
        rest = torch.cat((weights[:lo], weights[lo + len(visible) :]))
        assert rest.abs().max() < 1e-12 if len(rest) else True


def test_scores_leave_out_padding_and_other_documents():
    net, idx = sharp(pos="rope"), REPEATED[None]
    alone = pattern_scores(net, idx, "previous", "induction")
    targets = torch.tensor([[0] * T, [-1] * T])
    assert pattern_scores(net, torch.cat((idx, 0 * idx)), "previous", "induction", targets=targets) == alone
    docs = torch.tensor([[0] * V + [1] * V])
    apart = pattern_scores(net, idx, "previous", "induction", docs=docs)
    assert {each.score for each in apart["induction"].values()} == {0.0}  # no token has occurred in its document
    halves = idx.view(2, V)
    each = pattern_scores(net, halves, "previous")["previous"]
    for place, found in apart["previous"].items():
        assert found.score == pytest.approx(each[place].score, rel=1e-6) and found.even == each[place].even


def tokenizer_of(n: int) -> CharTokenizer:
    return CharTokenizer("abcdefghijklmnopqrstuvwxyz"[:n])


def test_units_by_hand():
    """Layer 1 of the model set by hand, at the second occurrence of token 4, which token 0 follows."""
    strength, t = 3.0, 8
    net, e = by_hand(strength), math.exp(strength)
    units, n, total = read_head(net, tokenizer_of(V), REPEATED, layer=1, head=0, position=t)
    assert n == len(units) == t + 1
    share = torch.zeros(t + 1, V, dtype=torch.float64)
    for i in range(t + 1):
        for j in range(i + 1):
            share[i, REPEATED[j]] += (e if j == i - 1 else 1) / (e + i if i else 1)
    hidden = torch.exp(strength * share[:, REPEATED[t]])
    assert [unit.name for unit in units] == [f"{i} '{'abcdef'[REPEATED[i]]}'" for i in range(t + 1)]
    for unit, h, row in zip(units, hidden, share, strict=True):
        assert unit.activation == pytest.approx(h.item(), rel=1e-9)
        assert unit.share == pytest.approx((h / hidden.sum()).item(), rel=1e-9)
        assert unit.incoming == pytest.approx(strength * row.norm().item(), rel=1e-9)  # b = strength * row, on tokens
        assert unit.outgoing == pytest.approx(1 / hidden.sum().item(), rel=1e-9)  # a copies the token, over Z

    # The head of the model reads from the stream the query's token and what the units write.
    onehot = torch.eye(V, dtype=torch.float64)[REPEATED[: t + 1]]
    z = onehot * (hidden / hidden.sum())[:, None]  # the logits that each unit adds
    logits = onehot[t] + z.sum(0)
    for unit, row, token in zip(units, z, REPEATED.tolist(), strict=False):
        gain = logits.log_softmax(0) - (logits - row).log_softmax(0)
        assert unit.promotes == [(f"'{'abcdef'[token]}'", pytest.approx(gain[token].item(), rel=1e-9))]
    best = max(units, key=lambda unit: unit.share)
    gain = logits.log_softmax(0) - onehot[t].log_softmax(0)
    assert best.name == "3 'a'" and total[0] == ("'a'", pytest.approx(gain[0].item(), rel=1e-9))


@pytest.mark.parametrize("kind, softmaxes", [("own", 2), ("joint", 1)])
def test_shares_are_weights_of_attention(kind, softmaxes):
    """Slots with a softmax of their own have shares of it; the units of the largest shares are shown."""
    net = build(block="superblock", layer=f"c.{kind}_slots", n_slot=3)
    with torch.no_grad():
        context_readers(net.blocks[1])["attn"].slot_k.mul_(30)
    idx = torch.arange(6) % V
    units, n, _ = read_head(net, tokenizer_of(V), idx, layer=1, head=0, position=5)
    slots, tokens = ([unit for unit in units if unit.name.startswith("slot") == is_slot] for is_slot in (True, False))
    assert (len(slots), len(tokens), n) == (3 * 2, 6, 12) or (len(slots), len(tokens)) == (len(units) - 6, 6)
    for part in [slots, tokens] if softmaxes == 2 else [units]:
        total = sum(unit.activation for unit in part)
        assert [unit.share for unit in part] == pytest.approx([unit.activation / total for unit in part], rel=1e-9)
    few, _, _ = read_head(net, tokenizer_of(V), idx, layer=1, head=0, position=5, most=4)
    assert min(unit.share for unit in few) >= sorted(unit.share for unit in units)[-4]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", M.NORM)
def test_the_last_norm_keeps_its_statistics(norm, bias):
    """The logits are linear in the stream, so its parts add up to them; a mean is subtracted only by a layer norm."""
    net = build(norm=norm, bias=bias, mup_base_width=8)
    with torch.no_grad():
        for p in net.norm.parameters():
            p += torch.rand_like(p)
        parts = torch.randn(3, net.cfg.n_embd, dtype=torch.float64)
        stream = parts.sum(0)
        constant = getattr(net.norm, "bias", None)
        offset = 0.0 if constant is None else net.logits(constant)
        assert torch.allclose(lens.added_logits(net, parts, stream).sum(0) + offset, net.logits(net.norm(stream)))
        if norm == "layernorm":
            expected = (parts[0] - parts[0].mean()) / (stream.var(correction=0) + 1e-5).sqrt() * net.norm.weight
            assert torch.allclose(lens.added_logits(net, parts[0], stream), net.logits(expected))


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_a_unit_promotes_what_the_stream_loses_without_it(softcap):
    """With norm=none nothing is frozen: log p of the final stream, minus log p without the unit's vector in it."""
    net = sharp(norm="none", norm_placement="none", logit_softcap=softcap, mup_base_width=8)
    letters, final = "abcdefghijklmnopqrstuvwxyz", []
    idx = text(net) % 26
    with net.norm.register_forward_pre_hook(lambda _, args: final.append(args[0][0, 5])), torch.no_grad():
        net.hidden(idx[None])
    units, _, total = read_head(net, tokenizer_of(26), idx, 1, 2, 5)
    _, outgoing, hidden = lens.contextual_mlp(net, idx, 1, 2, 5)
    vectors = hidden[:, None] * outgoing
    with torch.no_grad():
        for promotes, vector in zip([u.promotes for u in units] + [total], [*vectors, vectors.sum(0)], strict=True):
            now, then = (net.logits(x)[:26].log_softmax(0) for x in (final[0], final[0] - vector))
            best = (now.exp() - then.exp()).topk(lens.PROMOTED).indices.tolist()
            assert [letters.index(token[1]) for token, _ in promotes] == best
            assert [value for _, value in promotes] == pytest.approx((now - then)[best].tolist(), rel=1e-6)


def test_tokens_are_spelled_in_characters_that_can_be_printed():
    byte = ByteTokenizer()
    tokens = [ord("a"), 10, 0xC3, 0, ord("'"), 300]
    assert [lens.spelled(byte, t) for t in tokens] == ["'a'", r"'\n'", r"'\xc3'", r"'\x00'", "'''", "<id 300>"]


@pytest.mark.parametrize("block", [BLOCKS[0], BLOCKS[4], BLOCKS[5]], ids=str)
def test_the_units_of_the_largest_shares_are_shown_in_their_order(block):
    net = sharp(**block)
    idx = text(net) % 26
    units, n, total = read_head(net, tokenizer_of(26), idx, 1, 3, 9, most=99)
    few = read_head(net, tokenizer_of(26), idx, 1, 3, 9, most=4)
    best = sorted(units, key=lambda unit: -abs(unit.share))[:4]
    assert len(units) == n == few[1] and [unit.name for unit in few[0]] == [u.name for u in units if u in best]
    for same, unit in zip(few[0], (u for u in units if u in best), strict=True):
        assert_same_promotes(same.promotes, unit.promotes)
        assert [*same[1:-1]] == pytest.approx([*unit[1:-1]], rel=1e-9)
    assert_same_promotes(few[2], total)


@pytest.mark.parametrize("extra", [{}, {"mlp": "swiglu"}, {"block": "superblock", "n_group": 2}], ids=str)
def test_the_units_of_an_mlp_need_memory_linear_in_their_number(extra):
    net, largest = build(n_layer=1, n_head=2, n_embd=8, mlp_ratio=128.0, bias=True, **extra).eval(), 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            nonlocal largest
            out = f(*args, **(kwargs or {}))
            largest = max(largest, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)), 0)
            return out

    with Sizes():
        _, outgoing, hidden = lens.contextual_mlp(net, text(net), 0, 0, 3, reader="mlp")
    F = len(hidden)
    assert F > 600 and largest < F * F / 8
    if not extra:
        torch.testing.assert_close(outgoing, net.blocks[0].sums[1].mlp.down.weight.T)


def assert_same_promotes(found: list[tuple[str, float]], expected: list[tuple[str, float]]):
    """The same tokens; their values are sums that a product of another size takes in another order."""
    assert [token for token, _ in found] == [token for token, _ in expected]
    assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# Experts


def choices_by_hand(net: M.Model, name: str, batches: list[dict]) -> Counter:
    """(token, expert) -> the times that the expert of this name is among the best of a token, in a loop over tokens."""
    experts, read, found = net.get_submodule(name), [], Counter()
    weight, zeros = experts.router.weight.tolist(), [0.0] * 5
    of_scores = zeros if experts.router.bias is None else experts.router.bias.tolist()
    bias = experts.balance.bias.tolist() if experts.balance else zeros
    with experts.register_forward_pre_hook(lambda _, args: read.append(args[0])), torch.no_grad():
        for batch in batches:
            net(**batch)
    for batch, streams in zip(batches, read, strict=True):
        for ids, targets, stream in zip(batch["idx"].tolist(), batch["targets"].tolist(), streams, strict=True):
            for token, x in zip(ids if max(targets) >= 0 else [], stream.tolist(), strict=max(targets) >= 0):
                scores = [b + sum(map(operator.mul, row, x)) for row, b in zip(weight, of_scores, strict=True)]
                exps = [math.exp(s) for s in scores]
                p = [e / (1 + e) if net.cfg.router == "sigmoid" else e / sum(exps) for e in exps]
                best = sorted(range(5), key=lambda e: p[e] + bias[e], reverse=True)  # noqa: B023
                found.update((token, expert) for expert in best[: net.cfg.n_expert_active])
    return found


@pytest.mark.parametrize(
    "flags, name, reader",
    [
        ({}, "blocks.1.sums.1.experts", "experts"),
        ({"router": "sigmoid", "n_expert_active": 3, "n_expert_shared": 1}, "blocks.1.sums.1.experts", "experts"),
        ({"n_expert_active": 1, "router_balance": "none", "bias": True}, "blocks.1.sums.1.experts", "experts"),
        ({"block": "simplified"}, "blocks.1.sums.1.mlp", "mlp"),
        ({"block": "superblock", "layer": "c+e/2,c+e"}, "blocks.1.sums.1.experts2", "experts2"),
        ({"objective": "seq2seq", "n_encoder_layer": 1}, "blocks.1.sums.2.experts", "experts"),
    ],
    ids=str,
)
def test_reads_of_tokens_are_those_of_a_loop(flags, name, reader):
    """In float64, with padding in the last batch, and experts that have biases of both signs."""
    net = build(**flags, n_expert=5).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, p in net.named_parameters():
            if "router" in key or "balance" in key:
                p.copy_(torch.randn(p.shape, generator=generator) * (0.1 if "balance" in key else 1.0))
    batches = []
    for _ in range(3):
        idx = torch.randint(11, (3, 8), generator=generator)
        batches.append({"idx": idx, "targets": idx.clone()} | ({"source": idx.flip(1)} if "objective" in flags else {}))
    batches[-1]["targets"][1:] = -1
    expected = choices_by_hand(net, name, batches)
    experts = lens.reader_of(net, 1, reader)
    reads = reads_of_tokens(net, experts, batches)
    assert {(t, e): reads[t, e].item() for t, e in reads[:, :-1].nonzero().tolist()} == expected
    rows = torch.cat([batch["idx"][batch["targets"][:, 0] >= 0] for batch in batches]).flatten().tolist()
    assert {t: n for t, n in enumerate(reads[:, -1].tolist()) if n} == Counter(rows)
    assert "choose" not in vars(experts)

    tokens = 7 * 8
    for e in range(5):  # the rule of the order, from the counts of the loop
        own = sum(expected[t, e] for t in range(11))
        excess = {t: expected[t, e] - rows.count(t) * own / tokens for t in set(rows)}
        best = sorted((t for t in excess if excess[t] > 1e-9), key=lambda t: -excess[t])
        found = preferred(reads, e, most=4)
        assert [each.excess for each in found] == pytest.approx([excess[t] for t in best[:4]])
        for t, n, share, more in found:
            assert (n, share, more) == (expected[t, e], pytest.approx(n / rows.count(t)), pytest.approx(excess[t]))


def test_frequent_and_specific_tokens_come_first():
    """Of 100 tokens the expert reads 50: all of a rare one, and a bit more than half of a frequent one."""
    reads = torch.tensor([[4, 0, 4], [33, 27, 60], [8, 2, 10], [5, 21, 26], [0, 0, 0]])
    assert preferred(reads, 0, 9) == [
        Preferred(1, 33, 0.55, 3.0), Preferred(2, 8, 0.8, 3.0), Preferred(0, 4, 1.0, 2.0)
    ]  # fmt: skip
    assert preferred(reads, 1, 1) == [Preferred(3, 21, 21 / 26, 8.0)]
    assert preferred(torch.tensor([[0, 3, 3]]), 0, 9) == []  # nothing is read


# ---------------------------------------------------------------------------------------------------------------------
# The command

READ = ["--start=the cat sat", "--layer=1", "--head=1", "--device=cpu"]


def output(capsys, *flags: str) -> list[str]:
    lens.main(list(flags))
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    "flags,slots",
    [
        (["--block=superblock", "--layer=c.own_slots", "--n_slot=3"], 3),
        (["--block=simplified", "--pos=alibi"], 0),
        (["--objective=masked"], 0),
        (["--doc_mask=True", "--window=4"], 0),
        (["--objective=seq2seq", "--n_encoder_layer=1"], 0),
    ],
    ids=str,
)
def test_reads_every_kind_of_model(run, capsys, flags, slots):
    """Slots, the tokens that the query sees, and a line above them; then the scores."""
    out = run("--max_iters=1", "--warmup_iters=0", *flags)
    capsys.readouterr()
    source = ["--source=on a mat."] if "--objective=seq2seq" in flags else []
    first, last = (1 if "--window=4" in flags else 0), (10 if "--objective=masked" in flags else 4)
    n = last - first + 1
    lines = output(capsys, f"--out_dir={out}", *READ, "--position=4", *source)
    assert f"layer 1, head 1, query 4 'c': {slots + n} units, which together promote " in lines[0]
    assert [line.split("  ")[0] for line in lines[2:]] == [
        *(f"slot {i}" for i in range(slots)), *(f"{i} '{'the cat sat'[i]}'" for i in range(first, last + 1))
    ]  # fmt: skip
    scored = [line.split() for line in output(capsys, f"--out_dir={out}", "--find=previous", "--device=cpu")[4:8]]
    assert sorted(row[:2] for row in scored) == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]]
    assert all(0 < float(even) < 1 for *_, even in scored)


def test_other_readers_have_names_of_their_own(run, capsys):
    """Two readers of the context and hidden units, whose rows have numbers; scores of all heads."""
    out = run("--max_iters=1", "--warmup_iters=0", "--block=superblock", "--layer=c/2+p,c.relu/2,s", "--n_slot=3")
    capsys.readouterr()
    read = [f"--out_dir={out}", "--start=the cat sat", "--layer=1", "--device=cpu"]
    for reader, title, first, n in (
        ("attn2", "head 0 of attn2", "0 't'", 11),
        ("slots", "head 0 of slots", "slot 0", 3),
        ("mlp", "mlp", "unit 0", 64),
    ):
        lines = output(capsys, *read, f"--reader={reader}", "--units=99")
        assert f"layer 1, {title}, query 10 't': {n} units, which together promote " in lines[0]
        assert lines[2].split("  ")[0].strip() == first and len(lines) == 2 + n
        assert not any("nan" in line for line in lines)  # in attn2, nothing may pass the relu
    scored = [line.split()[4:] for line in output(capsys, f"--out_dir={out}", "--find=previous", "--device=cpu")[4:8]]
    assert sorted(scored) == [[], [], ["of", "attn2"], ["of", "attn2"]]


def test_the_text_and_the_picture(trained, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib; run pip install -e .[test]")
    file = tmp_path / "head.png"
    lines = output(capsys, f"--out_dir={trained}", *READ, "--units=6", f"--out={file}")
    assert len(lines) == 2 + 6 + 1 and lines[-1] == "5 more units have smaller shares; --units=11 shows them"
    shares = [float(line[lines[1].index("activation") + 10 :].split()[0]) for line in lines[2:-1]]
    assert 0.5 < sum(shares) < 1
    assert file.read_bytes().startswith(b"\x89PNG")
    assert output(capsys, f"--out_dir={trained}", *READ, f"--out={tmp_path / 'head.svg'}")
    assert "<svg" in (tmp_path / "head.svg").read_text()


def test_the_picture_has_three_bars_for_each_unit():
    pytest.importorskip("matplotlib", reason="needs matplotlib; run pip install -e .[test]")
    units = [
        Unit(f"{i} '$_{i}$'", 2.0 * i, 0.1 * i, i + 1.0, 0.5, [("'$x$'", 0.25), ("' longtoken'", 0.5)])
        for i in range(5)
    ]
    figure = lens.picture(units, "layer 0, head 1, query 4 '$'")
    figure.canvas.draw()
    axes = figure.axes
    assert [len(axis.patches) for axis in axes] == [5, 5, 5, 0]
    assert [bar.get_width() for bar in axes[0].patches] == [unit.share for unit in units]
    assert [bar.get_width() for bar in axes[1].patches] == [unit.incoming for unit in units]
    assert [bar.get_width() for bar in axes[2].patches] == [unit.outgoing for unit in units]
    assert [label.get_text() for label in axes[0].get_yticklabels()] == [unit.name for unit in units]
    assert [text.get_text() for text in axes[3].texts] == ["'$x$' +0.250", "' longto… +0.500"] * 5
    assert all(axis.get_xlabel() for axis in axes)


def test_find_reads_the_whole_validation_set(trained, tiny_data, capsys):
    lines = output(capsys, f"--out_dir={trained}", "--find=induction,previous", "--device=cpu")
    meta = sum(1 for _ in lens.eval_batches(*of_validation(tiny_data), 1))
    assert lines[0] == f"{tiny_data} val: {meta} windows of 16 tokens"
    for i, name in ((2, "induction"), (10, "previous")):
        assert lines[i].startswith(f"{name}: attention to the token ")
        table = [line.split() for line in lines[i + 2 : i + 6]]
        assert sorted(row[:2] for row in table) == [["0", "0"], ["0", "1"], ["1", "0"], ["1", "1"]]
        assert [row[2] for row in table] == sorted((row[2] for row in table), reverse=True)
        layer, head, best, _ = table[0]
        said = f"Heads with 0.4 or more: 0 of 4. The best is head {head} of layer {layer} with {best}."
        assert lines[i + 6] == said


def test_the_tokens_of_experts(run, tiny_data, capsys):
    """The figures that the functions return for the whole validation set, all experts and one of them."""
    out = run("--max_iters=2", "--warmup_iters=0", "--n_expert=3", "--n_dense_layer=1")
    capsys.readouterr()
    flags = [f"--out_dir={out}", "--reader=experts", "--layer=1", "--device=cpu"]
    first, empty, head, *lines = output(capsys, *flags)
    _, net, tokenizer = weights.alone(str(out), torch.device("cpu"), torch.float32, lambda flags: None)
    reads = reads_of_tokens(net, lens.reader_of(net, 1, "experts"), lens.eval_batches(*of_validation(tiny_data), 512))
    assert first.startswith(f"{tiny_data} val: ") and not empty and "share of each" in head and len(lines) == 3
    assert reads[:, -1].sum() == 16 * int(first.split()[2]) and reads[:, :-1].sum() == 2 * reads[:, -1].sum()
    for e, line in enumerate(lines):
        best = preferred(reads, e, 8)
        load = reads[:, e].sum() / (reads[:, -1].sum() * 2 / 3)
        shares = [f"{lens.spelled(tokenizer, each.token)} {each.share:.2f}" for each in best]
        assert line == f"{e:6}  {load:5.3f}  {'  '.join(shares)}"

        _, _, of_one, head, *rows = output(capsys, *flags, f"--expert={e}", "--units=3")
        assert of_one == f"expert {e}, whose load is {load:.3f} of the mean"
        assert head.split() == ["token", "reads", "share", "excess"] and len(rows) == len(best[:3])
        for row, (token, n, share, excess) in zip(rows, best, strict=False):
            name = lens.spelled(tokenizer, token)
            assert row.startswith(name)
            assert row.removeprefix(name).split() == [f"{n:,}", f"{share:.4f}", f"{excess:,.0f}"]

    for more, fragments in (
        (["--start=x"], ["start='x'", "validation set", "leave it out"]),
        (["--expert=3"], ["expert=3", "0 .. 2"]),
        (["--expert=-2"], ["expert=-2", "0 .. 2"]),
        (["--layer=0"], ["reader=experts", "has attn, mlp"]),
        (["--reader=attn"], ["start=''", "reader=attn", "give one"]),
        (["--out=a.png"], ["out=a.png", "only with start"]),
    ):
        line = refused(lens.main, [*flags, *more], capsys)
        assert all(fragment in line for fragment in fragments), line


def of_validation(folder):
    from data.dataset import open_data
    from data.objective import OBJECTIVE

    return open_data(str(folder)).split("val"), OBJECTIVE["causal"](257, 256, 16)


REFUSED = [
    ([], ["start=''", "find"]),
    (["--start=x", "--layer=2"], ["layer=2", "0 .. 1"]),
    (["--start=x", "--head=-1"], ["head=-1", "0 .. 1"]),
    (["--start=x", "--reader=mlp2"], ["reader=mlp2", "has attn, mlp"]),
    (["--start=x", "--reader=mlp", "--head=1"], ["head=1", "0 .. 0"]),
    (["--start=abc", "--position=3"], ["position=3", "0 .. 2"]),
    (["--start=abc", "--position=-2"], ["position=-2", "-1"]),
    (["--start=abcdefghijklmnopq"], ["start has 17 tokens", "block_size=16", "shorten"]),
    (["--start=x", "--units=0"], ["units=0", "at least 1"]),
    (["--start=x", "--source=y"], ["source='y'", "objective=causal", "leave it out"]),
    (["--start=x", "--out=a.jpg"], ["out=a.jpg", ".png or .svg"]),
    (["--start=x", "--out=/dev/null/a.png"], ["/dev/null"]),
    (["--start=x", "--dataset=pycode"], ["dataset=pycode", "only with find"]),
    (["--start=x", "--expert=1"], ["expert=1", "only with reader=experts"]),
    (["--reader=experts"], ["reader=experts", "has attn, mlp"]),
    (["--start=FILE:/no/prompt.txt"], ["/no/prompt.txt"]),
    (["--find=copying"], ["find=copying", "'copying'", "induction, previous"]),
    (["--find=previous,"], ["find=previous,", "''"]),
    (["--find=previous", "--layer=1"], ["--layer=1", "only with find=''", "find is previous"]),
    (["--find=previous", "--dataset=/no/such"], ["/no/such"]),
    (["--start=x", "--out_dir=/no/such/run"], ["/no/such/run"]),
    (["--find=previous", "--out_dir=nanogpt:/no/ckpt.pt"], ["/no/ckpt.pt"]),
    (["--start=x", "--device=tpu"], ["device='tpu'"]),
    (["--strat=x"], ["--strat=x", "start"]),
]


@pytest.mark.parametrize("flags,fragments", REFUSED, ids=lambda x: " ".join(x))
def test_wrong_flags(flags, fragments, trained, capsys):
    line = refused(lambda argv: lens.command(lambda: lens.main(argv)), [f"--out_dir={trained}", *flags], capsys)
    for fragment in fragments:
        assert fragment in line


def test_heads_with_an_unknown_gate(trained, capsys, monkeypatch):
    own = M.Pool.forward
    monkeypatch.setattr(M.Pool, "forward", lambda self, x, inputs: own(self, x, inputs) * x.sigmoid())
    line = refused(lens.main, [f"--out_dir={trained}", *READ], capsys)
    assert "layer=1 head=1 computes something else" in line and "Pool has changed" in line


def test_data_of_another_tokenizer(trained, tmp_path, capsys):
    text = "".join(map(chr, range(257))) * 2  # as many tokens as the model's
    with ShardWriter(tmp_path / "chars", CharTokenizer(text)) as out:
        for split in ("train", "val"):
            out.add(split, CharTokenizer(text).encode(text))
    flags = [f"--out_dir={trained}", "--find=previous", f"--dataset={tmp_path / 'chars'}"]
    assert "another tokenizer" in refused(lens.main, flags, capsys)


def test_without_matplotlib(trained, capsys, monkeypatch):
    own = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else own(name))
    line = refused(lens.main, [f"--out_dir={trained}", *READ, "--out=a.png"], capsys)
    assert "out=a.png" in line and "needs matplotlib; pip install -e .[plots]" in line
    assert output(capsys, f"--out_dir={trained}", *READ)
