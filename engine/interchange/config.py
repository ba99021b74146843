"""config.json of Hugging Face's models <-> our flags: the parts that engine/interchange/families.py puts together.

A Part translates a few keys both ways: part.read(keys, flags so far) -> flags, part.write(cfg) -> keys. `read` raises
ValueError for a value that our flags cannot express. It names the key, the value and the remedy.

    H query heads   C width of the stream   D head size   F hidden units of the MLP
"""

from collections.abc import Callable
from types import NoneType
from typing import Any, NamedTuple

from data.errors import require
from engine.interchange.keys import Keys, describe, express
from model import ModelConfig


class Part(NamedTuple):
    """Translates some keys of config.json: read(keys, flags so far) -> flags; write(cfg) -> keys."""

    read: Callable[[Keys, dict], dict]
    write: Callable[[ModelConfig], dict]


def value(name: str, flag: str, *kinds: type) -> Part:
    """A key and a flag of the same meaning; null means 0."""
    off = {float: 0.0}.get(kinds[0], 0)

    def read(keys: Keys, flags: dict) -> dict:
        found = keys(name, *kinds)
        return {flag: off if found is None else found}

    def write(cfg: ModelConfig) -> dict:
        found = getattr(cfg, flag)
        return {name: None if NoneType in kinds and found == off else found}

    return Part(read, write)


def only(**values: Any) -> Part:
    """Keys of which our flags express one value only."""

    def read(keys: Keys, flags: dict) -> dict:
        for name, wanted in values.items():
            found = keys.config.get(name, wanted)
            keys.seen.add(name)
            same = (found or None) == (wanted or None)
            express(same, f"{name}={describe(found)}, but only {wanted}")
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


def kv_flags(heads: int, flags: dict) -> dict:
    """Our flags for this number of key/value heads."""
    return {"attention": "gqa", "n_kv_head": heads} if heads != flags["n_head"] else {}


def kv_heads(keys: Keys, flags: dict) -> dict:
    return kv_flags(keys("num_key_value_heads", int, NoneType) or flags["n_head"], flags)


def head_dim(keys: Keys, flags: dict) -> dict:
    D = keys("head_dim", int, NoneType) or 0
    return {"head_dim": 0 if D * flags["n_head"] == flags["n_embd"] else D}


PLAIN = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2"}
PLAIN |= {"gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh"}  # the same function
GATED = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu", "gelu_new": "geglu_tanh"}


def mlp(activation: str, width: str, known: dict[str, str] = PLAIN) -> Part:
    """The MLP's activation function and width; a width of null is 4 C."""

    def read(keys: Keys, flags: dict) -> dict:
        name, C = keys(activation, str), flags["n_embd"]
        express(name in known, f"{activation}={describe(name)}, but only {', '.join(known)}")
        F = keys(width, int, NoneType) or 4 * C
        express(C % 64 or F % 64 == 0, f"{width}={F}, but with a width of {C} only a multiple of 64")
        return {"mlp": known[name], "mlp_ratio": F / C * (1.5 if known is GATED else 1)}

    def write(cfg: ModelConfig) -> dict:
        names = {ours: name for name, ours in reversed(known.items())}
        return {activation: names.get(cfg.mlp, next(iter(known))), width: cfg.hidden_dim}

    return Part(read, write)


SCALING = {  # rope_type -> the keys of our flag's numbers in order, with the flag's defaults
    "default": {},
    "linear": {"factor": 1},
    "llama3": {"factor": 1, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192},
    "yarn": {"factor": 1, "original_max_position_embeddings": 0, "beta_fast": 32, "beta_slow": 1},
}


def number(x: float) -> str:
    """The shortest text of the number that loses nothing."""
    return repr(int(x) if x == int(x) else x)


def read_rope(given: dict, defaults: dict, flags: dict, original: float | None = None) -> dict:
    """rope_theta, rope_fraction and rope_scaling, from transformers' dictionary of RoPE's parameters. An original
    context that stands beside the dictionary counts, not the one in it."""
    given = {name: x for name, x in given.items() if x is not None and (name, x) != ("truncate", True)}
    kind = given.get("rope_type", given.get("type", "default"))
    express(type(kind) is str and kind in SCALING, f"rope_type={describe(kind)}, but only {', '.join(SCALING)}")
    defaults = defaults | {"original_max_position_embeddings": flags["block_size"], "beta_fast": 32, "beta_slow": 1}
    if original is not None and "original_max_position_embeddings" in SCALING[kind]:
        given["original_max_position_embeddings"] = original
    keys = Keys(given, defaults)
    numbers = [keys(name, float) for name in SCALING[kind]]
    require(all(x > 0 for x in numbers), f"the numbers of rope_type={kind} must be positive; correct them")
    theta, fraction = keys("rope_theta", float), keys("partial_rotary_factor", float)
    more = sorted(given.keys() - keys.seen - {"rope_type", "type"}, key=str)
    express(not more, f"{describe(more[:1])} of rope_type={kind}, but only {', '.join(SCALING[kind]) or 'rope_theta'}")
    D = flags.get("head_dim") or max(1, flags["n_embd"] // flags["n_head"])
    rows = int(D * fraction)
    even = D % 2 or (0 < rows <= D and rows % 2 == 0)  # ModelConfig refuses an odd D itself
    express(even, f"partial_rotary_factor={fraction} turns {rows} of {D} rows, but only an even number of them")
    scaling = ":".join([kind, *map(number, numbers)]) if numbers else ""
    return {"rope_theta": theta, "rope_fraction": rows / D, "rope_scaling": scaling}


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


def rope(theta: str = "rope_theta", fraction: str = "", scaled: bool = True) -> Part:
    """RoPE of all layers, in the keys of transformers 5 (rope_parameters) or of older releases, which both read. Where
    a file has both, transformers takes rope_scaling."""

    def read(keys: Keys, flags: dict) -> dict:
        older, newer = (keys(name, dict, NoneType) or {} for name in ("rope_scaling", "rope_parameters"))
        given, original = older or newer, keys("original_max_position_embeddings", float, NoneType)
        defaults = {"rope_theta": keys(theta, float), "partial_rotary_factor": keys(fraction, float) if fraction else 1}
        found = read_rope(given, defaults, flags, original)
        express(fraction or found["rope_fraction"] == 1, f"partial_rotary_factor={found['rope_fraction']}, but only 1")
        express(scaled or not found["rope_scaling"], f"rope_scaling={describe(given)}, but only null")
        return found

    def write(cfg: ModelConfig) -> dict:
        keys = {theta: cfg.rope_theta, "rope_scaling": write_scaling(cfg)}
        return keys | {fraction: cfg.rope_fraction} if fraction else keys

    return Part(read, write)


def layer_flags(types: list | None, default: Callable[[int], bool], window: int | None, flags: dict) -> dict:
    """window and window_pattern; types or default say which layers have a sliding window."""
    L = flags["n_layer"]
    express(L < 2**12, f"a number of layers of {L}, but only one below 4096")
    types = types or ["sliding_attention" if default(i) else "full_attention" for i in range(L)]
    known = len(types) == L and all(each in ("sliding_attention", "full_attention") for each in types)
    express(known, f"layer_types={describe(types)}, but only {L} times sliding_attention or full_attention")
    pattern = "".join("S" if each == "sliding_attention" else "L" for each in types)
    if window is None or "S" not in pattern:
        return {}
    return {"window": window, "window_pattern": shortest(pattern).replace("S", "") and shortest(pattern)}


def shortest(pattern: str) -> str:
    """The shortest text that gives the pattern when it is repeated and cut."""
    return next(pattern[:n] for n in range(1, len(pattern) + 1) if (pattern[:n] * len(pattern)).startswith(pattern))


def layer_types(cfg: ModelConfig) -> list[str]:
    return ["sliding_attention" if cfg.layer_window(i) else "full_attention" for i in range(cfg.n_layer)]


def read_qwen_layers(keys: Keys, flags: dict) -> dict:
    on, window = keys("use_sliding_window", bool), keys("sliding_window", int, NoneType)
    first, types = keys("max_window_layers", int, least=0), keys("layer_types", list, NoneType)
    return layer_flags(types, lambda i: i >= first, window if on else None, flags)


def write_qwen_layers(cfg: ModelConfig) -> dict:
    types = layer_types(cfg)
    first = types.index("sliding_attention") if cfg.window and "sliding_attention" in types else cfg.n_layer
    keys = {"use_sliding_window": cfg.window > 0, "sliding_window": cfg.window or None, "max_window_layers": first}
    return keys | {"layer_types": types}


def read_gemma_layers(keys: Keys, flags: dict) -> dict:
    period, types = keys("sliding_window_pattern", int), keys("layer_types", list, NoneType)
    return layer_flags(types, lambda i: (i + 1) % period > 0, keys("sliding_window", int), flags)


def read_gemma2_layers(keys: Keys, flags: dict) -> dict:
    period, types = keys("sliding_window_pattern", int), keys("layer_types", list, NoneType)
    fact = f"sliding_window_pattern={period} counts nothing in a Gemma 2, whose second layers have no window"
    require(types or period == 2, f"{fact}; list the kinds of layers in layer_types")
    return read_gemma_layers(keys, flags)


def write_gemma_layers(cfg: ModelConfig) -> dict:
    types = layer_types(cfg)
    period = types.index("full_attention") + 1 if "full_attention" in types else cfg.n_layer + 1
    window = cfg.window or cfg.block_size  # theirs must be a number, even where no layer has a window
    return {"sliding_window": window, "sliding_window_pattern": period, "layer_types": types}


def read_gemma3_rope(keys: Keys, flags: dict) -> dict:
    """Layers with a window have a base of their own, without scaling."""
    given, scaling = (keys(name, dict, NoneType) or {} for name in ("rope_parameters", "rope_scaling"))
    inner, found = Keys(given, {}), {}
    for kind, theta in (("full_attention", "rope_theta"), ("sliding_attention", "rope_local_base_freq")):
        one = (inner(kind, dict, NoneType) or {}) | (scaling if kind == "full_attention" else {})
        found[kind] = read_rope(one, {"rope_theta": keys(theta, float), "partial_rotary_factor": 1}, flags)
        fraction = found[kind]["rope_fraction"]
        express(fraction == 1, f"partial_rotary_factor={fraction}, but only 1")
    inner.finish()
    local = found["sliding_attention"]
    express(not local["rope_scaling"], "a rope_type of sliding_attention, but only default")
    windows = flags.get("window_pattern") or ("S" if flags.get("window") else "L")
    pattern = windows.replace("L", "G").replace("S", "L")
    return found["full_attention"] | {
        "rope_theta_local": local["rope_theta"],
        "pos_pattern": pattern.strip("G") and pattern,
    }


def write_gemma3_rope(cfg: ModelConfig) -> dict:
    keys = {"rope_theta": cfg.rope_theta, "rope_local_base_freq": cfg.rope_theta_local}
    return keys | {"rope_scaling": write_scaling(cfg)}


def read_falcon(keys: Keys, flags: dict) -> dict:
    """The three generations: RW (in series, ALiBi), 7B (parallel, one key/value head), 40B (a norm for each reader)."""
    H, new, alibi = flags["n_head"], keys("new_decoder_architecture", bool), keys("alibi", bool)
    parallel, one = keys("parallel_attn", bool) or new, keys("multi_query", bool)
    norms = keys("num_ln_in_parallel_attn", int, NoneType) or 2
    own = keys("num_kv_heads", int, NoneType) or H
    heads = own if new else 1 if one else H
    found = kv_flags(heads, flags) | {"block": "parallel" if parallel else "standard"}
    found["norm_per_reader"] = new and norms == 2
    turns = rope().read(keys, flags)  # ALiBi ignores them
    if alibi:
        return found | {"pos": "alibi", "alibi_scale": max(1, flags["n_embd"] // H) ** -0.5}
    return found | {"pos": "rope"} | turns


def write_falcon(cfg: ModelConfig) -> dict:
    parallel = cfg.block != "standard"
    new = parallel and (cfg.norm_per_reader or cfg.kv_heads not in (1, cfg.n_head))
    keys = {"new_decoder_architecture": new, "parallel_attn": parallel, "multi_query": cfg.kv_heads == 1}
    keys |= {"num_ln_in_parallel_attn": 1 + cfg.norm_per_reader if new else None, "alibi": cfg.pos == "alibi"}
    return keys | {"num_kv_heads": cfg.kv_heads if new else cfg.n_head} | rope().write(cfg)


def read_neox_block(keys: Keys, flags: dict) -> dict:
    parallel = keys("use_parallel_residual", bool)
    return {"block": "parallel" if parallel else "standard", "norm_per_reader": parallel}


def read_llama_bias(keys: Keys, flags: dict) -> dict:
    both = keys("attention_bias", bool), keys("mlp_bias", bool)
    express(both[0] == both[1], "attention_bias={} with mlp_bias={}, but only two equal values".format(*both))
    return {"bias": both[0]}


def read_scores(keys: Keys, flags: dict) -> dict:
    """Gemma's factor of the scores, which goes into the weights; and that of the embeddings, which is no key."""
    require(keys("query_pre_attn_scalar", float) > 0, "query_pre_attn_scalar must be positive; correct it")
    return {"embed_scale": flags["n_embd"] ** 0.5}


WINDOW = value("sliding_window", "window", int, NoneType)
QWEN_LAYERS, GEMMA2_LAYERS = Part(read_qwen_layers, write_qwen_layers), Part(read_gemma2_layers, write_gemma_layers)
HEADS = [
    Part(kv_heads, lambda cfg: {"num_key_value_heads": cfg.kv_heads}),
    Part(head_dim, lambda cfg: {"head_dim": cfg.head_size}),
]
GEMMA3_LAYERS = Part(read_gemma_layers, write_gemma_layers)
SCORES = Part(read_scores, lambda cfg: {"query_pre_attn_scalar": cfg.head_size})
GEMMA3_ROPE, FALCON = Part(read_gemma3_rope, write_gemma3_rope), Part(read_falcon, write_falcon)
NEOX_BLOCK = Part(read_neox_block, lambda cfg: {"use_parallel_residual": cfg.block != "standard"})
LLAMA_BIAS = Part(read_llama_bias, lambda cfg: {"attention_bias": cfg.bias, "mlp_bias": cfg.bias})
MPT_SCORES = only(
    attn_type="multihead_attention", clip_qkv=None, softmax_scale=None, prefix_lm=False, qk_ln=False, alibi=True,
    alibi_bias_max=8,
)  # fmt: skip


def read_mpt_attention(keys: Keys, flags: dict) -> dict:
    inner = Keys(keys("attn_config", dict, NoneType) or {}, {})
    MPT_SCORES.read(inner, flags)
    inner.finish()
    return {}


MPT_ATTENTION = Part(read_mpt_attention, lambda cfg: {"attn_config": MPT_SCORES.write(cfg)})
