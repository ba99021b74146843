"""The families of Hugging Face's models: their config.json <-> our flags, and their weights <-> ours.

docs/interchange.md lists the families and says what a new one needs.

    H query heads   Hkv key/value heads   G = H / Hkv   D head size
"""

from collections.abc import Callable
from copy import copy
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data.base_tokenizer import Tokenizer
from engine.interchange import hf_config as parts
from engine.interchange.hf_config import PLAIN, Family, write_scaling
from engine.interchange.tokenizer import keeps_ids
from flags import READER, unused
from model import ModelConfig, hidden_units

# ---- Layouts of weights


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


def group(rows: Tensor, cfg: ModelConfig) -> Tensor:
    """All rows of q, then of k, then of v -> our order."""
    heads = rows.view(-1, cfg.head_size).split((cfg.n_head, cfg.kv_heads, cfg.kv_heads))
    return torch.cat([each.unflatten(0, (cfg.kv_heads, -1)) for each in heads], dim=1).flatten()


def scale_queries(x: Tensor, cfg: ModelConfig, config: dict) -> Tensor:
    """Their factor of the scores over ours, which is 1 / sqrt(D), goes into the first rows: queries or norm."""
    n = cfg.n_head * cfg.head_size
    return torch.cat((x[:n] * (cfg.head_size / config["query_pre_attn_scalar"]) ** 0.5, x[n:]))


TRANSPOSE = Conversion(lambda x, *_: x.t(), lambda x, *_: x.t())  # Conv1D of GPT-2; a bias stays as it is
GROUP = reordered(group)
# All gates, then all values, of each expert in turn -> pieces of gates and values in turn
UNITS = reordered(lambda rows, cfg: rows.view(cfg.n_expert or 1, 2, -1, cfg.hidden_multiple).transpose(1, 2).flatten())
STACK = Conversion(lambda x, cfg, _: x.unflatten(0, (cfg.n_expert, -1)), lambda x, *_: x.flatten(0, 1))  # of experts
PLUS_ONE = Conversion(lambda x, *_: x + 1, lambda x, *_: x - 1)  # Gemma's norms multiply by 1 + w
SCALE = Conversion(scale_queries, lambda x, *_: x)  # a file that we write has query_pre_attn_scalar = D


# ---- Families

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
    "attn.qkv": ("self_attn.q_proj self_attn.k_proj self_attn.v_proj", SCALE, GROUP),
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
LLAMA_KEYS = dict.fromkeys(
    "vocab_size num_hidden_layers num_attention_heads hidden_size max_position_embeddings intermediate_size".split()
    + "num_key_value_heads head_dim rope_scaling rope_parameters".split()
) | {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False}
WINDOWS = {"sliding_window": 4096, "layer_types": None}
QWEN_KEYS = LLAMA_KEYS | WINDOWS | {"use_sliding_window": False, "max_window_layers": 28, "num_key_value_heads": 32}
EXPERT_KEYS = LLAMA_KEYS | {"num_local_experts": None, "num_experts_per_tok": None}
GEMMA_KEYS = LLAMA_KEYS | WINDOWS | {
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True, "final_logit_softcapping": None,
}  # fmt: skip
del GEMMA_KEYS["hidden_act"]
LIKE_LLAMA = {"norm": "rmsnorm", "pos": "rope"}
EXPERTS = LIKE_LLAMA | {"router_balance": "none"}
GEMMA = LIKE_LLAMA | {"norm_placement": "sandwich"}

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM", LLAMA_KEYS | {"attention_bias": False, "mlp_bias": False}, LIKE_LLAMA, LLAMA,
        parts=(parts.heads, parts.rope, parts.bias),
    ),
    "mistral": Family(
        "MistralForCausalLM", LLAMA_KEYS | {"num_key_value_heads": 8, "sliding_window": 4096}, LIKE_LLAMA, LLAMA,
        parts=(parts.heads, parts.rope, parts.window),
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", QWEN_KEYS, LIKE_LLAMA | {"qkv_bias": True}, LLAMA,
        parts=(parts.heads, parts.rope, parts.qwen_windows),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", QWEN_KEYS | {"head_dim": 128}, LIKE_LLAMA | {"qk_norm": True}, LLAMA,
        parts=(parts.heads, parts.rope, parts.qwen_windows),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        EXPERT_KEYS | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None},
        EXPERTS, MIXTRAL, parts=(parts.heads, parts.rope, parts.window),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        EXPERT_KEYS | {"num_key_value_heads": 4, "norm_topk_prob": False, "moe_intermediate_size": None},
        EXPERTS | {"qk_norm": True}, QWEN3_MOE, parts=(parts.heads, parts.rope),
        fixed={"norm_topk_prob": True, "use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        unread=("intermediate_size", "sliding_window", "max_window_layers"), width="moe_intermediate_size",
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        GEMMA_KEYS | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}, GEMMA, GEMMA2,
        parts=(parts.heads, parts.scores, parts.gemma2_windows, parts.rope),
        fixed={"use_bidirectional_attention": False},
        unread=("hidden_act", "sliding_window_size", "sliding_window_pattern"), activation="hidden_activation",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        GEMMA_KEYS | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6},
        GEMMA | {"qk_norm": True}, GEMMA3,
        parts=(parts.heads, parts.scores, parts.gemma3_windows, parts.rope_of_two_kinds),
        fixed={"use_bidirectional_attention": False},
        unread=("hidden_act", "sliding_window_size"), activation="hidden_activation",
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        dict.fromkeys("vocab_size n_layer n_head n_embd n_positions n_inner".split())
        | {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        {"bias": True}, GPT2,
        fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        layers="transformer.h.{}.", activation="activation_function", width="n_inner", activations=PLAIN,
    ),
}  # fmt: skip

# ---- Which family expresses a model of ours

# Flags that matter only in training, and window, which network() says by its pattern
FREE = {"dropout", "loss_chunk", "fp32_residual", "doc_mask", "doc_positions", "scaled_init", "sas_beta_ff"}
FREE |= {"window", "init_std"}


def network(cfg: ModelConfig) -> dict[str, Any]:
    """The flags on which the network's results depend. Flags with the same effect have the same values."""
    left_out = FREE | set(unused(cfg))
    out = {each.name: getattr(cfg, each.name) for each in fields(ModelConfig) if each.name not in left_out}
    if out.get("last_norm") == cfg.norm:
        out["last_norm"] = "same"
    kinds = cfg.pos_pattern or "G"
    out["pos_pattern"] = [kinds[i % len(kinds)] for i in range(cfg.n_layer)]
    out["window_pattern"] = [cfg.layer_window(i) for i in range(cfg.n_layer)]
    out |= cfg.network | {"rope_scaling": write_scaling(cfg)}
    out["mlp_ratio"] = hidden_units(cfg, READER["p"])
    if cfg.n_expert:
        out["expert_ratio"] = hidden_units(cfg, READER["e"])
        out["mlp_ratio"] = 0
    return out


def lost(family: Family, cfg: ModelConfig) -> list[str]:
    """The flags on which the results depend, and which the family does not express."""
    wanted = network(cfg)
    try:
        found = network(ModelConfig(**family.flags(family.config(cfg))))
    except ValueError:
        return list(wanted)
    return sorted(flag for flag in wanted | found if wanted.get(flag) != found.get(flag))


def choose(cfg: ModelConfig, tokenizer: Tokenizer | None = None) -> tuple[Family, str, ModelConfig]:
    """(the first family that expresses the flags and keeps the tokenizer's ids, its name, the flags as it has them). A
    family with more biases expresses the model with biases of 0; the flags then have these biases too. ValueError names
    the flags that the nearest family lacks."""
    misses = []
    for biases in ({}, {"qkv_bias": True}, {"bias": True}):
        given = copy(cfg)
        vars(given).update(biases)  # which may leave others without effect
        for name, family in FAMILIES.items():
            flags = lost(family, given)
            if flags:
                misses.append((len(flags), name, flags))
            elif keeps_ids(tokenizer, name):
                return family, name, given
    _, name, flags = min(misses)
    values = " and ".join(f"{flag}={getattr(cfg, flag)}" for flag in flags)
    fact = f"no family of Hugging Face has {values} (the nearest is {name})"
    raise ValueError(f"{fact}; export with --remote_code=True, which writes model.py beside the weights")
