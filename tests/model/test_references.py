"""The model against torch.nn's layers and Hugging Face's models: outputs, and gradients of the reference's parameters.
Each weight of ours is a differentiable function of them."""

from functools import partial

import pytest
import torch
import torch.nn as nn
import transformers as hf  # whose classes are loaded when they are asked for
from torch import Tensor
from torch.func import functional_call

from flags import READER
from model import Block, Inputs, Model, ModelConfig, hidden_units

L, H, HKV, C, T, V = 3, 6, 2, 48, 24, 29  # names as in model.py; six heads are no power of two
S, LE = 19, 4  # tokens of a source and layers of its encoder (as many as the decoder's at least, says their cache)
SIZE = dict(n_layer=L, n_head=H, n_embd=C, block_size=T, vocab_size=V)
WINDOW = 5
EXACT, ROUNDED = 1e-9, 1e-5  # all in float64; "rounded" references do parts of it in float32


# ---- comparison


def jitter(reference: nn.Module) -> nn.Module:
    """In float64, every trained number off its initial value and large enough that no softmax is nearly uniform."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in reference.double().eval().parameters():
            if p.requires_grad:
                p += 0.2 * torch.randn_like(p)
    return reference


def complete(ours: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The biases that the reference lacks are zero."""
    return {name: torch.zeros_like(p) for name, p in ours.named_parameters() if name.endswith("bias")} | weights


def call(ours: nn.Module, weights: dict[str, Tensor], *inputs, **named):
    """ours(*inputs, **named) with these weights, which must name every parameter and nothing else."""
    return functional_call(ours, complete(ours, weights), inputs, named, strict=True)


def assert_close(got: Tensor, expected: Tensor, tolerance: float, what: str = "output"):
    assert got.shape == expected.shape
    error, size = (got - expected).abs().max().item(), expected.abs().max().item()
    assert error < tolerance * max(1.0, size), f"{what} up to {size:.1e} differs by {error:.1e}"


def assert_same(got: Tensor, expected: Tensor, leaves: dict[str, Tensor], tolerance: float):
    """Outputs and gradients of a random projection of them; what the reference does not use, ours does not either."""
    assert_close(got, expected, tolerance)
    projection = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(2))
    gradients = (
        torch.autograd.grad((y * projection).sum(), list(leaves.values()), allow_unused=True) for y in (got, expected)
    )
    for name, ours, theirs in zip(leaves, *gradients, strict=True):
        assert (ours is None) == (theirs is None), f"only one of the two uses {name}"
        if theirs is not None:
            assert_close(ours, theirs, tolerance, f"gradient of {name}")


def trained(reference: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in reference.named_parameters() if p.requires_grad}


# ---- copying


def put(name: str, *modules: nn.Module, merge=lambda *w: torch.cat(w)) -> dict[str, Tensor]:
    """Weight and, where there is one, bias of our layer `name`, merged from the reference's layers."""
    kinds = [kind for kind in ("weight", "bias") if getattr(modules[0], kind, None) is not None]
    return {f"{name}.{kind}": merge(*(getattr(m, kind) for m in modules)) for kind in kinds}


def group_major(*rows: Tensor, groups: int) -> Tensor:
    """Rows of all q, all k, all v -> per key/value head its queries, its key, its value."""
    return torch.cat([w.unflatten(0, (groups, -1)) for w in rows], dim=1).flatten(0, 1)


def thirds(qkv: Tensor, groups: int = H) -> Tensor:
    return group_major(*qkv.chunk(3), groups=groups)


def uninterleaved(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """group_major of heads in which RoPE turns rows (2j, 2j+1), made to turn (j, j + D/2)."""
    q, k = (w.unflatten(0, (-1, C // H // 2, 2)).transpose(1, 2).flatten(0, 2) for w in (q, k))
    return group_major(q, k, v, groups=groups)


def attention(theirs: nn.Module, out: nn.Linear, groups: int = HKV, merge=group_major) -> dict[str, Tensor]:
    qkv = theirs.q_proj, theirs.k_proj, theirs.v_proj
    return put("attn.qkv", *qkv, merge=partial(merge, groups=groups)) | put("attn.out", out)


def in_turn(gate: Tensor, up: Tensor) -> Tensor:
    """A gate's row, then the value's that it multiplies, as C is no multiple of 64; also of each expert."""
    return torch.stack((gate, up), dim=-2).flatten(-3, -2)


def gated_mlp(theirs: nn.Module) -> dict[str, Tensor]:
    return put("mlp.up", theirs.gate_proj, theirs.up_proj, merge=in_turn) | put("mlp.down", theirs.down_proj)


def inside(name: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.{inner}": w for inner, w in weights.items()}


def sums(*weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a block from those of its sums."""
    return {name: w for i, each in enumerate(weights) for name, w in inside(f"sums.{i}", each).items()}


def blocks(layers, weights_of) -> dict[str, Tensor]:
    weights = {}
    for i, layer in enumerate(layers):
        weights |= inside(f"blocks.{i}", weights_of(layer))
    return weights


def padding(length: int) -> Tensor:
    """(2, length), True at the last four tokens of the second row. Of a window full of padding, references make NaN."""
    return torch.arange(length) >= torch.tensor([[length], [length + 1 - WINDOW]])


# ---- torch.nn


def torch_layer(theirs: nn.TransformerEncoderLayer) -> dict[str, Tensor]:
    slot, attn = "before" if theirs.norm_first else "total", theirs.self_attn
    weights = {"attn.qkv.weight": thirds(attn.in_proj_weight)} | put("attn.out", attn.out_proj)
    if attn.in_proj_bias is not None:
        weights["attn.qkv.bias"] = thirds(attn.in_proj_bias)
    mlp = put("mlp.up", theirs.linear1) | put("mlp.down", theirs.linear2)
    return sums(weights | put(slot, theirs.norm1), mlp | put(slot, theirs.norm2))


def stream() -> Tensor:
    torch.manual_seed(T)
    return torch.randn(2, T, C, dtype=torch.float64, requires_grad=True)


FUTURE = torch.ones(T, T, dtype=torch.bool).triu(1)  # torch.nn's causal mask: True where hidden


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("mlp", ["gelu", "relu"])
@pytest.mark.parametrize("bias", [False, True])
def test_block_equals_torch(placement, mlp, bias):
    options = dict(dropout=0.0, activation=mlp, batch_first=True, norm_first=placement == "pre", bias=bias)
    theirs = jitter(nn.TransformerEncoderLayer(C, H, 4 * C, **options))
    cfg = ModelConfig(**SIZE, pos="none", norm_placement=placement, mlp=mlp, bias=bias)
    got = call(Block(cfg, layer=0).double(), torch_layer(theirs), x := stream(), Inputs())
    assert_same(got, theirs(x, src_mask=FUTURE), trained(theirs) | {"x": x}, EXACT)


# ---- Hugging Face: for each architecture the reference, our flags and our weights


NO_TOKENS = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)  # no id is special
THEIR_SIZE = NO_TOKENS | dict(
    num_hidden_layers=L, num_attention_heads=H, hidden_size=C, max_position_embeddings=T, vocab_size=V,
)  # fmt: skip
THETA = 50.0
THEIR_ROPE = dict(rope_parameters={"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 1.0})
THEIR_GQA = dict(num_key_value_heads=HKV)
OUR_ROPE, OUR_GQA = dict(pos="rope", rope_theta=THETA), dict(attention="gqa", n_kv_head=HKV)


def build(config, kind: str = "AutoModelForCausalLM") -> nn.Module:
    return jitter(getattr(hf, kind).from_config(config, attn_implementation="eager"))


def decoder(m: nn.Module, weights_of) -> dict[str, Tensor]:
    """The weights of a model of today's names, whose layers have those of weights_of(layer)."""
    return put("wte", m.embed_tokens) | blocks(m.layers, weights_of) | put("norm", m.norm)


GATED = dict(intermediate_size=hidden_units(ModelConfig(**SIZE, mlp="swiglu"), READER["p"]))


def mpt():
    """ALiBi, LayerNorm without bias."""
    config = hf.MptConfig(**NO_TOKENS, n_layers=L, n_heads=H, d_model=C, max_seq_len=T, vocab_size=V)
    reference = build(config)

    def weights_of(layer):
        return sums(
            put("before", layer.norm_1)
            | put("attn.qkv", layer.attn.Wqkv, merge=thirds)
            | put("attn.out", layer.attn.out_proj),
            put("before", layer.norm_2) | put("mlp.up", layer.ffn.up_proj) | put("mlp.down", layer.ffn.down_proj),
        )

    m = reference.transformer
    weights = put("wte", m.wte) | blocks(m.blocks, weights_of) | put("norm", m.norm_f)
    return reference, dict(pos="alibi"), weights


def cohere2():
    """Parallel, SwiGLU, no bias at all; in some layers RoPE, which turns neighbours, and windows, in others neither."""
    config = hf.Cohere2Config(
        **THEIR_SIZE, **THEIR_ROPE, **THEIR_GQA, **GATED, logit_scale=1.0,
        sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    reference = build(config)

    def weights_of(layer):
        return sums(
            put("before", layer.input_layernorm)
            | attention(layer.self_attn, layer.self_attn.o_proj, merge=uninterleaved)
            | gated_mlp(layer.mlp)
        )

    weights = decoder(reference.model, weights_of)
    flags = dict(block="parallel", mlp="swiglu", window=WINDOW, window_pattern="SLS", pos_pattern="GNG")
    return reference, flags | OUR_ROPE | OUR_GQA, weights


def marian_layer(layer: nn.Module) -> dict[str, Tensor]:
    """A layer of an encoder, or with cross-attention of a decoder."""
    attn = attention(layer.self_attn, layer.self_attn.out_proj, groups=H) | put("total", layer.self_attn_layer_norm)
    mlp = put("mlp.up", layer.fc1) | put("mlp.down", layer.fc2) | put("total", layer.final_layer_norm)
    if not hasattr(layer, "encoder_attn"):
        return sums(attn, mlp)
    theirs = layer.encoder_attn
    cross = put("cross.q", theirs.q_proj) | put("cross.out", theirs.out_proj)
    cross |= put("cross.kv", theirs.k_proj, theirs.v_proj, merge=partial(group_major, groups=H))
    return sums(attn, cross | put("total", layer.encoder_attn_layer_norm), mlp)


MARIAN = NO_TOKENS | dict(
    vocab_size=V, d_model=C, max_position_embeddings=T, encoder_layers=LE, encoder_attention_heads=H,
    encoder_ffn_dim=4 * C, decoder_layers=L, decoder_attention_heads=H, decoder_ffn_dim=4 * C, dropout=0.0,
    activation_function="relu", scale_embedding=True, decoder_start_token_id=0, forced_eos_token_id=None,
)  # fmt: skip
OUR_MARIAN = dict(bias=True, norm_placement="post", mlp="relu", pos="sinusoidal")


def tokens(length: int) -> Tensor:
    return torch.randint(V, (2, length), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("architecture", [cohere2, mpt])
def test_model_equals_hugging_face(architecture):
    """Logits and gradients. test_families.py has Llama, and others of its kind."""
    reference, flags, weights = architecture()
    ours, idx = Model(ModelConfig(**SIZE | flags)).double(), tokens(T)
    assert_same(call(ours, weights, idx), reference(idx, use_cache=False).logits, trained(reference), ROUNDED)


# ---- Hugging Face: an encoder with a decoder


def logits_and_loss(logits: Tensor, loss: Tensor) -> Tensor:
    return torch.cat((logits.flatten(), loss[None]))


def test_encoder_decoder_equals_hugging_face():
    """The first transformer: logits and loss with padding in the source, and gradients."""
    reference = build(hf.MarianConfig(**MARIAN), "AutoModelForSeq2SeqLM")
    m = reference.model
    weights = put("wte", m.shared) | inside("encoder", blocks(m.encoder.layers, marian_layer))
    weights |= blocks(m.decoder.layers, marian_layer)
    ours = Model(ModelConfig(**SIZE | OUR_MARIAN, objective="seq2seq", n_encoder_layer=LE)).double()
    idx = tokens(T)
    source = tokens(S)
    hidden = padding(S)
    answers = idx.roll(-1, dims=1)
    unasked = torch.arange(T) % 3 == 0
    theirs = reference(
        source, attention_mask=(~hidden).long(), decoder_input_ids=idx, labels=answers.masked_fill(unasked, -100)
    )
    given = dict(docs=torch.zeros_like(idx), source=source, source_docs=hidden.long())
    loss = call(ours, weights, idx, answers.masked_fill(unasked, -1), **given)
    got = logits_and_loss(call(ours, weights, idx, **given), loss)
    assert_same(got, logits_and_loss(theirs.logits, theirs.loss), trained(reference), ROUNDED)
