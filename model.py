"""The transformer. Each choice in its design is one flag and one table of variants; unused parts are identities.

    from model import Model, ModelConfig
    model = Model(ModelConfig(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=65, pos="rope"))
    loss = model(idx, targets)        # idx, targets (B, T) int64; targets of -1 are left out
    logits = model(idx)               # (B, T, V)

With objective="seq2seq", the encoder reads source (B, S). docs (B, T) and source_docs (B, S) hold document numbers that
never decrease along a row: a token sees only its own document. Padding is a document of its own. doc_starts (B, n) and
source_doc_starts (B, n), the first tokens of documents 0 ... n - 1, let CUDA compute them in one kernel.

A block is a list of sums. A sum adds the results of readers to the residual stream: attention reads the context,
cross-attention reads the encoder's memory, and an MLP reads its own parameters. To try an idea, add an entry to a table
(NORM, PLACEMENT, POSITION, MLP_KIND, BLOCK) and its name to the flag's Literal. The grid test walks the tables, so it
checks the new entry. docs/hacking.md has worked examples, the roles of modules, and the seams for other files.

Names used everywhere
    B batch   T time (queries)   S keys, or tokens of a source   C n_embd   V vocabulary   L layers
    H query heads   Hkv key/value heads   G = H / Hkv query heads of one group   D = C / H head size
    F hidden width of the MLP
"""

import math
import re
from collections import Counter, namedtuple
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial, reduce
from operator import add
from typing import Literal, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import ops
from ops import Mask

Maybe = Tensor | None
Shape = tuple[int, ...]
Fused = tuple[int, int, Shape]  # (dim, groups, sizes), see Linear

# ---------------------------------------------------------------------------------------------------------------------
# Flags


@dataclass
class ModelConfig:
    """The network's flags. ValueError names the flags of an impossible combination, their values and the remedy."""

    # --- model: size
    n_layer: int = 12  # number of blocks
    n_head: int = 12  # query heads per layer
    n_embd: int = 768  # width of the residual stream
    head_dim: int = 0  # width of a head, 0 = n_embd / n_head
    block_size: int = 1024  # context length in tokens
    vocab_size: int = 0  # 0 = the data's; above 1024 rounded up to a multiple of 64
    dropout: float = 0.0  # on embeddings, attention weights and both sub-layers' outputs
    bias: bool = False  # bias in linear layers and layer norms, as in GPT-2
    qkv_bias: bool = False  # bias of q, k and v where bias=False (Qwen2)
    norm_bias: bool = False  # bias of layer norms where bias=False (Falcon, StableLM)
    tie_weights: bool = True  # the head shares the token embedding
    init_std: float = 0.02  # standard deviation of the initial weights
    scaled_init: bool = True  # output layers begin smaller: init_std / sqrt(their number), as in GPT-2
    embed_scale: float = 1.0  # factor of the token embeddings; Gemma's is sqrt(n_embd)
    # --- model: block
    block: Literal["standard", "parallel", "simplified", "simplified_parallel", "superblock"] = "standard"  # the wiring
    norm: Literal[  # rmsnorm: x / sqrt(mean square + eps) (arXiv:1910.07467), rmsnorm_eps_outside: x / (rms + eps)
        "layernorm", "rmsnorm", "rmsnorm_eps_outside", "none"
    ] = "layernorm"
    last_norm: Literal["same", "layernorm", "rmsnorm"] = "same"  # kind of the norm before the head; same = as norm
    norm_placement: Literal[  # pre: x+f(n(x)), post: n(x+f(x)), after: x+n(f(x)), sandwich: x+n(f(n(x))), none: x+f(x)
        "pre", "post", "after", "sandwich", "none"
    ] = "pre"
    norm_eps: float = 1e-5  # added to the variance, or to the mean square, in every norm
    mlp: Literal[  # relu2 arXiv:2109.08668, *glu arXiv:2002.05202; *_tanh: the approximation of GPT-2 and Gemma
        "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "swiglu", "geglu", "geglu_tanh"
    ] = "gelu"
    mlp_ratio: float = 4.0  # hidden width over n_embd; gated kinds take 2/3 of it, so that parameters match
    simplified_value_proj: Literal["first", "all", "none"] = "first"  # layers whose value projection is trained
    simplified_beta_ff: float = 0.1  # initial gain of the MLP branch, use O(1 / sqrt(depth)) (arXiv:2311.01906)
    layer: str = "c+p"  # the superblock's readers: c context, p MLP, s slots, m memory (docs/blocks.md)
    n_group: int = 1  # slices of the stream that the superblock's parameters are read with, each with units of its own
    n_slot: int = 0  # learned slots per key/value head (arXiv:1907.01470); 0 = as many parameters as the MLP
    # --- model: experts
    n_expert: int = 0  # experts of an MLP, of which each token reads some (arXiv:1701.06538); 0 = dense
    n_expert_active: int = 2  # experts that a token reads
    n_expert_shared: int = 0  # experts that all tokens read besides (arXiv:2401.06066)
    expert_ratio: float = 0.0  # hidden width of an expert over n_embd, as mlp_ratio; 0 = mlp_ratio / (active + shared)
    router: Literal["softmax", "sigmoid"] = "softmax"  # scores of experts (Mixtral, arXiv:2401.04088; DeepSeek-V3)
    router_balance: Literal["bias", "none"] = "bias"  # bias: rarely read experts are preferred (arXiv:2408.15664)
    n_dense_layer: int = 0  # first layers that have no experts
    # --- model: attention
    attention: Literal["mha", "gqa", "mqa"] = "mha"  # gqa: arXiv:2305.13245, mqa: arXiv:1911.02150
    n_kv_head: int = 0  # key/value heads, must divide n_head; 0 = derived from attention
    qk_norm: bool = False  # RMS norm of each head's q and k (arXiv:2302.05442)
    window: int = 0  # tokens that each token sees, its own included; encoders: as many on both sides; 0 = all
    window_pattern: str = ""  # per layer, repeated: S = sliding window, L = full, such as SSSL; empty = all S
    attn_softcap: float = 0.0  # c tanh(scores / c), 0 = off (Gemma 2, arXiv:2408.00118)
    attn_gate: Literal["none", "head", "element"] = "none"  # a sigmoid of x for each head's result (arXiv:2505.06708)
    value_residual: bool = False  # v is a learned mix with the first layer's v (arXiv:2410.17897)
    fp32_residual: bool | Literal["auto"] = "auto"  # residual stream in float32; auto = unless a GPU has bfloat16
    # --- model: position
    pos: Literal["learned", "sinusoidal", "rope", "alibi", "none"] = "learned"  # position encoding
    rope_theta: float = 10000.0  # base of RoPE's wavelengths (arXiv:2104.09864)
    rope_scaling: str = ""  # linear:F, llama3:F:LOW:HIGH:ORIGINAL or yarn:F:ORIGINAL:FAST:SLOW; docs/blocks.md
    pos_pattern: str = ""  # per layer, repeated: G = as above, L = RoPE with rope_theta_local, N = none; empty = all G
    rope_theta_local: float = 10000.0  # RoPE's base in layers L, whose wavelengths are not scaled (Gemma 3)
    # --- model: objective
    objective: Literal["causal", "masked", "seq2seq"] = "causal"  # masked: encoder (BERT), seq2seq: both (T5)
    n_encoder_layer: int = 0  # blocks of the encoder, 0 = n_layer
    doc_mask: bool = False  # tokens attend only within their own document, which end-of-text begins
    doc_positions: bool = False  # positions count from the beginning of each document; needs doc_mask
    # --- model: loss
    logit_softcap: float = 0.0  # c tanh(logits / c), 0 = off
    z_loss: float = 0.0  # factor of the mean squared log-sum-exp of the logits (arXiv:2204.02311); 0 = off
    loss_chunk: int = 0  # most tokens whose logits exist at once in the loss; 0 = 128 MiB of float32, on a GPU 1 GiB

    def __post_init__(self):
        check_range(self, "n_head n_embd block_size", 1)
        check_range(self, "n_group n_expert_active", 1, 2**16)  # each layer holds a tuple of its groups
        check_range(self, "n_layer", 1, 2**12)  # building a layer takes a hundredth of a second
        check_range(self, "n_encoder_layer", 0, 2**12)
        check_range(self, "vocab_size head_dim n_kv_head n_slot window loss_chunk", 0)
        check_range(self, "attn_softcap logit_softcap norm_eps", 0)
        check_range(self, "n_expert n_expert_shared expert_ratio n_dense_layer init_std z_loss", 0, 2**16)
        check_range(self, "simplified_beta_ff embed_scale", -(2**31))
        check_range(self, "dropout", 0, 1)
        H, C, Hkv, pos, ratio = self.n_head, self.n_embd, self.n_kv_head, self.pos, self.mlp_ratio
        fact = f"n_embd={C} is not divisible by n_head={H}; set n_embd to a multiple such as {-(-C // H) * H}"
        require(self.head_dim or C % H == 0, f"{fact}, or set head_dim")
        require(0 < ratio * C < 2**31, f"mlp_ratio={ratio} must be positive, and times n_embd={C} below {2**31}")
        for name in ("rope_theta", "rope_theta_local", "init_std"):
            require(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be positive")
        if self.rope_scaling:
            scaled_frequencies(self, torch.ones(1))  # refuses a scaling that is not known
        for name, cap in (("attn_softcap", self.attn_softcap), ("logit_softcap", self.logit_softcap)):
            require(cap == 0 or cap >= 1e-6, f"{name}={cap} must be 0 (off) or at least 1e-06")
        require(C % self.n_group == 0, f"n_group={self.n_group} does not divide n_embd={C}; set n_group to a divisor")
        remedy, divides = f"set n_kv_head to a divisor of n_head={H}: {divisors(H)}", Hkv > 0 and H % Hkv == 0
        require(self.attention != "gqa" or divides, f"attention=gqa with n_kv_head={Hkv}: {remedy}")
        fixed = {"mha": H, "mqa": 1}.get(self.attention, Hkv)
        clash = f"contradicts attention={self.attention} (n_kv_head={fixed}); set attention=gqa"
        require(Hkv in (0, fixed), f"n_kv_head={Hkv} {clash}")
        size = f"head size {self.head_size} (head_dim, or n_embd / n_head)"
        require(pos != "rope" or self.head_size % 2 == 0, f"pos=rope needs an even head size, not {size}")
        whole = not self.block.startswith("simplified") or C == H * self.head_size
        require(whole, f"block={self.block} cuts the stream into heads, but {H} of {size} are not n_embd={C}")
        require(pos != "sinusoidal" or C % 2 == 0, f"pos=sinusoidal needs an even n_embd, and it is {C}")
        unused = f"doc_positions=True has no effect with pos={pos}, which encodes distances of tokens or nothing"
        absolute = pos in ("learned", "sinusoidal")
        require(not self.doc_positions or absolute, f"{unused}; leave it out, or set pos=learned")
        active, experts = self.n_expert_active, self.n_expert
        fact = f"n_expert_active={active} is more than n_expert={experts}"
        require(active <= experts or not experts, f"{fact}; lower it, or set more experts")
        if experts and self.block != "superblock" and self.n_dense_layer >= self.n_layer:
            fact = f"n_dense_layer={self.n_dense_layer} leaves none of n_layer={self.n_layer} layers with experts"
            raise ValueError(f"{fact}; lower it, or set n_expert=0")
        if self.block == "superblock":
            check_layer(self)
        moved = f"doc_mask=True with pos=rope and layer={self.layer} would give a document other results at another"
        require(not (self.doc_mask and self.placed_slots), f"{moved} place in the row; use own_slots")
        if pos == "alibi" and self.objective != "causal":
            fact = f"pos=alibi with objective={self.objective}: this was retired, as encoders see both ways"
            raise ValueError(f"{fact}; set pos=rope, or use an older version of this program")
        kinds, flag = {"rope": "GLN", "alibi": "GN"}.get(pos, ""), f"pos_pattern={self.pos_pattern!r} with pos={pos}"
        known = "may hold only the letters " + kinds if kinds else "has no effect, only rope and alibi differ by layer"
        require(set(self.pos_pattern) <= set(kinds), f"{flag} {known}; leave it empty for the same in all layers")
        pattern, flag = self.window_pattern, f"window_pattern={self.window_pattern!r}"
        require(set(pattern) <= set("SL"), f"{flag} may hold only S (sliding) and L (full), such as SSSL")

    @property
    def head_size(self) -> int:
        """D: head_dim, or n_embd / n_head."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        return {"mha": self.n_head, "gqa": self.n_kv_head, "mqa": 1}[self.attention]

    @property
    def vocab_rows(self) -> int:
        """Rows of embedding and head: vocab_size, to which Config adds padding that no token and no loss uses."""
        return self.vocab_size

    @property
    def hidden_dim(self) -> int:
        """F: mlp_ratio * C (2/3 of it for gated kinds), rounded to a multiple of 64 if C is a multiple of 64."""
        width = self.mlp_ratio * self.n_embd * (2 / 3 if self.gated else 1)
        unit = math.lcm(self.hidden_unit, self.n_group)  # every group of channels gets an equal slice
        return max(unit, round(width / unit) * unit)

    @property
    def gated(self) -> bool:
        return MLP_KIND[self.mlp].inputs == 2

    @property
    def hidden_unit(self) -> int:
        """Hidden units per piece. In each piece, a gated kind's gates stand before its values."""
        return 64 if self.n_embd % 64 == 0 else 1

    @property
    def layers(self) -> "list[tuple[list[Sources], int]]":
        """For each string of `layer`, c,p in other blocks: the readers of each sum, and how many layers have them."""
        each = ("c,e" if self.expert_layer(i) else "c,p" for i in range(self.n_layer if self.n_expert else 1))
        layer = self.layer if self.block == "superblock" else ";".join(each)
        n = len(parsed_layer(layer))
        return [(layer_readers(layer, self.objective, i), len(range(i, self.n_layer, n))) for i in range(n)]

    def expert_layer(self, layer: int) -> bool:
        """Whether the MLP of this layer has experts, in blocks other than superblock, whose `layer` says it."""
        return self.n_expert > 0 and layer >= self.n_dense_layer

    @property
    def readers(self) -> "list[Reader]":
        """The readers of all strings of `layer`."""
        return [reader for sums, _ in self.layers for readers in sums for reader in readers]

    @property
    def outputs(self) -> int:
        """Number of results that the readers of all layers add to the stream. Slots beside a context are one more."""
        return sum(n * sum(1 + bool(r.slots) for readers in sums for r in readers) for sums, n in self.layers)

    @property
    def stacks(self) -> "list[ModelConfig]":
        """These flags, and those of the encoder, if there is one."""
        encoder = copy(self)
        vars(encoder).update(objective="masked", n_layer=self.n_encoder_layer or self.n_layer)
        return [self, encoder] if self.objective == "seq2seq" else [self]

    def part(self, reader: "Reader") -> "ModelConfig":
        """The flags of one reader: its share of heads and hidden units, its phi as mlp, its slots as n_slot."""
        part = copy(self)
        phi = {"mlp": self.mlp, "softmax": "gelu" if reader.units else self.mlp}  # gelu: a kind without gates
        ratio = self.mlp_ratio
        if reader.source == "experts":
            ratio = self.expert_ratio or ratio / (self.n_expert_active + self.n_expert_shared)
            part.n_group = 8  # no groups: it makes hidden_dim a multiple of 8, as ops.grouped_linear is fast with
        vars(part).update(mlp=phi.get(reader.phi, reader.phi), mlp_ratio=ratio * reader.share)
        if not reader.units:
            H, Hkv = (int(n * reader.share) for n in (self.n_head, self.kv_heads))
            vars(part).update(n_head=H, attention="gqa", n_kv_head=Hkv, head_dim=self.head_size)
        if reader.slotted and not self.n_slot:
            mlp = (2 + part.gated) * self.n_embd * part.hidden_dim
            keys = 1 + part.gated * (reader.phi != "softmax")
            part.n_slot = max(1, round(mlp / ((keys + 1) * part.kv_heads * self.head_size)))
        return part

    @property
    def placed_slots(self) -> bool:
        """Whether slots have the position 0, so that a token's distance to them depends on its place."""
        return self.pos == "rope" and any(reader.slots == "joint_slots" for reader in self.readers)

    @property
    def bare(self) -> bool:
        """Whether simplified blocks have no norms; one layer norm after the embeddings is kept (He and Hofmann)."""
        return self.block.startswith("simplified") and "none" in (self.norm, self.norm_placement)

    @property
    def norms(self) -> set[str]:
        """Kinds of the norms of the residual stream."""
        of_sums = self.norm if PLACEMENT[self.norm_placement] else "none"
        return {of_sums, self.last_norm, "layernorm" if self.bare else "none"} - {"same", "none"}

    def layer_window(self, layer: int) -> int:
        """Sliding window of a layer in tokens, 0 = full attention."""
        kinds = self.window_pattern or "S"
        return self.window if kinds[layer % len(kinds)] == "S" else 0


# A flag that is set but has no effect is refused. flag -> (whether cfg uses it; when, in words that check_used reads)
USED_WHEN: dict[str, tuple[Callable[[ModelConfig], bool], str]] = {
    **dict.fromkeys(("rope_theta", "rope_scaling"), (lambda c: c.pos == "rope", "pos=rope")),
    "rope_theta_local": (lambda c: "L" in c.pos_pattern, "pos_pattern with an L"),
    "qkv_bias": (lambda c: not c.bias, "bias=False, as bias=True includes it"),
    "norm_bias": (
        lambda c: not c.bias and "layernorm" in c.norms,
        "norm=layernorm, norm_placement other than none, and bias=False",
    ),
    "scaled_init": (lambda c: not c.block.startswith("simplified"), "block other than simplified"),
    "last_norm": (lambda c: c.norm_placement != "post", "norm_placement other than post"),
    "norm_eps": (lambda c: bool(c.norms) or c.qk_norm, "norm and norm_placement other than none, or qk_norm=True"),
    "window_pattern": (lambda c: c.window > 0, "window > 0"),
    "value_residual": (
        lambda c: sum(n for sums, n in c.layers if any(r.source == "context" for each in sums for r in each)) > 1,
        "layer with a c twice or more often",
    ),
    "simplified_value_proj": (lambda c: c.block.startswith("simplified"), "block=simplified"),
    "simplified_beta_ff": (lambda c: c.block.startswith("simplified"), "block=simplified"),
    "layer": (lambda c: c.block == "superblock", "block=superblock"),
    "n_group": (lambda c: c.block == "superblock" and any(r.dense for r in c.readers), "block=superblock with a p"),
    "n_slot": (lambda c: any(r.slotted for r in c.readers), "layer with an s or c.own_slots, and block=superblock"),
    "n_expert": (
        lambda c: c.n_expert == 0 or any(r.source == "experts" for r in c.readers),
        "layer with an e, or block other than superblock",
    ),
    **dict.fromkeys(
        ("n_expert_active", "n_expert_shared", "expert_ratio", "router", "router_balance"),
        (lambda c: c.n_expert > 0, "n_expert > 0"),
    ),
    "n_dense_layer": (
        lambda c: c.n_expert > 0 and c.block != "superblock",
        "n_expert > 0 and block other than superblock",
    ),
    "n_encoder_layer": (lambda c: c.objective == "seq2seq", "objective=seq2seq"),
    "doc_positions": (lambda c: c.doc_mask, "doc_mask=True"),
    "mlp_ratio": (
        lambda c: any(r.dense or r.units and not c.expert_ratio or r.slotted and not c.n_slot for r in c.readers),
        "layer with a p, with an e and expert_ratio=0, or with slots and n_slot=0",
    ),
    "mlp": (lambda c: any(r.phi == "mlp" for r in c.readers), "layer with a p or e that has no other map"),
    "norm": (lambda c: c.norm_placement != "none" or c.norm == "none", "norm_placement other than none"),
    "norm_placement": (lambda c: c.norm != "none" or c.norm_placement == "none", "norm other than none"),
}


def require(condition: object, message: str):
    if not condition:
        raise ValueError(message)


def check_range(cfg, names: str, least: int, limit: int = 2**31):
    """ValueError unless each of these flags is at least `least` and below `limit`."""
    for name in names.split():
        value = getattr(cfg, name)
        require(least <= value < limit, f"{name}={value} must be at least {least} and below {limit}")


def divisors(n: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


# ---------------------------------------------------------------------------------------------------------------------
# Initial weights: a module says in `initial` what each of its own parameters begins with, a number, a tensor or Normal.

# Numbers from N(0, std), except that the first `zero` of every `period` rows are 0.
Normal = namedtuple("Normal", "std zero period", defaults=[0, 1])


def check_initial(model: nn.Module):
    """ValueError names a parameter whose module does not say what it begins with, or into which __init__ has written,
    or a buffer: a model that is built in parts, without memory, would lose these values."""
    for path, module in model.named_modules():
        declared = getattr(module, "initial", {})
        for name, p in module.named_parameters(recurse=False):
            if p.dim() == 0:
                raise ValueError(f"{path}.{name} has no dimensions, one of which FSDP cuts; give it the shape (1,)")
            if name not in declared:
                raise ValueError(f"{path}.{name} begins with no declared values; {declare(module, name, p)}")
            if p._version > 0 and not draws(module):
                raise ValueError(f"{path}.{name} is written in __init__; instead, {declare(module, name, p)}")
        for name, value in declared.items():
            if isinstance(value, Tensor) and value.is_meta:
                raise ValueError(f"initial[{name!r}] of {path} has no values; make this tensor with device='cpu'")
    for name, _ in model.named_buffers():
        raise ValueError(f"{name} is a buffer, whose values a model built in parts loses; compute it in forward")


def declare(module: nn.Module, name: str, p: Tensor) -> str:
    """The remedy: the line that declares what this parameter begins with."""
    value = "Normal(0.02)" if p.dim() > 1 else "0.0"
    return f'give its {type(module).__name__} an initial = {{"{name}": {value}}}, or other values'


def draws(module: nn.Module) -> bool:
    """Whether this layer is one of PyTorch, which writes into its parameters when it is made; ours do not."""
    reset = getattr(type(module), "reset_parameters", None)
    return reset is not None and reset.__module__ != __name__


# ---------------------------------------------------------------------------------------------------------------------
# Norms


class Ones:
    """A norm of PyTorch that begins with weights of 1 and biases of 0."""

    initial = {"weight": 1.0, "bias": 0.0}

    def reset_parameters(self):
        for name, p in self.named_parameters():
            p.data.fill_(self.initial[name])  # check_initial does not see what goes through .data


class LayerNorm(Ones, nn.LayerNorm):
    """LayerNorm whose result has the dtype of x, whichever dtype the weight has. The kernel's sums are in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(Ones, nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) times a weight."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


class RMSNormEpsOutside(Ones, nn.RMSNorm):
    """x / (rms + eps) times a weight: the RMSNorm of arXiv:1910.07467's authors, and of He and Hofmann."""

    def forward(self, x: Tensor) -> Tensor:
        wide = ops.at_least_float32(x)
        rms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True) / math.sqrt(x.size(-1))
        return (wide / (rms + self.eps) * self.weight).to(x.dtype)


NORM: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "layernorm": lambda c: LayerNorm(c.n_embd, c.norm_eps, bias=c.bias or c.norm_bias),
    "rmsnorm": lambda c: RMSNorm(c.n_embd, c.norm_eps),
    "rmsnorm_eps_outside": lambda c: RMSNormEpsOutside(c.n_embd, c.norm_eps),
    "none": lambda c: nn.Identity(),
}

PLACEMENT = {  # flag -> places of the norms: before a sum's readers, after them, on the total; last = before the head
    "pre": {"before", "last"},
    "post": {"total"},
    "after": {"after", "last"},
    "sandwich": {"before", "after", "last"},
    "none": set(),
}


def norm(cfg: ModelConfig, role: str) -> nn.Module:
    """The norm for this place, or an identity if norm_placement has no norm there."""
    kind = cfg.norm if role in PLACEMENT[cfg.norm_placement] else "none"
    if role == "last" and cfg.last_norm != "same":
        kind = cfg.last_norm
    return with_role(NORM[kind](cfg), "whole" if role == "total" else role)


def with_role(module: nn.Module, role: str) -> nn.Module:
    module.role = role
    return module


# ---------------------------------------------------------------------------------------------------------------------
# Positions: a class for the embedding and a class for q, k and v. t (T,) holds absolute positions; with doc_positions
# the embedding gets positions (B, T) within the documents.


class NoEmbedding(nn.Module):
    """Returns x (B, T, C) unchanged; the base class of position embeddings."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return x


def embedding(cfg: ModelConfig, rows: int) -> nn.Embedding:
    """nn.Embedding with an uninitialised weight. Drawing it on the meta device would import torch._dynamo: a second."""
    table = nn.Embedding(rows, cfg.n_embd, _weight=torch.empty(rows, cfg.n_embd))
    table.initial = {"weight": Normal(cfg.init_std)}
    return table


class LearnedEmbedding(NoEmbedding):
    """x + W[t] (GPT-2)."""

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg)
        self.wpe = with_role(embedding(cfg, cfg.block_size), "whole")

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return x + self.wpe(t)


class SinusoidalEmbedding(NoEmbedding):
    """sqrt(C) x + [sin(t w), cos(t w)], w_i = 10000^(-2i/C) (arXiv:1706.03762, sections 3.4 and 3.5)."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        C = x.size(-1)
        angle = t[..., None] * frequencies(C // 2, 10000.0, t.device)  # (..., T, C/2)
        return x * math.sqrt(C) + torch.cat((angle.sin(), angle.cos()), dim=-1).to(x.dtype)


def frequencies(n: int, theta: float, device: torch.device) -> Tensor:
    """theta^(-j/n), j < n: radians per token (n,). float64 keeps the phase of far positions exact."""
    dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
    return theta ** (-torch.arange(n, device=device, dtype=dtype) / n)


class AttentionPosition(nn.Module):
    """Returns q (B, H, T, D), k and v (B, Hkv, T, D) unchanged; the base class of encodings that act on them. Every
    layer has its own instance, which may have parameters. table(t) must not depend on them: one more instance, of the
    Stack, computes it once per forward, for all layers."""

    head_entries = 0  # number of entries, at the front of the table, that have a row for each head

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg

    def table(self, t: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return ()  # causal models: tensors (..., T, n), with a row for each position of t (T,)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, table: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, v

    def slots(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values (Hkv, M, D) of slots, which have no position, padded to the width E of forward's results."""
        return k, v


def llama3_scaling(f: Tensor, cfg: ModelConfig, factor: float, low=1.0, high=4.0, original=8192.0):
    """Wavelengths above original / low times the factor, those below original / high as they are (Llama 3.1)."""
    require(low < high, "LOW is not below HIGH")
    kept = ((original * f / math.tau - low) / (high - low)).clamp(0, 1)
    return f * kept + f / factor * (1 - kept), 1.0


def yarn_scaling(f: Tensor, cfg: ModelConfig, factor: float, original=0.0, fast=32.0, slow=1.0):
    """Pairs that turn more than `fast` times in the original context as they are, those that turn less than `slow`
    times with their wavelength times the factor; q and k grow too (YaRN, arXiv:2309.00071)."""
    n, original = len(f), original or cfg.block_size / factor  # the present context is the longer one
    ends = (n * math.log(original / (turns * math.tau)) / math.log(cfg.rope_theta) for turns in (fast, slow))
    first, last = max(math.floor(next(ends)), 0), min(math.ceil(next(ends)), 2 * n - 1)
    scaled = ((torch.arange(n, device=f.device) - first) / (last - first or 1e-3)).clamp(0, 1)
    return f * (1 - scaled) + f / factor * scaled, 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


ROPE_SCALING = {  # name -> (frequencies (n,), cfg, numbers of the flag) -> (frequencies (n,), factor of q and of k)
    "linear": lambda f, cfg, factor: (f / factor, 1.0),  # position interpolation (arXiv:2306.15595)
    "llama3": llama3_scaling,
    "yarn": yarn_scaling,
}


def scaled_frequencies(cfg: ModelConfig, f: Tensor) -> tuple[Tensor, float]:
    """RoPE's frequencies (n,) under cfg.rope_scaling, and the factor of q and of k."""
    if not cfg.rope_scaling:
        return f, 1.0
    name, *numbers = cfg.rope_scaling.split(":")
    try:
        numbers = [float(re.fullmatch("[0-9.]+([eE][+-]?[0-9]+)?", x)[0]) for x in numbers]
        require(all(1e-6 <= x <= 1e20 for x in numbers), "a number is too small or too large")
        return ROPE_SCALING[name](f, cfg, *numbers)
    except (KeyError, ValueError, TypeError, ZeroDivisionError):
        remedy = "set it to linear:F, llama3:F:LOW:HIGH:ORIGINAL or yarn:F:ORIGINAL:FAST:SLOW, such as llama3:8"
        raise ValueError(f"rope_scaling={cfg.rope_scaling!r} is not known; {remedy}") from None


class Rope(AttentionPosition):
    """Rotates pairs (x_j, x_{j+n}), j < n = D/2, by angles t * theta^(-j/n) (arXiv:2104.09864; pairs as in GPT-NeoX
    and Llama). The table holds cos and sin of layers G, then those of layers L."""

    def __init__(self, cfg: ModelConfig, first: int = 0):
        super().__init__(cfg)
        self.first = first  # entry of the table where this layer's begin

    def table(self, t: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        cfg, n = self.cfg, self.cfg.head_size // 2
        turns = [scaled_frequencies(cfg, frequencies(n, cfg.rope_theta, t.device))]
        if "L" in cfg.pos_pattern:
            turns.append((frequencies(n, cfg.rope_theta_local, t.device), 1.0))
        out = []
        for f, factor in turns:
            angle = t[:, None] * f  # (T, n)
            cos = (factor * angle.cos()).to(dtype)
            sin = (factor * angle.sin()).to(dtype)
            out += torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)  # (T, D)
        return tuple(out)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, table: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = (x.to(q.dtype) for x in table[self.first : self.first + 2])
        return ops.rotate(q, cos, sin), ops.rotate(k, cos, sin), v


class Alibi(AttentionPosition):
    """Adds -m_h (i - j) to the scores (arXiv:2108.12409) without a bias matrix. Softmax ignores a constant per row, so
    adding m_h j is enough. Extra columns of q and k, each exact in bfloat16, give this dot product:

        q   256 m_h, m_h, 256 m_h (i // 256), m_h (i % 256)   times sqrt(D)
        k   j // 256, j % 256, 0, 0

    A slot has the columns 0, 0, 1, 1. Its score then contains m_h i, as all scores of query i do; softmax cancels it.
    v is padded with zeros to the same width E, a multiple of 8 as the fused kernels need; Pool drops these columns.
    """

    head_entries = 1

    def table(self, t: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        cfg, D = self.cfg, self.cfg.head_size
        slope = alibi_slopes(cfg.n_head, t.device).to(dtype)[:, None] * math.sqrt(D)  # (H, 1)
        far, near = (t // 256).to(dtype), (t % 256).to(dtype)  # (T,)
        columns = (256 * slope).expand(-1, len(t)), slope.expand(-1, len(t)), 256 * slope * far, slope * near
        return self.pad(torch.stack(columns, dim=-1)), self.pad(torch.stack((far, near), dim=-1))  # (H, T, .), (T, .)

    def pad(self, columns: Tensor) -> Tensor:
        """(..., n) -> (..., E - D), where E is the least multiple of 8 that holds D + 4."""
        D = self.cfg.head_size
        return F.pad(columns, (0, -(-(D + 4) // 8) * 8 - D - columns.size(-1)))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, table: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        q_columns, k_columns = (c.to(q.dtype) for c in table)
        q = torch.cat((q, q_columns.expand(*q.shape[:3], -1)), dim=-1)  # (B, H, T, E)
        k = torch.cat((k, k_columns.expand(*k.shape[:3], -1)), dim=-1)  # (B, Hkv, T, E)
        return q, k, F.pad(v, (0, q.size(-1) - v.size(-1)))

    def slots(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        columns = self.pad(torch.cat((k.new_zeros(2), k.new_ones(2)))).expand(*k.shape[:2], -1)  # (Hkv, M, E - D)
        return torch.cat((k, columns), dim=-1), F.pad(v, (0, columns.size(-1)))


def alibi_slopes(n_head: int, device: torch.device | str = "cpu") -> Tensor:
    """Slopes (H,): 2^(-8i/H), i = 1..H. If H is no power of two: the slopes of the power p below, then half of 2p's."""
    p = 2 ** int(math.log2(n_head))
    i = torch.arange(n_head, device=device)
    return torch.exp2(-8 * torch.where(i < p, (i + 1) / p, (2 * (i - p) + 1) / (2 * p)))


POSITION = {  # flag -> (acts on the embedding, acts on q, k and v)
    "learned": (LearnedEmbedding, AttentionPosition),
    "sinusoidal": (SinusoidalEmbedding, AttentionPosition),
    "rope": (NoEmbedding, Rope),
    "alibi": (NoEmbedding, Alibi),
    "none": (NoEmbedding, AttentionPosition),
}


def layer_position(cfg: ModelConfig, layer: int) -> AttentionPosition:
    """What acts on q, k and v in this layer, by cfg.pos and cfg.pos_pattern."""
    kinds = cfg.pos_pattern or "G"
    position = {"G": POSITION[cfg.pos][1], "L": partial(Rope, first=2), "N": AttentionPosition}
    return position[kinds[layer % len(kinds)]](cfg)


def stream_dtype(cfg: ModelConfig, x: Tensor) -> torch.dtype:
    """The dtype of a residual stream that begins with x."""
    return x.dtype if ops.wide_stream(cfg.fp32_residual, x.device, ops.matmul_dtype(x)) else ops.matmul_dtype(x)


# ---------------------------------------------------------------------------------------------------------------------
# Layers


class UndrawnLinear(nn.Linear):
    """nn.Linear with an uninitialised weight, as Model.init_weights draws all weights."""

    def reset_parameters(self):
        pass


class Linear(UndrawnLinear):
    """A linear layer that declares its role, and the logical matrices that its weight stores side by side.

    fused = (dim, groups, sizes): along dim (0 rows, 1 columns) the weight has `groups` groups of pieces of `sizes`, and
    the n-th pieces of all groups are logical matrix n; None = one matrix. Muon orthogonalizes each matrix alone; tensor
    parallelism cuts between groups. `read_share` is the share of the weight that a token reads.
    """

    read_share = Fraction(1)

    def __init__(self, cfg: ModelConfig, n_in: int, n_out: int, role: str, fused: Fused | None = None, bias=False):
        super().__init__(n_in, n_out, cfg.bias or bias)
        self.role, self.fused = role, fused
        # The stream is a sum; 1 / sqrt(number of terms) keeps its variance from growing, but in simplified blocks.
        scaled = role in ("out", "second") and cfg.scaled_init and not cfg.block.startswith("simplified")
        std = cfg.init_std / math.sqrt(cfg.outputs) if scaled else cfg.init_std
        self.initial = {"weight": Normal(std), "bias": 0.0}
        assert fused is None or self.weight.size(fused[0]) == fused[1] * sum(fused[2])


class GroupedLinear(Linear):
    """Independent linear maps of slices, (..., groups i) -> (..., groups o), with weight (groups o, i). `rows` holds
    the numbers of rows of a map's logical matrices, such as the gate and the values of a gated MLP. Tensor parallelism
    cuts between the groups."""

    per_head = ("weight", "bias")

    def __init__(self, cfg: ModelConfig, groups: int, n_in: int, role: str, rows: Shape):
        super().__init__(cfg, n_in // groups, groups * sum(rows), role, (0, 1, groups * rows))
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        x, weight = x.unflatten(-1, (self.groups, -1)), self.weight.unflatten(0, (self.groups, -1))
        y = torch.einsum("...gi,goi->...go", x, weight).flatten(-2)
        return y if self.bias is None else y + self.bias


class NearIdentity(Linear):
    """skip x + resid W x, where W starts at 0: the reparametrised projections of arXiv:2311.01906, section 4."""

    def __init__(self, cfg: ModelConfig, role: str):
        super().__init__(cfg, cfg.n_embd, cfg.n_embd, role)
        self.bias = None
        self.initial = {"weight": 0.0}
        self.skip, self.resid = Gain(1.0), Gain(0.2 if cfg.simplified_value_proj == "all" else 1.0)
        self.same = with_role(nn.Identity(), role)

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(self.same(x)) + self.resid(super().forward(x))


class Gain(nn.Module):
    """A learned scalar times x."""

    role = "whole"

    def __init__(self, initial: float):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), float(initial)))
        self.initial = {"weight": float(initial)}

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class Inputs(NamedTuple):
    """Inputs of a block besides the stream: positions, document numbers and the encoder's memory."""

    table: tuple[Tensor, ...] = ()  # of AttentionPosition.table
    docs: tuple[Tensor, ...] | None = None  # of the queries and of the keys, as in a Mask
    memory: Tensor | None = None  # (B, S, C), the encoder's output
    memory_docs: tuple[Tensor, ...] | None = None  # of the queries and of the memory
    shared: "Shared | None" = None  # made anew for each forward


class Shared(dict):
    """What a layer hands to later layers, by name. It is no plain dict, because FSDP gives each block a copy of one."""


# ---------------------------------------------------------------------------------------------------------------------
# Readers: the normed stream x (B, T, C) -> (B, T, C), to be added to the stream. Each reads a pool of keys and values.
# A reader of the context declares its `window`, as in Mask: by default that of cfg, but a block may set another.

Kind = namedtuple("Kind", "f inputs", defaults=[1])  # f maps `inputs` tensors (..., F) to one (..., F)
MLP_KIND = {
    "gelu": Kind(F.gelu),
    "gelu_tanh": Kind(partial(F.gelu, approximate="tanh")),
    "relu": Kind(F.relu),
    "relu2": Kind(ops.squared_relu),
    "sigmoid": Kind(torch.sigmoid),
    "swiglu": Kind(lambda gate, x: F.silu(gate) * x, inputs=2),
    "geglu": Kind(lambda gate, x: F.gelu(gate) * x, inputs=2),
    "geglu_tanh": Kind(lambda gate, x: F.gelu(gate, approximate="tanh") * x, inputs=2),
}


class Reader(NamedTuple):
    """What a Pool is made from: four choices (source to out), slots, and its share of the layer."""

    name: str = "attn"  # of the module, on which its initial weights depend
    source: str = "context"  # of keys and values: context, memory, parameters, experts (parameters that a router picks)
    query: str = "heads"  # heads: projections of the stream, stream: its slices
    phi: str = "softmax"  # of the scores: softmax or an entry of MLP_KIND
    out: str = "matrix"  # or none
    slots: str = ""  # beside the context: own_slots have a softmax of their own, joint_slots share that of the context
    share: Fraction = Fraction(1)

    @property
    def units(self) -> bool:
        """Whether the stream itself reads parameters, as in an MLP."""
        return self.source in ("parameters", "experts") and self.query == "stream"

    @property
    def dense(self) -> bool:
        """Whether it reads all of them."""
        return self.units and self.source == "parameters"

    @property
    def slotted(self) -> bool:
        """Whether heads read parameters, alone or beside the context."""
        return bool(self.slots) or (self.source, self.query) == ("parameters", "heads")


READER = {  # letter of cfg.layer -> what it stands for without switches; the phi "mlp" is that of cfg.mlp
    "c": Reader("attn", "context"),
    "m": Reader("cross", "memory"),
    "s": Reader("slots", "parameters"),
    "p": Reader("mlp", "parameters", "stream", "mlp", "none"),
    "e": Reader("experts", "experts", "stream", "mlp", "none"),
}
SWITCH = {"heads": "query", "stream": "query", "matrix": "out", "none": "out", "own_slots": "slots"}
SWITCH |= {"joint_slots": "slots"} | dict.fromkeys(["softmax", *MLP_KIND], "phi")


Sources = tuple[Reader, ...]  # the readers of a sum


@cache
def parsed_layer(layer: str) -> tuple[tuple[Sources, ...], ...]:
    """For each string of cfg.layer its sums, and for each sum its readers. ValueError quotes what is no reader."""
    strings, shown = [], f"layer={layer!r}"
    remedy = "write c, p, e, s or m, such as c,p or c.relu/2+p/2 (docs/blocks.md)"
    for string in layer.split(";"):
        names, sums = Counter(), []
        for words in string.split(","):
            sums.append([])
            for word in words.split("+"):
                match = re.fullmatch(r"([1-9]\d?)?([a-z])((?:\.\w+)*)(?:/([1-9]\d?))?", word)
                require(match and match[2] in READER, f"{shown} has {word!r}, which is no reader; {remedy}")
                switches = match[3].split(".")[1:]
                for switch in switches:
                    require(switch in SWITCH, f"{shown} has the switch .{switch}; known are {', '.join(SWITCH)}")
                chosen = {SWITCH[switch]: switch for switch in switches}
                require(len(chosen) == len(switches), f"{shown}: {word!r} makes one choice twice; keep one switch")
                reader = READER[match[2]]._replace(**chosen, share=Fraction(int(match[1] or 1), int(match[4] or 1)))
                names[reader.name] += 1
                number = names[reader.name] if names[reader.name] > 1 else ""
                sums[-1].append(reader._replace(name=f"{reader.name}{number}"))
        strings.append(tuple(map(tuple, sums)))
    return tuple(strings)


def layer_readers(layer: str, objective: str, i: int) -> list[Sources]:
    """The readers of each sum of layer i. A decoder whose string has no m reads the memory in a sum of its own after
    the first sum with a c, or first of all; a model without an encoder has no m."""
    strings = parsed_layer(layer)
    sums = list(strings[i % len(strings)])
    if objective != "seq2seq":
        return [each for each in (tuple(r for r in readers if r.source != "memory") for readers in sums) if each]
    sources = [{reader.source for reader in readers} for readers in sums]
    if not any("memory" in each for each in sources):
        sums.insert(next((n for n, each in enumerate(sources, 1) if "context" in each), 0), (READER["m"],))
    return sums


def check_layer(cfg: ModelConfig):
    """ValueError if the readers of cfg.layer cannot be built."""
    shown, H, Hkv, D = f"layer={cfg.layer!r}", cfg.n_head, cfg.kv_heads, cfg.head_size
    readers, n = [r for sums in parsed_layer(cfg.layer) for each in sums for r in each], len(parsed_layer(cfg.layer))
    require(n <= cfg.n_layer, f"{shown} has {n} strings, one for each layer, but n_layer={cfg.n_layer}; leave some out")
    for where, stack in zip(("", " in the encoder's layers"), cfg.stacks, strict=False):
        sees = any(r.source == "context" for sums, n in stack.layers if n for each in sums for r in each)
        require(sees, f"{shown} has no c{where}, so no token would see another; add one")
    memory = cfg.objective == "seq2seq" or all(r.source != "memory" for r in readers)
    require(memory, f"{shown} has an m, which reads an encoder; set objective=seq2seq, or leave m out")
    for r in readers:
        tokens, mapped, what = r.source in ("context", "memory"), r.phi not in ("softmax", "mlp"), f"{shown}: {r.name}"
        require(r.share <= 1, f"{what} takes {r.share} of the heads or units; write a part, such as /2 or 3c/4")
        for name, n in (("n_head", H), ("its key/value heads", Hkv)):
            fits = (r.share * n).denominator == 1 or r.units
            require(fits, f"{what} takes {r.share} of {name}={n}; /n goes with n = {str(divisors(n))[1:-1]}")
        cut = tokens and r.query == "stream" or r.out == "none" and r.query == "heads"
        wide = f"{H * r.share} heads of {D} are not n_embd={cfg.n_embd}"
        require(not cut or H * r.share * D == cfg.n_embd, f"{what} has no matrix between heads and stream, but {wide}")
        plain = (r.query, r.out) == ("stream", "none") and r.phi != "softmax"
        routed = r.source == "experts"
        require(not routed or plain, f"{what} may have only another map, such as e.relu2; leave the rest out")
        require(not routed or cfg.n_expert, f"{what} needs experts, and n_expert=0; set n_expert")
        gated = mapped and MLP_KIND[r.phi].inputs == 2
        require(not (tokens and gated), f"{what}: .{r.phi} needs two keys for each value; only p and s have them")
        beside = not r.slots or r.source == "context" and not mapped
        require(beside, f"{what}: .{r.slots} puts slots beside the softmax of a c; write c.{r.slots}")
        biased = cfg.pos == "alibi" and r.source == "context"
        require(not (biased and mapped), f"{what}: pos=alibi needs a softmax, not .{r.phi}; set pos=rope, or drop it")
        require(not (biased and r.share != 1), f"{what}: pos=alibi has slopes for n_head={H}; leave /n out")


def over_tokens(phi: Callable, scores: Tensor, n: Tensor) -> Tensor:
    """phi(scores) / n, or sigmoid(scores - log n), for queries that see n tokens: scores (..., T, S), n (..., T, 1)."""
    n = n.clamp(min=1)
    return phi(scores - n.log()) if phi is torch.sigmoid else phi(scores) / n


def over_keys(phi: Callable, inputs: int, scores: Tensor, n: Tensor) -> Tensor:
    """phi of the scores (..., T, inputs M) of learned keys: (..., T, M)."""
    return phi(*scores.chunk(inputs, -1))


class Pool(nn.Module):
    """sum_j phi(q . k_j) v_j W_O over a pool of keys k_j and values v_j. Attention and the MLP are settings of it.

    source       keys and values                                                 attributes
    context      two projections of each token that the query sees               qkv
    memory       two projections of each token of the encoder                    q, kv
    parameters   for queries from heads: M slots of each key/value head          q, slot_k, slot_v
                 for the stream: hidden units, rows of `up`, columns of `down`   up, down

    Queries of H heads are projections of x, or x itself, cut into H heads; hidden units see it in n_group slices. G =
    H / Hkv query heads share keys and values. Scores are divided by sqrt(D), but not before an MLP's phi. A softmax
    normalises its sum. Another phi over n tokens is divided by n, and the sigmoid is that of the score minus log n
    (arXiv:2309.08586, 2409.04431). W_O is a matrix, or left out.
    """

    per_head: tuple[str, ...] = ()  # names of the parameters that have a row for each head
    strips: Callable | None = None  # see ops.attention
    initial: dict[str, Normal | float | Tensor] = {}

    def __init__(self, cfg: ModelConfig, layer: int, reader: Reader = READER["c"]):
        super().__init__()
        cfg, context = cfg.part(reader), reader.source == "context"
        H, Hkv, D, C = cfg.n_head, cfg.kv_heads, cfg.head_size, cfg.n_embd
        self.reader, self.head_dim, self.n_head, self.group = reader, D, H, H // Hkv
        self.window, self.causal = cfg.layer_window(layer) if context else 0, context and cfg.objective != "masked"
        self.softcap, self.dropout = cfg.attn_softcap, cfg.dropout
        self.cache = None  # decoding sets a KVCache
        self.phi = None if reader.phi == "softmax" else MLP_KIND[cfg.mlp].f
        self.qkv = self.gate = self.mix = None
        self.units = reader.units
        if self.units:
            return self.make_units(cfg)
        if self.phi:
            self.phi = partial(over_keys, self.phi, 1 + cfg.gated) if reader.slotted else partial(over_tokens, self.phi)
        self.q_norm = with_role(RMSNorm(D, cfg.norm_eps) if cfg.qk_norm else nn.Identity(), "whole")
        self.k_norm = with_role(RMSNorm(D, cfg.norm_eps) if cfg.qk_norm else nn.Identity(), "whole")
        self.position = layer_position(cfg, layer) if context else AttentionPosition(cfg)
        self.make_projections(cfg, layer)
        if cfg.attn_gate != "none" and context:
            width, role = {"head": (1, "per_head"), "element": (D, "into")}[cfg.attn_gate]
            self.gate = Linear(cfg, C, H * width, role)
        if cfg.value_residual and context:
            self.mix = nn.ModuleList(Gain(0.5) for _ in range(2 if layer else 0))
        if reader.slotted:
            self.per_head = (*self.per_head, "slot_k", "slot_v")
            keys = 1 if self.phi is None else 1 + cfg.gated
            self.slot_k, self.slot_v = (nn.Parameter(torch.empty(Hkv, n * cfg.n_slot, D)) for n in (keys, 1))
            std = cfg.init_std * math.sqrt(C)  # as a normed stream's keys
            self.initial = {**self.initial, "slot_k": Normal(std), "slot_v": Normal(std)}

    def make_projections(self, cfg: ModelConfig, layer: int):
        """The layers that make q, k and v from x, and the one that maps the heads' results to the stream."""
        H, Hkv, D, C, G = cfg.n_head, cfg.kv_heads, cfg.head_size, cfg.n_embd, self.group
        in_heads, bias = self.reader.query == "heads", cfg.qkv_bias
        self.out = Linear(cfg, H * D, C, "out") if self.reader.out == "matrix" else with_role(nn.Identity(), "out")
        if self.reader.source == "context" and in_heads:
            self.qkv = Linear(cfg, C, (G + 2) * Hkv * D, "into", (0, Hkv, (G * D, D, D)), bias)
            return
        self.q = Linear(cfg, C, H * D, "into", bias=bias) if in_heads else with_role(nn.Identity(), "into")
        if self.reader.source != "parameters":
            role = "memory" if self.reader.source == "memory" else "into"
            self.kv = Linear(cfg, C, 2 * Hkv * D, role, (0, Hkv, (D, D)), bias)

    def make_units(self, cfg: ModelConfig):
        """The layers of hidden units. A gated kind's `up` has `unit` rows of W_gate and of W_up in turn, so that tensor
        parallelism can cut between them. Each of several groups reads a slice of the stream, and writes to it."""
        C, hidden, groups = cfg.n_embd, cfg.hidden_dim, cfg.n_group
        unit = cfg.hidden_unit if groups == 1 and self.phi else hidden // groups
        rows = (unit,) * (1 + cfg.gated)
        self.rows = rows if self.phi is None or cfg.gated else ()
        self.phi = self.phi or (lambda scores: (scores * (C // groups) ** -0.5).softmax(-1))
        self.q, self.out = nn.Identity(), nn.Identity()
        if groups == 1:
            self.up = Linear(cfg, C, hidden * len(rows), "into", (0, hidden // unit, rows))
            self.down = Linear(cfg, hidden, C, "out")
        else:  # tensor parallelism cuts the slices, as it cuts heads
            self.up = GroupedLinear(cfg, groups, C, "into", rows)
            self.down = GroupedLinear(cfg, groups, hidden, "out", (C // groups,))
            self.q, self.out = with_role(nn.Identity(), "into"), with_role(nn.Identity(), "out")
        if self.reader.out == "matrix":
            self.out = Linear(cfg, C, C, "second" if groups == 1 else "out")
            self.down.initial = self.up.initial

    def forward(self, x: Tensor, inputs: Inputs) -> Tensor:
        if self.units:
            return self.out(self.down(activations(self.phi, self.rows, self.up(self.q(x)))))
        q, k, v = self.project(x, inputs)  # (B, H, T, D), and twice (B, heads, T or S, D)
        if self.mix is not None:
            first = inputs.shared.setdefault(f"v of {v.size(1)} heads of {self.reader.name}", v)
            if len(self.mix):  # not in the first layer
                own, other = self.mix
                v = (own(v) + other(first)).to(v.dtype)
        y = self.read(self.q_norm(q), self.k_norm(k), v, inputs).transpose(1, 2)  # (B, T, H, D)
        if self.gate is not None:
            y = y * torch.sigmoid(self.gate(x)).unflatten(-1, (y.size(2), -1))
        return self.out(y.flatten(2))  # (B, T, C)

    def project(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, H, T, D), k and v (B, heads, T or S, D), before norms and positions."""
        if self.qkv is not None:
            return self.split(self.qkv(x), self.group, 1, 1)
        (q,) = self.split(self.q(x.to(ops.matmul_dtype(x))), 1)
        if self.reader.source == "parameters":
            return q, *(slot.to(q.dtype).expand(len(q), -1, -1, -1) for slot in (self.slot_k, self.slot_v))
        if self.reader.source == "memory" and self.cache:
            return q, *self.cache.once(lambda: self.split(self.kv(inputs.memory), 1, 1))
        return q, *self.split(self.kv(inputs.memory if self.reader.source == "memory" else x), 1, 1)

    def read(self, q: Tensor, k: Tensor, v: Tensor, inputs: Inputs) -> Tensor:
        """The heads' results (B, H, T, D) for normed q and k, which do not have their positions yet."""
        if self.reader.source == "parameters":
            return Pool.attend(self, q, k, v, Mask(causal=False))  # not self.attend, which cp replaces
        unplaced = q
        q, k, v = self.position(q, k, v, inputs.table)
        k, v = self.cache.extend(k, v) if self.cache and self.causal else (k, v)  # (B, heads, S, E)
        docs = inputs.memory_docs if self.reader.source == "memory" else inputs.docs
        mask = Mask(self.causal, self.window, docs)
        y = self.attend(q, k, v, mask)[..., : self.head_dim]
        if self.reader.slots != "own_slots":
            return y
        slots = (x.expand(len(q), -1, -1, -1) for x in self.slots(q.dtype))
        return y + Pool.attend(self, unplaced, *slots, Mask(causal=False))

    def slots(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of the slots beside the context, each (Hkv, M, D)."""
        return self.k_norm(self.slot_k).to(dtype), self.slot_v.to(dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """phi of all scores, times the values. A variant of it goes here and works with slots, shaped and cross
        attention too."""
        if not q.dtype == k.dtype == v.dtype:
            found = f"q, k and v have the dtypes {q.dtype}, {k.dtype} and {v.dtype}"
            raise ValueError(f"{found}; after a product of x with a float32 parameter, write .to(x.dtype)")
        E, beside = v.size(3), self.reader.slots == "joint_slots"
        slots = self.position.slots(*self.slots(k.dtype)) if beside else None  # each (Hkv, M, E)
        options = self.softcap, self.dropout if self.training else 0.0, slots, self.strips, self.phi
        return ops.attention(q, k, v, self.head_dim, mask, *options)[..., :E]

    def split(self, x: Tensor, *sizes: int) -> tuple[Tensor, ...]:
        """(B, T, groups * sum(sizes) * D) -> for each size n, (B, groups * n, T, D)."""
        B, T, _ = x.shape
        n, D = sum(sizes), self.head_dim
        heads = x.view(B, T, x.size(2) // (n * D), n, D).permute(0, 2, 3, 1, 4)  # (B, groups, n, T, D)
        return tuple(part.flatten(1, 2) for part in heads.split_with_sizes(sizes, 2))


class ExpertLinear(Linear):
    """Linear maps of E experts: the rows of x (N, i) of the first expert, of the second, ... -> (N, o). `ends` (E,) are
    the ends of their rows; weight (E, o, i). `fused` is about one expert's matrix."""

    loop: Callable | None = None  # see ops.grouped_linear

    def __init__(self, cfg: ModelConfig, n_in: int, n_out: int, role: str, fused: Fused | None = None):
        super().__init__(cfg, n_in, n_out, role, fused)
        self.weight = nn.Parameter(torch.empty(cfg.n_expert, n_out, n_in))
        self.read_share = Fraction(cfg.n_expert_active, cfg.n_expert)
        if self.bias is not None:
            self.bias = nn.Parameter(torch.empty(cfg.n_expert, n_out))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return ops.grouped_linear(x, self.weight, self.bias, ends, self.loop)


class LoadBalance(nn.Module):
    """A bias for each expert, by which experts are chosen, but not weighed (arXiv:2408.15664). Its gradient is the
    expert's load over the mean load, minus 1. So the ranks and micro-steps of a step add it up as they add up
    gradients, and the optimizer moves the bias against its sign."""

    role = "whole"

    def __init__(self, n: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(n))
        self.initial = {"bias": 0.0}

    def forward(self, weights: Tensor, load: Tensor) -> Tensor:
        """weights (N, k) of the chosen experts, unchanged; load (E,) is the number of tokens that read each expert."""
        return ops.with_gradient(weights, self.bias, load / load.mean() - 1)


class Experts(nn.Module):
    """sum_e w_e M_e(x) over the k experts that the router chooses for a token, plus those that all tokens read.

    p is the softmax, or the sigmoid, of router(x) (E,). The experts with the largest p + bias are chosen; w is their p,
    divided by its sum if k > 1. No token is left out, whatever the load of an expert.
    """

    def __init__(self, cfg: ModelConfig, layer: int, reader: Reader):
        super().__init__()
        self.reader, part, C = reader, cfg.part(reader), cfg.n_embd
        self.active = cfg.n_expert_active
        self.score = torch.sigmoid if cfg.router == "sigmoid" else partial(torch.softmax, dim=-1)
        hidden, unit = part.hidden_dim, part.hidden_unit
        rows = (unit,) * (1 + part.gated)
        self.phi, self.rows = MLP_KIND[part.mlp].f, rows if part.gated else ()
        self.router = Linear(cfg, C, cfg.n_expert, "router")
        self.up = ExpertLinear(part, C, hidden * len(rows), "into", (0, hidden // unit, rows))
        self.down = ExpertLinear(part, hidden, C, "out")
        self.routing: Maybe = None  # of each sequence of the last evaluation: the loads, and the sum of p's entropies
        self.balance = LoadBalance(cfg.n_expert) if cfg.router_balance == "bias" else None
        self.shared = None
        if cfg.n_expert_shared:
            wide = copy(part)
            wide.mlp_ratio = cfg.n_expert_shared * hidden / C * (1.5 if part.gated else 1)  # see hidden_dim
            wide.n_group = 1
            self.shared = Pool(wide, layer, READER["p"]._replace(phi=reader.phi))

    def forward(self, x: Tensor, inputs: Inputs) -> Tensor:
        tokens = x.flatten(0, 1)  # (N, C)
        scores = ops.wide_linear(tokens, self.router.weight, self.router.bias)  # (N, E)
        p = self.score(scores)
        k, chosen = self.active, self.choose(p)
        weights = p.gather(1, chosen)
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20) if k > 1 else weights
        order, ends = ops.by_expert(chosen.flatten(), p.size(1))
        load = ends.diff(prepend=ends.new_zeros(1)).to(p.dtype)
        if self.balance is not None:
            weights = self.balance(weights, load)
        if not self.training:
            entropy = torch.special.entr(p / p.sum(1, keepdim=True)).view(len(x), -1).sum(1, keepdim=True)
            self.routing = torch.cat((loads(chosen.view(len(x), -1), p), entropy), dim=1).detach()
        token = order // k  # of each row
        rows = self.read(tokens.index_select(0, token), ends)  # (N k, C), sorted by expert
        rows = rows * weights.flatten().index_select(0, order)[:, None]
        y = rows.new_zeros(tokens.shape).index_add(0, token, rows).view_as(x)
        return y if self.shared is None else y + self.shared(x, inputs)

    def choose(self, p: Tensor) -> Tensor:
        """The experts (N, k) that each token reads, in no order, for its p (N, E)."""
        preferred = p if self.balance is None else p.detach() + self.balance.bias
        return preferred.topk(self.active, sorted=False).indices

    def read(self, rows: Tensor, ends: Tensor) -> Tensor:
        """What each expert makes of its rows, see ExpertLinear: rows (N, C) -> (N, C)."""
        return self.down(activations(self.phi, self.rows, self.up(rows, ends)), ends)


def loads(chosen: Tensor, p: Tensor) -> Tensor:
    """chosen (B, n), experts -> how often each of them is there, (B, E), where p is (..., E)."""
    zeros = p.new_zeros(len(chosen), p.size(-1))
    return zeros.scatter_add(1, chosen, p.new_ones(1).expand_as(chosen))


def activations(phi: Callable, rows: Shape, scores: Tensor) -> Tensor:
    """phi of the scores (..., units) of hidden units. A gated phi has pieces of gates and values of `rows` in turn."""
    if not rows:
        return phi(scores)
    parts = scores.unflatten(-1, (-1, sum(rows))).split(rows, dim=-1)  # each (..., F / unit, unit)
    return phi(*parts).flatten(-2)


def module_of(cfg: ModelConfig, layer: int, reader: Reader) -> nn.Module:
    """The module of a reader."""
    return (Experts if reader.source == "experts" else Pool)(cfg, layer, reader)


def mlp_of(cfg: ModelConfig, layer: int) -> nn.Module:
    """The MLP of a layer, which may have experts."""
    return module_of(cfg, layer, READER["e" if cfg.expert_layer(layer) else "p"])


class ShapedPool(Pool):
    """(alpha_h I + beta_h softmax(q_h k_h^T / sqrt(D)) - gamma_h U) x_h (arXiv:2311.01906, equation 9; 2306.17759).

    U is the same attention with q = k = 0. So the initial values, W_Q = 0 and gains of 1, make this the identity. I and
    U are never built as matrices. Values and output are x itself, or start near x where they are trained.
    """

    per_head = ("alpha", "beta", "gamma")

    def make_projections(self, cfg: ModelConfig, layer: int):
        G, Hkv, D = self.group, cfg.kv_heads, cfg.head_size
        self.qk = Linear(cfg, cfg.n_embd, (G + 1) * Hkv * D, "into", (0, Hkv, (G * D, D)), cfg.qkv_bias)
        std = self.qk.initial["weight"].std
        self.qk.initial = {"weight": Normal(std, zero=G * D, period=(G + 1) * D), "bias": 0.0}  # W_Q = 0
        trained = {"first": (layer == 0, False), "all": (True, True), "none": (False, False)}[cfg.simplified_value_proj]
        roles = zip(trained, ("into", "out"), strict=True)
        self.value, self.out = (NearIdentity(cfg, role) if on else with_role(nn.Identity(), role) for on, role in roles)
        self.alpha, self.beta, self.gamma = (nn.Parameter(torch.empty(cfg.n_head)) for _ in range(3))
        self.initial = {"alpha": 1.0, "beta": 1.0, "gamma": 1.0}

    def project(self, x: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        return *self.split(self.qk(x), self.group, 1), *self.split(self.value(x), 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        k = k.repeat_interleave(v.size(1) // k.size(1), dim=1)  # each query head has its own value, a chunk of x
        alpha, beta, gamma = (gain[:, None, None] for gain in (self.alpha, self.beta, self.gamma))
        uniform = ops.uniform_attention(q, k, v, self.head_dim, mask, self.strips)
        y = super().attend(q, k.to(q.dtype), v.to(q.dtype), mask)
        y = alpha * v[:, :, -q.size(2) :] + beta * y - gamma * uniform
        return y.to(v.dtype)  # not the gains, whose steps are smaller than those of 16 bits


# ---------------------------------------------------------------------------------------------------------------------
# Blocks


class Sum(nn.Module):
    """s -> total(skip s + after(gain_1 reader_1(before(s)) + gain_2 reader_2(before(s)) + ...)).

    before, after and total are norms or identities, see PLACEMENT. gains maps a reader's name to the initial value of
    its learned gain; a single reader's gain acts outside of `after`, whose norm would cancel it. skip is 1, 0, or
    "learned", which starts at 1.
    """

    def __init__(self, cfg: ModelConfig, skip: int | str = 1, gains: dict[str, float] | None = None, **readers):
        super().__init__()
        self.before, self.after, self.total = (norm(cfg, role) for role in ("before", "after", "total"))
        require(set(gains or ()) <= set(readers), f"gains={gains} must have the names of readers: {', '.join(readers)}")
        each = [Gain(gains[name]) if name in gains else nn.Identity() for name in readers] if gains else []
        self.gain = each[0] if len(each) == 1 else nn.Identity()
        self.gains = nn.ModuleList(each) if len(each) > 1 else None
        self.skip = Gain(1.0) if skip == "learned" else nn.Identity() if skip else None
        self.dropout, self.names = cfg.dropout, tuple(readers)
        for name, reader in readers.items():
            require(not hasattr(self, name), f"a reader cannot have the name {name!r}, which a sum has for itself")
            self.add_module(name, reader)

    def forward(self, s: Tensor, inputs: Inputs) -> Tensor:
        x = self.before(s)
        y = [getattr(self, name)(x, inputs) for name in self.names]
        y = [ops.dropped(part, self.dropout * self.training) for part in y]
        if self.gains is not None:
            y = [gain(part) for gain, part in zip(self.gains, y, strict=True)]
        y = self.gain(self.after(reduce(add, y)))
        if self.skip is not None:
            y = y + self.skip(s)
        return self.total(y).to(s.dtype)  # some norms return float32


def readers_of(cfg: ModelConfig, layer: int, string: str) -> list[Sum]:
    """The sums of a layer whose readers stand in this string, as in cfg.layer."""
    if cfg.block != "superblock" and cfg.expert_layer(layer):
        string = string.replace("p", "e")
    sums = layer_readers(string, cfg.objective, layer)
    return [Sum(cfg, **{reader.name: module_of(cfg, layer, reader) for reader in readers}) for readers in sums]


def cross(cfg: ModelConfig, layer: int) -> dict[str, Pool]:
    """Cross-attention, if there is an encoder. Block leaves out a sum without readers."""
    return {"cross": Pool(cfg, layer, READER["m"])} if cfg.objective == "seq2seq" else {}


def simplified(cfg: ModelConfig, layer: int) -> list[Sum]:
    """s = g_A SA(n1(s));  s = g_S s + b_FF M(n2(s)): no skip around attention (SAS, arXiv:2311.01906)."""
    attn = Sum(cfg, skip=0, gains={"attn": 1.0}, attn=ShapedPool(cfg, layer))
    mlp = Sum(cfg, skip="learned", gains={"mlp": cfg.simplified_beta_ff}, mlp=mlp_of(cfg, layer))
    return [attn, Sum(cfg, **cross(cfg, layer)), mlp]


def simplified_parallel(cfg: ModelConfig, layer: int) -> list[Sum]:
    """s = g_A SA(n(s)) + b_FF M(n(s)): no skip at all (SAS-P, arXiv:2311.01906)."""
    gains = {"attn": 1.0, "mlp": cfg.simplified_beta_ff}
    both = Sum(cfg, skip=0, gains=gains, attn=ShapedPool(cfg, layer), mlp=mlp_of(cfg, layer))
    return [Sum(cfg, **cross(cfg, layer)), both]


BLOCK: dict[str, Callable[[ModelConfig, int], list[Sum]]] = {
    "standard": partial(readers_of, string="c,p"),  # arXiv:1706.03762, with its norm in front as in GPT-2
    "parallel": partial(readers_of, string="m,c+p"),  # one norm for both (GPT-J; PaLM, arXiv:2204.02311)
    "simplified": simplified,
    "simplified_parallel": simplified_parallel,
    "superblock": lambda cfg, layer: readers_of(cfg, layer, cfg.layer),
}


class Block(nn.Module):
    """One layer: the sums of BLOCK[cfg.block], one after the other."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        self.sums = nn.ModuleList(each for each in BLOCK[cfg.block](cfg, layer) if each.names)
        names = [name for each in self.sums for name in each.names]  # initial weights depend on the names
        require(len(set(names)) == len(names), f"block={cfg.block} has two readers of one name: {', '.join(names)}")
        plain = [name for name, m in self.named_modules() if isinstance(m, nn.Linear) and not isinstance(m, Linear)]
        require(not plain, f"block={cfg.block} has plain nn.Linear layers: {', '.join(plain)}; use Linear, with a role")

    def forward(self, s: Tensor, inputs: Inputs) -> Tensor:
        for each in self.sums:
            s = each(s, inputs)
        return s


# ---------------------------------------------------------------------------------------------------------------------
# Model


class Stack(nn.Module):
    """The blocks and the last norm: the encoder, and the base class of Model."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        kind = "layernorm" if cfg.bare else "none"
        self.first_norm = with_role(NORM[kind](cfg), "whole")
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.n_layer))
        self.norm = norm(cfg, "last")
        self.position_table = POSITION[cfg.pos][1](cfg).table

    def table(self, t: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return self.position_table(t, torch.promote_types(x.dtype, torch.float32))

    def through_blocks(self, x: Tensor, inputs: Inputs) -> Tensor:
        x, inputs = self.first_norm(x).to(x.dtype), inputs._replace(shared=Shared())
        for block in self.blocks:
            x = block(x, inputs)
        return self.norm(x)


class Model(Stack):
    """Computes logits or the loss from token ids; see the module's docstring. seed determines the initial weights; None
    draws a seed from torch's global generator."""

    def __init__(self, cfg: ModelConfig, seed: int | None = None):
        require(cfg.vocab_size > 0, "vocab_size=0 means the data's, and here there is no data; set vocab_size")
        super().__init__(cfg)
        self.wte = with_role(embedding(cfg, cfg.vocab_rows), "vocab")
        self.pos = POSITION[cfg.pos][0](cfg)
        self.head = with_role(UndrawnLinear(cfg.n_embd, cfg.vocab_rows, bias=False), "vocab")
        self.head.initial = {"weight": Normal(cfg.init_std)}
        self.encoder = Stack(cfg.stacks[1]) if cfg.objective == "seq2seq" else None
        self.chunk_loss, self.n_targets = ops.chunk_loss, None
        self.tie()
        check_initial(self)
        if not self.wte.weight.is_meta:
            self.init_weights(int(torch.randint(2**62, (), device="cpu")) if seed is None else seed)

    def tie(self):
        """Make head and embedding one parameter again. Call it after parameters were replaced."""
        if self.cfg.tie_weights:
            self.head.weight = self.wte.weight

    @torch.no_grad()
    def init_weights(self, seed: int):
        for name, p in self.named_parameters():
            p.copy_(self.initial_weight(name, seed, p.shape, (0,) * p.dim(), p.shape, p.device))

    def initial_weight(self, name: str, seed: int, shape: Shape, start: Shape, size: Shape, device) -> Tensor:
        """Initial values of the part, with shape `size` from index `start` on, of parameter `name` with `shape`. They
        depend only on the seed, the name and the place in the parameter. The number of a sum is left out of the name,
        so a reader starts with the same weights in every block. docs/hacking.md has the table of initial weights."""
        layer, _, kind = name.rpartition(".")
        value = self.get_submodule(layer).initial[kind]
        if not isinstance(value, Normal):  # a number, or a tensor of this shape
            part = tuple(slice(first, first + n) for first, n in zip(start, size, strict=True))
            return torch.as_tensor(value, dtype=torch.float32, device=device).expand(shape)[part].clone()
        drawn = value.std * ops.normal(f"{seed} {re.sub(r'sums[.][0-9]+[.]', '', name)}", shape, start, size, device)
        row = torch.arange(start[0], start[0] + size[0], device=device) % value.period
        drawn[row < value.zero] = 0
        return drawn

    def forward(
        self, idx: Tensor, targets: Maybe = None, docs: Maybe = None, source: Maybe = None, source_docs: Maybe = None,
        doc_starts: Maybe = None, source_doc_starts: Maybe = None,
    ) -> Tensor:  # fmt: skip
        """idx (B, T) -> logits (B, T, V) float32; with targets (B, T), the mean loss in nats over targets >= 0. The
        module's docstring says what the others are; each number in docs must also be in source_docs."""
        pairs = (docs, source_docs), (doc_starts, source_doc_starts)
        together = source is None or all((a is None) == (b is None) for a, b in pairs)
        fact = "docs and source_docs go together, and so do doc_starts and source_doc_starts"
        require(together, f"{fact}; give zeros to the one that is a single document")
        memory = self.encode(source, source_docs, source_doc_starts)
        x = self.hidden(idx, 0, docs, memory, source_docs, doc_starts, source_doc_starts)
        if targets is None:
            return self.logits(x)
        return self.loss(x, targets)

    def experts(self) -> list[Experts]:
        """The experts of all layers, those of the encoder last."""
        return [m for m in self.modules() if isinstance(m, Experts)] if self.cfg.n_expert else []

    def encode(self, source: Maybe, docs: Maybe = None, starts: Maybe = None) -> Maybe:
        """source (B, S) -> the encoder's output (B, S, C), called memory; None for a model without an encoder."""
        given, wanted = source is not None, self.encoder is not None
        require(given == wanted, f"objective={self.cfg.objective} {'needs a' if wanted else 'reads no'} source")
        return self.hidden(source, docs=docs, starts=starts, stack=self.encoder) if given else None

    def embed(self, idx: Tensor, start: int, docs: Maybe = None) -> tuple[Tensor, Tensor]:
        """idx (B, T), whose first token has position `start`, docs (B, T) -> the stream (B, T, C), positions (T,)."""
        T, limit = idx.size(1), self.cfg.block_size
        require(T <= limit, f"a sequence of {T} tokens does not fit in block_size={limit}; crop it")
        t = self.place(torch.arange(start, start + T, device=idx.device))
        place = t
        if docs is not None and self.cfg.doc_positions:
            docs = docs.contiguous()
            place = t - torch.searchsorted(docs, docs[:, t])  # (B, T), counted from the first token of the document
        x = self.wte(idx) if self.cfg.embed_scale == 1 else self.wte(idx) * self.cfg.embed_scale
        x = ops.dropped(self.pos(x, place), self.cfg.dropout * self.training)
        return x.to(stream_dtype(self.cfg, x)), t

    def place(self, t: Tensor) -> Tensor:
        """Numbers of the tokens that this model is given, (T,) -> their positions in the text."""
        return t

    def hidden(
        self, idx: Tensor, start: int = 0, docs: Maybe = None, memory: Maybe = None, memory_docs: Maybe = None,
        starts: Maybe = None, memory_starts: Maybe = None, stack: Stack | None = None,
    ) -> Tensor:  # fmt: skip
        """idx (B, T), whose first token has position `start` -> the stream that the head reads, or with stack=encoder
        the cross-attention, (B, T, C)."""
        (x, t), stack = self.embed(idx, start, docs), stack or self
        own, of_memory = (None, None) if docs is None else ((docs, docs), (docs, memory_docs))
        if docs is not None and starts is not None:
            ends = ops.boundaries(starts, docs.size(1))
            own = *own, ends
            if memory is not None:
                of_memory = *of_memory, ends, ops.boundaries(memory_starts, memory.size(1))
        return stack.through_blocks(x, Inputs(stack.table(t, x), own, memory, of_memory))

    def head_weight(self) -> Tensor:
        """The head's weight (V, C), without its padding rows."""
        weight, V = self.head.weight, self.cfg.vocab_size
        return weight if len(weight) == V else weight[:V]

    def logits(self, x: Tensor) -> Tensor:
        """The last norm's result x (..., C) -> logits (..., V) in float32."""
        logits = F.linear(x, self.head_weight())
        return ops.capped(ops.at_least_float32(logits), self.cfg.logit_softcap)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        x, targets = x.flatten(0, 1), targets.flatten()  # (N, C), (N,)
        options = self.cfg.logit_softcap, self.cfg.loss_chunk, self.chunk_loss, self.cfg.z_loss
        total = ops.cross_entropy(x, self.head_weight(), targets, *options)
        return self.mean(total, targets)

    def mean(self, total: Tensor, targets: Tensor) -> Tensor:
        """A sum over targets >= 0, divided by their number; if `n_targets` is not None, by this number instead."""
        return total / ((targets >= 0).sum().clamp(min=1) if self.n_targets is None else self.n_targets)

    def n_params(self) -> int:
        """Number of trainable parameters; a tied head counts once."""
        return sum(p.numel() for p in self.parameters())
