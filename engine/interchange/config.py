"""config.json of Hugging Face's models <-> our flags: the parts that engine/interchange/families.py puts together.

A Part translates a few keys both ways: part.read(keys, flags so far) -> flags, part.write(cfg) -> keys. `read` asks
Keys for the values of keys. It raises ValueError for a value that our flags cannot express, with the key, the value and
the remedy. Keys that nothing reads are refused too.

    H query heads   C width of the stream   D head size   F hidden units of the MLP
"""

import math
import reprlib
from collections.abc import Callable
from types import NoneType
from typing import Any, NamedTuple

from torch import Tensor

from data.errors import require
from model import READER, ModelConfig

# ---------------------------------------------------------------------------------------------------------------------
# The keys of a file

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


def describe(value: Any) -> str:
    """A short text for an untrusted value, safe to print."""
    if isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return ascii(value[:80]) if type(value) is str else " ".join(ascii(reprlib.repr(value))[1:-1].split())[:80]


def express(condition: object, fact: str):
    """ValueError unless the condition holds; the fact is a key, its value and the values that our flags express."""
    require(condition, f"{fact} can be expressed by our flags; choose another model")


class Keys:
    """Reads keys of a config.json in their types. A key that the file leaves out has the family's default."""

    def __init__(self, config: dict, defaults: dict):
        self.config, self.defaults = config, defaults
        self.seen: set[str] = set()

    def __call__(self, name: str, *kinds: type, least: int = 1) -> Any:
        """The value of the key. ValueError if it is of another type, or a whole number below `least`."""
        self.seen.add(name)
        value = self.config.get(name, self.defaults.get(name))
        if type(value) is int and float in kinds and abs(value) < 2**53:
            value = float(value)
        good = type(value) in kinds and (type(value) is not float or math.isfinite(value))
        good = good and (type(value) is not int or least <= value < 2**31)
        words = {int: f"int (a whole number from {least} on and below 2**31)", float: "float (a finite number)"}
        words |= {bool: "bool (True or False)", NoneType: "null"}
        wanted = " or ".join(words.get(kind, kind.__name__) for kind in kinds)
        require(good, f"{name}={describe(value)} must be of type {wanted}; correct it")
        return value

    def finish(self):
        """ValueError names the keys that nobody has read, unless they are known to say nothing about the logits."""
        rest = sorted(self.config.keys() - self.seen - UNREAD)
        rest = [name for name in rest if self.config[name] != NEUTRAL.get(name)]
        some = ", ".join(f"{ascii(name[:80])}={describe(self.config[name])}" for name in rest[:2])
        more = f" and {len(rest) - 2} more" if len(rest) > 2 else ""
        remedy = "delete keys that change nothing in this model, or choose another model"
        require(not rest, f"nothing here reads {some}{more}; {remedy}")


# ---------------------------------------------------------------------------------------------------------------------
# Parts


class Part(NamedTuple):
    read: Callable[[Keys, dict], dict]
    write: Callable[[ModelConfig], dict]


def value(name: str, flag: str, *kinds: type) -> Part:
    """A key and a flag of the same meaning; null means 0."""
    off = kinds[0]()
    none = None if NoneType in kinds else off
    return Part(lambda keys, flags: {flag: keys(name, *kinds) or off}, lambda cfg: {name: getattr(cfg, flag) or none})


def only(**values: Any) -> Part:
    """Keys of which our flags express one value only."""

    def read(keys: Keys, flags: dict) -> dict:
        keys.seen.update(values)
        for name, wanted in values.items():
            found = keys.config.get(name, keys.defaults.get(name, wanted))
            express((found or None) == (wanted or None), f"{name}={describe(found)}, but only {wanted}")
        return {}

    return Part(read, lambda cfg: dict(values))


def ignored(*names: str) -> Part:
    """Keys that transformers ignores in this family, though another family reads them."""
    return Part(lambda keys, flags: keys.seen.update(names) or {}, lambda cfg: {})


def sizes(n_layer: str, n_head: str, n_embd: str, block_size: str) -> list[Part]:
    """The sizes of every model, by the names of their keys."""
    names = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, "block_size": block_size}
    tied = value("tie_word_embeddings", "tie_weights", bool)
    return [value("vocab_size", "vocab_size", int), tied, *(value(names[flag], flag, int) for flag in names)]


def read_heads(keys: Keys, flags: dict) -> dict:
    H = flags["n_head"]
    heads = keys("num_key_value_heads", int, NoneType) or H
    D = keys("head_dim", int, NoneType) or 0
    found = {"head_dim": 0 if D * H == flags["n_embd"] else D}
    if heads != H:
        found |= {"attention": "gqa", "n_kv_head": heads}
    return found


HEADS = Part(read_heads, lambda cfg: {"num_key_value_heads": cfg.kv_heads, "head_dim": cfg.head_size})
PLAIN = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2"}
PLAIN |= {"gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"}  # the same function
GATED = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu", "gelu_new": "geglu_tanh"}


def mlp(activation: str, width: str, known: dict[str, str] = PLAIN, unit: int = 1) -> Part:
    """The MLP's activation function and width, a multiple of `unit`; a width of null is 4 C."""

    def read(keys: Keys, flags: dict) -> dict:
        name, C = keys(activation, str), flags["n_embd"]
        express(name in known, f"{activation}={describe(name)}, but only {', '.join(known)}")
        F, step = keys(width, int, NoneType) or 4 * C, unit if C % 64 else 64
        express(F % step == 0, f"{width}={F}, but with a width of {C} only a multiple of {step}")
        return {"mlp": known[name], "mlp_ratio": F / C * (1.5 if known is GATED else 1)}

    def write(cfg: ModelConfig) -> dict:
        names = {ours: name for name, ours in reversed(known.items())}
        return {activation: names.get(cfg.mlp, next(iter(known))), width: cfg.hidden_dim}

    return Part(read, write)


def experts(width: str) -> Part:
    """Gated experts of this width in every layer, whose weights are normalised if a token reads several."""
    units = mlp("hidden_act", width, GATED, unit=8)

    def read(keys: Keys, flags: dict) -> dict:
        n = keys("num_experts" if "num_experts" in keys.config else "num_local_experts", int)
        active = keys("num_experts_per_tok", int)
        express(active > 1, f"num_experts_per_tok={active}, but only 2 or more")
        own = units.read(keys, flags)
        return {"n_expert": n, "n_expert_active": active, "mlp": own["mlp"], "expert_ratio": own["mlp_ratio"]}

    def write(cfg: ModelConfig) -> dict:
        keys = units.write(cfg.part(READER["e"]))
        return keys | {"num_local_experts": cfg.n_expert, "num_experts_per_tok": cfg.n_expert_active}

    return Part(read, write)


SCALING = {  # rope_type -> the keys of our flag's numbers in order, with the flag's defaults
    "default": {},
    "linear": {"factor": 1},
    "llama3": {"factor": 1, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192},
    "yarn": {"factor": 1, "original_max_position_embeddings": 0, "beta_fast": 32, "beta_slow": 1},
}


def read_rope(given: dict, theta: float, flags: dict, original: float | None = None) -> dict:
    """rope_theta and rope_scaling, from transformers' dictionary of RoPE's parameters. If it lacks a base, `theta`
    counts. `original`, the context before scaling that stands beside the dictionary, counts before the one in there."""
    neutral = {"truncate": True, "partial_rotary_factor": 1}
    given = {name: x for name, x in given.items() if x is not None and x != neutral.get(name)}
    kind = given.get("rope_type", given.get("type", "default"))
    express(type(kind) is str and kind in SCALING, f"rope_type={describe(kind)}, but only {', '.join(SCALING)}")
    defaults = {"rope_theta": theta, "beta_fast": 32, "beta_slow": 1}
    defaults["original_max_position_embeddings"] = flags["block_size"]
    if original is not None and "original_max_position_embeddings" in SCALING[kind]:
        given["original_max_position_embeddings"] = original
    keys = Keys(given, defaults)
    numbers = [keys(name, float) for name in SCALING[kind]]
    require(all(x > 0 for x in numbers), f"the numbers of rope_type={kind} must be positive; correct them")
    theta = keys("rope_theta", float)
    more = sorted(given.keys() - keys.seen - {"rope_type", "type"}, key=str)
    express(not more, f"{describe(more[:1])} of rope_type={kind}, but only {', '.join(SCALING[kind]) or 'rope_theta'}")
    exact = [repr(int(x) if x.is_integer() else x) for x in numbers]
    scaling = ":".join([kind, *exact]) if exact else ""
    return {"rope_theta": theta, "rope_scaling": scaling}


def write_scaling(cfg: ModelConfig) -> dict | None:
    """Our flag rope_scaling as transformers' dictionary, with all numbers."""
    kind, *numbers = cfg.rope_scaling.split(":")
    if kind not in SCALING:
        return None
    found = SCALING[kind] | dict(zip(SCALING[kind], (float(x) for x in numbers), strict=False))
    if "original_max_position_embeddings" in found:
        original = found["original_max_position_embeddings"] or cfg.block_size / found["factor"]
        found["original_max_position_embeddings"] = int(original) if original % 1 == 0 else original
    return {"rope_type": kind} | found


def read_rope_of_all_layers(keys: Keys, flags: dict) -> dict:
    given = [keys(name, dict, NoneType) for name in ("rope_scaling", "rope_parameters")]
    original = keys("original_max_position_embeddings", float, NoneType)
    return read_rope(given[0] or given[1] or {}, keys("rope_theta", float), flags, original)


def write_rope(cfg: ModelConfig) -> dict:
    return {"rope_theta": cfg.rope_theta, "rope_scaling": write_scaling(cfg)}


# RoPE of all layers, in the keys of transformers 5 (rope_parameters) or of older releases, which both read. Where a
# file has both, transformers takes rope_scaling.
ROPE = Part(read_rope_of_all_layers, write_rope)
SLIDING, FULL = "sliding_attention", "full_attention"


def read_windows(keys: Keys, flags: dict, slides: Callable[[int], bool], window: int | None) -> dict:
    """window and window_pattern, from layer_types; if the file has none, slides(i) says which layers have a window."""
    L, types = flags["n_layer"], keys("layer_types", list, NoneType)
    express(L < 2**12, f"a number of layers of {L}, but only one below 4096")
    types = types or [SLIDING if slides(i) else FULL for i in range(L)]
    known = len(types) == L and all(each in (SLIDING, FULL) for each in types)
    express(known, f"layer_types={describe(types)}, but only {L} times {SLIDING} or {FULL}")
    pattern = "".join("S" if each == SLIDING else "L" for each in types)
    if window is None or "S" not in pattern:
        return {}
    shortest = next(pattern[:n] for n in range(1, L + 1) if (pattern[:n] * L).startswith(pattern))
    return {"window": window, "window_pattern": shortest.strip("S") and shortest}


def layer_types(cfg: ModelConfig) -> list[str]:
    return [SLIDING if cfg.layer_window(i) else FULL for i in range(cfg.n_layer)]


def read_qwen_layers(keys: Keys, flags: dict) -> dict:
    on, window = keys("use_sliding_window", bool), keys("sliding_window", int, NoneType)
    first = keys("max_window_layers", int, least=0)
    return read_windows(keys, flags, lambda i: i >= first, window if on else None)


def write_qwen_layers(cfg: ModelConfig) -> dict:
    types, window = layer_types(cfg), cfg.window or None
    keys = {"use_sliding_window": cfg.window > 0, "sliding_window": window, "layer_types": types}
    return keys | {"max_window_layers": [*types, SLIDING].index(SLIDING)}


def read_gemma2_layers(keys: Keys, flags: dict) -> dict:
    return read_windows(keys, flags, lambda i: i % 2 == 0, keys("sliding_window", int))


def read_gemma3_layers(keys: Keys, flags: dict) -> dict:
    period = keys("sliding_window_pattern", int)
    return read_windows(keys, flags, lambda i: (i + 1) % period > 0, keys("sliding_window", int))


def write_gemma_layers(cfg: ModelConfig) -> dict:
    # a number even where no layer has a window
    return {"sliding_window": cfg.window or cfg.block_size, "layer_types": layer_types(cfg)}


def write_gemma3_layers(cfg: ModelConfig) -> dict:
    """With the period that releases before layer_types read."""
    period = [*layer_types(cfg), FULL].index(FULL) + 1
    return write_gemma_layers(cfg) | {"sliding_window_pattern": period}


def read_gemma3_rope(keys: Keys, flags: dict) -> dict:
    """Layers with a window have a base of their own, without scaling."""
    given, scaling = (keys(name, dict, NoneType) or {} for name in ("rope_parameters", "rope_scaling"))
    inner = Keys(given, {})
    full, local = (inner(kind, dict, NoneType) or {} for kind in (FULL, SLIDING))
    found = read_rope(full | scaling, keys("rope_theta", float), flags)
    local = read_rope(local, keys("rope_local_base_freq", float), flags)
    inner.finish()
    express(not local["rope_scaling"], f"a rope_type of {SLIDING}, but only default")
    windows = flags.get("window_pattern") or ("S" if flags.get("window") else "L")
    pattern = windows.replace("L", "G").replace("S", "L")
    return found | {"rope_theta_local": local["rope_theta"], "pos_pattern": pattern.strip("G") and pattern}


def read_llama_bias(keys: Keys, flags: dict) -> dict:
    both = keys("attention_bias", bool), keys("mlp_bias", bool)
    express(both[0] == both[1], "attention_bias={} with mlp_bias={}, but only two equal values".format(*both))
    return {"bias": both[0]}


def read_scores(keys: Keys, flags: dict) -> dict:
    """Gemma's factor of the scores, which goes into the weights; and that of the embeddings, which is no key."""
    require(keys("query_pre_attn_scalar", float) > 0, "query_pre_attn_scalar must be positive; correct it")
    return {"embed_scale": flags["n_embd"] ** 0.5}


WINDOW = value("sliding_window", "window", int, NoneType)
SOFTCAP = value("attn_logit_softcapping", "attn_softcap", float, NoneType)
QWEN_LAYERS = Part(read_qwen_layers, write_qwen_layers)
GEMMA2_LAYERS = Part(read_gemma2_layers, write_gemma_layers)
GEMMA3_LAYERS = Part(read_gemma3_layers, write_gemma3_layers)
GEMMA3_ROPE = Part(read_gemma3_rope, lambda cfg: write_rope(cfg) | {"rope_local_base_freq": cfg.rope_theta_local})
SCORES = Part(read_scores, lambda cfg: {"query_pre_attn_scalar": cfg.head_size})
LLAMA_BIAS = Part(read_llama_bias, lambda cfg: {"attention_bias": cfg.bias, "mlp_bias": cfg.bias})
