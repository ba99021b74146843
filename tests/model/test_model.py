"""What tests/naive.py does not know of the model: dtypes, kernels, memory, initial values, counts, refusals."""

import re
from collections import Counter

import pytest
import torch

import model as M
from configurator import try_flags
from engine.decode import generate
from engine.plan.accounting import attention_kernels, flops
from model import Model, ModelConfig
from tests.helpers import Operations
from tests.models import (
    DOCS,
    TINY,
    S,
    T,
    assert_same,
    beside,
    build,
    changes,
    jitter,
    leaves,
    spy_on_kernels,
    tokens,
)

SLOTS = {"block": "c.own_slots", "n_slot": 5}
JOINT = SLOTS | {"block": "c.joint_slots"}
IDX = torch.zeros(1, 4, dtype=torch.int64)
LONG = torch.zeros(1, 14, dtype=torch.int64)


# ---- the model's use of attention


def test_a_model_of_bfloat16_parameters_trains():
    """Not under autocast: gradients of all parameters, those of the norms among them, are near float32's."""
    grads = []
    for dtype in (torch.float32, torch.bfloat16):
        net = build(dtype, norm="rmsnorm", qk_norm=True, pos="rope", mlp="relu2")
        idx = tokens(2, T)
        net(idx, idx).backward()
        grads.append(torch.cat([p.grad.flatten().float() for p in net.parameters()]))
    assert (grads[1] - grads[0]).norm() < 0.05 * grads[0].norm()


@pytest.mark.parametrize("flag,dtype", [(True, torch.float32), (False, torch.bfloat16)])
def test_the_residual_stream_has_the_dtype_of_the_flag(flag, dtype):
    seen = set()
    net = build(torch.float32, norm="rmsnorm", qk_norm=True, pos="rope", fp32_residual=flag)
    for block in net.blocks:
        block.register_forward_hook(lambda _, args, y: seen.update((args[0].dtype, y.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        net(IDX)
    assert seen == {dtype}


@pytest.mark.parametrize("device,cp,flags,said", [
    ("cpu", 1, {}, "full (2 layers)"),
    ("cpu", 1, {"window": 3, "window_pattern": "SL"}, "strips (1 layer), full (1 layer)"),
    ("cpu", 1, {"window": 3, "objective": "masked"}, "strips (2 layers)"),
    ("cpu", 1, {"dropout": 0.1}, "naive (2 layers)"),
    ("cpu", 1, {"window": 3, **SLOTS}, "strips (2 layers), full (2 layers)"),
    ("cpu", 1, {"objective": "seq2seq", "window": 3}, "strips (4 layers), full (2 layers)"),
    ("cpu", 1, {"objective": "seq2seq", "block": "parallel", "doc_mask": True}, "strips (6 layers)"),
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
    {"dropout": 0.1},
    {"block": "simplified", "window": 100},
    {"block": "simplified_parallel", "pos": "alibi"},
    {"block": "c.joint_slots", "n_slot": 32},
    {"objective": "masked", "block": "simplified"},
    {"objective": "masked", "block": "c.own_slots", "n_slot": 32, "attn_softcap": 5.0},
    {"objective": "seq2seq", "block": "c.own_slots", "n_slot": 32, "pos": "rope"},
], ids=changes)  # fmt: skip
@pytest.mark.parametrize("docs", [False, True])
def test_no_square_tensor(monkeypatch, flags, docs):
    """Of two heads, in strips of queries. Of an attention's scores, the backward keeps at most those of 256 queries."""
    T = 1024
    kernels = spy_on_kernels(monkeypatch)
    model = Model(ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=T, vocab_size=16, **flags))
    idx = torch.randint(16, (1, T))
    source = {"source": idx} if model.encoder else {}
    of_docs = {}
    if docs:
        of_docs["docs"] = torch.arange(T)[None] // 300
        of_docs["source_docs"] = of_docs["docs"] if source else None
    kept = {}  # the bytes of what is wider than the model, each once
    sizes = []

    def note(f, args, kwargs, result):
        results = result if isinstance(result, tuple | list) else (result,)
        sizes.extend(x.numel() for x in results if isinstance(x, torch.Tensor))

    def keep(x):
        if x.dim() and x.size(-1) > 4 * model.cfg.n_embd:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        with Operations(note):
            model(idx, idx, **source, **of_docs).backward()
    assert T < max(sizes) < 0.6 * T * T
    assert sum(kept.values()) < 0.6 * T * T * 4 * len(kernels), "the scores are kept for the backward"
    if docs or model.cfg.objective == "masked":
        return
    model.eval()
    sizes.clear()
    with Operations(note), torch.no_grad():
        list(generate(model, idx[:, :900], 2, lambda logits: logits.argmax(-1), **source))
    assert T < max(sizes) < 0.6 * T * T


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


def test_a_compiled_convolution_is_the_uncompiled_one():
    """As one graph, with documents; tests/naive.py has the sum written out."""
    net = build(**CONV)
    jitter(net)
    conv = net.blocks[0].sums[0].conv
    inputs = net.inputs(tokens(2, T), torch.arange(T), torch.empty(0), docs=(DOCS, DOCS))
    (x,) = leaves((2, T, 32))
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
    assert_same(compiled(x, inputs), conv(x, inputs), [x, conv.weight])


def test_a_compiled_convolution_keeps_nothing_but_its_input():
    """For the backward; padded copies in float32 would take a multiple of its memory."""
    net = build(torch.float32, **CONV)
    conv = net.blocks[0].sums[0].conv
    inputs = net.inputs(tokens(2, T), torch.arange(T), torch.empty(0))
    x = torch.randn(2, T, 32).to(torch.bfloat16).requires_grad_()
    kept = []
    compiled = torch.compile(conv, backend="aot_eager_decomp_partition", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        compiled(x, inputs)
    memory = {saved.untyped_storage().data_ptr() for saved in kept}
    assert memory == {x.data_ptr(), conv.weight.data_ptr()}


def test_a_convolution_in_sixteen_bits_rounds_once():
    """The result is that of float32, rounded; so are the gradients."""
    net = build(torch.float32, **CONV)
    jitter(net)
    conv = net.blocks[0].sums[0].conv
    inputs = net.inputs(tokens(2, T), torch.arange(T), torch.empty(0))
    x = torch.randn(2, T, 32).to(torch.bfloat16).requires_grad_()
    wide = x.detach().float().requires_grad_()
    found = conv(x, inputs)
    expected = conv(wide, inputs)
    assert torch.equal(found, expected.to(torch.bfloat16))
    grad = torch.randn_like(found)
    gradients = torch.autograd.grad(found, [x, conv.weight], grad)
    exact = torch.autograd.grad(expected, [wide, conv.weight], grad.float())
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(gradients, exact, strict=True))


def test_convolutions_begin_as_the_model_without_them():
    """With the same initial weights; each convolution begins at 0 and has a gradient."""
    idx = tokens(2, T)
    net = Model(ModelConfig(**TINY, conv=4), seed=1)
    without = Model(ModelConfig(**TINY), seed=1)
    assert torch.equal(net(idx), without(idx))
    net(idx, idx).backward()
    added = [p.grad for name, p in net.named_parameters() if name.endswith("conv.weight")]
    assert [grad.shape for grad in added] == [(32, 4)] * 4
    assert all(grad.abs().min() > 0 for grad in added)


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


def test_a_batch_without_targets_has_a_loss_of_zero():
    net = build()
    idx = tokens(2, T)
    assert net(idx, torch.full_like(idx, -1)).item() == 0


# ---- accounting, initialisation, configuration


@pytest.mark.parametrize("S", [96, 60])
def test_parameters_and_flops_of_an_encoder_and_decoder_counted_by_hand(S):
    """The encoder's window reaches to both sides, and no farther than the source; every second layer has none."""
    L = 3
    E = 5
    C = 256
    T = 128
    V = 1000
    W = 40
    flags = dict(
        n_layer=L, n_encoder_layer=E, n_head=8, n_embd=C, block_size=T, vocab_size=V, objective="seq2seq",
        attention="gqa", n_kv_head=2, pos="rope", window=W, window_pattern="SL", mlp_ratio=3.0,
    )  # fmt: skip
    mlp = 2 * C * 3 * C
    kv = 2 * C * C // 4
    encoder = E * (C * C + kv + C * C + mlp)
    decoder = L * (C * C + kv + C * C + mlp + C * C + C * C)
    for block in ("standard", "superblock"):
        with torch.device("meta"):
            model = Model(ModelConfig(**flags, block=block))
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
    usual = Model(ModelConfig(**flags), seed=1)
    other = Model(ModelConfig(**flags, init_std=0.006), seed=1)
    for p, q in zip(usual.parameters(), other.parameters(), strict=True):
        constant = p.numel() == 1 or p.std() == 0
        torch.testing.assert_close(q, p if constant else 0.3 * p, rtol=1e-5, atol=0)
    assert other.wte.weight.std().item() == pytest.approx(0.006, rel=0.05)


@pytest.mark.parametrize("values,resid", [("first", 1.0), ("all", 0.2)])
@pytest.mark.parametrize("block, skips", [("simplified", 2), ("simplified_parallel", 0)])
def test_initial_values_of_simplified_blocks(block, skips, values, resid):
    """W_Q and the near identities' W are 0, no linear layer shrinks with depth, and the gains are the flags'."""
    flags = dict(block=block, sas_value_proj=values, sas_beta_ff=0.3, attention="gqa", n_kv_head=2)
    model = Model(ModelConfig(n_layer=2, n_head=4, n_embd=256, block_size=64, vocab_size=512, **flags), 1)
    of_mlp = {"simplified": "sums.1.gain", "simplified_parallel": "sums.0.gains.1"}[block]
    gains = {"value": 0.0, "out": 0.0, "value.resid": resid, "out.resid": resid, of_mlp: 0.3}
    for name, p in model.named_parameters():
        layer = name.removesuffix(".weight")
        if layer.endswith(".qk"):  # two groups of two heads' queries and one's keys
            q, k = p.view(2, 3, 64, 256).split((2, 1), dim=1)
            assert (q == 0).all()
            assert k.std().item() == pytest.approx(0.02, rel=0.05)
        elif layer.endswith(("up", "down", "wte", "wpe")):
            assert p.std().item() == pytest.approx(0.02, rel=0.05), name
        else:
            value = next((value for end, value in gains.items() if layer.endswith(f".{end}")), 1.0)
            assert torch.equal(p, torch.full_like(p, value)), name
    names = [name for name, _ in model.named_parameters()]
    assert "blocks.1.sums.0.attn.alpha" in names
    assert sum("sums.1.skip" in name for name in names) == skips


@pytest.mark.parametrize("flags,fragments", [
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
    ({"value_embedding": True, "block": "p;c,p"}, ["'a c in layer 0, 2, 4, ...', and here"]),
    ({"block": "c,e.heads", "n_expert": 4}, ["block=", "experts may have only another map"]),
    *(({"pos": "rope", "rope_scaling": each}, ["rope_scaling=", each, "linear:F"])
      for each in ("linear", "linear:2:3", "linear:-2", "yarn:1e300")),
], ids=str)  # fmt: skip
def test_impossible_flags_are_named(flags, fragments):
    with pytest.raises(ValueError) as error:
        try_flags(ModelConfig(**TINY | flags))
    assert "\n" not in str(error.value)
    for fragment in fragments:
        assert fragment in str(error.value)


@pytest.mark.parametrize("flags,idx,given,said", [
    ({}, LONG, {}, "14 tokens.*block_size=13"),
    ({"objective": "seq2seq"}, IDX, {"source": LONG}, "14 tokens.*block_size=13"),
    ({"objective": "seq2seq"}, IDX, {}, "objective=seq2seq needs a source, and other models read none"),
    ({"objective": "seq2seq"}, IDX, {"source": IDX, "docs": IDX}, "docs and source_docs belong together"),
], ids=str)  # fmt: skip
def test_what_a_model_does_not_take_is_refused(flags, idx, given, said):
    model = build(**flags)
    with pytest.raises(ValueError, match=said):
        model(idx, **given)
