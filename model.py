"""The transformer. Each choice in its design is one flag and one table of variants; unused parts are identities.

    from model import Model, ModelConfig
    model = Model(ModelConfig(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=65, pos="rope"))
    loss = model(idx, targets)        # idx, targets (B, T) int64; targets of -1 are left out
    logits = model(idx)               # (B, T, V)

A layer is a list of sums, s = s + reader(norm(s)), where s is the residual stream (B, T, C). A reader is a module such
as attention or an MLP. A sum may have several readers; GPT-2's layer has two sums, and each has one reader.
To try an idea, add an entry to BLOCK, or to NORM, PLACEMENT, POSITION or ACTIVATION and its name to the flag's Literal.
docs/hacking.md has examples. It also lists the attributes that parallelism, decoding and compilation replace.

Names used everywhere
    B batch   T time (queries)   S keys, or tokens of a source   N = B T tokens   C n_embd   V vocabulary   L layers
    H query heads   Hkv key/value heads   G = H / Hkv query heads of a group   D head size   F hidden units
    K taps of a convolution   M slots: learned keys and values   E experts; in attention, D plus ALiBi's columns
"""

import math
import re
from collections import UserDict, namedtuple
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ops
from flags import READER, SWITCH, LayerFlags, Reader, check_layer, refuse
from ops import Mask  # because transformers copies only files that `from` lines name when it loads an exported model


@dataclass
class ModelConfig(LayerFlags):
    """The network's flags. A bracket holds a rule that flags.py enforces: [>0] limits the number itself, [any] allows a
    negative one, and [pos=rope] says beside which flags it has an effect. Names such as has_map are properties of
    LayerFlags. A comment line that begins with a bracket belongs to the flag above."""

    # --- model: size
    n_layer: int = 12  # [>0] [<=4096] number of blocks
    n_head: int = 12  # [>0] query heads per layer
    n_embd: int = 768  # [>0] width of the residual stream
    head_dim: int = 0  # width of a head, 0 = n_embd / n_head
    block_size: int = 1024  # [>0] context length in tokens
    vocab_size: int = 0  # 0 = the data's; above 1024 rounded up to a multiple of 64
    dropout: float = 0.0  # [<1] on embeddings, attention weights and both sub-layers' outputs
    bias: bool = False  # bias in linear layers and layer norms, as in GPT-2
    qkv_bias: bool = False  # [bias=False] bias of q, k and v alone (Qwen2)
    norm_bias: bool = False  # [bias=False] Layer norms have a bias, and linear layers have none (Falcon, StableLM).
    # [norm=layernorm and norm_placement!=none or last_norm=layernorm or bare]
    tie_weights: bool = True  # the head shares the token embedding
    init_std: float = 0.02  # [>0] [<65536] standard deviation of the initial weights
    scaled_init: bool = True  # [block!=simplified*] output layers begin smaller, as in GPT-2
    embed_scale: float = 1.0  # [any] factor of the token embeddings; Gemma's is sqrt(n_embd)
    # --- model: block
    block: str = "standard"  # a name, or readers such as c,p: c context, p MLP, e experts, s slots, m memory
    norm: Literal["layernorm", "rmsnorm", "rmsnorm_eps_outside"] = "layernorm"  # [norm_placement!=none] of the stream
    last_norm: Literal["same", "layernorm", "rmsnorm"] = "same"  # [norm_placement!=post] of the norm before the head
    norm_placement: Literal["pre", "post", "after", "sandwich", "none"] = "pre"  # around a sum; docs/blocks.md
    norm_eps: float = 1e-5  # added to the variance, or to the mean square, in every norm
    # [norm_placement!=none or last_norm!=same or block=simplified* or qk_norm=True]
    mlp: Literal["gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "swiglu", "geglu", "geglu_tanh"] = "gelu"
    # [has_map or has_soft_slots and n_slot=0] The MLP's map. arXiv:2109.08668 has relu2, 2002.05202 *glu, GPT-2 *_tanh.
    mlp_ratio: float = 4.0  # [>0] [<65536] hidden width over n_embd; gated kinds take 2/3 of it
    # [has_p or has_e and expert_ratio=0 or has_slots and n_slot=0]
    conv: int = 0  # [<=64] K taps of a causal convolution of each channel alone (arXiv:2109.08668, 2512.17351); 0 = off
    # [conv!=1] [objective=causal] Its result is added to the input of a sum's readers (docs/blocks.md).
    sas_value_proj: Literal["first", "all", "none"] = "first"  # [block=simplified*] layers that train W_V
    sas_beta_ff: float = 0.1  # [any] [block=simplified*] initial gain of the MLP, use O(1 / sqrt(depth))
    n_slot: int = 0  # [has_slots] slots per key/value head (arXiv:1907.01470); 0 = as many parameters as the MLP
    # --- model: experts
    n_expert: int = 0  # [<=65536] [n_expert=0 or has_e] experts of an MLP (arXiv:1701.06538); 0 = dense
    n_expert_active: int = 2  # [>0] [<=65536] [n_expert>0] experts that a token reads
    n_expert_shared: int = 0  # [<=65536] [n_expert>0] experts that all tokens read besides (arXiv:2401.06066)
    expert_ratio: float = 0.0  # [<65536] [n_expert>0] mlp_ratio of each; 0 = mlp_ratio / (active + shared)
    router: Literal["softmax", "sigmoid"] = "softmax"  # [n_expert>0] scores (Mixtral, arXiv:2401.04088; DeepSeek-V3)
    router_balance: Literal["bias", "none"] = "bias"  # [n_expert>0] prefer rarely read experts (arXiv:2408.15664)
    n_dense_layer: int = 0  # [n_expert>0 and has_name] first layers that have no experts
    # --- model: attention
    attention: Literal["mha", "gqa", "mqa"] = "mha"  # gqa: arXiv:2305.13245, mqa: arXiv:1911.02150
    n_kv_head: int = 0  # key/value heads, must divide n_head; 0 = derived from attention. Beside mha, it means gqa
    qk_norm: bool = False  # RMS norm of each head's q and k (arXiv:2302.05442)
    value_embedding: bool = False  # [block!=simplified*] [has_even_c] a token adds a vector to v in layers 0, 2, ...
    window: int = 0  # tokens that each token sees, its own included; encoders: as many on both sides; 0 = all
    window_pattern: str = ""  # [window>0] per layer, repeated: S = sliding, L = full, such as SSSL; empty = all S
    attn_softcap: float = 0.0  # c tanh(scores / c), 0 = off (Gemma 2, arXiv:2408.00118)
    fp32_residual: bool | Literal["auto"] = "auto"  # residual stream in float32; auto = unless a GPU has bfloat16
    # [dtype!=float32]
    # --- model: position
    pos: Literal["learned", "sinusoidal", "rope", "alibi", "none"] = "learned"  # position encoding
    rope_theta: float = 10000.0  # [>0] [pos=rope] base of RoPE's wavelengths (arXiv:2104.09864)
    rope_scaling: str = ""  # [pos=rope] linear:F, llama3:F:LOW:HIGH:ORIGINAL or yarn:F:ORIGINAL:FAST:SLOW
    pos_pattern: str = ""  # [pos_pattern='' or pos=rope|alibi] per layer: G as above, L by rope_theta_local, N none
    rope_theta_local: float = 10000.0  # [>0] [pos_pattern=*L*] RoPE's base in layers L, not scaled (Gemma 3)
    # --- model: objective
    objective: Literal["causal", "masked", "seq2seq"] = "causal"  # masked: encoder (BERT), seq2seq: both (T5)
    n_encoder_layer: int = 0  # [<=4096] [objective=seq2seq] blocks of the encoder, 0 = n_layer
    doc_mask: bool = False  # tokens attend only within their own document, which end-of-text begins
    doc_positions: bool = False  # [doc_mask=True and pos=learned|sinusoidal] positions count from each document's start
    # --- model: loss
    logit_softcap: float = 0.0  # c tanh(logits / c), 0 = off
    loss_chunk: int = 0  # most tokens whose logits exist at once in the loss; 0 = 128 MiB of float32, on a GPU 1 GiB

    @property
    def head_size(self) -> int:
        """D: head_dim, or n_embd / n_head."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        """Hkv."""
        return {"mha": self.n_kv_head or self.n_head, "gqa": self.n_kv_head, "mqa": 1}[self.attention]


# ---- What modules declare, and what a layer reads

Maybe = Tensor | None
Tensors = tuple[Tensor, ...]
Shape = tuple[int, ...]
Fused = tuple[int, Shape]  # (groups, sizes), see Linear

# A module with parameters declares what its initial weights, its optimizer and tensor parallelism need to know:
#   role      a row of the table in docs/hacking.md: what its weights begin with, and how processes cut them. Identities
#             have roles too, because processes cut or exchange what passes through them
#   initial   what Model.init_weights fills each parameter with: a number, a tensor, or draws from Normal(std)
#   per_head  names of its parameters that have a row for each head
#   fused     the matrices that one weight stores, see Linear. An example of a module:
#     class Shift(nn.Module):
#         role = "replicated"  # each process has all of it
#         initial = {"weight": 0.0}
#         def __init__(self, cfg):
#             super().__init__()
#             self.weight = nn.Parameter(torch.empty(cfg.n_embd))  # without values, because init_weights writes them
Normal = namedtuple("Normal", "std zero period", defaults=[0, 1])  # the first `zero` of every `period` rows are 0


def with_role(module: nn.Module, role: str) -> nn.Module:
    module.role = role
    return module


class Inputs(NamedTuple):
    """What a block reads besides the stream. Stack.inputs makes it."""

    table: Tensors = ()  # the result of AttentionPosition.table
    docs: Tensors | None = None  # document numbers of the queries and of the keys, as in ops.Mask
    memory: Tensor | None = None  # (B, S, C), the encoder's output
    memory_docs: Tensors | None = None  # document numbers of the queries and of the memory
    idx: Tensor | None = None  # (B, T), the token ids
    place: Tensor | None = None  # (B, T), each token's position in its document; None without documents
    shared: "Shared | None" = None  # what layers hand on; each forward has a new one


class Shared(UserDict):
    """Tensors that a layer hands to later layers, by name. No dict, because FSDP gives each block a copy of a dict."""


# ---- Model


class Stack(nn.Module):
    """The blocks and the last norm: the encoder, and the base class of Model."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        if not any(reader.source == "context" and n_layers for reader, n_layers in cfg.readers):
            refuse(cfg, "block n_layer", "a layer has no c, so no token would see another; add one")
        self.first_norm = with_role(NORM["layernorm" if cfg.bare else "none"](cfg), "replicated")  # bare: no other norm
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.n_layer))
        self.norm = norm(cfg, "last")
        self.position_table = partial(POSITION[cfg.pos][1].table, cfg)

    def inputs(
        self, idx: Tensor, t: Tensor, x: Tensor, docs: Tensors | None = None, memory: Maybe = None,
        memory_docs: Tensors | None = None,
    ) -> Inputs:  # fmt: skip
        """What the blocks read besides the stream x (B, T, C). The tokens idx (B, T) have the positions t (T,)."""
        table = self.position_table(t, torch.promote_types(x.dtype, torch.float32))
        place = None if docs is None else positions_in(docs, t)
        return Inputs(table, docs, memory, memory_docs, idx, place)

    def through_blocks(self, x: Tensor, inputs: Inputs) -> Tensor:
        x = self.first_norm(x).to(x.dtype)  # because the stream keeps its dtype
        inputs = inputs._replace(shared=Shared())
        for block in self.blocks:
            x = block(x, inputs)
        return self.norm(x)


class Model(Stack):
    """Computes logits or the loss from token ids. seed determines the initial weights; None draws a seed from torch's
    global generator.

    With objective="seq2seq", the encoder reads source (B, S). docs (B, T) and source_docs (B, S) hold document numbers
    that never decrease along a row. A token sees only tokens of its own document, and of the source only those with the
    same number. Padding is a document of its own. doc_starts (B, n) and source_doc_starts (B, n) are the first tokens
    of documents 0 ... n - 1; with them, CUDA computes attention in one kernel.
    """

    def __init__(self, cfg: ModelConfig, seed: int | None = None):
        if cfg.vocab_size == 0:
            refuse(cfg, "vocab_size", "this means the data's, and here there is no data; set it")
        check_layer(cfg)
        super().__init__(cfg)
        self.wte = embedding(cfg, cfg.vocab_rows, "vocab")
        self.pos = POSITION[cfg.pos][0](cfg)
        self.head = Linear(cfg, cfg.n_embd, cfg.vocab_rows, "vocab", bias=False)
        self.encoder = None
        if cfg.objective == "seq2seq":
            flags = copy(cfg)
            flags.objective = "masked"  # because tokens of the source see both sides
            flags.n_layer = cfg.n_encoder_layer or cfg.n_layer
            self.encoder = Stack(flags)
        self.chunk_loss = ops.chunk_loss  # compilation and tensor parallelism replace it
        self.n_targets = None  # training sets it if micro-batches have unequally many targets, see mean
        self.tie()
        if self.wte.weight.is_meta:
            return  # because parameters on the meta device have no values
        if seed is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
        self.init_weights(seed)

    def tie(self):
        """Make head and embedding one parameter again. Call it after parameters were replaced."""
        if self.cfg.tie_weights:
            self.head.weight = self.wte.weight

    @torch.no_grad()
    def init_weights(self, seed: int):
        for name, p in self.named_parameters():
            p.copy_(self.initial_weight(name, seed, p.shape, (0,) * p.dim(), p.shape, p.device))

    def initial_weight(self, name: str, seed: int, shape: Shape, start: Shape, size: Shape, device) -> Tensor:
        """Initial values of a slice of parameter `name`. The parameter has `shape`, and the slice begins at the index
        `start` and has the shape `size`. The values depend only on seed, name and place, because each process draws its
        slice alone. The name counts without the number of the sum, so attn of a layer is the same in every --block."""
        module, _, own_name = name.rpartition(".")
        value = self.get_submodule(module).initial[own_name]
        if not isinstance(value, Normal):  # a number, or a tensor of this shape
            part = tuple(slice(first, first + n) for first, n in zip(start, size, strict=True))
            return torch.as_tensor(value, dtype=torch.float32, device=device).expand(shape)[part].clone()
        key = re.sub(r"sums[.][0-9]+[.]", "", name)
        drawn = value.std * ops.normal(f"{seed} {key}", shape, start, size, device)
        row = torch.arange(start[0], start[0] + size[0], device=device) % value.period
        drawn[row < value.zero] = 0
        return drawn

    def forward(
        self, idx: Tensor, targets: Maybe = None, docs: Maybe = None, source: Maybe = None, source_docs: Maybe = None,
        doc_starts: Maybe = None, source_doc_starts: Maybe = None,
    ) -> Tensor:  # fmt: skip
        """idx (B, T) -> logits (B, T, V) float32; with targets (B, T), the mean loss in nats over targets >= 0."""
        own = documents(docs, docs, doc_starts, doc_starts)  # each is None if there are no documents
        of_source = documents(source_docs, source_docs, source_doc_starts, source_doc_starts)
        memory = self.encode(source, of_source)
        if memory is not None and (docs is None) != (source_docs is None):
            raise ValueError("docs and source_docs belong together; pass both or neither")
        of_memory = documents(docs, source_docs, doc_starts, source_doc_starts)
        x = self.hidden(idx, 0, own, memory, of_memory)
        if targets is None:
            return self.logits(x)
        return self.loss(x, targets)

    def encode(self, source: Maybe, docs: Tensors | None = None) -> Maybe:
        """source (B, S) -> the encoder's output (B, S, C), called memory; None without encoder. docs as in Mask."""
        if (source is None) != (self.encoder is None):
            raise ValueError("objective=seq2seq needs a source, and other models read none")
        if source is None:
            return None
        x, t = self.embed(source, 0, docs)
        return self.encoder.through_blocks(x, self.encoder.inputs(source, t, x, docs))

    def hidden(
        self, idx: Tensor, start: int = 0, docs: Tensors | None = None, memory: Maybe = None,
        memory_docs: Tensors | None = None,
    ) -> Tensor:  # fmt: skip
        """idx (B, T), whose first token has position `start` -> the stream that the head reads, (B, T, C). docs and
        memory_docs as in a Mask."""
        x, t = self.embed(idx, start, docs)
        return self.through_blocks(x, self.inputs(idx, t, x, docs, memory, memory_docs))

    def embed(self, idx: Tensor, start: int, docs: Tensors | None = None) -> Tensors:
        """idx (B, T), whose first token has position `start` -> the stream (B, T, C), positions (T,)."""
        cfg = self.cfg
        T = idx.size(1)
        if T > cfg.block_size:
            raise ValueError(f"a sequence of {T} tokens does not fit in block_size={cfg.block_size}; crop it")
        t = self.positions(torch.arange(start, start + T, device=idx.device))
        position = t
        if docs is not None and cfg.doc_positions:
            position = positions_in(docs, t)
        x = self.wte(idx)
        if cfg.embed_scale != 1:
            x = x * cfg.embed_scale
        x = ops.dropped(self.pos(x, position), cfg.dropout * self.training)
        return x.to(stream_dtype(cfg, x)), t

    def positions(self, t: Tensor) -> Tensor:
        """Indices (T,) of this process's tokens -> their positions in the text. Context parallelism replaces this."""
        return t

    def head_weight(self) -> Tensor:
        """The head's weight (V, C), without its padding rows."""
        if self.cfg.vocab_rows == self.cfg.vocab_size:
            return self.head.weight
        return self.head.weight[: self.cfg.vocab_size]

    def logits(self, x: Tensor) -> Tensor:
        """The last norm's result x (..., C) -> logits (..., V) in float32."""
        logits = ops.linear(x, self.head_weight())
        return ops.capped(ops.at_least_float32(logits), self.cfg.logit_softcap)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """x (B, T, C), targets (B, T) -> the mean in nats over targets >= 0."""
        targets = targets.flatten()
        return self.mean(self.cross_entropy(x.flatten(0, 1), targets), targets)

    def cross_entropy(self, x: Tensor, targets: Tensor) -> Tensor:
        """x (N, C), targets (N,) -> the sum in nats over targets >= 0, without all logits at once."""
        cfg = self.cfg
        return ops.cross_entropy(x, self.head_weight(), targets, cfg.logit_softcap, cfg.loss_chunk, self.chunk_loss)

    def mean(self, total: Tensor, targets: Tensor) -> Tensor:
        """A sum over targets >= 0, divided by `n_targets`; if this is None, by the number of these targets."""
        if self.n_targets is not None:
            return total / self.n_targets
        return total / (targets >= 0).sum().clamp(min=1)

    def n_params(self) -> int:
        """Number of trainable parameters; a tied head counts once."""
        return sum(p.numel() for p in self.parameters())


# ---- A layer


class Block(nn.Module):
    """One layer: its sums, one after the other. --block is their string, or the name of an entry of BLOCK."""

    def __init__(self, cfg: ModelConfig, layer: int):
        super().__init__()
        build = BLOCK.get(cfg.block)
        self.sums = nn.ModuleList(build(cfg, layer) if callable(build) else from_string(cfg, layer))
        names = [name for each in self.sums for name in each.names]
        if len(set(names)) < len(names):  # refused, because their initial weights would be equal
            raise ValueError(f"block={cfg.block} has two readers of one name: {', '.join(names)}")

    def forward(self, s: Tensor, inputs: Inputs) -> Tensor:
        for add_to in self.sums:
            s = add_to(s, inputs)
        return s


class Sum(nn.Module):
    """s -> total(skip s + after(gain_1 reader_1(x) + gain_2 reader_2(x) + ...)), where x = before(s).

    before, after and total are norms or identities, see PLACEMENT. --conv adds a convolution of x to x. gains maps each
    reader's name to the initial value of its learned gain. The gain of a single reader is applied behind `after`,
    because a norm cancels it. skip is 1, 0, or "learned", which starts at 1.
    """

    def __init__(self, cfg: ModelConfig, skip: int | str = 1, gains: dict[str, float] | None = None, **readers):
        super().__init__()
        self.before = norm(cfg, "before")
        self.conv = Convolution(cfg) if cfg.conv else None
        self.after = norm(cfg, "after")
        self.total = norm(cfg, "total")
        reader_gains = [Gain(gains[name]) if gains else nn.Identity() for name in readers]
        self.gain = nn.Identity()
        if len(readers) == 1:
            self.gain = reader_gains[0]
            reader_gains = [nn.Identity()]
        self.gains = nn.ModuleList(reader_gains)
        self.skip = {1: nn.Identity(), "learned": Gain(1.0), 0: None}[skip]
        self.dropout = cfg.dropout
        self.names = tuple(readers)
        for name, reader in readers.items():
            if hasattr(self, name):
                raise ValueError(f"a reader cannot have the name {name!r}, which a sum has for itself")
            self.add_module(name, reader)

    def forward(self, s: Tensor, inputs: Inputs) -> Tensor:
        x = self.before(s)
        if self.conv is not None:
            x = self.conv(x, inputs)
        y = [getattr(self, name)(x, inputs) for name in self.names]
        y = [ops.dropped(part, self.dropout * self.training) for part in y]
        y = [gain(part) for gain, part in zip(self.gains, y, strict=True)]
        y = self.gain(self.after(reduce(add, y)))
        if self.skip is not None:
            y = y + self.skip(s)
        return self.total(y).to(s.dtype)  # because gains in float32 widen y


def from_string(cfg: ModelConfig, layer: int) -> list[Sum]:
    """The sums of a layer whose --block is a string of readers, or the name of such a string."""
    kinds = {"context": Attention, "memory": CrossAttention, "parameters": Slots, "experts": Experts}
    sums = []
    for readers in cfg.sums(layer):
        modules = {}
        for reader in readers:
            kind = MLP if reader.dense else kinds[reader.source]  # p and s read parameters, but p has no heads
            modules[reader.name] = kind(cfg, layer, reader)
        sums.append(Sum(cfg, **modules))
    return sums


# ---- Linear layers and the MLP


class Linear(nn.Linear):
    """A linear layer, whose weight may store several matrices.

    fused = (groups, sizes) describes the rows. (Hkv, (G D, D, D)) means three matrices: each of Hkv groups has G D rows
    of W_Q, then D of W_K and D of W_V. None means one matrix. Muon orthogonalizes each matrix alone, and tensor
    parallelism cuts between groups.
    """

    def __init__(self, cfg: ModelConfig, n_in: int, n_out: int, role: str, fused: Fused | None = None, bias=None):
        super().__init__(n_in, n_out, cfg.bias if bias is None else bias)
        self.role = role
        self.fused = fused
        std = cfg.init_std
        if role in ("row", "after_row") and cfg.scaled_init and not cfg.block.startswith("simplified"):
            std /= math.sqrt(cfg.outputs)  # because the stream is a sum of so many outputs, and their variances add up
        self.initial = {"weight": Normal(std), "bias": 0.0}

    def reset_parameters(self):
        pass  # because Model.init_weights fills all parameters

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


Activation = namedtuple("Activation", "phi arity", defaults=[1])  # phi maps `arity` tensors to one; gated ones map two
ACTIVATION = {
    "gelu": Activation(F.gelu),
    "gelu_tanh": Activation(partial(F.gelu, approximate="tanh")),
    "relu": Activation(F.relu),
    "relu2": Activation(lambda x: F.relu(x).square()),
    "sigmoid": Activation(torch.sigmoid),
    "swiglu": Activation(lambda gate, x: F.silu(gate) * x, arity=2),
    "geglu": Activation(lambda gate, x: F.gelu(gate) * x, arity=2),
    "geglu_tanh": Activation(lambda gate, x: F.gelu(gate, approximate="tanh") * x, arity=2),
}


def activation_of(cfg: ModelConfig, reader: Reader) -> Activation:
    """The reader's phi. A softmax is Activation(None), because callers compute it."""
    name = cfg.mlp if reader.phi == "mlp" else reader.phi
    kinds = {"softmax": Activation(None)} | ACTIVATION
    if name not in kinds:
        refuse(cfg, "block", f".{name} is no switch; known are {', '.join([*SWITCH, *kinds])}")
    return kinds[name]


class MLP(nn.Module):
    """down(phi(up(x))). In words of attention, x is a query, a row of `up` is a key, and a column of `down` its value.
    If phi is a softmax, the scores are divided by sqrt(C). The switch .matrix adds a matrix W_O behind `down`."""

    linear = Linear  # the class of `up` and `down`

    def __init__(self, cfg: ModelConfig, layer: int, reader: Reader = READER["p"], hidden: int = 0):
        super().__init__()
        C = cfg.n_embd
        hidden = hidden or hidden_units(cfg, reader)  # Experts gives it for the experts that all tokens read
        self.reader = reader
        self.phi, arity = activation_of(cfg, reader)
        unit = cfg.hidden_multiple
        if reader.phi == "softmax":
            unit = hidden  # one piece, because the softmax is over all hidden units
            self.phi = lambda scores: (scores * C**-0.5).softmax(-1)
        self.pieces = (unit,) * arity  # rows of a group of `up`: a piece of the gates, then a piece of the values
        self.up = self.linear(cfg, C, hidden * arity, "column", (hidden // unit, self.pieces))
        self.down = self.linear(cfg, hidden, C, "row")
        self.out = nn.Identity()
        if reader.out == "matrix":
            self.out = Linear(cfg, C, C, "after_row")
            self.down.initial = self.up.initial  # not smaller, because W_O is the output layer here

    def forward(self, x: Tensor, inputs: Inputs) -> Tensor:
        return self.out(self.read(x))

    def read(self, x: Tensor, *ends: Tensor) -> Tensor:
        """x (..., C) -> (..., C). Of experts, x is sorted by expert, and `ends` are the ends of each expert's rows."""
        scores = self.up(x, *ends).unflatten(-1, (-1, sum(self.pieces)))
        hidden = self.phi(*scores.split(self.pieces, dim=-1))  # (..., F / unit, unit)
        return self.down(hidden.flatten(-2), *ends)


# ---- Attention: each class reads another pool of keys and values, and all take their queries from x
#                  keys and values                       position   cache             kernel
# Attention        of x, and slots if any                yes        grows if causal   ops.attention
# CrossAttention   of the encoder's output               no         made once         ops.attention
# Slots            parameters                            no         none              ops.attention
# ShapedAttention  keys of x; values x, or W_V x         yes        grows if causal   the same and uniform_attention


class MultiHeadAttention(nn.Module):
    """Attention of H heads, W_O sum_j phi(q . k_j / sqrt(D)) v_j over a pool of keys k_j and values v_j. Subclasses
    make q, k and v in `project`. Then `read` adds positions, cache and mask, and `attend` computes the sum."""

    per_head: tuple[str, ...] = ()  # parameters that have a row for each head
    strips: Callable | None = None  # see ops.attention
    initial: dict[str, Normal | float | Tensor] = {}
    causal = False  # as in ops.Mask
    window = 0

    def __init__(self, cfg: ModelConfig, reader: Reader):
        super().__init__()
        self.reader = reader
        self.n_head, self.n_kv_head = heads_of(cfg, reader)
        self.group = self.n_head // self.n_kv_head  # query heads that share keys and values
        self.head_size = D = cfg.head_size
        self.phi = phi_of_heads(cfg, reader)
        self.softcap = cfg.attn_softcap
        self.dropout = cfg.dropout
        self.cache = None  # decoding sets a KVCache. A class attribute would make torch.compile compile blocks again
        head_norm = RMSNorm if cfg.qk_norm else nn.Identity
        self.q_norm = with_role(head_norm(D, cfg.norm_eps), "replicated")
        self.k_norm = with_role(head_norm(D, cfg.norm_eps), "replicated")
        self.position = AttentionPosition(cfg)
        width = self.n_head * D
        if width != cfg.n_embd and (reader.query == "stream" or reader.out == "none"):
            fact = f"{self.n_head} heads of {D} channels are not as wide as the stream"
            refuse(cfg, "block n_embd", f"{fact}, and {reader.name} has no matrix between them; give it one")
        self.out = with_role(nn.Identity(), "row")
        if reader.out == "matrix":
            self.out = Linear(cfg, width, cfg.n_embd, "row")

    def forward(self, x: Tensor, inputs: Inputs) -> Tensor:
        q, k, v = self.project(x, inputs)  # q (B, H, T, D), k (B, Hkv, S, D), v (B, Hkv or H, S, D)
        y = self.read(self.q_norm(q), self.k_norm(k), v, inputs).transpose(1, 2)  # (B, T, H, D)
        return self.out(y.flatten(2))  # (B, T, C)

    def read(self, q: Tensor, k: Tensor, v: Tensor, inputs: Inputs) -> Tensor:
        """The heads' results (B, H, T, D) for normed q and k. Here, every query sees the whole pool."""
        return self.attend(q, k, v, Mask(causal=False))

    def add_per_head(self, name: str, initial: float | Normal, *shape: int):
        """Make a parameter with a row for each head, or key/value head, which begins with these values."""
        self.per_head = (*self.per_head, name)
        self.initial = {**self.initial, name: initial}
        setattr(self, name, nn.Parameter(torch.empty(shape)))

    def make_slots(self, cfg: ModelConfig):
        """Make n_slot slots for each key/value head. A slot is a learned value with a learned key, or with two keys if
        phi is gated. n_slot=0 means as many parameters as the MLP would have."""
        arity = activation_of(cfg, self.reader).arity  # keys of a value
        n = cfg.n_slot
        if n == 0:
            phi = "mlp" if self.reader.phi == "softmax" else self.reader.phi
            mlp = READER["p"]._replace(phi=phi, share=self.reader.share)
            parameters = (1 + activation_of(cfg, mlp).arity) * cfg.n_embd * hidden_units(cfg, mlp)
            n = max(1, round(parameters / ((arity + 1) * self.n_kv_head * self.head_size)))
        drawn = Normal(cfg.init_std * math.sqrt(cfg.n_embd))  # the standard deviation of a normed stream's keys
        self.add_per_head("slot_k", drawn, self.n_kv_head, arity * n, self.head_size)
        self.add_per_head("slot_v", drawn, self.n_kv_head, n, self.head_size)

    def projection(self, cfg: ModelConfig, role: str, *sizes: int) -> Linear:
        """A layer that makes heads for each key/value head: sizes of G, 1, 1 mean G of q, one of k and one of v."""
        rows = tuple(n * self.head_size for n in sizes)
        groups = self.n_kv_head
        return Linear(cfg, cfg.n_embd, groups * sum(rows), role, (groups, rows), cfg.bias or cfg.qkv_bias)

    def make_queries(self, cfg: ModelConfig):
        self.q = with_role(nn.Identity(), "column")
        if self.reader.query == "heads":
            self.q = self.projection(cfg, "column", self.group)

    def queries(self, x: Tensor) -> Tensor:
        """x (B, T, C) -> q (B, H, T, D)."""
        x = x.to(ops.matmul_dtype(x))  # because self.q may be an identity, where autocast converts nothing
        return self.split(self.q(x), self.group)[0]

    def split(self, x: Tensor, *sizes: int) -> Tensors:
        """A projection's result (B, T, groups * sum(sizes) * D) -> for each size n, (B, groups * n, T, D)."""
        # Split before the permutation, so that the backward writes the gradient of x once.
        parts = x.unflatten(2, (-1, sum(sizes), self.head_size)).split_with_sizes(sizes, 3)  # (B, T, groups, n, D)
        return tuple(part.permute(0, 2, 3, 1, 4).flatten(1, 2) for part in parts)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """phi of all scores, times the values. A variant of softmax goes here, because all attention calls this."""
        slots = None
        if self.reader.slots == "joint_slots":
            slots = self.position.slots(*self.slots(k.dtype))  # each (Hkv, M, E)
        dropout = self.dropout if self.training else 0.0
        return ops.attention(q, k, v, self.head_size, mask, self.softcap, dropout, slots, self.strips, self.phi)


class Attention(MultiHeadAttention):
    """Attention to the context: each query reads the tokens that the mask admits, perhaps with slots beside them."""

    def __init__(self, cfg: ModelConfig, layer: int, reader: Reader = READER["c"]):
        super().__init__(cfg, reader)
        self.window = cfg.layer_window(layer)
        self.causal = cfg.objective != "masked"
        self.position = layer_position(cfg, layer)
        self.make_projections(cfg, layer)
        self.of_token = None  # or value embeddings (Hkv, V, D)
        if cfg.value_embedding and layer % 2 == 0:
            self.add_per_head("of_token", Normal(cfg.init_std), self.n_kv_head, cfg.vocab_size, self.head_size)
        if reader.slots:
            self.make_slots(cfg)

    def make_projections(self, cfg: ModelConfig, layer: int):
        if self.reader.query == "heads":
            self.qkv = self.projection(cfg, "column", self.group, 1, 1)
        else:
            self.make_queries(cfg)
            self.kv = self.projection(cfg, "column", 1, 1)

    def project(self, x: Tensor, inputs: Inputs) -> Tensors:
        """q (B, H, T, D), k and v (B, Hkv, T, D), before norms and positions. Value embeddings are added to v."""
        if self.reader.query == "heads":
            q, k, v = self.split(self.qkv(x), self.group, 1, 1)
        else:
            q = self.queries(x)
            k, v = self.split(self.kv(x), 1, 1)
        if self.of_token is not None:
            v = (v + self.values_of(inputs.idx)).to(v.dtype)
        return q, k, v

    def values_of(self, idx: Tensor) -> Tensor:
        """idx (B, T) -> value embeddings (B, Hkv, T, D). They are looked up as bags of one row, because threads add up
        the gradients of an index, or of F.embedding in a compiled graph, in no fixed order."""
        Hkv, V, D = self.of_token.shape
        rows = idx[:, None] + V * torch.arange(Hkv, device=idx.device)[:, None]  # of a table (Hkv V, D)
        y = F.embedding_bag(rows.reshape(-1, 1), self.of_token.flatten(0, 1), mode="sum")
        return y.view(*rows.shape, D)

    def read(self, q: Tensor, k: Tensor, v: Tensor, inputs: Inputs) -> Tensor:
        """The heads' results (B, H, T, D) for normed q and k, which do not have their positions yet."""
        unplaced = q
        q, k, v = self.position(q, k, v, inputs.table)
        if self.cache and self.causal:
            k, v = self.cache.extend(k, v)  # k (B, Hkv, S, E), v (B, Hkv or H, S, E)
        mask = Mask(self.causal, self.window, inputs.docs)
        y = self.attend(q, k, v, mask)[..., : self.head_size]  # without ALiBi's columns
        if self.reader.slots == "own_slots":
            slots = (x.expand(len(q), -1, -1, -1) for x in self.slots(q.dtype))
            # Not self.attend, because context parallelism replaces it by one that gathers k and v, and slots are whole
            y = y + MultiHeadAttention.attend(self, unplaced, *slots, Mask(causal=False))
        return y

    def slots(self, dtype: torch.dtype) -> Tensors:
        """Keys and values of the slots beside the context, each (Hkv, M, D)."""
        return self.k_norm(self.slot_k).to(dtype), self.slot_v.to(dtype)


# ---- Norms


class LayerNorm(nn.LayerNorm):
    """LayerNorm whose result has the dtype of x, whichever dtype the weight has. The kernel's sums are in float32."""

    initial = {"weight": 1.0, "bias": 0.0}

    def reset_parameters(self):
        pass

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) times a weight."""

    initial = {"weight": 1.0}

    def reset_parameters(self):
        pass

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


class RMSNormEpsOutside(RMSNorm):
    """x / (rms + eps) times a weight: the RMSNorm of the authors of arXiv:1910.07467, and of those of 2311.01906."""

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

PLACEMENT = {  # flag -> where norms are: before a sum's readers, after them, on its total, or last, before the head
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
    return with_role(NORM[kind](cfg), role)


# ---- Positions: each --pos has a class that acts on the embedding and one that acts on q, k and v
# t (T,) holds absolute positions; with doc_positions the embedding gets positions (B, T) within the documents.


def embedding(cfg: ModelConfig, rows: int, role: str) -> nn.Embedding:
    """nn.Embedding without values, because init_weights draws them. On the meta device, nn.Embedding's own draw would
    import torch._dynamo, which takes a second."""
    table = nn.Embedding(rows, cfg.n_embd, _weight=torch.empty(rows, cfg.n_embd))
    table.initial = {"weight": Normal(cfg.init_std)}
    return with_role(table, role)


class NoEmbedding(nn.Identity):  # because nn.Identity's __init__ takes any arguments, here cfg
    """Returns x (B, T, C) unchanged."""

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return x


class LearnedEmbedding(nn.Module):
    """x + W[t] (GPT-2)."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.wpe = embedding(cfg, cfg.block_size, "replicated")

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return x + self.wpe(t)


class AttentionPosition(nn.Identity):
    """Returns q (B, H, T, D), k and v (B, Hkv, T, D) unchanged: the base class of encodings that change them. A layer
    has its own instance, perhaps with parameters. `table` is computed once per forward, for all layers."""

    @classmethod
    def table(cls, cfg: ModelConfig, t: Tensor, dtype: torch.dtype) -> Tensors:
        """What forward needs to know of the positions t (T,): tensors (T, n), or (H, T, n) if each head has its own."""
        return ()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, table: Tensors) -> Tensors:
        return q, k, v

    def slots(self, k: Tensor, v: Tensor) -> Tensors:
        """Keys and values of slots (Hkv, M, D) -> (Hkv, M, E), as wide as those of tokens. Slots have no position."""
        return k, v


class Rope(AttentionPosition):
    """Rotates pairs (x_j, x_{j+n}), j < n = D/2, by angles t * theta^(-j/n) (arXiv:2104.09864; pairs as in GPT-NeoX
    and Llama). The table holds cos and sin for rope_theta, then for rope_theta_local if pos_pattern has an L."""

    def __init__(self, cfg: ModelConfig, first: int = 0):
        super().__init__(cfg)
        self.first = first  # index of this layer's cos in the table, behind which its sin stands
        if cfg.head_size % 2:
            refuse(cfg, "pos head_size", "RoPE turns pairs of channels; make head_dim, or n_embd / n_head, even")
        scaled_frequencies(cfg, torch.ones(1, device="cpu"))  # called because it refuses a wrong rope_scaling

    @classmethod
    def table(cls, cfg: ModelConfig, t: Tensor, dtype: torch.dtype) -> Tensors:
        n = cfg.head_size // 2
        rotations = [scaled_frequencies(cfg, frequencies(n, cfg.rope_theta, t.device))]
        if "L" in cfg.pos_pattern:
            rotations.append((frequencies(n, cfg.rope_theta_local, t.device), 1.0))
        out = []
        for f, factor in rotations:
            angle = t[:, None] * f  # (T, n)
            cos = (factor * angle.cos()).to(dtype)
            sin = (factor * angle.sin()).to(dtype)
            out += torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)  # (T, D)
        return tuple(out)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, table: Tensors) -> Tensors:
        cos, sin = (x.to(q.dtype) for x in table[self.first : self.first + 2])
        return ops.rotate(q, cos, sin), ops.rotate(k, cos, sin), v


def frequencies(n: int, theta: float, device: torch.device) -> Tensor:
    """theta^(-j/n), j < n: radians per token (n,). float64 keeps the phase of far positions exact."""
    dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
    return theta ** (-torch.arange(n, device=device, dtype=dtype) / n)


def layer_position(cfg: ModelConfig, layer: int) -> AttentionPosition:
    """The module that acts on q, k and v in this layer. The layer's letter in cfg.pos_pattern chooses it."""
    kinds = {"G": POSITION[cfg.pos][1], "N": AttentionPosition}
    if cfg.pos == "rope":
        kinds["L"] = partial(Rope, first=2)  # with rope_theta_local
    pattern = cfg.pos_pattern or "G"
    if not set(pattern) <= kinds.keys():
        refuse(cfg, "pos_pattern pos", f"may hold only the letters {', '.join(kinds)}; leave it empty for all G")
    return kinds[pattern[layer % len(pattern)]](cfg)


# ---- Sizes and maps of readers, documents, and the dtype of the stream


def heads_of(cfg: ModelConfig, reader: Reader) -> tuple[int, int]:
    """H and Hkv: the reader's share of the layer's heads."""
    H = cfg.n_head
    Hkv = cfg.kv_heads
    if not cfg.head_dim and cfg.n_embd % H:
        width = -(-cfg.n_embd // (2 * H)) * 2 * H  # rounded up to heads of an even size, because RoPE needs one
        refuse(cfg, "n_embd n_head", f"set n_embd to a multiple of n_head such as {width}, or set head_dim")
    if cfg.n_kv_head not in (0, Hkv):
        refuse(cfg, "n_kv_head attention", "mqa has one key/value head; set n_kv_head=0, or attention=gqa")
    if Hkv == 0 or H % Hkv:
        refuse(cfg, "attention n_kv_head n_head", "set n_kv_head to a divisor of n_head")
    if reader.share > 1 or (reader.share * Hkv).denominator > 1:
        fact = f"{reader.name} takes {reader.share} of {H} heads and of {Hkv} key/value heads"
        refuse(cfg, "block", f"{fact}; write a part of both, such as /2 or 3c/4")
    return int(reader.share * H), int(reader.share * Hkv)


def hidden_units(cfg: ModelConfig, reader: Reader) -> int:
    """F: the reader's share of mlp_ratio * C (2/3 of it for gated kinds), or the units of one of its experts. It is a
    multiple of 64 if C is."""
    if reader.source == "experts":
        ratio = cfg.expert_ratio or cfg.mlp_ratio / (cfg.n_expert_active + cfg.n_expert_shared)
        multiple = math.lcm(cfg.hidden_multiple, 8)  # ops.grouped_linear is fast with multiples of 8
    else:
        ratio = cfg.mlp_ratio
        multiple = cfg.hidden_multiple
    width = ratio * reader.share * cfg.n_embd
    if activation_of(cfg, reader).arity == 2:
        width *= 2 / 3
    return max(multiple, round(width / multiple) * multiple)


def phi_of_heads(cfg: ModelConfig, reader: Reader) -> Callable | None:
    """A function of scores (..., T, S) and of the number n (..., T, 1) of keys that a query sees; None = softmax. Over
    tokens, a map is divided by n, and a sigmoid is that of the score minus log n (arXiv:2309.08586, 2409.04431)."""
    phi, arity = activation_of(cfg, reader)
    if phi is None:
        return None
    if reader.source == "parameters":  # slots: a gated phi has two keys for each value
        return lambda scores, n: phi(*scores.chunk(arity, -1))
    if arity == 2:
        refuse(cfg, "block", f"{reader.name}.{reader.phi} needs two keys for each value, which only p, e and s have")
    if phi is torch.sigmoid:
        return lambda scores, n: phi(scores - n.clamp(min=1).log())
    return lambda scores, n: phi(scores) / n.clamp(min=1)


def documents(queries: Maybe, keys: Maybe, starts: Maybe, key_starts: Maybe) -> Tensors | None:
    """Mask.docs of document numbers of queries (B, T) and keys (B, S), and of the first tokens of documents if they are
    known. None without documents."""
    if queries is None or keys is None:
        return None
    if starts is None and key_starts is None:
        return queries, keys
    return queries, keys, ops.boundaries(starts, queries.size(1)), ops.boundaries(key_starts, keys.size(1))


def positions_in(docs: Tensors, t: Tensor) -> Tensor:
    """Positions t (T,) in a text -> positions in their documents, (B, T)."""
    numbers = docs[1].contiguous()  # (B, S), of the whole text
    return t - torch.searchsorted(numbers, numbers[:, t])


def stream_dtype(cfg: ModelConfig, x: Tensor) -> torch.dtype:
    """The dtype of a residual stream that begins with x."""
    narrow = ops.matmul_dtype(x)
    if ops.wide_stream(cfg.fp32_residual, x.device, narrow):
        return x.dtype
    return narrow


# ---- Variants: other positions


class SinusoidalEmbedding(nn.Module):
    """sqrt(C) x + [sin(t w), cos(t w)], w_i = 10000^(-2i/C) (arXiv:1706.03762, sections 3.4 and 3.5)."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        if cfg.n_embd % 2:
            refuse(cfg, "pos n_embd", "half of the channels are sines, half are cosines; set n_embd to an even number")

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        C = x.size(-1)
        angle = t[..., None] * frequencies(C // 2, 10000.0, t.device)  # (..., T, C/2)
        waves = torch.cat((angle.sin(), angle.cos()), dim=-1)
        return x * math.sqrt(C) + waves.to(x.dtype)


class Alibi(AttentionPosition):
    """Adds -m_h (i - j) to the scores (arXiv:2108.12409) without a bias matrix. Softmax ignores a constant per row, so
    adding m_h j is enough. Extra columns of q and k, each exact in bfloat16, give this dot product:

        q   256 m_h, m_h, 256 m_h (i // 256), m_h (i % 256)   times sqrt(D)
        k   j // 256, j % 256, 0, 0

    A slot has the columns 0, 0, 1, 1. Its score then contains m_h i, as all scores of query i do; softmax cancels it.
    Four columns of zeros follow, because fused kernels need multiples of 8. v gets eight zeros, which attention drops.
    """

    @classmethod
    def table(cls, cfg: ModelConfig, t: Tensor, dtype: torch.dtype) -> Tensors:
        slope = alibi_slopes(cfg.n_head, t.device).to(dtype)[:, None] * math.sqrt(cfg.head_size)  # (H, 1)
        far = (t // 256).to(dtype)  # (T,)
        near = (t % 256).to(dtype)
        one = torch.ones_like(far)
        zero = torch.zeros_like(far)
        of_queries = torch.stack((256 * slope * one, slope * one, 256 * slope * far, slope * near), dim=-1)  # (H, T, 4)
        of_keys = torch.stack((far, near, zero, zero), dim=-1)  # (T, 4)
        return F.pad(of_queries, (0, 4)), F.pad(of_keys, (0, 4))  # each (..., 8)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, table: Tensors) -> Tensors:
        of_queries, of_keys = (columns.to(q.dtype) for columns in table)
        q = torch.cat((q, of_queries.expand(*q.shape[:3], -1)), dim=-1)  # (B, H, T, E)
        k = torch.cat((k, of_keys.expand(*k.shape[:3], -1)), dim=-1)  # (B, Hkv, T, E)
        return q, k, F.pad(v, (0, of_keys.size(-1)))

    def slots(self, k: Tensor, v: Tensor) -> Tensors:
        columns = k.new_zeros(*k.shape[:2], 8)  # (Hkv, M, 8)
        columns[..., 2:4] = 1
        return torch.cat((k, columns), dim=-1), F.pad(v, (0, columns.size(-1)))


def alibi_slopes(n_head: int, device: torch.device | str = "cpu") -> Tensor:
    """Slopes (H,): 2^(-8i/H), i = 1..H. If H is no power of two: those of the power p below, then of 2p with odd i."""
    p = 2 ** int(math.log2(n_head))
    of_power = torch.arange(1, p + 1, device=device) / p
    of_rest = (2 * torch.arange(n_head - p, device=device) + 1) / (2 * p)
    return torch.exp2(-8 * torch.cat((of_power, of_rest)))


POSITION = {  # flag -> (acts on the embedding, acts on q, k and v)
    "learned": (LearnedEmbedding, AttentionPosition),
    "sinusoidal": (SinusoidalEmbedding, AttentionPosition),
    "rope": (NoEmbedding, Rope),
    "alibi": (NoEmbedding, Alibi),
    "none": (NoEmbedding, AttentionPosition),
}


def scaled_frequencies(cfg: ModelConfig, f: Tensor) -> tuple[Tensor, float]:
    """RoPE's frequencies (n,) under cfg.rope_scaling, and the factor of q and of k (YaRN's, else 1)."""
    name, *words = (cfg.rope_scaling or "linear:1").split(":")
    try:
        numbers = [float(word) for word in words]
        if not all(1e-6 <= number <= 1e20 for number in numbers):
            raise ValueError("too small or too large")
        kept = ROPE_SCALING[name](f, cfg, *numbers)
    except (KeyError, ValueError, TypeError, ZeroDivisionError):
        remedy = "set it to linear:F, llama3:F:LOW:HIGH:ORIGINAL or yarn:F:ORIGINAL:FAST:SLOW, such as llama3:8"
        refuse(cfg, "rope_scaling", f"no known scaling; {remedy}")
    factor = numbers[0]
    growth = 1.0
    if name == "yarn" and factor > 1:
        growth = 0.1 * math.log(factor) + 1
    return f * kept + f / factor * (1 - kept), growth


# Each function maps frequencies (n,) to numbers from 0 to 1 (n,): 1 keeps a frequency, and 0 divides it by the factor.
def linear_scaling(f: Tensor, cfg: ModelConfig, factor: float) -> Tensor:
    """No frequency stays: position interpolation (arXiv:2306.15595)."""
    return torch.zeros_like(f)


def llama3_scaling(f: Tensor, cfg: ModelConfig, factor: float, low=1.0, high=4.0, original=8192.0) -> Tensor:
    """Wavelengths below original / high stay, those above original / low do not (Llama 3.1)."""
    if low >= high:
        raise ValueError("LOW is not below HIGH")
    return ((original * f / math.tau - low) / (high - low)).clamp(0, 1)


def yarn_scaling(f: Tensor, cfg: ModelConfig, factor: float, original=0.0, fast=32.0, slow=1.0) -> Tensor:
    """Pairs that turn more than `fast` times in the original context stay, those that turn less than `slow` times do
    not (arXiv:2309.00071)."""
    n = len(f)
    original = original or cfg.block_size / factor  # because block_size is the extended context
    pairs = n / math.log(cfg.rope_theta)  # pairs in which the wavelength grows by a factor of e
    first = max(math.floor(pairs * math.log(original / (fast * math.tau))), 0)
    last = min(math.ceil(pairs * math.log(original / (slow * math.tau))), 2 * n - 1)
    length = 1e-3 if first == last else last - first
    return 1 - ((torch.arange(n, device=f.device, dtype=f.dtype) - first) / length).clamp(0, 1)


ROPE_SCALING = {"linear": linear_scaling, "llama3": llama3_scaling, "yarn": yarn_scaling}


# ---- Variants: a convolution


class Neighbours(nn.Module):
    """Weighs each token and the n > 0 tokens before it. A module that reads them holds a Neighbours, because decoding
    gives it a cache of n rows, and context parallelism the rows of other processes."""

    def __init__(self, n: int):
        super().__init__()
        self.reach = n
        self.cache = None  # decoding sets a RowCache

    def forward(self, x: Tensor, inputs: Inputs, taps: Tensors) -> list[Tensor]:
        """x (B, ..., T, C), n + 1 taps -> tap_0 x_t, tap_1 x_{t-1}, ..., each like x; 0 before the text or document.
        The products are shifted, because torch.compile would write x, shifted, and keep it for the backward."""
        pieces = self.pieces(x)
        first = pieces.size(-2) - x.size(-2) // len(pieces)
        rows = [ops.shifted(tap * pieces, i)[..., first:, :] for i, tap in enumerate(taps)]  # (P, B, ..., T/P, C)
        rows = [row.movedim(0, -3).flatten(-3, -2) for row in rows]
        if inputs.place is not None:
            place = inputs.place.view(len(x), *(1,) * (x.dim() - 3), -1, 1)
            rows[1:] = [row.where(place >= i, 0) for i, row in enumerate(rows[1:], 1)]
        return rows

    def pieces(self, x: Tensor) -> Tensor:
        """x in P pieces of a text: (P, B, ..., T/P, C). P = 1, with --cp 2. A cache and --cp put the n rows before each
        piece in front of it."""
        if self.cache:
            x = self.cache.extend(x)
        return x.unsqueeze(0)


class Convolution(nn.Module):
    """x_t + w_0 x_t + w_1 x_{t-1} + ... over K tokens of a document, where each channel has its own numbers w_i."""

    role = "replicated"

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.earlier = Neighbours(cfg.conv - 1)
        self.weight = nn.Parameter(torch.empty(cfg.n_embd, cfg.conv))
        self.initial = {"weight": 0.0}

    def forward(self, x: Tensor, inputs: Inputs) -> Tensor:
        wide = ops.at_least_float32(x)
        return sum(self.earlier(wide, inputs, self.weight.unbind(1)), wide).to(x.dtype)


# ---- Variants: experts


class ExpertLinear(Linear):
    """A linear layer for each of E experts, with weight (E, o, i). The rows of x (N, i) are sorted by expert, and
    `ends` (E,) says where each one's rows end. `fused` describes the matrix of one expert."""

    loop: Callable | None = None  # see ops.grouped_linear

    def __init__(self, cfg: ModelConfig, n_in: int, n_out: int, role: str, fused: Fused | None = None):
        super().__init__(cfg, n_in, n_out, role, fused)
        self.weight = nn.Parameter(torch.empty(cfg.n_expert, n_out, n_in))
        if self.bias is not None:
            self.bias = nn.Parameter(torch.empty(cfg.n_expert, n_out))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return ops.grouped_linear(x, self.weight, self.bias, ends, self.loop)


class LoadBalance(nn.Module):
    """A bias for each expert. It counts where experts are chosen, but not in their weights (arXiv:2408.15664). Its
    gradient is the expert's load over the mean load, minus 1. This is a gradient because ranks and micro-steps add up
    gradients anyway. The optimizer moves the bias against the gradient's sign."""

    role = "replicated"

    def __init__(self, n: int):
        super().__init__()
        self.bias = nn.Parameter(torch.empty(n))
        self.initial = {"bias": 0.0}

    def forward(self, weights: Tensor, load: Tensor) -> Tensor:
        """weights (N, k) of the chosen experts, unchanged; load (E,) is the number of tokens that read each expert."""
        return ops.WithGradient.apply(weights, self.bias, load / load.mean() - 1)


class Experts(MLP):
    """sum_e w_e M_e(x) over the k experts (MLPs M_e) that the router chooses for a token, plus those of all tokens.

    p (E,) is the softmax, or the sigmoid, of router(x). The experts with the largest p + bias are chosen. w is their p,
    divided by its sum if k > 1. No expert has a capacity, so no token is dropped.
    """

    linear = ExpertLinear

    def __init__(self, cfg: ModelConfig, layer: int, reader: Reader):
        if cfg.n_expert_active > cfg.n_expert:
            refuse(cfg, "n_expert_active n_expert", "a token reads some of the experts; lower it, or set more experts")
        super().__init__(cfg, layer, reader)
        self.active = cfg.n_expert_active
        self.score = torch.sigmoid if cfg.router == "sigmoid" else partial(torch.softmax, dim=-1)
        self.router = Linear(cfg, cfg.n_embd, cfg.n_expert, "router")
        self.balance = LoadBalance(cfg.n_expert) if cfg.router_balance == "bias" else None
        self.shared = None
        if cfg.n_expert_shared:
            hidden = cfg.n_expert_shared * self.down.in_features
            self.shared = MLP(cfg, layer, READER["p"]._replace(phi=reader.phi), hidden)

    def forward(self, x: Tensor, inputs: Inputs) -> Tensor:
        tokens = x.flatten(0, 1)  # (N, C)
        scores = ops.wide_linear(tokens, self.router.weight, self.router.bias)  # (N, E)
        p = self.score(scores)
        preferred = p if self.balance is None else p.detach() + self.balance.bias
        chosen = preferred.topk(self.active, sorted=False).indices  # (N, k), in no order
        weights = p.gather(1, chosen)
        if self.active > 1:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        order, ends = ops.by_expert(chosen.flatten(), p.size(1))
        if self.balance is not None:
            load = ends.diff(prepend=ends.new_zeros(1)).to(p.dtype)
            weights = self.balance(weights, load)
        token = order // self.active  # of each row
        rows = self.read(tokens.index_select(0, token), ends)  # (N k, C), sorted by expert
        rows = rows * weights.flatten().index_select(0, order)[:, None]
        y = rows.new_zeros(tokens.shape).index_add(0, token, rows).view_as(x)
        return y if self.shared is None else y + self.shared(x, inputs)


# ---- Variants: attention to an encoder, and to learned keys and values


class CrossAttention(MultiHeadAttention):
    """Attention to the memory: each query reads the tokens of the encoder."""

    def __init__(self, cfg: ModelConfig, layer: int, reader: Reader = READER["m"]):
        super().__init__(cfg, reader)
        self.make_queries(cfg)
        self.kv = self.projection(cfg, "memory_column", 1, 1)

    def project(self, x: Tensor, inputs: Inputs) -> Tensors:
        """q (B, H, T, D), k and v (B, Hkv, S, D), before norms."""

        def pool() -> Tensors:
            return self.split(self.kv(inputs.memory), 1, 1)

        if self.cache:
            k, v = self.cache.once(pool)  # because all decoded tokens read the same memory
        else:
            k, v = pool()
        return self.queries(x), k, v

    def read(self, q: Tensor, k: Tensor, v: Tensor, inputs: Inputs) -> Tensor:
        return self.attend(q, k, v, Mask(causal=False, docs=inputs.memory_docs))


class Slots(MultiHeadAttention):
    """Attention to learned keys and values, the same for all tokens (arXiv:1907.01470)."""

    def __init__(self, cfg: ModelConfig, layer: int, reader: Reader = READER["s"]):
        super().__init__(cfg, reader)
        self.make_queries(cfg)
        self.make_slots(cfg)

    def project(self, x: Tensor, inputs: Inputs) -> Tensors:
        """q (B, H, T, D), k and v (B, Hkv, M, D), before norms."""
        q = self.queries(x)
        k = self.slot_k.to(q.dtype).expand(len(q), -1, -1, -1)
        v = self.slot_v.to(q.dtype).expand(len(q), -1, -1, -1)
        return q, k, v


# ---- Variants: simplified blocks (arXiv:2311.01906)


class Gain(nn.Module):
    """A learned scalar times x."""

    role = "replicated"

    def __init__(self, initial: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1))
        self.initial = {"weight": initial}

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class NearIdentity(Linear):
    """skip x + resid W x, where W starts at 0: the reparametrised projections of arXiv:2311.01906, section 4."""

    def __init__(self, cfg: ModelConfig, role: str):
        super().__init__(cfg, cfg.n_embd, cfg.n_embd, role, bias=False)
        self.initial = {"weight": 0.0}
        self.skip = Gain(1.0)
        self.resid = Gain(0.2 if cfg.sas_value_proj == "all" else 1.0)
        self.same = with_role(nn.Identity(), role)  # because tensor parallelism cuts or pads x here like W x

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(self.same(x)) + self.resid(super().forward(x))


class ShapedAttention(Attention):
    """(alpha_h I + beta_h softmax(q_h k_h^T / sqrt(D)) - gamma_h U) x_h (arXiv:2311.01906, equation 9; 2306.17759).

    U is the same attention with q = k = 0. So the initial values, W_Q = 0 and gains of 1, make this the identity. I and
    U are never built as matrices. W_V and W_O are identities, and begin as identities where they are trained.
    """

    def make_projections(self, cfg: ModelConfig, layer: int):
        D = self.head_size
        if self.n_head * D != cfg.n_embd:
            refuse(cfg, "block n_embd n_head head_size", "heads are slices of the stream; leave head_dim out")
        self.qk = self.projection(cfg, "column", self.group, 1)
        keys_alone = Normal(cfg.init_std, zero=self.group * D, period=(self.group + 1) * D)  # W_Q = 0 in each group
        self.qk.initial = {"weight": keys_alone, "bias": 0.0}
        trained = cfg.sas_value_proj
        self.value = with_role(nn.Identity(), "column")
        self.out = with_role(nn.Identity(), "row")
        if trained == "all" or trained == "first" and layer == 0:
            self.value = NearIdentity(cfg, "column")
        if trained == "all":
            self.out = NearIdentity(cfg, "row")
        for gain in ("alpha", "beta", "gamma"):
            self.add_per_head(gain, 1.0, self.n_head)

    def project(self, x: Tensor, inputs: Inputs) -> Tensors:
        q, k = self.split(self.qk(x), self.group, 1)
        (v,) = self.split(self.value(x), 1)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        k = k.repeat_interleave(v.size(1) // k.size(1), dim=1)  # because each query head has its own value
        alpha, beta, gamma = (gain[:, None, None] for gain in (self.alpha, self.beta, self.gamma))
        uniform = ops.uniform_attention(q, k, v, self.head_size, mask, self.strips)
        y = super().attend(q, k.to(q.dtype), v.to(q.dtype), mask)
        y = alpha * v[:, :, -q.size(2) :] + beta * y - gamma * uniform  # v of the queries' own tokens
        return y.to(v.dtype)  # the gains themselves stay in float32, because 16 bits would round their steps away


def simplified(cfg: ModelConfig, layer: int) -> list[Sum]:
    """s = g_A SA(n1(s));  s = g_S s + b_FF M(n2(s)): no skip around attention (SAS, arXiv:2311.01906)."""
    attn = Sum(cfg, skip=0, gains={"attn": 1.0}, attn=ShapedAttention(cfg, layer))
    mlp = Sum(cfg, skip="learned", gains={"mlp": cfg.sas_beta_ff}, mlp=mlp_of(cfg, layer))
    return [attn, *cross(cfg, layer), mlp]


def simplified_parallel(cfg: ModelConfig, layer: int) -> list[Sum]:
    """s = g_A SA(n(s)) + b_FF M(n(s)): no skip at all (SAS-P, arXiv:2311.01906)."""
    gains = {"attn": 1.0, "mlp": cfg.sas_beta_ff}
    both = Sum(cfg, skip=0, gains=gains, attn=ShapedAttention(cfg, layer), mlp=mlp_of(cfg, layer))
    return [*cross(cfg, layer), both]


def mlp_of(cfg: ModelConfig, layer: int) -> nn.Module:
    if cfg.n_expert and layer >= cfg.n_dense_layer:
        return Experts(cfg, layer, READER["e"])
    return MLP(cfg, layer)


def cross(cfg: ModelConfig, layer: int) -> list[Sum]:
    if cfg.objective != "seq2seq":
        return []
    return [Sum(cfg, cross=CrossAttention(cfg, layer))]


BLOCK: dict[str, str | Callable[[ModelConfig, int], list[Sum]]] = {  # name -> its string, or what makes the sums
    "standard": "c,p",  # s = s + A(n1(s)); s = s + M(n2(s)) (arXiv:1706.03762, norms in front as in GPT-2)
    "parallel": "m,c+p",  # s = s + A(n(s)) + M(n(s)) (GPT-J; PaLM, arXiv:2204.02311); m if there is an encoder
    "superblock": "c+p",  # the same; if there is an encoder, a sum that reads its memory follows
    "simplified": simplified,
    "simplified_parallel": simplified_parallel,
}
ModelConfig.NAMES = {"block": BLOCK}  # set here, because flags.py cannot import this file
