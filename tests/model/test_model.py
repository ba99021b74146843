"""The model against independent references: naive attention, closed forms, counts by hand, its own uncached self."""

import itertools
import math
import random
import re
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import model as M
import ops
from configurator import try_flags
from engine import decode
from engine.decode import generate
from engine.parallel.tensor import sharded_dim
from engine.plan.accounting import attention_kernels, flops
from model import Model, ModelConfig
from tests.helpers import Operations
from tests.models import (
    DOCS,
    TINY,
    USUAL,
    S,
    T,
    assert_same,
    beside,
    build,
    check_decoding,
    draw,
    jitter,
    spy_on_kernels,
    tokens,
)


def combinations(drawn: int = 500) -> list[dict]:
    """Rows of flags in which every two values of two flags meet that any of many random rows has and is not refused."""
    rng = random.Random(0)
    pool = [draw(rng) for _ in range(drawn)]
    columns = {value: i for i, value in enumerate(dict.fromkeys((k, v) for row in pool for k, v in row.items()))}
    has = torch.zeros(len(pool), len(columns))
    for i, row in enumerate(pool):
        has[i, [columns[value] for value in row.items()]] = 1
    missing = has.T @ has > 0
    rows = []
    while missing.any():
        best = ((has @ missing.float()) * has).sum(1).argmax()
        try:
            try_flags(ModelConfig(**TINY | pool[best]))
        except ValueError:  # which the command line tells too
            has[best] = 0
            missing &= has.T @ has > 0
        else:
            rows.append(pool[best])
            missing[torch.outer(has[best], has[best]) > 0] = False
    return rows


def changes(row: dict) -> str:
    """The flags of a row that are not as usual, as its name."""
    return ",".join(f"{k}={v}" for k, v in row.items() if v != USUAL[k])


GRID = combinations()


@pytest.mark.parametrize("flags", GRID, ids=changes)
def test_grid(flags):
    """Roles, initial loss, loss and gradients, documents, and of each objective who sees whom and what is generated."""
    model = build(**flags)
    for parameter, _ in model.named_parameters():
        sharded_dim(model, parameter)  # refuses, by name, what --tp could not cut
    torch.manual_seed(2)
    idx, targets = tokens(2, T), tokens(2, T)
    targets[0, 3:6] = targets[1, 10:] = -1
    assert abs(model(idx, targets, **beside(model, docs=False)).item() - math.log(TINY["vocab_size"])) < 0.35
    jitter(model)
    for docs in (False, True):
        logits = check_loss(model, idx, targets, **beside(model, docs))
    with torch.no_grad():
        check_documents_alone(model, logits, idx, **beside(model))
        for docs in (False, True):
            check_sight(model, idx, **beside(model, docs))


@pytest.mark.parametrize("objective", ["causal", "masked", "seq2seq"])
def test_a_block_may_give_its_readers_other_windows(objective, monkeypatch):
    """Two windows in one sum: the model sees as far as the wider one, whatever the flags say."""

    def two(cfg, layer):
        near, far = M.Attention(cfg, layer), M.Attention(cfg, layer)
        near.window, far.window = 2, 4
        return [
            M.Sum(cfg, near=near, far=far),
            *M.cross(cfg, layer),
            M.Sum(cfg, mlp=M.MLP(cfg, layer)),
        ]

    monkeypatch.setitem(M.BLOCK, "two", two)
    assert reach(build(block="two", window=3)) == 3 + 3
    test_grid({"block": "two", "objective": objective, "pos": "rope", "window": 3})


def check_loss(model, idx, targets, **given) -> torch.Tensor:
    """The logits. Targets of -1 are left out; a finite gradient reaches every parameter, beside padding too."""
    loss, logits = model(idx, targets, **given), model(idx, **given)
    assert logits.isfinite().all()
    assert torch.allclose(loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1), atol=1e-9)
    model.zero_grad()
    model.train()(
        idx, targets, **given
    ).backward()  # there is no dropout, but a loss may have a part for training alone
    model.eval()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not 0 < p.grad.abs().max() < math.inf]
    assert not dead, f"no gradient, or no finite one, reaches {dead}"
    return logits


def check_documents_alone(model, together, idx, docs, source=None, source_docs=None):
    """A row's first document gives what it gives alone; the others do so where only distances count."""
    distances = model.cfg.pos in ("rope", "alibi", "none") and not model.cfg.placed_slots
    relative = model.cfg.doc_positions or distances
    for row in range(2):
        for number in docs[row].unique() if relative else [0]:
            here = docs[row] == number
            alone = {} if source is None else {"source": source[row][source_docs[row] == number][None]}
            assert torch.allclose(together[row][here], model(idx[row][here][None], **alone)[0], atol=1e-9)


def check_sight(model, idx, docs=None, source=None, source_docs=None):
    """Who sees whom, of the text and of the source, and that a text is continued as it is read."""
    given = dict(idx=idx, docs=docs, source=source, source_docs=source_docs)
    masked = model.cfg.objective == "masked"
    after = torch.arange(T) - 6
    near = (after <= reach(model)) & (after >= (-reach(model) if masked else 0))
    check_reach(model, "idx", near & within(docs, docs, 6), **given)
    if source is not None:
        check_reach(model, "source", within(docs, source_docs, 6), **given)
    if docs is None and not masked:
        check_decoding(model, idx[:, :10], T - 8, source=source)


def reach(model: Model) -> int:
    """How far apart two tokens can be of which one sees the other."""
    sums = [each for block in model.blocks for each in block.sums]
    read = [[m for m in each.children() if isinstance(m, M.Heads) and m.reader.source == "context"] for each in sums]
    windows = [[m.window for m in readers] for readers in read]
    seen = sum(max((window - 1 if window else T for window in each), default=0) for each in windows)
    return seen + sum(m.reach for m in model.blocks.modules() if isinstance(m, M.Neighbours))


def within(docs, of_changed, place: int) -> torch.Tensor:
    """(2, T), True in the document of what is changed at a place."""
    return torch.ones(2, T, dtype=torch.bool) if docs is None else docs == of_changed[:, place, None]


def check_reach(model, changed, seen, **given):
    """Another token at place 6 of what is changed, the text or the source, moves exactly the logits at seen (2, T)."""
    given = {name: x.repeat(2, 1) for name, x in given.items() if x is not None}
    given[changed][2:, 6] = (given[changed][2:, 6] + 1) % TINY["vocab_size"]
    before, after = model(**given).chunk(2)
    moved = (after - before).abs().amax(dim=2)
    assert (moved[~seen] < 1e-12).all(), f"sees what it must not: {moved}"
    assert (moved[seen] > 1e-12).all(), f"does not see what it should: {moved}"


@pytest.mark.parametrize("pos", M.POSITION)
def test_the_context_of_a_long_prompt_is_its_end(pos):
    """A prompt that fills block_size, or is longer."""
    model = build(pos=pos)
    jitter(model)
    for length in (T, T + 1, 3 * T):
        check_decoding(model, tokens(2, length), 4)


SLOTS = {"block": "c.own_slots", "n_slot": 5}
JOINT = SLOTS | {"block": "c.joint_slots"}


# ---- the model's use of attention


def test_a_model_of_bfloat16_parameters_trains():
    """Not under autocast: gradients of all parameters, those of the norms among them, are near float32's."""
    flags, grads = {"norm": "rmsnorm", "qk_norm": True, "pos": "rope", "mlp": "relu2"}, []
    for dtype in (torch.float32, torch.bfloat16):
        lm, ids = build(dtype, **flags), tokens(2, 13)
        lm(ids, ids).backward()
        grads.append(torch.cat([p.grad.flatten().float() for p in lm.parameters()]))
    assert (grads[1] - grads[0]).norm() < 0.05 * grads[0].norm()


def test_the_residual_stream_has_the_dtype_of_the_flag():
    for flag, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        seen, lm = set(), build(torch.float32, norm="rmsnorm", qk_norm=True, pos="rope", fp32_residual=flag)
        for block in lm.blocks:
            block.register_forward_hook(lambda _, args, y, seen=seen: seen.update((args[0].dtype, y.dtype)))
        with torch.autocast("cpu", torch.bfloat16):
            lm(torch.zeros(1, 8, dtype=torch.int64))
        assert seen == {dtype}


@pytest.mark.parametrize("device,cp,flags,said", [
    ("cpu", 1, {}, "full (2 layers)"),
    ("cpu", 1, {"window": 3, "window_pattern": "SL"}, "strips (1 layer), full (1 layer)"),
    ("cpu", 1, {"window": 3, "objective": "masked"}, "strips (2 layers)"),
    ("cpu", 1, {"dropout": 0.1}, "naive (2 layers)"),
    ("cpu", 1, {"window": 3, **SLOTS}, "strips (2 layers), full (2 layers)"),
    ("cpu", 1, {"pos": "alibi", **JOINT}, "strips (2 layers)"),
    ("cpu", 1, {"objective": "seq2seq", "window": 3}, "strips (4 layers), full (2 layers)"),
    ("cpu", 1, {"objective": "seq2seq", "block": "parallel", "doc_mask": True}, "strips (6 layers)"),
    ("cpu", 2, {}, "strips (2 layers)"),
    ("cuda", 1, {"window": 3, "dropout": 0.1}, "flash (2 layers)"),
    ("cuda", 1, {"window": 3, "doc_mask": True}, "varlen (2 layers)"),
    ("cuda", 1, JOINT, "flash (2 layers)"),
    ("cuda", 2, {"n_head": 1, "n_embd": 256, "pos": "rope"}, "flash (2 layers)"),
    ("cuda", 2, {"n_head": 1, "n_embd": 256, "pos": "alibi"}, "strips (2 layers)"),  # wider than flash allows
], ids=str)  # fmt: skip
def test_the_kernels_of_a_model_are_those_that_training_takes(monkeypatch, device, cp, flags, said):
    """On this machine; for a GPU and context parallelism, where the queries of a piece see earlier keys, by hand."""
    model = build(torch.float32, **flags).train()
    source = S if model.encoder else 0
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    assert attention_kernels(model, T - T % cp, source, device, dtype, cp) == said
    if (device, cp) == ("cpu", 1):
        answers = spy_on_kernels(monkeypatch)
        model(tokens(2, T), tokens(2, T), **beside(model, docs=model.cfg.doc_mask))
        assert Counter(answers) == {kernel: int(n) for kernel, n in re.findall(r"(\w+) \((\d+) layers?\)", said)}


@pytest.mark.parametrize("block", ["parallel", "superblock"])
def test_every_reader_has_a_dropout_of_its_own(block):
    """The branches' sum loses each branch at other places: some entries keep one of the two alone."""
    net = build(torch.float64, block=block, dropout=0.5, pos="none").train()
    (both,) = net.blocks[0].sums
    for name, value in (("attn", 1.0), ("mlp", 10.0)):
        reader = getattr(both, name)
        reader.forward = lambda x, inputs, value=value: torch.full_like(x, value)
    s = torch.zeros(2, 12, net.cfg.n_embd, dtype=torch.float64)
    assert set(both(s, M.Inputs()).unique().tolist()) == {0.0, 2.0, 20.0, 22.0}


@pytest.mark.parametrize("flags", [
    {},
    {"attention": "mqa", "window": 100, "pos": "alibi"},
    {"attn_softcap": 5.0},
    {"dropout": 0.1},
    {"block": "simplified", "window": 100},
    {"block": "simplified_parallel", "pos": "alibi"},
    {"block": "c.joint_slots", "n_slot": 32},
    {"objective": "masked", "window": 100},
    {"objective": "masked", "block": "simplified"},
    {"objective": "masked", "block": "c.own_slots", "n_slot": 32, "attn_softcap": 5.0},
    {"objective": "seq2seq", "block": "c.own_slots", "n_slot": 32, "pos": "rope"},
], ids=changes)  # fmt: skip
@pytest.mark.parametrize("docs", [False, True])
def test_no_square_tensor(flags, docs):
    """Of two heads, in strips of 256 queries."""
    T = 1024
    model = Model(ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=T, vocab_size=16, **flags))
    idx, numbers = torch.randint(16, (1, T)), torch.arange(T)[None] // 300
    source = {"source": idx} if model.encoder else {}
    of_docs = {"docs": numbers, "source_docs": numbers if source else None} if docs else {}
    kept, sizes = [], []

    def note(f, args, kwargs, result):
        results = result if isinstance(result, tuple | list) else (result,)
        sizes.extend(x.numel() for x in results if isinstance(x, torch.Tensor))

    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        with Operations(note):
            model(idx, idx, **source, **of_docs).backward()
    assert T < max(sizes) < 0.6 * T * T
    assert sum(kept) < 1.5 * T * T, "the strips' matrices are kept for the backward"  # of a layer, or two
    if docs or model.cfg.objective == "masked":
        return
    model.eval()
    sizes.clear()
    with Operations(note), torch.no_grad():
        list(generate(model, idx[:, :900], 2, lambda logits: logits.argmax(-1), **source))
    assert T < max(sizes) < 0.6 * T * T


def test_caches_have_the_length_of_the_text(monkeypatch):
    lengths = []
    model = Model(ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=32, vocab_size=11)).eval()
    monkeypatch.setattr(decode, "KVCache", lambda length, real=decode.KVCache: lengths.append(length) or real(length))
    for prompt, new in ((4, 5), (30, 2), (30, 9)):
        list(generate(model, torch.zeros(1, prompt, dtype=torch.int64), new, lambda logits: logits.argmax(-1)))
    lengths = [length for length in lengths if length]  # 0 when decoding ends
    assert lengths[:2] == [9, 32] and set(lengths[2:]) == {32}


def test_alibi_columns_are_exact_far_out_in_bfloat16():
    """Two columns hold j exactly to 65,535 in bfloat16; scores of neighbours still differ by the slope."""
    cfg = ModelConfig(n_head=8, n_embd=8 * 64)
    alibi = M.Alibi(cfg)
    t = torch.tensor([40000, 40001, 40200])
    q = torch.zeros(1, 8, 3, 64, dtype=torch.bfloat16)
    Q, K, _ = alibi(q, q, q, alibi.table(cfg, t, torch.bfloat16))
    scores = (Q[:, :, :1].double() @ K.double().mT)[0, :, 0] / 8  # (H, S), sqrt(D) = 8
    difference = scores - scores[:, :1]
    expected = M.alibi_slopes(8)[:, None] * torch.tensor([0.0, 1.0, 200.0])
    assert torch.allclose(difference.float(), expected, rtol=1e-3)


# ---- convolutions


CONV = {"conv": 4, "pos": "rope"}


def written_out(x: torch.Tensor, weight: torch.Tensor, docs: torch.Tensor) -> torch.Tensor:
    rows = []
    for row, numbers in zip(x, docs.tolist(), strict=True):
        for t in range(len(row)):
            seen = [i for i in range(weight.size(1)) if t - i >= 0 and numbers[t - i] == numbers[t]]
            rows.append(row[t] + sum(weight[:, i] * row[t - i] for i in seen))
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("docs", [None, DOCS])
@pytest.mark.parametrize("taps, compiled", [(2, False), (2, True), (4, False), (T + 3, False)])
def test_a_convolution_is_the_sum_written_out(docs, taps, compiled):
    """What a convolution gives the readers, and its gradients."""
    net, seen = build(**CONV | {"conv": taps, "n_layer": 1}), []
    jitter(net)
    conv = net.blocks[0].sums[1].conv
    conv.register_forward_hook(lambda conv, args, y: seen.append((*args, y)))
    net(tokens(2, T), docs=docs)
    [(x, inputs, _)] = seen
    x = x.detach().requires_grad_()
    conv._forward_hooks.clear()
    f = torch.compile(conv, backend="aot_eager", fullgraph=True) if compiled else conv
    expected = written_out(x, conv.weight, DOCS * 0 if docs is None else docs)
    assert_same(f(x, inputs), expected, [x, conv.weight])


def test_a_convolution_in_sixteen_bits_rounds_once():
    """The result is that of float32, rounded; so are the gradients."""
    net, idx = build(torch.float32, **CONV), tokens(2, T)
    jitter(net)
    conv, inputs = net.blocks[0].sums[0].conv, net.inputs(idx, torch.arange(T), torch.empty(0))
    x = torch.randn(2, T, 32).to(torch.bfloat16).requires_grad_()
    wide = x.detach().float().requires_grad_()
    found, expected = conv(x, inputs), conv(wide, inputs)
    assert torch.equal(found, expected.to(torch.bfloat16))
    grad = torch.randn_like(found)
    gradients = torch.autograd.grad(found, [x, conv.weight], grad)
    exact = torch.autograd.grad(expected, [wide, conv.weight], grad.float())
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(gradients, exact, strict=True))


def test_convolutions_begin_as_the_model_without_them():
    """With the same initial weights; each convolution begins at 0 and has a gradient."""
    idx = tokens(2, T)
    net, without = (Model(ModelConfig(**TINY, conv=conv), seed=1) for conv in (4, 0))
    assert torch.equal(net(idx), without(idx))
    net(idx, idx).backward()
    added = [p.grad for name, p in net.named_parameters() if name.endswith("conv.weight")]
    assert [grad.shape for grad in added] == [(32, 4)] * 4 and all(grad.abs().min() > 0 for grad in added)


def test_value_embeddings_add_a_vector_of_the_token_in_every_second_layer():
    """As a loop over tokens adds it to the values of the same model without them."""
    flags = TINY | {"n_layer": 3, "attention": "gqa", "n_kv_head": 2}
    net, plain = (Model(ModelConfig(**flags, value_embedding=on), seed=1).double() for on in (True, False))
    idx = tokens(2, T)

    def added(project, table, x, inputs):
        q, k, v = project(x, inputs)
        v = v.clone()
        for b, t in itertools.product(range(2), range(T)):
            v[b, :, t] += table[:, idx[b, t]]
        return q, k, v

    tables = [block.sums[0].attn.of_token for block in net.blocks]
    assert tables[1] is None and not torch.allclose(net(idx), plain(idx))
    for layer in (0, 2):
        attn = plain.blocks[layer].sums[0].attn
        attn.project = partial(added, attn.project, tables[layer])
    torch.testing.assert_close(net(idx), plain(idx))


def test_value_embeddings_have_the_same_gradient_each_time():
    """Digit for digit on two threads, in a compiled graph too, as an exact resume needs."""
    attn = Model(ModelConfig(**TINY, value_embedding=True), seed=1).blocks[0].sums[0].attn
    idx = tokens(8, 512)
    weight = torch.randn(8, 4, 512, 8)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for values_of in (attn.values_of, torch.compile(attn.values_of)):
            found = [torch.autograd.grad((values_of(idx) * weight).sum(), attn.of_token)[0] for _ in range(4)]
            assert all(torch.equal(each, found[0]) for each in found)
    finally:
        torch.set_num_threads(threads)


# ---- loss


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("chunk", [1, 5, 26, 1000])
def test_the_loss_in_chunks(softcap, chunk):
    """Against cross_entropy of all logits."""
    model = build(logit_softcap=softcap, loss_chunk=chunk)
    for p in model.parameters():
        torch.nn.init.normal_(p)
    idx, targets = torch.randint(29, (2, 2, 13))
    targets[0, 3:6] = -1
    logits = model(idx)[targets >= 0]
    expected = F.cross_entropy(logits, targets[targets >= 0])
    loss, parameters = model(idx, targets), list(model.parameters())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    with torch.no_grad():
        assert model(idx, targets).item() == pytest.approx(expected.item(), rel=1e-12)
    for p, q in zip(*(torch.autograd.grad(each, parameters) for each in (loss, expected)), strict=True):
        assert torch.allclose(p, q, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("trained", ["head", "all but the head", "nothing"])
def test_chunked_loss_of_frozen_parameters(trained):
    """Trained parameters have the gradients that they have together; without autograd, no chunk computes a gradient."""
    model, idx = build(loss_chunk=5, tie_weights=False), tokens(2, 13)
    model(idx, idx).backward()
    whole = {name: p.grad for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.grad = None
        p.requires_grad_(trained != "nothing" and (name == "head.weight") == (trained == "head"))
    calls = []
    model.chunk_loss = lambda *args: calls.append(args[-1]) or ops.chunk_loss(*args)
    loss = model(idx, idx)
    if trained != "nothing":
        loss.backward()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, whole[name]) if p.requires_grad else p.grad is None, name
    with torch.no_grad():
        model(idx, idx)
    assert len(calls) == 12 and not any(calls[6:])


# ---- accounting, initialisation, configuration


@pytest.mark.parametrize("S", [96, 60])
def test_parameters_and_flops_of_an_encoder_and_decoder_counted_by_hand(S):
    """The encoder's window reaches to both sides, and no farther than the source; every second layer has none."""
    L, E, H, Hkv, C, T, V, W = 3, 5, 8, 2, 256, 128, 1000, 40
    wide = C + 2 * C * Hkv // H
    flags = dict(
        n_layer=L, n_encoder_layer=E, n_head=H, n_embd=C, block_size=T, vocab_size=V, objective="seq2seq",
        attention="gqa", n_kv_head=Hkv, pos="rope", window=W, window_pattern="SL", mlp_ratio=3.0,
    )  # fmt: skip
    for block in ("standard", "superblock"):
        with torch.device("meta"):
            model = Model(ModelConfig(**flags, block=block))
        mlp, kv = 2 * C * 3 * C, C * 2 * C * Hkv // H
        encoder, decoder = E * (C * wide + C * C + mlp), L * (C * wide + C * C + mlp + C * C + C * C)
        norms = {"standard": 2 * E + 3 * L, "superblock": E + 2 * L}[block] + 2
        assert model.n_params() == encoder + decoder + L * kv + V * C + norms * C
        weights = S * (encoder + L * kv) + T * (decoder + V * C)
        scores = (S * (3 * min(S, 2 * W - 1) + 2 * S) + T * (2 * W + T + L * S)) * C
        assert flops(model, T, source=S) == 6 * weights + 12 * scores


@pytest.mark.parametrize("flags", [
    {},
    {"scaled_init": False},
    {"block": "simplified"},
    {"objective": "seq2seq"},
    {"n_expert": 2},
    {"block": "c.own_slots"},
    {"block": "c,p.matrix"},
], ids=str)  # fmt: skip
def test_init_std_scales_all_that_is_drawn(flags):
    """Also output layers and slots. Values that are not drawn stay; the embedding has the flag's standard deviation."""
    flags = flags | dict(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=512)
    usual, other = (Model(ModelConfig(**flags, init_std=std), 1) for std in (0.02, 0.006))
    for p, q in zip(usual.parameters(), other.parameters(), strict=True):
        constant = p.std() == 0 if p.numel() > 1 else True
        torch.testing.assert_close(q, p if constant else 0.3 * p, rtol=1e-5, atol=0)
    assert other.wte.weight.std().item() == pytest.approx(0.006, rel=0.05)


@pytest.mark.parametrize("values,resid", [("first", 1.0), ("all", 0.2)])
@pytest.mark.parametrize("block, skips", [("simplified", 2), ("simplified_parallel", 0)])
def test_initial_values_of_simplified_blocks(block, skips, values, resid):
    """W_Q and the near identities' W are 0, no linear layer shrinks with depth, and the gains are the flags'."""
    flags = dict(block=block, simplified_value_proj=values, simplified_beta_ff=0.3, attention="gqa", n_kv_head=2)
    model = Model(ModelConfig(n_layer=2, n_head=4, n_embd=256, block_size=64, vocab_size=512, **flags), 1)
    of_mlp = {"simplified": "sums.1.gain", "simplified_parallel": "sums.0.gains.1"}[block]
    gains = {"value": 0.0, "out": 0.0, "value.resid": resid, "out.resid": resid, of_mlp: 0.3}
    for name, p in model.named_parameters():
        layer = name.removesuffix(".weight")
        if layer.endswith(".qk"):  # two groups of two heads' queries and one's keys
            q, k = p.view(2, 3, 64, 256).split((2, 1), dim=1)
            assert (q == 0).all() and k.std().item() == pytest.approx(0.02, rel=0.05)
        elif layer.endswith(("up", "down", "wte", "wpe")):
            assert p.std().item() == pytest.approx(0.02, rel=0.05), name
        else:
            value = next((value for end, value in gains.items() if layer.endswith(f".{end}")), 1.0)
            assert torch.equal(p, torch.full_like(p, value)), name
    names = [name for name, _ in model.named_parameters()]
    assert sum("sums.1.skip" in name for name in names) == skips and "blocks.1.sums.0.attn.alpha" in names


@pytest.mark.parametrize("block", M.BLOCK)
@pytest.mark.parametrize("pos, norm_placement", [("learned", "pre"), ("rope", "post")])
def test_encoder_is_a_masked_model_without_head(block, pos, norm_placement):
    flags = dict(block=block, pos=pos, norm_placement=norm_placement, window=4, window_pattern="SL")
    both = build(objective="seq2seq", n_encoder_layer=3, **flags)
    alone = build(objective="masked", n_layer=3, **flags)
    jitter(both)
    weights = {n: p for n, p in both.state_dict().items() if n.startswith(("wte", "pos", "head"))}
    weights |= {n.removeprefix("encoder."): p for n, p in both.state_dict().items() if n.startswith("encoder.")}
    alone.load_state_dict(weights)
    source = tokens(2, T)
    for docs in (None, (DOCS, DOCS)):
        assert torch.allclose(both.encode(source, docs), alone.hidden(source, docs=docs), atol=1e-12)


@pytest.mark.parametrize("flags,fragments", [
    ({"window": -1}, ["window=-1"]),
    ({"dropout": 1.0}, ["dropout=1.0"]),
    ({"attention": "gqa"}, ["n_kv_head=0", "attention=gqa", "n_head=4"]),
    ({"attention": "gqa", "n_kv_head": 3}, ["n_kv_head=3", "n_head=4"]),
    ({"attention": "mqa", "n_kv_head": 2}, ["n_kv_head=2", "attention=mqa", "set n_kv_head=0"]),
    ({"pos": "rope", "n_embd": 36}, ["pos=rope", "9"]),
    ({"pos": "sinusoidal", "n_embd": 35, "n_head": 5}, ["pos=sinusoidal", "35"]),
    ({"window": 4, "window_pattern": "SX"}, ["window_pattern=SX"]),
    ({"block": "superblok"}, ["block=superblok: no block has this name; write superblock, or readers such as c,p"]),
    ({"block": "xyzzy"}, ["write standard, parallel, superblock, simplified, simplified_parallel, or readers"]),
    ({"block": "c+s.gelu", "mlp": "relu"}, ["mlp=relu", "'slots with a softmax' and n_slot=0"]),
    ({"n_expert": 4, "n_expert_active": 7}, ["n_expert_active=7", "n_expert=4", "lower it"]),
    ({"n_expert": 4, "n_dense_layer": 2}, ["n_expert=4", "used only with", "or block or n_dense_layer"]),
    ({"block": "c,e"}, ["n_expert=0", "set n_expert"]),
    (JOINT | {"doc_mask": True, "pos": "rope"}, ["doc_mask=True", "pos=rope", "block=", "use own_slots"]),
    ({"conv": 1}, ["conv=1: needs conv!=1"]),
    ({"conv": 65}, ["conv=65: must be <=64"]),
    ({"value_embedding": True, "block": "p;c,p"}, ["'a c in layer 0, 2, 4, ...', and here"]),
    ({"conv": 4, "objective": "masked"}, ["conv=4: used only with objective=causal"]),
    ({"block": "c,e.heads", "n_expert": 4}, ["block=", "experts may have only another map"]),
    *(({"pos": "rope", "rope_scaling": each}, ["rope_scaling=", each, "linear:F"])
      for each in (":::", "linear", "linear:2:3", "linear:-2", "linear:nan", "yarn:1e300")),
], ids=str)  # fmt: skip
def test_impossible_flags_are_named(flags, fragments):
    with pytest.raises(ValueError) as error:
        try_flags(ModelConfig(**TINY | flags))
    assert "\n" not in str(error.value)
    for fragment in fragments:
        assert fragment in str(error.value)


IDX, LONG = torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 14, dtype=torch.int64)


@pytest.mark.parametrize("flags,idx,given,said", [
    ({}, LONG, {}, "14 tokens.*block_size=13"),
    ({"objective": "seq2seq"}, IDX, {"source": LONG}, "14 tokens.*block_size=13"),
    ({}, IDX, {"source": IDX}, "objective=seq2seq needs a source, and other models read none"),
    ({"objective": "seq2seq"}, IDX, {}, "objective=seq2seq needs a source, and other models read none"),
    ({"objective": "seq2seq"}, IDX, {"source": IDX, "docs": IDX}, "docs and source_docs belong together"),
    ({"objective": "seq2seq"}, IDX, {"source": IDX, "source_docs": IDX}, "docs and source_docs belong together"),
], ids=str)  # fmt: skip
def test_what_a_model_does_not_take_is_refused(flags, idx, given, said):
    model = build(**flags)
    with pytest.raises(ValueError, match=said):
        model(idx, **given)


def test_a_masked_model_continues_no_text():
    with pytest.raises(ValueError, match="objective=masked does not continue a text"):
        next(generate(build(objective="masked"), IDX, 1, lambda logits: logits.argmax(-1)))
