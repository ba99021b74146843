"""The model against independent implementations with the same weights: torch.nn's layers and Hugging Face's models.

Each weight of ours is written as a differentiable function of the reference's parameters. Both networks are then
functions of the same numbers, and must agree in their outputs and in their gradients with respect to all of them.
"""

from functools import partial

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.func import functional_call

from model import Attention, Model, ModelConfig, StandardBlock

L, H, HKV, C, T, V = 3, 6, 2, 48, 24, 29  # names as in model.py; six heads are no power of two
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


def call(ours: nn.Module, weights: dict[str, Tensor], *inputs):
    """ours(*inputs) with these weights, which must name every parameter and nothing else."""
    return functional_call(ours, complete(ours, weights), inputs, strict=True)


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


def group_major(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """Rows of all q, all k, all v -> per key/value head its queries, its key, its value."""
    return torch.cat([w.unflatten(0, (groups, -1)) for w in (q, k, v)], dim=1).flatten(0, 1)


def thirds(qkv: Tensor, groups: int = H) -> Tensor:
    return group_major(*qkv.chunk(3), groups)


def uninterleaved(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """group_major of heads in which RoPE turns rows (2j, 2j+1), made to turn (j, j + D/2)."""
    q, k = (w.unflatten(0, (-1, C // H // 2, 2)).transpose(1, 2).flatten(0, 2) for w in (q, k))
    return group_major(q, k, v, groups)


def attention(theirs: nn.Module, out: nn.Linear, groups: int = HKV, merge=group_major) -> dict[str, Tensor]:
    qkv = theirs.q_proj, theirs.k_proj, theirs.v_proj
    return put("attn.qkv", *qkv, merge=partial(merge, groups=groups)) | put("attn.out", out)


def gated_mlp(theirs: nn.Module) -> dict[str, Tensor]:
    return put("mlp.up", theirs.gate_proj, theirs.up_proj) | put("mlp.down", theirs.down_proj)


def blocks(layers, weights_of) -> dict[str, Tensor]:
    return {f"blocks.{i}.{name}": w for i, layer in enumerate(layers) for name, w in weights_of(layer).items()}


# ---- torch.nn


def torch_attention(theirs: nn.MultiheadAttention) -> dict[str, Tensor]:
    weights = {"qkv.weight": thirds(theirs.in_proj_weight)} | put("out", theirs.out_proj)
    return weights if theirs.in_proj_bias is None else weights | {"qkv.bias": thirds(theirs.in_proj_bias)}


def stream() -> tuple[Tensor, Tensor]:
    """x (2, T, C) and torch.nn's causal mask, True where hidden."""
    torch.manual_seed(3)
    x = torch.randn(2, T, C, dtype=torch.float64, requires_grad=True)
    return x, torch.ones(T, T, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("bias", [False, True])
def test_attention_equals_torch(bias):
    theirs = jitter(nn.MultiheadAttention(C, H, bias=bias, batch_first=True))
    ours = Attention(ModelConfig(**SIZE, pos="none", bias=bias), layer=0).double()
    x, mask = stream()
    expected, _ = theirs(x, x, x, attn_mask=mask, need_weights=False)
    assert_same(call(ours, torch_attention(theirs), x, ()), expected, trained(theirs) | {"x": x}, EXACT)


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("mlp", ["gelu", "relu"])
@pytest.mark.parametrize("bias", [False, True])
def test_block_equals_torch(placement, mlp, bias):
    theirs = nn.TransformerEncoderLayer(
        C, H, 4 * C, dropout=0.0, activation=mlp, batch_first=True, norm_first=placement == "pre", bias=bias
    )
    theirs = jitter(theirs)
    ours = StandardBlock(ModelConfig(**SIZE, pos="none", norm_placement=placement, mlp=mlp, bias=bias), layer=0)
    slot = {"pre": "before", "post": "total"}[placement]
    weights = {f"attn.{name}": w for name, w in torch_attention(theirs.self_attn).items()}
    weights |= put(f"norm_attn.{slot}", theirs.norm1) | put(f"norm_mlp.{slot}", theirs.norm2)
    weights |= put("mlp.up", theirs.linear1) | put("mlp.down", theirs.linear2)
    x, mask = stream()
    assert_same(call(ours.double(), weights, x, ()), theirs(x, src_mask=mask), trained(theirs) | {"x": x}, EXACT)


# ---- Hugging Face: for each architecture the reference, our flags, our weights and how exact the reference is


@pytest.fixture(scope="module")
def hf():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield pytest.importorskip("transformers", "5", reason="needs transformers >= 5; run pip install -e .[test]")


NO_TOKENS = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)  # no id is special
OPENAI_SIZE = dict(n_layer=L, n_head=H, n_embd=C, n_positions=T, vocab_size=V, activation_function="gelu") | NO_TOKENS
THEIR_SIZE = NO_TOKENS | dict(
    num_hidden_layers=L, num_attention_heads=H, hidden_size=C, max_position_embeddings=T, vocab_size=V,
)  # fmt: skip
THETA = 50.0
THEIR_ROPE = dict(rope_parameters={"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 1.0})
THEIR_GQA = dict(num_key_value_heads=HKV)
OUR_ROPE, OUR_GQA = dict(pos="rope", rope_theta=THETA), dict(attention="gqa", n_kv_head=HKV)


def build(hf, config) -> nn.Module:
    return jitter(hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def gated_width(mlp: str) -> int:
    return ModelConfig(**SIZE, mlp=mlp).hidden_dim


def openai_weights(m: nn.Module, qkv, matrix) -> dict[str, Tensor]:
    def weights_of(layer):
        return (
            put("norm_attn.before", layer.ln_1)
            | put("attn.qkv", layer.attn.c_attn, merge=qkv)
            | put("attn.out", layer.attn.c_proj, merge=matrix)
            | put("norm_mlp.before", layer.ln_2)
            | put("mlp.up", layer.mlp.c_fc, merge=matrix)
            | put("mlp.down", layer.mlp.c_proj, merge=matrix)
        )

    return put("wte", m.wte) | put("pos.wpe", m.wpe) | blocks(m.h, weights_of) | put("norm", m.ln_f)


def gpt2(hf):
    """Its Conv1D layers hold transposed weights."""
    reference = build(hf, hf.GPT2Config(**OPENAI_SIZE, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    weights = openai_weights(reference.transformer, lambda w: thirds(w.t()), Tensor.t)
    return reference, dict(bias=True), weights, EXACT


def gpt_bigcode(hf):
    """GPT-2 with multi-query attention (StarCoder): of one group, all q, k, v is group-major."""
    reference = build(hf, hf.GPTBigCodeConfig(**OPENAI_SIZE, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    weights = openai_weights(reference.transformer, torch.clone, torch.clone)
    return reference, dict(bias=True, attention="mqa"), weights, ROUNDED


def gptj(hf):
    """One norm for attention and MLP in parallel; biases in norms and MLP only; RoPE turns neighbours."""
    reference = build(hf, hf.GPTJConfig(**OPENAI_SIZE, rotary_dim=C // H))
    reference.lm_head.bias = None

    def weights_of(layer):
        return (
            put("norm.before", layer.ln_1)
            | attention(layer.attn, layer.attn.out_proj, groups=H, merge=uninterleaved)
            | put("mlp.up", layer.mlp.fc_in)
            | put("mlp.down", layer.mlp.fc_out)
        )

    m = reference.transformer
    weights = put("wte", m.wte) | blocks(m.h, weights_of) | put("norm", m.ln_f) | put("head", reference.lm_head)
    return reference, dict(block="parallel", bias=True, pos="rope", tie_weights=False), weights, ROUNDED


def phi(hf):
    """Parallel as GPT-J, with biases everywhere and our order of RoPE."""
    config = hf.PhiConfig(**THEIR_SIZE, **THEIR_ROPE, **THEIR_GQA, intermediate_size=4 * C, hidden_act="gelu")
    reference = build(hf, config)
    reference.lm_head.bias = None

    def weights_of(layer):
        return (
            put("norm.before", layer.input_layernorm)
            | attention(layer.self_attn, layer.self_attn.dense)
            | put("mlp.up", layer.mlp.fc1)
            | put("mlp.down", layer.mlp.fc2)
        )

    m = reference.model
    weights = put("wte", m.embed_tokens) | blocks(m.layers, weights_of) | put("norm", m.final_layernorm)
    flags = dict(block="parallel", bias=True, tie_weights=False)
    return reference, flags | OUR_ROPE | OUR_GQA, weights | put("head", reference.lm_head), ROUNDED


def cohere(hf):
    """Parallel with LayerNorm, SwiGLU and no bias at all; tied head; RoPE turns neighbours."""
    config = hf.CohereConfig(
        **THEIR_SIZE, **THEIR_ROPE, **THEIR_GQA, intermediate_size=gated_width("swiglu"), logit_scale=1.0
    )
    reference = build(hf, config)

    def weights_of(layer):
        return (
            put("norm.before", layer.input_layernorm)
            | attention(layer.self_attn, layer.self_attn.o_proj, merge=uninterleaved)
            | gated_mlp(layer.mlp)
        )

    m = reference.model
    weights = put("wte", m.embed_tokens) | blocks(m.layers, weights_of) | put("norm", m.norm)
    return reference, dict(block="parallel", mlp="swiglu") | OUR_ROPE | OUR_GQA, weights, ROUNDED


def llama_weights(reference) -> dict[str, Tensor]:
    def weights_of(layer):
        return (
            put("norm_attn.before", layer.input_layernorm)
            | attention(layer.self_attn, layer.self_attn.o_proj)
            | put("norm_mlp.before", layer.post_attention_layernorm)
            | gated_mlp(layer.mlp)
        )

    m = reference.model
    weights = put("wte", m.embed_tokens) | blocks(m.layers, weights_of) | put("norm", m.norm)
    return weights | put("head", reference.lm_head)


LLAMA = (
    THEIR_SIZE
    | THEIR_ROPE
    | THEIR_GQA
    | dict(intermediate_size=gated_width("swiglu"), rms_norm_eps=1e-5, tie_word_embeddings=False)
)
OUR_LLAMA = dict(norm="rmsnorm", mlp="swiglu", tie_weights=False) | OUR_ROPE | OUR_GQA


def llama(hf):
    reference = build(hf, hf.LlamaConfig(**LLAMA))
    return reference, OUR_LLAMA, llama_weights(reference), ROUNDED


def mistral(hf):
    """Llama with a sliding window in every layer."""
    reference = build(hf, hf.MistralConfig(**LLAMA, sliding_window=WINDOW))
    return reference, OUR_LLAMA | dict(window=WINDOW), llama_weights(reference), ROUNDED


def qwen3(hf):
    """Llama with norms of q and k before RoPE; here full attention in the first layer, sliding windows above."""
    config = hf.Qwen3Config(
        **LLAMA, head_dim=C // H, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    )
    reference = build(hf, config)
    weights = llama_weights(reference)
    for i, layer in enumerate(reference.model.layers):
        for norm in ("q_norm", "k_norm"):
            weights |= put(f"blocks.{i}.attn.heads.{norm}", getattr(layer.self_attn, norm))
    return reference, OUR_LLAMA | dict(qk_norm=True, window=WINDOW, window_pattern="LSS"), weights, ROUNDED


def gemma2(hf):
    """Sandwich norms with gains 1 + w, both soft caps, GeGLU, every other layer a sliding window."""
    config = hf.Gemma2Config(
        **THEIR_SIZE, **THEIR_ROPE, **THEIR_GQA, head_dim=C // H, query_pre_attn_scalar=C // H, rms_norm_eps=1e-5,
        intermediate_size=gated_width("geglu"), hidden_activation="gelu", tie_word_embeddings=False,
        sliding_window=WINDOW, attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
    )  # fmt: skip
    reference = build(hf, config)
    gain = dict(merge=lambda w: 1 + w)

    def weights_of(layer):
        return (
            put("norm_attn.before", layer.input_layernorm, **gain)
            | attention(layer.self_attn, layer.self_attn.o_proj)
            | put("norm_attn.after", layer.post_attention_layernorm, **gain)
            | put("norm_mlp.before", layer.pre_feedforward_layernorm, **gain)
            | gated_mlp(layer.mlp)
            | put("norm_mlp.after", layer.post_feedforward_layernorm, **gain)
        )

    m = reference.model
    weights = put("wte", m.embed_tokens, merge=lambda w: w * C**0.5) | blocks(m.layers, weights_of)
    weights |= put("norm", m.norm, **gain) | put("head", reference.lm_head)
    flags = dict(norm="rmsnorm", norm_placement="sandwich", mlp="geglu", tie_weights=False, window=WINDOW)
    flags |= dict(window_pattern="SL", attn_softcap=2.0, logit_softcap=3.0)
    return reference, flags | OUR_ROPE | OUR_GQA, weights, ROUNDED


def nemotron(hf):
    """Squared ReLU, and LayerNorm with gains 1 + w and biases, which the linear layers do not have."""
    reference = build(hf, hf.NemotronConfig(**THEIR_SIZE, **THEIR_ROPE, **THEIR_GQA, intermediate_size=4 * C))

    def norm(name, theirs):
        return {f"{name}.weight": 1 + theirs.weight, f"{name}.bias": theirs.bias}

    def weights_of(layer):
        return (
            norm("norm_attn.before", layer.input_layernorm)
            | attention(layer.self_attn, layer.self_attn.o_proj)
            | norm("norm_mlp.before", layer.post_attention_layernorm)
            | put("mlp.up", layer.mlp.up_proj)
            | put("mlp.down", layer.mlp.down_proj)
        )

    m = reference.model
    weights = put("wte", m.embed_tokens) | blocks(m.layers, weights_of) | norm("norm", m.norm)
    flags = dict(bias=True, mlp="relu2", tie_weights=False)
    return reference, flags | OUR_ROPE | OUR_GQA, weights | put("head", reference.lm_head), ROUNDED


def mpt(hf, n_head: int):
    """ALiBi, LayerNorm without bias."""
    config = hf.MptConfig(**NO_TOKENS, n_layers=L, n_heads=n_head, d_model=C, max_seq_len=T, vocab_size=V)
    reference = build(hf, config)

    def weights_of(layer):
        return (
            put("norm_attn.before", layer.norm_1)
            | put("attn.qkv", layer.attn.Wqkv, merge=partial(thirds, groups=n_head))
            | put("attn.out", layer.attn.out_proj)
            | put("norm_mlp.before", layer.norm_2)
            | put("mlp.up", layer.ffn.up_proj)
            | put("mlp.down", layer.ffn.down_proj)
        )

    m = reference.transformer
    weights = put("wte", m.wte) | blocks(m.blocks, weights_of) | put("norm", m.norm_f)
    return reference, dict(n_head=n_head, pos="alibi"), weights, ROUNDED


def marian(hf):
    """The decoder of the first transformer: post-norm, sinusoidal positions beside sqrt(C) times the embedding."""
    config = hf.MarianConfig(
        **NO_TOKENS, decoder_start_token_id=0, forced_eos_token_id=None, vocab_size=V, d_model=C,
        max_position_embeddings=T, decoder_layers=L, decoder_attention_heads=H, decoder_ffn_dim=4 * C,
        dropout=0.0, activation_function="relu", scale_embedding=True,
    )  # fmt: skip
    reference = build(hf, config)

    def weights_of(layer):
        return (
            attention(layer.self_attn, layer.self_attn.out_proj, groups=H)
            | put("norm_attn.total", layer.self_attn_layer_norm)
            | put("mlp.up", layer.fc1)
            | put("mlp.down", layer.fc2)
            | put("norm_mlp.total", layer.final_layer_norm)
        )

    m = reference.model.decoder
    weights = put("wte", m.embed_tokens) | blocks(m.layers, weights_of)
    return reference, dict(bias=True, norm_placement="post", mlp="relu", pos="sinusoidal"), weights, ROUNDED


architectures = pytest.mark.parametrize(
    "architecture",
    [gpt2, gpt_bigcode, gptj, phi, cohere, llama, mistral, qwen3, gemma2, nemotron, marian]
    + [pytest.param(partial(mpt, n_head=n), id=f"mpt with {n} heads") for n in (4, 6, 12)],
    ids=lambda f: getattr(f, "__name__", None),
)


def tokens(length: int) -> Tensor:
    return torch.randint(V, (2, length), generator=torch.Generator().manual_seed(4))


@architectures
def test_model_equals_hugging_face(hf, architecture):
    reference, flags, weights, tolerance = architecture(hf)
    ours, idx = Model(ModelConfig(**SIZE | flags)).double(), tokens(T)
    assert_same(call(ours, weights, idx), reference(idx, use_cache=False).logits, trained(reference), tolerance)


@architectures
def test_generation_equals_hugging_face(hf, architecture):
    """Greedy text, and the logits of every step through their cache and ours, from prompt to full context."""
    reference, flags, weights, _ = architecture(hf)
    ours, prompt = Model(ModelConfig(**SIZE | flags)).double(), tokens(8)
    weights, logits = complete(ours, weights), []
    with torch.no_grad():
        for name, p in ours.named_parameters():
            p.copy_(weights[name])
    expected = reference.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=T - 8, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    text = list(ours.generate(prompt, T - 8, lambda z: logits.append(z) or z.argmax(-1)))
    assert torch.equal(torch.stack(text, dim=1), expected.sequences[:, 8:])
    assert_close(torch.stack(logits), torch.stack(expected.logits), ROUNDED)  # theirs are cast to float32
