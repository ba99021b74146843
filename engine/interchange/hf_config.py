"""config.json of Hugging Face's models <-> our flags: one reader and one writer for the families of families.py.

A Family lists its keys. What is read and written depends on them alone. A key that nothing reads is refused too.

    H query heads   C width of the stream   D head size   F hidden units of the MLP   L layers
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from configurator import convert, try_flags
from data.errors import require
from flags import READER
from model import ModelConfig, hidden_units

# ---- The keys of a file

# Keys that say nothing about the logits, whatever their values
UNREAD = {
    # They name the file, its maker, or the program that wrote it.
    *"_name_or_path architectures auto_map is_llama_config model_type tokenizer_class transformers_version".split(),
    "transformers.js_config",
    # They say how transformers computes, in which dtype, and what it returns beside the logits.
    *"_attn_implementation _attn_implementation_autoset cache_implementation dtype gradient_checkpointing".split(),
    *"output_attentions output_hidden_states output_router_logits pretraining_tp reorder_and_upcast_attn".split(),
    *"return_dict torch_dtype torchscript use_bfloat16 use_cache".split(),
    # They are of training: dropout, initial weights and losses of routers.
    *"attention_dropout attn_pdrop embd_pdrop initializer_range resid_pdrop router_aux_loss_coef".split(),
    "router_jitter_noise",
    # They are of other tasks: classification, summaries.
    *"id2label is_decoder label2id n_special num_labels predict_special_tokens problem_type summary_activation".split(),
    *"summary_first_dropout summary_proj_to_labels summary_type summary_use_proj task_specific_params".split(),
    # They say how text becomes ids, and how much more text is drawn.
    *"bos_token_id eos_token_id max_length pad_token_id sep_token_id unk_token_id".split(),
    # transformers ignores them.
    *"_sliding_window_pattern n_ctx".split(),
}
# Further keys that nothing has to read while they have these values. Of keys that are absent here, this value is null.
NEUTRAL = {
    "attention_bias": False,
    "is_causal": True,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1,
    "pruned_heads": {},
    "rope_interleaved": False,
    "use_mrope": False,
}


def express(condition: object, fact: str):
    """ValueError unless the condition holds; the fact is a key, its value and the values that our flags express."""
    require(condition, f"{fact} can be expressed by our flags; choose another model")


def refuse_rest(keys: dict, neutral: dict[str, Any]):
    """ValueError names the first key that nobody has taken, unless it has this value, or null."""
    remedy = "delete it if it changes nothing in this model, or choose another model"
    for name, value in sorted(keys.items()):
        wanted = neutral.get(name)
        if value != wanted and (wanted or value is not None):
            raise ValueError(f"nothing here reads {name!r:.80}={value!r:.80}; {remedy}")


# ---- The reader and the writer

SAME = {  # key -> our flag of the same meaning and type
    "vocab_size": "vocab_size",
    "tie_word_embeddings": "tie_weights",
    **dict.fromkeys(("num_hidden_layers", "n_layer"), "n_layer"),
    **dict.fromkeys(("num_attention_heads", "n_head"), "n_head"),
    **dict.fromkeys(("hidden_size", "n_embd"), "n_embd"),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), "block_size"),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon"), "norm_eps"),
}
CAPS = {"final_logit_softcapping": "logit_softcap", "attn_logit_softcapping": "attn_softcap"}  # null means 0
GATED = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu", "gelu_new": "geglu_tanh"}
PLAIN = {"gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}  # the same function
PLAIN |= {"gelu": "gelu", "relu": "relu", "relu2": "relu2"}
SLIDING, FULL = "sliding_attention", "full_attention"
SCALING = {  # rope_type -> the keys of our flag's numbers in order, with the flag's defaults
    "default": {},
    "linear": {"factor": 1},
    "llama3": {"factor": 1, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192},
    "yarn": {"factor": 1, "original_max_position_embeddings": 0, "beta_fast": 32, "beta_slow": 1},
}


@dataclass(frozen=True)
class Family:
    """What models of a family have in common. `keys` has each key that our flags express, with the value that counts
    where a file leaves it out; None where it must be there, or where null has a meaning."""

    architecture: str  # the class of transformers
    keys: dict[str, Any]
    ours: dict[str, Any]  # our flags that are the same in all models of the family
    rows: dict[str, tuple]  # our layer -> their layers, the conversions to ours
    parts: tuple[Callable, ...] = ()  # part(keys, flags so far) takes keys that are no flags as they are, returns flags
    fixed: dict[str, Any] = field(default_factory=dict)  # keys of which our flags express only this value
    unread: tuple[str, ...] = ()  # keys that transformers ignores here, though other families read them
    layers: str = "model.layers.{}."  # the beginning of the names of their layer {}
    activation: str = "hidden_act"
    width: str = "intermediate_size"  # the key of F
    activations: dict[str, str] = field(default_factory=lambda: GATED)  # theirs -> our flag mlp

    def flags(self, config: dict) -> dict[str, Any]:
        """Our flags for this config.json. ValueError if they cannot express it, or another error for a wrong type."""
        keys = self.keys | config
        for name in ("sliding_window", *CAPS):  # transformers takes a 0 as it is: it hides all tokens, or divides
            express(keys.get(name) != 0, f"{name}=0, but only null or more than 0")
        flags = dict(self.ours)
        for name, flag in SAME.items():
            if name in self.keys:
                flags[flag] = convert(ModelConfig, flag, keys.pop(name), name)
        for name, flag in CAPS.items():
            if name in self.keys:
                flags[flag] = keys.pop(name) or 0.0
        flags |= self._mlp(keys, flags["n_embd"])
        for part in self.parts:
            flags |= part(keys, flags)
        for name in (*UNREAD, *self.unread):
            keys.pop(name, None)
        refuse_rest(keys, NEUTRAL | self.fixed)
        flags = {flag: convert(ModelConfig, flag, value, "config.json") for flag, value in flags.items()}
        try_flags(ModelConfig(**flags))
        return flags

    def _mlp(self, keys: dict, C: int) -> dict:
        """The MLP or the experts; a width of null is 4 C."""
        name = keys.pop(self.activation)
        F = keys.pop(self.width) or 4 * C
        express(name in self.activations, f"{self.activation}={name!r:.80}, but only {', '.join(self.activations)}")
        experts = "num_experts_per_tok" in self.keys
        step = 8 if experts else 1
        if C % 64 == 0:
            step = 64
        express(F % step == 0, f"{self.width}={F}, but with a width of {C} only a multiple of {step}")
        ratio = F / C
        if self.activations is GATED:
            ratio *= 1.5
        if not experts:
            return {"mlp": self.activations[name], "mlp_ratio": ratio}
        active = keys.pop("num_experts_per_tok")
        express(active > 1, f"num_experts_per_tok={active}, but only 2 or more")  # their weights are normalised
        n = keys.pop("num_experts" if "num_experts" in keys else "num_local_experts")
        return {"mlp": self.activations[name], "expert_ratio": ratio, "n_expert": n, "n_expert_active": active}

    def config(self, cfg: ModelConfig) -> dict[str, Any]:
        """config.json for these flags. Flags that the family cannot express get lost."""
        reader = READER["e" if cfg.n_expert else "p"]
        theirs = [name for name, ours in self.activations.items() if ours == cfg.mlp] or [*self.activations]
        types = [SLIDING if cfg.layer_window(i) else FULL for i in range(cfg.n_layer)]
        written = {name: getattr(cfg, flag) for name, flag in SAME.items()}
        written |= {name: getattr(cfg, flag) or None for name, flag in CAPS.items()}
        written |= {
            self.activation: theirs[0], self.width: hidden_units(cfg, reader),
            "num_local_experts": cfg.n_expert, "num_experts_per_tok": cfg.n_expert_active,
            "num_key_value_heads": cfg.kv_heads, "head_dim": cfg.head_size, "query_pre_attn_scalar": cfg.head_size,
            "attention_bias": cfg.bias, "mlp_bias": cfg.bias,
            "rope_theta": cfg.rope_theta, "rope_local_base_freq": cfg.rope_theta_local,
            "rope_scaling": write_scaling(cfg), "layer_types": types,
            "sliding_window": cfg.window or None, "use_sliding_window": cfg.window > 0,
        }  # fmt: skip
        if "layer_types" in self.keys and not cfg.window:
            written["sliding_window"] = cfg.block_size  # Gemma needs a number even where no layer has a window
        own = {name: written[name] for name in self.keys if name in written}
        return {"architectures": [self.architecture]} | own | self.fixed

    def source(self, name: str, n_expert: int = 0) -> tuple[list[str], list]:
        """(names of their tensors, conversions to ours) for our parameter. {} stands for the number of an expert."""
        layer, place, rest, kind = re.fullmatch(r"(?:blocks[.](\d+)[.])?(sums[.]\d+[.])?(.+)[.](\w+)", name).groups()
        names, *conversions = self.rows.get(f"{place}{rest}") or self.rows[rest]
        if "{}" in names:
            names = " ".join(names.format(*[e] * names.count("{}")) for e in range(n_expert))
        start = "" if layer is None else self.layers.format(layer)
        return [f"{start}{each}.{kind}" for each in names.split()], conversions


# ---- Parts of the reader


def heads(keys: dict, flags: dict) -> dict:
    H = flags["n_head"]
    Hkv = keys.pop("num_key_value_heads")
    D = keys.pop("head_dim") or 0
    if D * H == flags["n_embd"]:
        D = 0
    if Hkv in (None, H):
        return {"head_dim": D}
    return {"head_dim": D, "attention": "gqa", "n_kv_head": Hkv}


def bias(keys: dict, flags: dict) -> dict:
    attention = keys.pop("attention_bias")
    mlp = keys.pop("mlp_bias")
    express(attention == mlp, f"attention_bias={attention} with mlp_bias={mlp}, but only two equal values")
    return {"bias": attention}


def scores(keys: dict, flags: dict) -> dict:
    """Gemma's factor of the scores, which goes into the weights; and that of the embeddings, which is no key."""
    require(keys.pop("query_pre_attn_scalar") > 0, "query_pre_attn_scalar must be positive; correct it")
    return {"embed_scale": flags["n_embd"] ** 0.5}


def window(keys: dict, flags: dict) -> dict:
    return {"window": keys.pop("sliding_window") or 0}


def qwen_windows(keys: dict, flags: dict) -> dict:
    first = keys.pop("max_window_layers")
    found = windows(keys, flags, lambda i: i >= first)
    return found if keys.pop("use_sliding_window") else {}


def gemma2_windows(keys: dict, flags: dict) -> dict:
    return windows(keys, flags, lambda i: i % 2 == 0)


def gemma3_windows(keys: dict, flags: dict) -> dict:
    period = keys.pop("sliding_window_pattern")
    return windows(keys, flags, lambda i: (i + 1) % period > 0)


def windows(keys: dict, flags: dict, slides: Callable[[int], bool]) -> dict:
    """window and window_pattern, from layer_types; if the file has none, slides(i) says which layers have a window."""
    L = flags["n_layer"]
    size = keys.pop("sliding_window")
    express(L <= 2**12, f"a number of layers of {L}, but at most 4096")
    types = keys.pop("layer_types") or [SLIDING if slides(i) else FULL for i in range(L)]
    known = len(types) == L and all(each in (SLIDING, FULL) for each in types)
    express(known, f"layer_types={types!r:.80}, but only {L} times {SLIDING} or {FULL}")
    pattern = "".join("S" if each == SLIDING else "L" for each in types)
    if size is None or "S" not in pattern:
        return {}
    shortest = next(pattern[:n] for n in range(1, L + 1) if (pattern[:n] * L).startswith(pattern))
    return {"window": size, "window_pattern": "" if shortest == "S" else shortest}


def rope(keys: dict, flags: dict) -> dict:
    """RoPE of all layers, in the keys of transformers 5 (rope_parameters) or of older releases, which both read. Where
    a file has both, transformers takes rope_scaling."""
    old, new = keys.pop("rope_scaling"), keys.pop("rope_parameters")
    given = dict(old or new or {})
    kind = given.pop("type", None)  # the older name of rope_type
    given.setdefault("rope_type", kind)
    return read_scaling(given, keys.pop("rope_theta"), flags)


def rope_of_two_kinds(keys: dict, flags: dict) -> dict:
    """Layers with a window have a base of their own, without scaling."""
    kinds = dict(keys.pop("rope_parameters") or {})
    full = (kinds.pop(FULL, None) or {}) | (keys.pop("rope_scaling") or {})
    local = {"rope_theta": keys.pop("rope_local_base_freq")} | (kinds.pop(SLIDING, None) or {})
    theta = local.pop("rope_theta")
    refuse_rest(kinds | local, {"rope_type": "default"})
    pattern = ""
    if "window" in flags:  # some layers are S: these get RoPE's L, and the others G
        pattern = (flags["window_pattern"] or "S").translate(str.maketrans("SL", "LG"))
    found = read_scaling(full, keys.pop("rope_theta"), flags)
    return found | {"rope_theta_local": theta, "pos_pattern": pattern}


def read_scaling(given: dict, theta: float, flags: dict) -> dict:
    """rope_theta and rope_scaling, from transformers' dictionary of RoPE's parameters. The default base is `theta`."""
    given = {name: value for name, value in given.items() if value is not None}
    kind = given.pop("rope_type", "default")
    express(kind in SCALING, f"rope_type={kind!r:.80}, but only {', '.join(SCALING)}")
    theta = given.pop("rope_theta", theta)
    defaults = {"original_max_position_embeddings": flags["block_size"], "beta_fast": 32, "beta_slow": 1} | given
    words = [kind]
    for name in SCALING[kind]:
        value = defaults.get(name)
        express(type(value) in (int, float), f"{name}={value!r:.80} of rope_type={kind}, but only a number")
        words.append(repr(float(value)).removesuffix(".0"))
        given.pop(name, None)
    refuse_rest(given, {"truncate": True, "partial_rotary_factor": 1})
    return {"rope_theta": theta, "rope_scaling": "" if kind == "default" else ":".join(words)}


def write_scaling(cfg: ModelConfig) -> dict | None:
    """Our flag rope_scaling as transformers' dictionary, with all numbers."""
    if not cfg.rope_scaling:
        return None
    kind, *numbers = cfg.rope_scaling.split(":")
    found = SCALING[kind] | dict(zip(SCALING[kind], map(float, numbers), strict=False))
    if "original_max_position_embeddings" in found:
        original = found["original_max_position_embeddings"] or cfg.block_size / found["factor"]
        if original % 1 == 0:
            original = int(original)
        found["original_max_position_embeddings"] = original
    return {"rope_type": kind} | found
