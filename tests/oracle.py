"""A training run of a small GPT-2 once more, from the equations, in float64: what train.py has to log and to save.

    lines, tensors = train(flags, sources)

Nothing of the project is imported. What is drawn at random (weights, the data's order, corruption) is computed number
by number with Python's integers, and weights, gradients and the optimizers' states are float64. Only the derivatives
are autograd's, and the network is that of tests/naive.py. All loops are plain: the runs are small.

    B sequences of a micro-batch   T tokens   S tokens of a source
    C width   H query heads   K key/value heads   D = C / H
"""

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from tests.naive import Naive

WORD, GOLDEN = 2**64, 0x9E3779B97F4A7C15


def splitmix(x: int) -> int:
    """The number that splitmix64 gives in the state x (Steele, Lea and Flood 2014)."""
    x = (x + GOLDEN) % WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB % WORD
    return x ^ x >> 31


def permuted(i: int, n: int, key: int) -> int:
    """Where a permutation of 0 .. n-1 takes i: four Feistel rounds, again and again until the result is below n."""
    bits = max(1, math.ceil((n - 1).bit_length() / 2))
    while True:
        left, right = divmod(i, 2**bits)
        for r in range(4):
            left, right = right, left ^ splitmix(right ^ splitmix(key + r)) % 2**bits
        i = left * 2**bits + right
        if i < n:
            return i


def window_of(sample: int, n: int, seed: int) -> int:
    """Which of n windows a sample reads. Each epoch has a permutation of its own; evaluations take epoch -1."""
    epoch, place = divmod(sample, n)
    return permuted(place, n, splitmix((splitmix(seed) + epoch) % WORD))


def corruption_key(number: int, seed: int) -> int:
    return splitmix((splitmix((splitmix(seed % WORD) + 2**63) % WORD) + number) % WORD)


def random_numbers(key: int, n: int) -> list[int]:
    return [splitmix((key + i) % WORD) for i in range(n)]


def normal_numbers(key: str, n: int) -> list[float]:
    """Box and Muller's cosine of the two halves of each hash; the key's SHA-256 says where splitmix64 begins."""
    first = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    result = []
    for i in range(n):
        high, low = divmod(splitmix((first + i - 1) * GOLDEN % WORD), 2**32)
        result.append(math.sqrt(-2 * math.log((high + 0.5) / 2**32)) * math.cos(2 * math.pi * low / 2**32))
    return result


@dataclass
class Source:
    """Tokens by split. They are read if none are given: `name` is what the flag dataset calls their folder."""

    name: str
    weight: int = 1
    splits: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self):
        for split in {"train", "val"} - self.splits.keys():
            files = sorted(Path(self.name).glob(f"{split}_*.bin"))
            self.splits[split] = [t for file in files for t in np.fromfile(file, "<u2")[512:].tolist()]

    def windows(self, split: str, T: int) -> list[list[int]]:
        """T inputs and one more target each."""
        tokens = self.splits[split]
        return [tokens[start : start + T + 1] for start in range(0, len(tokens) - T, T)]


def turns(weights: list[int]) -> list[int]:
    """The sources of a period of samples: of those behind their share, the one whose next sample is due first."""
    period, taken, result = sum(weights), [0] * len(weights), []
    for i in range(period):
        due = {}
        for j, weight in enumerate(weights):
            if taken[j] * period < weight * (i + 1):
                due[j] = math.ceil(period * (taken[j] + 1) / weight)
        first = min(due.values())
        result.append(next(j for j in due if due[j] == first))
        taken[result[-1]] += 1
    return result


class Data:
    """What each training sample and each evaluation reads."""

    def __init__(self, f: SimpleNamespace, sources: list[Source]):
        self.f, self.sources = f, sources
        self.turns = turns([source.weight for source in sources])
        self.train = [source.windows("train", f.block_size) for source in sources]

    def sample(self, number: int) -> dict[str, list[int]]:
        source = self.turns[number % len(self.turns)]
        periods, rest = divmod(number, len(self.turns))
        before = periods * self.turns.count(source) + self.turns[:rest].count(source)
        windows = self.train[source]
        return corrupted(self.f, windows[window_of(before, len(windows), self.f.seed)], number, self.f.seed)

    def epochs(self, samples: int) -> dict[str, float]:
        drawn = [self.turns[i % len(self.turns)] for i in range(samples)]
        return {s.name: drawn.count(j) / len(self.train[j]) for j, s in enumerate(self.sources)}

    def evaluation(self, split: str) -> list[dict[str, list[int]]]:
        """All windows of val, or as many of either split as eval_iters batches hold: train's are never all."""
        windows = [window for source in self.sources for window in source.windows(split, self.f.block_size)]
        n, batches, order = len(windows), self.f.eval_iters, range(len(windows))
        if split == "train" and not batches:
            n_val = sum(len(source.windows("val", self.f.block_size)) for source in self.sources)
            batches = min(math.ceil(n_val / self.f.batch_size), 100)
        if batches:
            order = [window_of(i - n, n, self.f.seed) for i in range(min(n, batches * self.f.batch_size))]
        return [corrupted(self.f, windows[i], i, -1) for i in order]


def corrupted(f: SimpleNamespace, window: list[int], number: int, seed: int) -> dict[str, list[int]]:
    """What the model reads of a window, and what it is to predict; -1 is no target."""
    key = corruption_key(number, seed)
    return {"causal": causal, "masked": masked, "seq2seq": seq2seq}[f.objective](f, window, key)


def documents(f: SimpleNamespace, text: list[int]) -> list[int]:
    """Numbers of the documents: an end-of-text begins one. Without doc_mask all is one document."""
    return [sum(t == f.eot for t in text[: i + 1]) * f.doc_mask for i in range(len(text))]


def causal(f: SimpleNamespace, window: list[int], key: int) -> dict[str, list[int]]:
    return {"idx": window[:-1], "targets": window[1:], "docs": documents(f, window[:-1])}


def masked(f: SimpleNamespace, window: list[int], key: int) -> dict[str, list[int]]:
    """The tokens with the smallest random numbers, and never an end-of-text; a second one says what replaces it."""
    text = window[:-1]
    numbers = random_numbers(key, len(text))
    candidates = sorted((x, i) for i, x in enumerate(numbers) if text[i] != f.eot)
    idx, targets = list(text), [-1] * len(text)
    for x, i in candidates[: max(1, round(f.corrupt_ratio * len(text)))]:
        share, any_id = divmod(splitmix(x), 2**32)
        targets[i] = text[i]
        if share / 2**32 < 0.8:
            idx[i] = f.own_vocab
        elif share / 2**32 < 0.9:
            idx[i] = any_id * f.own_vocab // 2**32
    return {"idx": idx, "targets": targets, "docs": documents(f, text)}


def span_counts(f: SimpleNamespace) -> tuple[int, int]:
    """Tokens of a window to restore, and spans that they are in."""
    T = f.block_size
    m = min(max(1, round(f.corrupt_ratio * T)), T - 1)
    return m, max(1, min(round(m / f.span_length), m, T - m))


def parts(numbers: list[int], k: int) -> list[int]:
    """A whole number cut in k: of the places between its units, those with the smallest random numbers are cuts."""
    cuts = sorted(sorted(range(1, len(numbers) + 1), key=lambda place: numbers[place - 1])[: k - 1])
    return [b - a for a, b in zip([0, *cuts], [*cuts, len(numbers) + 1], strict=True)]


def seq2seq(f: SimpleNamespace, window: list[int], key: int) -> dict[str, list[int]]:
    """Walks through gap, span, gap, ..., span, gap; each span leaves a sentinel of its own in the source."""
    text, (m, k) = window[:-1], span_counts(f)
    numbers, number = random_numbers(key, len(text)), documents(f, text)
    spans, gaps = parts(numbers[: m - 1], k), parts(numbers[m - 1 :], k + 1)
    gaps[0], gaps[-1] = gaps[0] - 1, gaps[-1] - 1
    source, source_docs, answer, docs, i = [], [], [], [], 0
    for n in range(k + 1):
        source += text[i : i + gaps[n]]
        source_docs += number[i : i + gaps[n]]
        i += gaps[n]
        answer.append(f.own_vocab + n)
        if n < k:
            source.append(f.own_vocab + n)
            source_docs.append(number[i])
            answer += text[i : i + spans[n]]
            docs += [number[i]] * (spans[n] + 1)
            i += spans[n]
    return {"idx": answer[:-1], "targets": answer[1:], "docs": docs, "source": source, "source_docs": source_docs}


def shapes(f: SimpleNamespace) -> dict[str, tuple[int, ...]]:
    """The parameters, by name."""
    C, F, D = f.n_embd, 4 * f.n_embd, f.n_embd // f.n_head
    result = {"wte.weight": (f.vocab_size, C), "pos.wpe.weight": (f.block_size, C)}

    def layer(name: str, *shape: int):
        result[f"{name}.weight"] = shape
        if f.bias:
            result[f"{name}.bias"] = shape[:1]

    def blocks(prefix: str, n: int, cross: bool):
        for name in (f"{prefix}.{i}.sums" for i in range(n)):
            layer(f"{name}.0.before", C)
            layer(f"{name}.0.attn.qkv", (f.n_head + 2 * f.kv_heads) * D, C)
            layer(f"{name}.0.attn.out", C, C)
            if cross:
                layer(f"{name}.1.before", C)
                layer(f"{name}.1.cross.q", C, C)
                layer(f"{name}.1.cross.kv", 2 * f.kv_heads * D, C)
                layer(f"{name}.1.cross.out", C, C)
            last = 2 if cross else 1
            layer(f"{name}.{last}.before", C)
            layer(f"{name}.{last}.mlp.up", F, C)
            layer(f"{name}.{last}.mlp.down", C, F)

    blocks("blocks", f.n_layer, f.objective == "seq2seq")
    layer("norm", C)
    if not f.tie_weights:
        result["head.weight"] = (f.vocab_size, C)
    if f.objective == "seq2seq":
        blocks("encoder.blocks", f.n_encoder_layer, False)
        layer("encoder.norm", C)
    return result


def initial_weights(f: SimpleNamespace) -> dict[str, Tensor]:
    """N(0, 0.02), divided by the root of their number where branches are added to the stream; biases 0, gains 1.

    The number of the sum that a weight stands in is no part of the name that its random numbers depend on.
    """
    result = {}
    for name, shape in shapes(f).items():
        if len(shape) == 1:
            result[name] = torch.full(shape, float(name.endswith("weight")), dtype=torch.float64)
            continue
        summands = 1
        if name.endswith(("out.weight", "down.weight")):
            in_decoder = (3 if f.objective == "seq2seq" else 2) * f.n_layer
            summands = 2 * f.n_encoder_layer if name.startswith("encoder") else in_decoder
        before, sums, after = name.partition("sums.")
        drawn_as = before + after[2:] if sums else name  # without "sums.0."
        numbers = torch.tensor(normal_numbers(f"{f.seed} {drawn_as}", math.prod(shape)), dtype=torch.float64)
        result[name] = 0.02 / math.sqrt(summands) * numbers.view(shape)
    return result


def loss_of(f: SimpleNamespace, w: dict[str, Tensor], rows: list[dict[str, list[int]]]) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropies over the rows' targets, and the stream that the head reads."""
    read = {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}
    targets = read.pop("targets")
    net = Naive(vars(f), w)
    x = net.stream(**read)
    return net.losses(net.logits_of(x), targets).sum(), x


def n_targets(rows: list[dict[str, list[int]]]) -> int:
    return sum(t >= 0 for row in rows for t in row["targets"])


def learning_rate(f: SimpleNamespace, step: int) -> float:
    end = f.lr_decay_iters or f.max_iters
    if step < f.warmup_iters:
        return f.learning_rate * (step + 1) / (f.warmup_iters + 1)
    if f.schedule == "constant":
        return f.learning_rate
    if f.schedule == "cosine":
        done = min(1.0, (step - f.warmup_iters) / (end - f.warmup_iters))
        return f.min_lr + (f.learning_rate - f.min_lr) * (1 + math.cos(math.pi * done)) / 2
    cooldown = f.cooldown_iters or max(1, end // 5)
    left = min(max((end - step) / cooldown, 0.0), 1.0)
    return f.min_lr + (f.learning_rate - f.min_lr) * left


def logical_matrices(f: SimpleNamespace, name: str) -> list[list[int]] | None:
    """The rows of each matrix that the weight `name` of a hidden layer stores; None if it is no such weight."""
    K, G, D = f.kv_heads, f.n_head // f.kv_heads, f.n_embd // f.n_head
    layer = name.removesuffix(".weight").rpartition(".")[2]
    per_head = {"qkv": [G * D, D, D], "kv": [D, D]}.get(layer)
    if per_head is None:
        return [list(range(shapes(f)[name][0]))] if layer in ("out", "q", "up", "down") else None
    result, row = [[] for _ in per_head], 0
    for _ in range(K):
        for matrix, size in zip(result, per_head, strict=True):
            matrix += range(row, row + size)
            row += size
    return result


def newton_schulz(x: Tensor) -> Tensor:
    """Jordan's quintic, five times, on x over its Frobenius norm; the smaller of the two Gram matrices is taken."""
    if x.size(0) > x.size(1):
        return newton_schulz(x.T).T
    x = x / (x.square().sum().sqrt() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
    return x


class Optimizer:
    """AdamW (arXiv:1711.05101), and Muon for the matrices of hidden layers; `state` is by name and kind."""

    def __init__(self, f: SimpleNamespace, weights: dict[str, Tensor]):
        self.f, self.state = f, {}
        for name, w in weights.items():
            if self.muon(name):
                self.state[name] = {"momentum": torch.zeros_like(w)}
            else:
                zeros = {kind: torch.zeros_like(w) for kind in ("exp_avg", "exp_avg_sq")}
                self.state[name] = {"step": torch.zeros((), dtype=torch.float64), **zeros}

    def muon(self, name: str) -> bool:
        is_hidden = name.endswith(".weight") and logical_matrices(self.f, name) is not None
        return self.f.optimizer == "muon" and is_hidden

    def step(self, weights: dict[str, Tensor], gradients: dict[str, Tensor], lr: float):
        f = self.f
        for name, w in weights.items():
            g, state = gradients[name], self.state[name]
            rate = lr * f.muon_lr / f.learning_rate if self.muon(name) else lr
            if w.dim() == 2:
                w *= 1 - rate * f.weight_decay
            if self.muon(name):
                mu, b = f.muon_momentum, state["momentum"]
                b.copy_(mu * b + (1 - mu) * g)
                nesterov = mu * b + (1 - mu) * g
                for rows in logical_matrices(f, name):
                    scale = math.sqrt(max(1.0, len(rows) / w.size(1)))
                    w[rows] -= rate * scale * newton_schulz(nesterov[rows])
            else:
                state["step"] += 1
                t = state["step"].item()
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.copy_(f.beta1 * m + (1 - f.beta1) * g)
                v.copy_(f.beta2 * v + (1 - f.beta2) * g * g)
                w -= rate * (m / (1 - f.beta1**t)) / (torch.sqrt(v / (1 - f.beta2**t)) + 1e-8)


@dataclass
class Scaler:
    """A gradient scaler, and the number above which a scaled gradient of the stream becomes infinite."""

    scale: float
    growth_interval: int
    largest: float
    good: int = 0  # steps since the scale has changed

    def update(self, overflow: bool):
        if overflow:
            self.scale, self.good = self.scale / 2, 0
        else:
            self.good += 1
            if self.good == self.growth_interval:
                self.scale, self.good = self.scale * 2, 0


def train(
    flags: dict, sources: list[Source], infinite: tuple[int, ...] = (), scaler: Scaler | None = None
) -> tuple[list[dict], dict[str, Tensor]]:
    """The lines of metrics.jsonl without times, and the tensors of the last checkpoint. The scaler changes in place.

    infinite   steps in which the loss of a micro-batch is infinite; they are left out, as skip_nonfinite asks
    """
    f = SimpleNamespace(**flags)
    f.own_vocab, f.eot = 257, 256  # bytes and an end-of-text
    f.vocab_size = 257 + {"causal": 0, "masked": 1, "seq2seq": span_counts(f)[1] + 1}[f.objective]
    f.kv_heads = f.n_kv_head if f.attention == "gqa" else f.n_head
    data, w = Data(f, sources), initial_weights(f)
    optimizer, lines, samples, skipped = Optimizer(f, w), [], 0, 0

    def mean_loss(split: str) -> tuple[float, float | None]:
        rows = data.evaluation(split)
        nats = loss_of(f, w, rows)[0].item()
        n_bytes = sum(t != f.eot for row in rows for t in row["targets"])
        return nats / n_targets(rows), nats / math.log(2) / n_bytes if f.objective == "causal" else None

    for step in range(f.max_iters + 1):
        if step % f.eval_interval == 0 or step == f.max_iters:
            val_loss, bpb = mean_loss("val")
            figures = {"train_loss": mean_loss("train")[0], "val_loss": val_loss, "val_bpb": bpb}
            lines.append({"step": step, "kind": "eval", **figures})
        if step == f.max_iters:
            break
        loss, steepest = 0.0, 0.0
        total = {name: torch.zeros_like(x) for name, x in w.items()}
        for _ in range(f.gradient_accumulation_steps):
            rows = [data.sample(samples + i) for i in range(f.batch_size)]
            samples += f.batch_size
            leaves = {name: x.clone().requires_grad_() for name, x in w.items()}
            nats, stream = loss_of(f, leaves, rows)
            part = nats / n_targets(rows) / f.gradient_accumulation_steps
            *gradients, of_stream = torch.autograd.grad(part, [*leaves.values(), stream])
            for name, g in zip(leaves, gradients, strict=True):
                total[name] += g
            loss += part.item()
            steepest = max(steepest, of_stream.abs().max().item())
        norm = math.sqrt(sum(g.square().sum().item() for g in total.values()))
        overflow = scaler is not None and steepest * scaler.scale > scaler.largest
        lr = learning_rate(f, step)
        if step in infinite:
            skipped += 1
        elif not overflow:
            shrink = min(1.0, f.grad_clip / (norm + 1e-6)) if f.grad_clip else 1.0
            optimizer.step(w, {name: shrink * g for name, g in total.items()}, lr)
        if scaler is not None:
            scaler.update(overflow or step in infinite)
        epochs = data.epochs(samples)
        figures = {
            "loss": None if step in infinite else loss, "lr": lr,
            "grad_norm": None if overflow or step in infinite else norm, "tokens": samples * f.block_size,
            **({"epochs": epochs} if len(epochs) > 1 else {"epoch": epochs[sources[0].name]}),
            **({"skipped": skipped} if skipped else {}),
        }  # fmt: skip
        lines.append({"step": step, "kind": "train", **figures})
    states = {f"optim.{name}.{kind}": x for name, kinds in optimizer.state.items() for kind, x in kinds.items()}
    return lines, {f"model.{name}": x for name, x in w.items()} | states
