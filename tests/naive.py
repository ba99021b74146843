"""The network once more, from docs/blocks.md and the comments of the flags: logits and loss for any flags.

    net = Naive(flags, weights)         # the parameters of a Model, by name
    logits = net.logits(idx)            # (B, T, V)
    loss = net.loss(logits, targets)    # the mean over targets >= 0

Nothing of the project is imported. Heads and experts are computed one by one, with masks and scores as whole matrices.
Whoever asks for a weight says its shape.

    B sequences   T tokens   S tokens of a source   C width   H query heads   K key/value heads   D width of a head
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace

import torch
from torch import Tensor

STRINGS = {
    "standard": "c,p",
    "parallel": "m,c+p",
    "superblock": "c+p",
    "simplified": "c,p",
    "simplified_parallel": "m,c+p",
}
PLAIN = dict(  # the flags that are known here, each with the value by which it does nothing, or GPT-2's
    n_layer=12, n_head=12, n_embd=768, head_dim=0, block_size=1024, vocab_size=0, bias=False, qkv_bias=False,
    norm_bias=False, tie_weights=True, init_std=0.02, scaled_init=True, embed_scale=1.0, block="standard",
    norm="layernorm", last_norm="same", norm_placement="pre", norm_eps=1e-5, mlp="gelu", mlp_ratio=4.0, conv=0,
    sas_value_proj="first", sas_beta_ff=0.1, n_slot=0, n_expert=0, n_expert_active=2, n_expert_shared=0,
    expert_ratio=0.0, router="softmax", router_balance="bias", n_dense_layer=0, attention="mha", n_kv_head=0,
    qk_norm=False, value_embedding=False, window=0, window_pattern="", attn_softcap=0.0, fp32_residual="auto",
    pos="learned", rope_theta=1e4, rope_scaling="", pos_pattern="", rope_theta_local=1e4, objective="causal",
    n_encoder_layer=0, doc_mask=False, doc_positions=False, logit_softcap=0.0, loss_chunk=0,
)  # fmt: skip
CHOICES = {  # flag -> the names that are known here
    "norm": ["layernorm", "rmsnorm", "rmsnorm_eps_outside"],
    "last_norm": ["same", "layernorm", "rmsnorm"],
    "norm_placement": ["pre", "post", "after", "sandwich", "none"],
    "mlp": ["gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "swiglu", "geglu", "geglu_tanh"],
    "sas_value_proj": ["first", "all", "none"],
    "router": ["softmax", "sigmoid"],
    "router_balance": ["bias", "none"],
    "attention": ["mha", "gqa", "mqa"],
    "pos": ["learned", "sinusoidal", "rope", "alibi", "none"],
    "objective": ["causal", "masked", "seq2seq"],
}
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}  # the map of the gate


def knows(flags: dict) -> bool:
    """Whether these flags are computed here: a flag or a name may be new."""
    for name, value in flags.items():
        if name not in PLAIN or value not in CHOICES.get(name, [value]):
            return False
    block = flags.get("block", "standard")
    return block in STRINGS or not block.isidentifier()


def mapped(name: str, x: Tensor) -> Tensor:
    """phi of each number, for the maps that are no softmax."""
    if name == "relu":
        return x * (x > 0)
    if name == "relu2":
        return x * x * (x > 0)
    if name == "sigmoid":
        return torch.sigmoid(x)
    if name == "silu":
        return x * torch.sigmoid(x)
    if name == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    if name == "gelu_tanh":
        return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    raise KeyError(name)


def softmax(scores: Tensor, seen: Tensor) -> Tensor:
    """Over the last dimension, where seen is True."""
    return torch.softmax(scores.masked_fill(~seen, -math.inf), dim=-1)


@dataclass
class Reader:
    letter: str
    name: str  # of its parameters
    share: Fraction
    query: str
    phi: str
    out: str
    slots: str = ""


def reader_of(word: str, f: SimpleNamespace) -> Reader:
    """The reader of a word such as 3c.relu/4."""
    many, letter, switches, parts = re.fullmatch(r"(\d*)(\w)([.\w]*)/?(\d*)", word).groups()
    names = {"c": "attn", "m": "cross", "p": "mlp", "e": "experts", "s": "slots"}
    reader = Reader(letter, names[letter], Fraction(int(many or 1), int(parts or 1)), "heads", "softmax", "matrix")
    if letter in "pe":
        reader.query = "stream"
        reader.phi = f.mlp
        reader.out = "none"
    for switch in switches.split(".")[1:]:
        if switch in ("heads", "stream"):
            reader.query = switch
        elif switch in ("matrix", "none"):
            reader.out = switch
        elif switch in ("own_slots", "joint_slots"):
            reader.slots = switch
        else:
            reader.phi = switch
    return reader


def sums_of_layer(f: SimpleNamespace, layer: int, decoder_of_memory: bool) -> list[list[Reader]]:
    """The readers of each sum of a layer."""
    strings = STRINGS.get(f.block, f.block).split(";")
    string = strings[layer % len(strings)]
    if f.block in STRINGS and f.n_expert > 0 and layer >= f.n_dense_layer:
        string = string.replace("p", "e")
    sums = []
    for words in string.split(","):
        readers = [reader_of(word, f) for word in words.split("+")]
        if not decoder_of_memory:
            readers = [reader for reader in readers if reader.letter != "m"]
        if readers:
            sums.append(readers)
    letters = ["".join(reader.letter for reader in readers) for readers in sums]
    if decoder_of_memory and "m" not in "".join(letters):
        behind = [number + 1 for number, each in enumerate(letters) if "c" in each]
        sums.insert(min(behind, default=0), [reader_of("m", f)])
    number_readers(sums, f)
    return sums


def number_readers(sums: list[list[Reader]], f: SimpleNamespace):
    """Of several readers of one name, the second one is called attn2, and so on."""
    counts = {}
    for readers in sums:
        for reader in readers:
            if f.block.startswith("simplified") and reader.letter == "e":
                reader.name = "mlp"
            counts[reader.name] = counts.get(reader.name, 0) + 1
            if counts[reader.name] > 1:
                reader.name += str(counts[reader.name])


def frequencies(f: SimpleNamespace, n: int) -> tuple[list[float], float]:
    """Radians per token of RoPE's n pairs under rope_scaling, and the factor of queries and keys."""
    plain = [f.rope_theta ** (-j / n) for j in range(n)]
    kind, *numbers = f.rope_scaling.split(":")
    numbers = [float(number) for number in numbers]
    if kind == "linear":
        return [w / numbers[0] for w in plain], 1.0
    if kind == "llama3":
        factor, low, high, original = numbers + [1, 4, 8192][len(numbers) - 1 :]
        return [llama3(w, factor, low, high, original) for w in plain], 1.0
    if kind == "yarn":
        factor, original, fast, slow = numbers + [f.block_size / numbers[0], 32, 1][len(numbers) - 1 :]
        first = max(0, math.floor(pair_that_turns(fast, original, n, f.rope_theta)))
        last = min(2 * n - 1, math.ceil(pair_that_turns(slow, original, n, f.rope_theta)))
        slower = []
        for j, w in enumerate(plain):
            way = (j - first) / max(last - first, 0.001)
            way = min(max(way, 0), 1)
            slower.append((1 - way) * w + way * w / factor)
        return slower, 0.1 * math.log(factor) + 1
    return plain, 1.0


def llama3(w: float, factor: float, low: float, high: float, original: float) -> float:
    wavelength = 2 * math.pi / w
    if wavelength < original / high:
        return w
    if wavelength > original / low:
        return w / factor
    kept = (original / wavelength - low) / (high - low)
    return kept * w + (1 - kept) * w / factor


def pair_that_turns(times: float, original: float, n: int, theta: float) -> float:
    """The pair j for which theta^(-j/n) * original is so many full turns."""
    return n * math.log(original / (2 * math.pi * times)) / math.log(theta)


def alibi_slopes(n: int) -> list[float]:
    """Geometric, from 2^(-8/n) on; if n is no power of two, then every second slope of twice the power follows."""
    if math.log2(n).is_integer():
        return [2 ** (-8 * i / n) for i in range(1, n + 1)]
    power = 2 ** math.floor(math.log2(n))
    return alibi_slopes(power) + alibi_slopes(2 * power)[::2][: n - power]


def places(docs: Tensor | None, B: int, T: int) -> Tensor:
    """(B, T), the position of each token in its document."""
    if docs is None:
        return torch.arange(T).repeat(B, 1)
    rows = []
    for numbers in docs.tolist():
        rows.append([t - numbers.index(number) for t, number in enumerate(numbers)])
    return torch.tensor(rows)


@dataclass
class Text:
    """What the layers of an encoder or a decoder read besides the stream."""

    stack: str  # what the names of its parameters begin with
    idx: Tensor  # (B, T)
    docs: Tensor | None  # (B, T)
    causal: bool
    memory: Tensor | None = None  # (B, S, C)
    memory_docs: Tensor | None = None  # (B, S)

    def seen(self, window: int) -> Tensor:
        """(B, T, T), whether a query, the second dimension, sees a key."""
        B, T = self.idx.shape
        back = torch.arange(T)[:, None] - torch.arange(T)
        seen = torch.ones(B, T, T, dtype=torch.bool)
        if self.causal:
            seen = seen & (back >= 0)
        if window:
            seen = seen & (back < window) & (back > -window)
        if self.docs is not None:
            seen = seen & (self.docs[:, :, None] == self.docs[:, None, :])
        return seen

    def seen_of_memory(self) -> Tensor:
        """(B, T, S)"""
        if self.docs is None:
            return torch.ones(*self.idx.shape, self.memory.size(1), dtype=torch.bool)
        return self.docs[:, :, None] == self.memory_docs[:, None, :]


class Naive:
    def __init__(self, flags: dict, weights: dict[str, Tensor]):
        self.f = f = SimpleNamespace(**PLAIN | flags)
        self.w = weights
        self.D = f.head_dim or f.n_embd // f.n_head
        self.K = {"mha": f.n_kv_head or f.n_head, "gqa": f.n_kv_head, "mqa": 1}[f.attention]
        self.balancing = 0.0  # is zero, and its gradients are those of the biases that balance experts

    def weight(self, name: str, *shape: int) -> Tensor:
        assert self.w[name].shape == shape, f"{name} has the shape {tuple(self.w[name].shape)}, not {shape}"
        return self.w[name]

    def linear(self, name: str, x: Tensor, n_out: int, bias: bool | None = None) -> Tensor:
        y = x @ self.weight(f"{name}.weight", n_out, x.size(-1)).T
        if self.f.bias if bias is None else bias:
            y = y + self.weight(f"{name}.bias", n_out)
        return y

    # ---- from tokens to the loss

    def logits(self, idx, docs=None, source=None, source_docs=None) -> Tensor:
        return self.logits_of(self.stream(idx, docs, source, source_docs))

    def stream(self, idx, docs=None, source=None, source_docs=None) -> Tensor:
        """What the head reads."""
        memory = None
        if source is not None:
            encoder = Text("encoder.", source, source_docs, causal=False)
            memory = self.through_layers(encoder, self.f.n_encoder_layer or self.f.n_layer)
        text = Text("", idx, docs, self.f.objective != "masked", memory, source_docs)
        return self.through_layers(text, self.f.n_layer)

    def logits_of(self, x: Tensor) -> Tensor:
        head = "wte.weight" if self.f.tie_weights else "head.weight"
        return self.capped(x @ self.weight(head, self.f.vocab_size, self.f.n_embd).T, self.f.logit_softcap)

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(B, T), the cross entropy of each target; 0 where it is -1."""
        log_p = torch.log_softmax(logits, dim=-1)
        return -log_p.gather(2, targets.clamp(min=0)[:, :, None])[:, :, 0] * (targets >= 0)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.losses(logits, targets).sum() / (targets >= 0).sum() + self.balancing

    def capped(self, x: Tensor, cap: float) -> Tensor:
        return cap * torch.tanh(x / cap) if cap else x

    def through_layers(self, text: Text, n_layer: int) -> Tensor:
        s = self.embedded(text)
        if self.f.block.startswith("simplified") and self.f.norm_placement == "none":
            s = self.norm("layernorm", f"{text.stack}first_norm", s)
        for layer in range(n_layer):
            sums = sums_of_layer(self.f, layer, text.memory is not None)
            for number, readers in enumerate(sums):
                s = self.sum(text, layer, f"{text.stack}blocks.{layer}.sums.{number}", readers, s)
        if self.f.last_norm != "same":
            return self.norm(self.f.last_norm, f"{text.stack}norm", s)
        if self.f.norm_placement in ("post", "none"):
            return s
        return self.norm(self.f.norm, f"{text.stack}norm", s)

    def embedded(self, text: Text) -> Tensor:
        f = self.f
        C = f.n_embd
        B, T = text.idx.shape
        x = f.embed_scale * self.weight("wte.weight", f.vocab_size, C)[text.idx]
        t = places(text.docs if f.doc_positions else None, B, T)
        if f.pos == "learned":
            return x + self.weight("pos.wpe.weight", f.block_size, C)[t]
        if f.pos == "sinusoidal":
            w = torch.tensor([10000 ** (-2 * i / C) for i in range(C // 2)], dtype=x.dtype)
            angle = t[:, :, None] * w
            return math.sqrt(C) * x + torch.cat((torch.sin(angle), torch.cos(angle)), dim=-1)
        return x

    def norm(self, kind: str, name: str, x: Tensor) -> Tensor:
        f = self.f
        n = x.size(-1)
        weight = self.weight(f"{name}.weight", n)
        if kind == "rmsnorm":
            return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + f.norm_eps)
        if kind == "rmsnorm_eps_outside":
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # whose gradient at 0 is finite
            return weight * x / (length / math.sqrt(n) + f.norm_eps)
        x = x - x.mean(-1, keepdim=True)
        y = weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + f.norm_eps)
        if f.bias or f.norm_bias:
            y = y + self.weight(f"{name}.bias", n)
        return y

    # ---- a sum

    def sum(self, text: Text, layer: int, name: str, readers: list[Reader], s: Tensor) -> Tensor:
        """s + the readers' results, with the norms, gains and the convolution that belong to it."""
        placement = self.f.norm_placement
        letters = [reader.letter for reader in readers]
        simplified = self.f.block.startswith("simplified") and "m" not in letters
        x = s
        if placement in ("pre", "sandwich"):
            x = self.norm(self.f.norm, f"{name}.before", x)
        if self.f.conv:
            x = self.convolved(f"{name}.conv", text, x)
        parts = [self.read(text, layer, f"{name}.{reader.name}", reader, x) for reader in readers]
        if simplified and len(parts) > 1:
            parts = [self.weight(f"{name}.gains.{i}.weight", 1) * part for i, part in enumerate(parts)]
        y = sum(parts)
        if placement in ("after", "sandwich"):
            y = self.norm(self.f.norm, f"{name}.after", y)
        if simplified and len(parts) == 1:
            y = self.weight(f"{name}.gain.weight", 1) * y
        if not simplified:
            y = s + y
        elif "c" not in letters:
            y = y + self.weight(f"{name}.skip.weight", 1) * s
        if placement == "post":
            y = self.norm(self.f.norm, f"{name}.total", y)
        return y

    def convolved(self, name: str, text: Text, x: Tensor) -> Tensor:
        """x_t + w_0 x_t + w_1 x_{t-1} + ... within each document."""
        B, T = text.idx.shape
        weight = self.weight(f"{name}.weight", self.f.n_embd, self.f.conv)
        place = places(text.docs, B, T)
        rows = []
        for t in range(T):
            row = x[:, t]
            for i in range(min(self.f.conv, t + 1)):
                row = row + (place[:, t] >= i)[:, None] * weight[:, i] * x[:, t - i]
            rows.append(row)
        return torch.stack(rows, dim=1)

    def read(self, text: Text, layer: int, name: str, reader: Reader, x: Tensor) -> Tensor:
        if reader.letter == "c" and self.f.block.startswith("simplified"):
            return self.shaped(text, layer, name, x)
        if reader.letter == "c":
            return self.context(text, layer, name, reader, x)
        if reader.letter == "m":
            return self.memory(text, name, reader, x)
        if reader.letter == "e":
            return self.experts(name, reader, x)
        if reader.query == "heads":
            return self.learned_slots(name, reader, x)
        y = self.units(name, reader.phi, self.hidden(self.f.mlp_ratio * reader.share, reader.phi), x)
        if reader.out == "matrix":
            y = self.linear(f"{name}.out", y, self.f.n_embd)
        return y

    # ---- hidden units

    def hidden(self, ratio: float, phi: str, multiple: int = 1) -> int:
        """The number of hidden units: ratio times the width, of which gated kinds take 2/3, rounded."""
        width = ratio * self.f.n_embd * (2 / 3 if phi in GATED else 1)
        if self.f.n_embd % 64 == 0:
            multiple = 64
        return max(multiple, multiple * round(width / multiple))

    def units(self, name: str, phi: str, hidden: int, x: Tensor) -> Tensor:
        """W2 phi(W1 x). The rows of W1 stand as `activated` takes them."""
        scores = self.linear(f"{name}.up", x, hidden * (2 if phi in GATED else 1))
        return self.linear(f"{name}.down", self.activated(phi, scores), self.f.n_embd)

    def activated(self, phi: str, scores: Tensor) -> Tensor:
        """phi of the scores. If the width is a multiple of 64, 64 gates stand before their 64 values, else one."""
        if phi == "softmax":
            return torch.softmax(scores / math.sqrt(self.f.n_embd), dim=-1)
        if phi not in GATED:
            return mapped(phi, scores)
        unit = 64 if self.f.n_embd % 64 == 0 else 1
        pieces = scores.unflatten(-1, (-1, 2, unit))
        return (mapped(GATED[phi], pieces[..., 0, :]) * pieces[..., 1, :]).flatten(-2)

    def experts(self, name: str, reader: Reader, x: Tensor) -> Tensor:
        """The sum over the chosen experts, weighed by their scores, and over the shared ones."""
        f = self.f
        chosen, weights = self.routed(name, x)
        if f.router_balance == "bias":
            bias = self.weight(f"{name}.balance.bias", f.n_expert)
            load = chosen.sum((0, 1)).to(x.dtype)
            self.balancing = self.balancing + ((bias - bias.detach()) * (load / load.mean() - 1)).sum()
        ratio = f.expert_ratio or f.mlp_ratio / (f.n_expert_active + f.n_expert_shared)
        hidden = self.hidden(ratio * reader.share, reader.phi, multiple=8)
        rows = hidden * (2 if reader.phi in GATED else 1)
        up = self.weight(f"{name}.up.weight", f.n_expert, rows, f.n_embd)
        down = self.weight(f"{name}.down.weight", f.n_expert, f.n_embd, hidden)
        y = torch.zeros_like(x)
        for e in range(f.n_expert):
            scores = x @ up[e].T
            if f.bias:
                scores = scores + self.weight(f"{name}.up.bias", f.n_expert, rows)[e]
            result = self.activated(reader.phi, scores) @ down[e].T
            if f.bias:
                result = result + self.weight(f"{name}.down.bias", f.n_expert, f.n_embd)[e]
            y = y + weights[:, :, e, None] * result
        if f.n_expert_shared:
            y = y + self.units(f"{name}.shared", reader.phi, f.n_expert_shared * hidden, x)
        return y

    def routed(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, E), whether a token reads an expert, and how its result is weighed."""
        f = self.f
        scores = self.linear(f"{name}.router", x, f.n_expert)
        if f.router == "softmax":
            p = torch.softmax(scores, dim=-1)
        else:
            p = mapped("sigmoid", scores)
        preferred = p.detach()
        if f.router_balance == "bias":
            preferred = preferred + self.weight(f"{name}.balance.bias", f.n_expert).detach()
        last = preferred.sort(dim=-1, descending=True).values[:, :, f.n_expert_active - 1, None]
        chosen = preferred >= last
        weights = p * chosen
        if f.n_expert_active > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        return chosen, weights

    # ---- heads

    def context(self, text: Text, layer: int, name: str, reader: Reader, x: Tensor) -> Tensor:
        """Attention to the tokens of the text, perhaps with slots beside them."""
        D = self.D
        H, K = self.heads_of(reader)
        of_projections = self.f.bias or self.f.qkv_bias
        if reader.query == "heads":
            rows = self.linear(f"{name}.qkv", x, (H + 2 * K) * D, of_projections).unflatten(-1, (K, H // K + 2, D))
            q = rows[:, :, :, :-2].flatten(2, 3)  # (B, T, H, D)
        else:
            rows = self.linear(f"{name}.kv", x, 2 * K * D, of_projections).unflatten(-1, (K, 2, D))
            q = x.unflatten(-1, (H, D))
        k = rows[:, :, :, -2]  # (B, T, K, D)
        v = rows[:, :, :, -1]
        if self.f.value_embedding and layer % 2 == 0:
            of_token = self.weight(f"{name}.of_token", K, self.f.vocab_size, D)
            v = v + of_token[:, text.idx].permute(1, 2, 0, 3)
        q = self.head_norm(f"{name}.q_norm", q)
        k = self.head_norm(f"{name}.k_norm", k)
        seen = text.seen(self.window(layer))
        bias = self.position_bias(layer, text)
        slot_k = slot_v = None
        if reader.slots:
            slot_k, slot_v = self.slots(name, reader)
        heads = []
        for h in range(H):
            g = h // (H // K)
            scores = self.scores(self.turned(layer, q[:, :, h]), self.turned(layer, k[:, :, g])) + bias[h]
            if reader.slots == "joint_slots":
                of_slots = self.scores(self.turned(layer, q[:, :, h]), slot_k[g])
                always = torch.ones_like(of_slots, dtype=torch.bool)
                weights = softmax(torch.cat((of_slots, scores), -1), torch.cat((always, seen), -1))
                M = of_slots.size(-1)
                heads.append(weights[:, :, :M] @ slot_v[g] + weights[:, :, M:] @ v[:, :, g])
                continue
            y = self.weights(reader.phi, scores, seen) @ v[:, :, g]
            if reader.slots == "own_slots":
                y = y + torch.softmax(self.scores(q[:, :, h], slot_k[g]), -1) @ slot_v[g]
            heads.append(y)
        return self.written(name, reader, heads)

    def memory(self, text: Text, name: str, reader: Reader, x: Tensor) -> Tensor:
        """Attention to what the encoder has made of the source."""
        H, K = self.heads_of(reader)
        of_projections = self.f.bias or self.f.qkv_bias
        q = self.head_norm(f"{name}.q_norm", self.queries(name, reader, x))
        kv = self.linear(f"{name}.kv", text.memory, 2 * K * self.D, of_projections).unflatten(-1, (K, 2, self.D))
        k = self.head_norm(f"{name}.k_norm", kv[:, :, :, 0])
        v = kv[:, :, :, 1]
        heads = []
        for h in range(H):
            g = h // (H // K)
            weights = self.weights(reader.phi, self.scores(q[:, :, h], k[:, :, g]), text.seen_of_memory())
            heads.append(weights @ v[:, :, g])
        return self.written(name, reader, heads)

    def learned_slots(self, name: str, reader: Reader, x: Tensor) -> Tensor:
        """Attention to learned keys and values. A gated map has all keys of its gates first."""
        H, K = self.heads_of(reader)
        q = self.head_norm(f"{name}.q_norm", self.queries(name, reader, x))
        slot_k, slot_v = self.slots(name, reader)
        heads = []
        for h in range(H):
            g = h // (H // K)
            scores = self.scores(q[:, :, h], slot_k[g])
            if reader.phi == "softmax":
                weights = torch.softmax(scores, -1)
            elif reader.phi in GATED:
                gate, value = scores.chunk(2, -1)
                weights = mapped(GATED[reader.phi], gate) * value
            else:
                weights = mapped(reader.phi, scores)
            heads.append(weights @ slot_v[g])
        return self.written(name, reader, heads)

    def shaped(self, text: Text, layer: int, name: str, x: Tensor) -> Tensor:
        """(alpha I + beta softmax(q k^T / sqrt(D)) - gamma U) x, for each head's slice of x."""
        f = self.f
        H, K, D = f.n_head, self.K, self.D
        rows = self.linear(f"{name}.qk", x, (H + K) * D, f.bias or f.qkv_bias).unflatten(-1, (K, H // K + 1, D))
        q = self.head_norm(f"{name}.q_norm", rows[:, :, :, :-1].flatten(2, 3))
        k = self.head_norm(f"{name}.k_norm", rows[:, :, :, -1])
        trained = f.sas_value_proj
        if trained == "all" or trained == "first" and layer == 0:
            x = self.near_identity(f"{name}.value", x)
        v = x.unflatten(-1, (H, D))
        seen = text.seen(self.window(layer))
        bias = self.position_bias(layer, text)
        alpha = self.weight(f"{name}.alpha", H)
        beta = self.weight(f"{name}.beta", H)
        gamma = self.weight(f"{name}.gamma", H)
        identity = torch.eye(x.size(1), dtype=x.dtype)
        heads = []
        for h in range(H):
            scores = self.scores(self.turned(layer, q[:, :, h]), self.turned(layer, k[:, :, h // (H // K)]))
            softened = softmax(scores + bias[h], seen)
            uniform = softmax(torch.zeros_like(scores) + bias[h], seen)
            heads.append((alpha[h] * identity + beta[h] * softened - gamma[h] * uniform) @ v[:, :, h])
        y = torch.cat(heads, -1)
        return self.near_identity(f"{name}.out", y) if trained == "all" else y

    def near_identity(self, name: str, x: Tensor) -> Tensor:
        W = self.weight(f"{name}.weight", self.f.n_embd, self.f.n_embd)
        return self.weight(f"{name}.skip.weight", 1) * x + self.weight(f"{name}.resid.weight", 1) * (x @ W.T)

    def heads_of(self, reader: Reader) -> tuple[int, int]:
        return int(reader.share * self.f.n_head), int(reader.share * self.K)

    def queries(self, name: str, reader: Reader, x: Tensor) -> Tensor:
        """(B, T, H, D)"""
        H, _ = self.heads_of(reader)
        if reader.query == "heads":
            x = self.linear(f"{name}.q", x, H * self.D, self.f.bias or self.f.qkv_bias)
        return x.unflatten(-1, (H, self.D))

    def head_norm(self, name: str, x: Tensor) -> Tensor:
        return self.norm("rmsnorm", name, x) if self.f.qk_norm else x

    def slots(self, name: str, reader: Reader) -> tuple[Tensor, Tensor]:
        """Keys (K, M or 2 M, D) and values (K, M, D). By default they have as many parameters as the MLP."""
        f = self.f
        _, K = self.heads_of(reader)
        keys = 2 if reader.phi in GATED else 1
        M = f.n_slot
        if M == 0:
            phi = f.mlp if reader.phi == "softmax" else reader.phi
            matrices = 3 if phi in GATED else 2
            of_mlp = matrices * f.n_embd * self.hidden(f.mlp_ratio * reader.share, phi)
            M = max(1, round(of_mlp / ((keys + 1) * K * self.D)))
        slot_k = self.weight(f"{name}.slot_k", K, keys * M, self.D)
        return self.head_norm(f"{name}.k_norm", slot_k), self.weight(f"{name}.slot_v", K, M, self.D)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return self.capped(q @ k.mT / math.sqrt(self.D), self.f.attn_softcap)

    def weights(self, phi: str, scores: Tensor, seen: Tensor) -> Tensor:
        """phi over the n tokens that are seen: a map is divided by n, and the sigmoid is that of the score - log n."""
        if phi == "softmax":
            return softmax(scores, seen)
        n = seen.sum(-1, keepdim=True).to(scores.dtype)
        if phi == "sigmoid":
            return seen * mapped(phi, scores - torch.log(n))
        return seen * mapped(phi, scores) / n

    def written(self, name: str, reader: Reader, heads: list[Tensor]) -> Tensor:
        y = torch.cat(heads, -1)
        return self.linear(f"{name}.out", y, self.f.n_embd) if reader.out == "matrix" else y

    # ---- windows and positions of a layer

    def window(self, layer: int) -> int:
        pattern = self.f.window_pattern or "S"
        return self.f.window if pattern[layer % len(pattern)] == "S" else 0

    def position_of(self, layer: int) -> str:
        pattern = self.f.pos_pattern or "G"
        return pattern[layer % len(pattern)]

    def turned(self, layer: int, x: Tensor) -> Tensor:
        """x (B, T, D) by RoPE: the pair (x_j, x_{j + D/2}) is turned by an angle that grows with the position."""
        letter = self.position_of(layer)
        if self.f.pos != "rope" or letter == "N":
            return x
        n = self.D // 2
        if letter == "L":
            w = [self.f.rope_theta_local ** (-j / n) for j in range(n)]
            factor = 1.0
        else:
            w, factor = frequencies(self.f, n)
        angle = torch.arange(x.size(1))[:, None] * torch.tensor(w, dtype=x.dtype)
        cos = torch.cos(angle)
        sin = torch.sin(angle)
        one = x[:, :, :n]
        other = x[:, :, n:]
        return factor * torch.cat((one * cos - other * sin, one * sin + other * cos), dim=-1)

    def position_bias(self, layer: int, text: Text) -> Tensor:
        """ALiBi's (H, T, T), or zeros."""
        T = text.idx.size(1)
        H = self.f.n_head
        slopes = [0.0] * H
        if self.f.pos == "alibi" and self.position_of(layer) == "G":
            slopes = alibi_slopes(H)
        back = torch.arange(T)[:, None] - torch.arange(T)
        return -torch.tensor(slopes, dtype=torch.float64).view(H, 1, 1) * back
