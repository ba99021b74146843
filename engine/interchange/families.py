"""The families of Hugging Face's models: their config.json <-> our flags, and their weights <-> ours.

    family = FAMILIES[config["model_type"]]
    flags = family.flags(config)                   # ValueError names a key that our flags cannot express
    config = family.config(cfg)                    # the reverse
    names, conversions = family.source("blocks.0.sums.0.attn.qkv.weight")   # their layers, and how ours is made of them
    family, name, cfg = choose(cfg, tokenizer)     # the first family that expresses the flags

docs/interchange.md lists the families and says what a new one needs.

    H query heads   Hkv key/value heads   G = H / Hkv   D head size
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data.base_tokenizer import Tokenizer
from engine.interchange import config as hf_config
from engine.interchange.config import GATED, Keys, Part, ignored, mlp, only, sizes, value
from engine.interchange.tokenizer import keeps_ids
from model import READER, USED_WHEN, ModelConfig

# ---------------------------------------------------------------------------------------------------------------------
# Layouts of weights


class Conversion(NamedTuple):
    """Changes the layout of a tensor: read(x, our flags, their config.json) -> ours, write(...) -> theirs. A layer of
    ours that is made of several of theirs starts with their rows, one below the other. A bias has only rows."""

    read: Callable[[Tensor, ModelConfig, dict], Tensor]
    write: Callable[[Tensor, ModelConfig, dict], Tensor]


def reordered(rows: Callable[[Tensor, ModelConfig], Tensor]) -> Conversion:
    """The same rows in another order: rows(the numbers of their rows, our flags) -> these numbers in our order."""

    def order(x: Tensor, cfg: ModelConfig) -> Tensor:
        return rows(torch.arange(len(x)), cfg).to(x.device)

    return Conversion(lambda x, cfg, _: x[order(x, cfg)], lambda x, cfg, _: x[order(x, cfg).argsort()])


def split_heads(x: Tensor, cfg: ModelConfig) -> Tensor:
    """Rows of our qkv -> (Hkv, G + 2, D, ...): per key/value head its G queries, its key, its value."""
    return x.unflatten(0, (cfg.kv_heads, -1, cfg.head_size))


def group(rows: Tensor, cfg: ModelConfig) -> Tensor:
    """All rows of q, then of k, then of v -> our order."""
    heads = rows.view(-1, cfg.head_size).split((cfg.n_head, cfg.kv_heads, cfg.kv_heads))
    return torch.cat([each.unflatten(0, (cfg.kv_heads, -1)) for each in heads], dim=1).flatten()


def score_scale(cfg: ModelConfig, config: dict) -> float:
    """Their factor of the scores, over ours, which is 1 / sqrt(D)."""
    return (cfg.head_size / config["query_pre_attn_scalar"]) ** 0.5


def scale_queries(x: Tensor, cfg: ModelConfig, config: dict) -> Tensor:
    """The rows of the queries times score_scale."""
    heads = split_heads(x, cfg)
    return torch.cat((heads[:, :-2] * score_scale(cfg, config), heads[:, -2:]), dim=1).flatten(0, 2)


TRANSPOSE = Conversion(lambda x, *_: x.t(), lambda x, *_: x.t())  # Conv1D of GPT-2; a bias stays as it is
GROUP = reordered(group)
# All gates, then all values, of each expert in turn -> pieces of gates and values in turn
UNITS = reordered(lambda rows, cfg: rows.view(cfg.n_expert or 1, 2, -1, cfg.hidden_unit).transpose(1, 2).flatten())
STACK = Conversion(lambda x, cfg, _: x.unflatten(0, (cfg.n_expert, -1)), lambda x, *_: x.flatten(0, 1))  # of experts
PLUS_ONE = Conversion(lambda x, *_: x + 1, lambda x, *_: x - 1)  # Gemma's norms multiply by 1 + w
# A file that we write has query_pre_attn_scalar = D, so nothing is scaled back.
SCALE_QUERIES = Conversion(scale_queries, lambda x, *_: x)
SCALE = Conversion(lambda x, cfg, config: x * score_scale(cfg, config), lambda x, *_: x)


# ---------------------------------------------------------------------------------------------------------------------
# Families


@dataclass(frozen=True)
class Family:
    architecture: str  # the class of transformers
    layers: str  # the beginning of the names of their layer {}
    ours: dict[str, Any]  # our flags that are the same in all models of the family
    parts: list[Part]  # the other flags
    defaults: dict[str, Any]  # of keys that a config.json may leave out
    rows: dict[str, tuple]  # our layer -> their layers, the conversions to ours

    def flags(self, config: dict) -> dict[str, Any]:
        """Our flags for this config.json. ValueError if they cannot express it."""
        keys = Keys(config, self.defaults)
        flags = dict(self.ours)
        for part in self.parts:
            flags |= part.read(keys, flags)
        keys.finish()
        ModelConfig(**flags)  # may raise
        return flags

    def config(self, cfg: ModelConfig) -> dict[str, Any]:
        """config.json for these flags. Flags that the family cannot express get lost."""
        keys = {"architectures": [self.architecture]}
        for part in self.parts:
            keys |= part.write(cfg)
        return keys

    def source(self, name: str, n_expert: int = 0) -> tuple[list[str], list[Conversion]]:
        """(names of their tensors, conversions to ours) for our parameter. {} stands for the number of an expert."""
        layer, place, rest, kind = re.fullmatch(r"(?:blocks[.](\d+)[.])?(sums[.]\d+[.])?(.+)[.](\w+)", name).groups()
        names, *conversions = self.rows.get(f"{place}{rest}") or self.rows[rest]
        if "{}" in names:
            names = " ".join(names.format(*[e] * names.count("{}")) for e in range(n_expert))
        start = "" if layer is None else self.layers.format(layer)
        return [f"{start}{each}.{kind}" for each in names.split()], conversions


LLAMA = {
    "wte": ("model.embed_tokens",),
    "sums.0.before": ("input_layernorm",),
    "attn.qkv": ("self_attn.q_proj self_attn.k_proj self_attn.v_proj", GROUP),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
    "attn.out": ("self_attn.o_proj",),
    "sums.1.before": ("post_attention_layernorm",),
    "mlp.up": ("mlp.gate_proj mlp.up_proj", UNITS),
    "mlp.down": ("mlp.down_proj",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
}
GEMMA2 = LLAMA | {
    "sums.0.before": ("input_layernorm", PLUS_ONE),
    "attn.qkv": (*LLAMA["attn.qkv"], SCALE_QUERIES),
    "sums.0.after": ("post_attention_layernorm", PLUS_ONE),
    "sums.1.before": ("pre_feedforward_layernorm", PLUS_ONE),
    "sums.1.after": ("post_feedforward_layernorm", PLUS_ONE),
    "norm": ("model.norm", PLUS_ONE),
}
MIXTRAL = LLAMA | {
    "experts.router": ("block_sparse_moe.gate",),
    "experts.up": ("block_sparse_moe.experts.{}.w1 block_sparse_moe.experts.{}.w3", UNITS, STACK),
    "experts.down": ("block_sparse_moe.experts.{}.w2", STACK),
}
QWEN3_MOE = LLAMA | {
    "experts.router": ("mlp.gate",),
    "experts.up": ("mlp.experts.{}.gate_proj mlp.experts.{}.up_proj", UNITS, STACK),
    "experts.down": ("mlp.experts.{}.down_proj", STACK),
}
GEMMA3 = GEMMA2 | {
    "attn.qkv": LLAMA["attn.qkv"],
    "attn.q_norm": ("self_attn.q_norm", PLUS_ONE, SCALE),
    "attn.k_norm": ("self_attn.k_norm", PLUS_ONE),
}
GPT2 = {
    "wte": ("transformer.wte",),
    "pos.wpe": ("transformer.wpe",),
    "sums.0.before": ("ln_1",),
    "attn.qkv": ("attn.c_attn", TRANSPOSE, GROUP),
    "attn.out": ("attn.c_proj", TRANSPOSE),
    "sums.1.before": ("ln_2",),
    "mlp.up": ("mlp.c_fc", TRANSPOSE),
    "mlp.down": ("mlp.c_proj", TRANSPOSE),
    "norm": ("transformer.ln_f",),
    "head": ("lm_head",),
}
LLAMA_SIZES = sizes("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings")
LLAMA_SHAPE = [*LLAMA_SIZES, hf_config.HEADS, value("rms_norm_eps", "norm_eps", float)]
LLAMA_PARTS = [*LLAMA_SHAPE, mlp("hidden_act", "intermediate_size", GATED), hf_config.ROPE]
GEMMA_PARTS = [
    *LLAMA_SHAPE,
    mlp("hidden_activation", "intermediate_size", GATED),
    hf_config.SCORES,
    value("final_logit_softcapping", "logit_softcap", float, NoneType),
    only(attention_bias=False, use_bidirectional_attention=False),
    ignored("hidden_act", "sliding_window_size"),
]
QWEN_DEFAULTS = dict(use_sliding_window=False, sliding_window=4096, max_window_layers=28, num_key_value_heads=32)
GEMMA_DEFAULTS = dict(
    num_key_value_heads=4, head_dim=256, hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256,
    tie_word_embeddings=True, sliding_window=4096,
)  # fmt: skip


def llama(name: str, ours: dict, parts: list[Part], rows: dict[str, tuple] = LLAMA, **defaults) -> Family:
    """A family with Llama's names of layers; `ours` and `defaults` are those besides Llama's."""
    ours = {"norm": "rmsnorm", "pos": "rope"} | ours
    of_llama = dict(hidden_act="silu", rms_norm_eps=1e-6, rope_theta=1e4, tie_word_embeddings=False)
    of_llama |= dict(attention_bias=False, mlp_bias=False)
    return Family(f"{name}ForCausalLM", "model.layers.{}.", ours, parts, of_llama | defaults, rows)


FAMILIES = {
    "llama": llama("Llama", {}, [*LLAMA_PARTS, hf_config.LLAMA_BIAS]),
    "mistral": llama("Mistral", {}, [*LLAMA_PARTS, hf_config.WINDOW], num_key_value_heads=8, sliding_window=4096),
    "qwen2": llama("Qwen2", {"qkv_bias": True}, [*LLAMA_PARTS, hf_config.QWEN_LAYERS], **QWEN_DEFAULTS),
    "qwen3": llama(
        "Qwen3",
        {"qk_norm": True},
        [*LLAMA_PARTS, hf_config.QWEN_LAYERS, only(attention_bias=False)],
        **QWEN_DEFAULTS | {"head_dim": 128},
    ),
    "mixtral": llama(
        "Mixtral",
        {"router_balance": "none"},
        [*LLAMA_SHAPE, hf_config.experts("intermediate_size"), hf_config.ROPE, hf_config.WINDOW],
        MIXTRAL,
        num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6, sliding_window=None,
    ),
    "qwen3_moe": llama(
        "Qwen3Moe",
        {"router_balance": "none", "qk_norm": True},
        [
            *LLAMA_SHAPE,
            hf_config.experts("moe_intermediate_size"),
            hf_config.ROPE,
            only(norm_topk_prob=True, attention_bias=False, use_sliding_window=False, decoder_sparse_step=1),
            only(mlp_only_layers=[]),
            ignored("intermediate_size", "sliding_window", "max_window_layers"),
        ],
        QWEN3_MOE,
        num_key_value_heads=4, norm_topk_prob=False,
    ),
    "gemma2": llama(
        "Gemma2",
        {"norm_placement": "sandwich"},
        [*GEMMA_PARTS, hf_config.GEMMA2_LAYERS, hf_config.SOFTCAP, hf_config.ROPE, ignored("sliding_window_pattern")],
        GEMMA2,
        **GEMMA_DEFAULTS, final_logit_softcapping=30.0, attn_logit_softcapping=50.0,
    ),
    "gemma3_text": llama(
        "Gemma3",
        {"norm_placement": "sandwich", "qk_norm": True},
        # transformers ignores attn_logit_softcapping
        [*GEMMA_PARTS, hf_config.GEMMA3_LAYERS, only(attn_logit_softcapping=None), hf_config.GEMMA3_ROPE],
        GEMMA3,
        **GEMMA_DEFAULTS, sliding_window_pattern=6, rope_theta=1e6, rope_local_base_freq=10000.0,
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "transformer.h.{}.",
        {"bias": True},
        [
            *sizes("n_layer", "n_head", "n_embd", "n_positions"),
            value("layer_norm_epsilon", "norm_eps", float),
            mlp("activation_function", "n_inner"),
            only(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False),
        ],
        dict(activation_function="gelu_new", layer_norm_epsilon=1e-5, tie_word_embeddings=True),
        GPT2,
    ),
}  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------------
# Which family expresses a model of ours

# Flags that only matter in training, and two that others say
FREE = {"dropout", "loss_chunk", "fp32_residual", "doc_mask", "doc_positions", "scaled_init", "simplified_beta_ff"}
FREE |= {"attention", "window", "z_loss", "init_std"}


def network(cfg: ModelConfig) -> dict[str, Any]:
    """The flags on which the network's results depend. Flags with the same effect have the same values."""
    flags = [each.name for each in fields(ModelConfig) if each.name not in FREE]
    out = {name: getattr(cfg, name) for name in flags if name not in USED_WHEN or USED_WHEN[name][0](cfg)}
    if out.get("last_norm") == cfg.norm:
        out["last_norm"] = "same"
    kinds = cfg.pos_pattern or "G"
    out["pos_pattern"] = [kinds[i % len(kinds)] for i in range(cfg.n_layer)]
    out["window_pattern"] = [cfg.layer_window(i) for i in range(cfg.n_layer)]
    out |= {"n_kv_head": cfg.kv_heads, "head_dim": cfg.head_size, "rope_scaling": hf_config.write_scaling(cfg)}
    out["mlp_ratio"] = cfg.hidden_dim
    if cfg.n_expert:
        out["expert_ratio"] = cfg.part(READER["e"]).hidden_dim
        out["mlp_ratio"] = 0
    return out


def choose(cfg: ModelConfig, tokenizer: Tokenizer | None = None) -> tuple[Family, str, ModelConfig]:
    """(the first family that expresses the flags and keeps the tokenizer's ids, its name, the flags as it has them). A
    family with more biases expresses the model with biases of 0; the flags then have these biases too. ValueError names
    the flags that the nearest family lacks."""
    plain = cfg
    if cfg.block == "superblock" and cfg.layer == "c,p" and cfg.n_group == 1:
        plain = replace(cfg, block="standard")  # the parameters have the same names
    misses, also = [], ""
    for biases in ({}, {"qkv_bias": True}, {"bias": True}):
        given = replace(plain, **biases)
        wanted = network(given)
        for name, family in FAMILIES.items():
            try:
                found = network(ModelConfig(**family.flags(family.config(given))))
            except ValueError:
                continue
            wrong = sorted(flag for flag in wanted | found if wanted.get(flag) != found.get(flag))
            if wrong:
                misses.append((len(wrong), name, wrong))
            elif keeps_ids(tokenizer, name):
                return family, name, given
            else:
                also = f"; {name} would fit, but AutoTokenizer gives it other ids than the run's tokenizer"
    _, name, wrong = min(misses, default=(0, "any", ["block"]))
    values = " and ".join(f"{flag}={getattr(cfg, flag)}" for flag in wrong)
    fact = f"no family of Hugging Face has {values} (the nearest is {name}{also})"
    raise ValueError(f"{fact}; export with --remote_code=True, which writes model.py beside the weights")
