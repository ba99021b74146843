"""muP (arXiv:2203.03466) against the package `mup` (pip install --no-deps mup), against its rules
written here, and by a coordinate check."""

import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import refused

from configurator import Config
from engine import optim
from engine.interchange.families import choose
from model import Model, ModelConfig
from tools import coords

BASE, WIDTH, HEADS, T, V = 16, 64, 2, 12, 29
SIZES = dict(n_layer=2, n_head=HEADS, block_size=T, vocab_size=V, norm="layernorm", pos="learned")
LR, DECAY = 0.01, 0.1


def ours(width: int, base: int, **flags) -> tuple[Model, Config]:
    cfg = Config(**SIZES | flags, n_embd=width, mup_base_width=base, learning_rate=LR, weight_decay=DECAY)
    return Model(cfg, seed=3).double(), cfg


def batches(n: int = 3) -> torch.Tensor:
    return torch.randint(V, (n, 4, T + 1), generator=torch.Generator().manual_seed(0))


def train(model: nn.Module, optimizer, loss) -> list[float]:
    losses = []
    for batch in batches():
        model.zero_grad()
        losses.append(loss(batch[:, :-1], batch[:, 1:]))
        losses[-1].backward()
        optimizer.step()
    return [each.item() for each in losses]


class Plain(nn.Module):
    """A transformer of plain layers, whose parameters have the names and shapes of Model's. factor (head) divides the
    head's input unless the head does so itself."""

    def __init__(self, width: int, head=nn.Linear, factor: float = 1.0):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, width), nn.Embedding(T, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "norm_1": nn.LayerNorm(width, bias=False), "qkv": nn.Linear(width, 3 * width, bias=False),
                "out": nn.Linear(width, width, bias=False), "norm_2": nn.LayerNorm(width, bias=False),
                "up": nn.Linear(width, 4 * width, bias=False), "down": nn.Linear(4 * width, width, bias=False),
            })
            for _ in range(2)
        )  # fmt: skip
        self.norm, self.head, self.factor = nn.LayerNorm(width, bias=False), head(width, V, bias=False), factor

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe.weight
        for layer in self.layers:
            heads = layer["qkv"](layer["norm_1"](x)).unflatten(-1, (HEADS, 3, -1)).permute(3, 0, 2, 1, 4)
            scale = math.sqrt(BASE // HEADS) / (x.size(-1) // HEADS)  # sqrt(base d) / d
            y = F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale)
            x = x + layer["out"](y.transpose(1, 2).flatten(2))
            x = x + layer["down"](F.gelu(layer["up"](layer["norm_2"](x))))
        return F.cross_entropy(self.head(self.norm(x) / self.factor).flatten(0, 1), targets.flatten())

    def load(self, model: Model):
        """Take the weights of `model`, in its order."""
        own, theirs = self.in_order(), self.of(model)
        assert [x.shape for x in own] == [x.shape for x in theirs]
        for x, y in zip(own, theirs, strict=True):
            x.data.copy_(y)

    def in_order(self) -> list[nn.Parameter]:
        hidden = [p for layer in self.layers for p in layer.parameters()]
        return [self.wte.weight, self.wpe.weight, *hidden, self.norm.weight, self.head.weight]

    @staticmethod
    def of(model: Model) -> list[nn.Parameter]:
        layers = []
        for block in model.blocks:
            (attention, mlp) = block.sums
            layers += [attention.before, attention.attn.qkv, attention.attn.out, mlp.before, mlp.mlp.up, mlp.mlp.down]
        return [m.weight for m in (model.wte, model.pos.wpe, *layers, model.norm, model.head)]


def by_rule(tied: bool):
    """The plain transformer and AdamW by muP's table 8, written here."""
    m = WIDTH / BASE
    model = Plain(WIDTH, factor=m).double()
    if tied:
        model.head.weight = model.wte.weight
    params = dict(model.named_parameters())
    names = ("qkv", "out", "up", "down")
    hidden = [p for name, p in params.items() if name.split(".")[-2] in names]
    vectors = [p for p in params.values() if p.dim() == 1]
    rest = [p for p in params.values() if p.dim() == 2 and not any(p is h for h in hidden)]
    groups = [
        {"params": hidden, "lr": LR / m, "weight_decay": DECAY * m},
        {"params": rest, "weight_decay": DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))


def by_package(tied: bool):
    """The same by the authors' package."""
    mup = pytest.importorskip("mup", reason="pip install --no-deps mup")
    shared = lambda width, *_, bias: mup.MuReadout(width, V, bias=bias)  # noqa: E731
    model, base, delta = (Plain(width, shared) for width in (WIDTH, BASE, 2 * BASE))
    if tied:
        for each in (model, base, delta):
            each.head = mup.MuSharedReadout(each.wte.weight, bias=False)
    mup.set_base_shapes(model, base, delta=delta, rescale_params=False)
    model.double()
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return model, mup.MuAdamW(groups, lr=LR, betas=(0.9, 0.95))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("reference", [by_rule, by_package])
def test_weights_after_three_steps_are_those_of_the_reference(reference, tied):
    model, cfg = ours(WIDTH, BASE, tie_weights=tied)
    theirs, theirs_optimizer = reference(tied)
    theirs.load(model)
    optimizer = optim.build(model, cfg)
    optimizer.set_lr(LR)
    start = [p.detach().clone() for p in Plain.of(model)]
    got, expected = train(model, optimizer, model), train(theirs, theirs_optimizer, theirs)
    assert got == pytest.approx(expected, rel=1e-9)
    for before, x, y in zip(start, Plain.of(model), theirs.in_order(), strict=True):
        assert (x - y).abs().max() < 1e-9 < (x - before).abs().max()


@pytest.mark.parametrize("flags", [{}, {"optimizer": "muon"}, {"head_dim": 8, "tie_weights": False}])
def test_at_the_base_width_nothing_changes(flags):
    runs = []
    for base in (0, WIDTH):
        model, cfg = ours(WIDTH, base, **flags)
        optimizer = optim.build(model, cfg)
        optimizer.set_lr(LR)
        runs.append((train(model, optimizer, model), [*model.parameters()]))
    (losses, weights), (same_losses, same_weights) = runs
    assert losses == same_losses and all(map(torch.equal, weights, same_weights))


def test_initial_weights_and_rates_of_every_role():
    flags = dict(n_expert=4, mlp="swiglu", attn_gate="head", attention="gqa", n_kv_head=1, tie_weights=False)
    (with_mup, cfg), (without, _) = ours(WIDTH, BASE, **flags), ours(WIDTH, 0, **flags)
    optimizer, m = optim.build(with_mup, cfg), WIDTH / BASE
    optimizer.set_lr(LR)
    rate = {p: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    names = dict(without.named_parameters())
    for name, p in with_mup.named_parameters():
        vector, few = p.dim() == 1, "router" in name or "gate" in name
        fixed = vector or name.split(".")[0] in ("wte", "pos", "head")  # their inputs, or these times the factor, are
        factor = 1 if fixed else m if few else math.sqrt(m)
        torch.testing.assert_close(p * factor, names[name], msg=name)
        if "balance" not in name:
            assert rate[p] == ((LR, DECAY * (not vector)) if fixed else (LR / m, DECAY * m)), name


def test_scores_follow_the_size_of_heads():
    """The base model has the same number of heads; with head_dim, they have the same size instead."""
    for flags, scale in (({}, math.sqrt(BASE // HEADS) / (WIDTH // HEADS)), ({"head_dim": 8}, 8**-0.5)):
        (pool, *_) = [m.attn for m in ours(WIDTH, BASE, **flags)[0].modules() if hasattr(m, "attn")]
        assert pool.q_scale * pool.head_dim**-0.5 == pytest.approx(scale)


BLOCKS = {
    "standard": [],
    "qk norm, rmsnorm": ["--norm=rmsnorm", "--qk_norm=True", "--mlp=relu2", "--head_dim=16"],
    "parallel": ["--block=parallel"],
    "grouped": ["--block=superblock", "--layer=c/2+p/2,c/2+p/2", "--n_group=2"],
    "experts": ["--n_expert=4", "--norm=rmsnorm"],
    "seq2seq": ["--objective=seq2seq"],
    "muon": ["--optimizer=muon"],
}


@pytest.mark.parametrize("name", BLOCKS)
def test_activations_keep_their_size(name):
    """After four steps, every kind of layer has moved about as far in models of 64 to 256; without muP, some layer has
    moved farther in the wide ones, where the optimizer is AdamW."""
    flags = [f"--{k}={v}" for k, v in (SIZES | dict(n_head=4, block_size=32, pos="rope")).items()]
    cfg = coords.parse(Config, [*flags, "--batch_size=4", "--learning_rate=0.01", *BLOCKS[name]])
    widths = (64, 128, 256)
    slopes = {kind: slope for kind, (_, slope) in coords.check(cfg, 64, widths).items()}
    assert slopes.keys() >= {"embedding", "attn", "last norm", "logits"}
    assert max(slopes.values()) < 0.7 and abs(slopes["logits"]) < 0.25 and min(slopes.values()) > -0.7, slopes
    if name != "muon":
        without = {kind: slope for kind, (_, slope) in coords.check(cfg, 0, widths).items()}
        assert without["logits"] > 0.3 and max(without.values()) > 1.2, without


def test_picture_and_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(coords, "WIDTHS", (16, 32))
    flags = [f"--{name}={value}" for name, value in SIZES.items() if name != "vocab_size"]
    coords.main([*flags, "--batch_size=2", f"--out_dir={tmp_path}"])
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split() == ["16", "32", "slope"] and rows[1] == "without muP"
    assert sum(row.split()[0] == "logits" for row in rows) == 2
    assert (tmp_path / "coords.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "flags",
    [["--pos=sinusoidal"], ["--attn_diff=True"], ["--block=superblock", "--layer=c.own_slots,p"],
     ["--block=superblock", "--layer=c,p.softmax"], ["--mup_base_width=-1"]],
)  # fmt: skip
def test_refused(flags, capsys):
    import train as program

    line = refused(program.main, ["--mup_base_width=64", *flags], capsys)
    assert "mup_base_width" in line and (flags[-1].partition("=")[2] in line)


def test_export_names_the_flag():
    with pytest.raises(ValueError, match="mup_base_width=16.*--remote-code"):
        choose(ModelConfig(**SIZES, n_embd=WIDTH, mup_base_width=BASE))
