"""Whatever a network has, each layout of the ranks computes its gradients: one step in float64 against one process."""

import json
import random
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import model as M
from configurator import parse, try_flags
from engine.config import Config
from engine.parallel.ranks import check_flags, join
from engine.parallel.sharded import ShardedModel
from flags import unused
from tests.helpers import TINY
from tests.models import USUAL, draw, jitter
from tests.ranks import launch, part_of

FLAGS = [*TINY, "--n_layer=4", "--n_head=4", "--vocab_size=30", "--block_size=16", "--batch_size=2"]
LAYOUTS = {  # of two ranks
    "ddp": "--parallel=ddp", "fsdp": "--parallel=fsdp", "tp": "--tp=2", "cp": "--cp=2", "pp": "--pp=2"
}  # fmt: skip
ENCODERS = [
    "--objective=masked --doc_mask=True --doc_positions=True --norm_bias=True",
    "--objective=seq2seq --n_encoder_layer=2 --corrupt_ratio=0.25 --span_length=1.0",
]
ROWS = [  # in which each flag of the network has an effect
    "--bias=True --norm_placement=sandwich --pos=sinusoidal --tie_weights=False --embed_scale=3 --init_std=0.05",
    "--block=parallel --norm=rmsnorm --pos=rope --attention=gqa --n_kv_head=2 --value_embedding=True",
    "--n_embd=48 --mlp=swiglu --qk_norm=True --window=5 --window_pattern=SL --norm_eps=0.001 --head_dim=6 --conv=4",
    "--block=simplified --pos=alibi --sas_value_proj=all --attn_softcap=3 --mlp_ratio=3",
    "--block=simplified_parallel --sas_beta_ff=0.3 --norm_placement=none --last_norm=rmsnorm",
    "--block=c/2+p/2,c.stream.relu+s.gelu/2,p.matrix --n_slot=4 --conv=3 --pos=rope",
    "--block=c.own_slots --pos=rope --pos_pattern=LNG --rope_theta=99 --rope_theta_local=7",
    "--pos=rope --rope_scaling=llama3:8:1:4:8 --norm_placement=after --norm=rmsnorm_eps_outside --qkv_bias=True",
    "--n_expert=4 --n_expert_active=1 --n_expert_shared=1 --n_dense_layer=1 --expert_ratio=1.5 --router=sigmoid",
    "--block=c+e,p/2 --n_expert=3 --router_balance=none --scaled_init=False",
    "--logit_softcap=5 --loss_chunk=7 --norm_placement=post --doc_mask=True",
    *ENCODERS,
]
APART = {  # flags without a row
    *"n_layer n_head n_embd block_size vocab_size".split(),  # which all rows have
    "dropout",  # test_every_rank_drops_something_else: ranks draw other masks than one process
    "fp32_residual",  # has no effect in float64
}
V = 30
SIZES = {"n_layer": 4, "n_head": 4, "n_embd": 16, "block_size": 16, "vocab_size": V}


def new_rows() -> list[str]:
    """A row for each flag of the network that no row above names, such as one of yours."""
    named = {word[2:].partition("=")[0] for row in ROWS for word in row.split()} | APART
    return [plainest_row(field.name) for field in fields(M.ModelConfig) if field.name not in named]


def plainest_row(name: str) -> str:
    """A row in which this flag has an effect, beside as few others as possible."""
    for seed in range(1000):
        flags = in_effect(draw(random.Random(seed)))
        if name in flags:
            for other in sorted(flags.keys() - {name}):
                fewer = in_effect({key: value for key, value in flags.items() if key != other})
                if name in fewer:
                    flags = fewer
            return " ".join(f"--{key}={value}" for key, value in flags.items())
    pytest.fail(f"{name} has no values to try; name some in `numbers` of tests/models.py")


def in_effect(flags: dict) -> dict:
    """Those of the flags that are not as usual and have an effect beside the others; none if no network has them."""
    flags = {key: value for key, value in flags.items() if value != USUAL[key]}
    cfg = object.__new__(M.ModelConfig)
    vars(cfg).update(USUAL | flags)
    if idle := flags.keys() & {*unused(cfg)}:
        return in_effect({key: value for key, value in flags.items() if key not in idle})
    try:
        try_flags(M.ModelConfig(**SIZES, **flags))
    except ValueError:
        return {}
    return flags


def micro_batches(cfg: Config) -> list[dict[str, torch.Tensor]]:
    """Two, as arguments of Model.forward: texts of a few documents, with targets that are left out. The second one has
    so few that not every piece of --cp has one."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for n in (16, 2):
        idx, targets, source = torch.randint(V, (3, 2, 16), generator=draw)
        targets[0, 3:6] = -1
        targets[:, n:] = -1
        batch = {"idx": idx, "targets": targets}
        if cfg.objective == "seq2seq":
            batch["source"] = source
        if cfg.doc_mask:
            batch["docs"] = torch.tensor([[0] * 5 + [1] * 8 + [2] * 3, [0] * 9 + [1] * 6 + [2]])
        found.append(batch)
    return found


def alone(flags: list[str]) -> tuple[list[dict], float, dict[str, torch.nn.Parameter]]:
    """The micro-batches, their loss in one process, and the parameters with their gradients."""
    cfg = parse(Config, [*FLAGS, *flags])
    given = micro_batches(cfg)
    model = M.Model(cfg, cfg.seed)
    jitter(model)
    model.n_targets = sum((batch["targets"] >= 0).sum() for batch in given) / 2
    loss = sum(model(**batch) / 2 for batch in given)
    loss.backward()
    return given, loss.item(), dict(model.named_parameters())


JOINED = {}  # layout -> the groups of its ranks, which are those of all rows


def difference(flags: list[str], layout: str, given: list[dict], loss: float, expected: dict) -> str:
    """What differs on this rank from `alone`, or why the layout is refused."""
    cfg = parse(Config, [*FLAGS, *flags, layout])
    try:
        check_flags(cfg)
        if layout not in JOINED:
            JOINED[layout] = join(cfg)
        ranks = JOINED[layout]
        sharded = ShardedModel(cfg, ranks)
        sharded.fill({name: p.detach() for name, p in expected.items()})
        n = 2 // ranks.data_size
        mine = given[ranks.data_rank * n :][:n]
        sharded.equal_targets = False  # the numbers of targets
        found = sharded.mean(sharded.backward(iter(mine), n, torch.amp.GradScaler("cpu", enabled=False)))
    except ValueError as error:
        return f"refused: {error}"
    wrong = []
    if not abs(found - loss) < 1e-9:
        wrong.append(f"loss {found} instead of {loss}")
    for name, p in sharded.model.named_parameters():
        part = sharded.slice_of(name, p.grad)
        mine = part_of(expected[name].grad, part)
        if p in sharded.loads:  # of which the sign counts
            part.tensor.sign_()
            mine = mine.sign()
        error = (part.tensor - mine).abs().max() / expected[name].grad.abs().max()
        if not error < 1e-9:
            wrong.append(f"{name} by {error:.1e}")
    return ", ".join(wrong)


def differences(rows: list[tuple[str, str]], folder: Path):
    """Writes what differs in each layout, for rows of (flags, name of one of HACKS or nothing)."""
    torch.set_default_dtype(torch.float64)
    found = {name: {} for name in LAYOUTS}
    for row, hack in rows:
        with pytest.MonkeyPatch.context() as patch:
            if hack:
                HACKS[hack](patch)
            reference = alone(row.split())
            for name, layout in LAYOUTS.items():
                found[name][hack or row] = difference(row.split(), layout, *reference)
    (folder / f"found {dist.get_rank()}.json").write_text(json.dumps(found))


def on_all_layouts(rows: list[tuple[str, str]], folder: Path) -> dict[str, dict[str, str]]:
    """Layout -> row or hack -> what the first of two ranks finds, or the second."""
    launch(2, differences, folder, rows, folder)
    first, second = (json.loads((folder / f"found {rank}.json").read_text()) for rank in range(2))
    for layout, found in first.items():
        for row, what in found.items():
            found[row] = what or second[layout][row]
    return first


def test_every_flag_has_its_gradients_on_every_layout(tmp_path):
    found = on_all_layouts([(row, "") for row in ROWS], tmp_path)
    for layout in ("cp", "pp"):
        for row in ENCODERS:
            if (layout, row) != ("pp", ENCODERS[0]):
                assert f"refused: {layout}=2 (command line) with objective=" in found[layout].pop(row)
    for layout in LAYOUTS:
        assert not any(found[layout].values()), f"{layout}: {found[layout]}"


def test_a_new_flag_has_its_gradients_on_every_layout_or_is_refused_by_name(tmp_path):
    """In make quick too, where it takes no time as long as the rows above name all flags."""
    rows = new_rows()
    if not rows:
        return
    for layout, found in on_all_layouts([(row, "") for row in rows], tmp_path).items():
        for row, what in found.items():
            assert not what or what.startswith("refused: "), f"{LAYOUTS[layout]} {row}: {what}"


# ---- What a user may add to the network


def keys_of_pairs(patch):
    """Every second layer reads the keys and values of the layer before it."""
    init = M.Attention.__init__
    project = M.Attention.project

    def numbered(self, cfg, layer, *reader):
        init(self, cfg, layer, *reader)
        self.pair = f"pair {layer // 2}"

    def shared(self, x, inputs):
        q, k, v = project(self, x, inputs)
        return q, inputs.shared.setdefault(f"k, {self.pair}", k), inputs.shared.setdefault(f"v, {self.pair}", v)

    patch.setattr(M.Attention, "__init__", numbered)
    patch.setattr(M.Attention, "project", shared)


def z_loss(patch):
    """The squared logarithms of the normalisers are a part of the loss, with a learned factor in the head."""
    init = M.Linear.__init__
    loss = M.Model.loss

    def made(self, cfg, n_in, n_out, role, *given, **more):
        init(self, cfg, n_in, n_out, role, *given, **more)
        if role == "vocab":
            self.factor = M.Gain(0.5)

    def added(self, x, targets):
        return loss(self, x, targets) + self.head.factor(self.logits(x).logsumexp(-1).square().mean())[0]

    patch.setattr(M.Linear, "__init__", made)
    patch.setattr(M.Model, "loss", added)


def shifted_targets(patch):
    """Each token also predicts the target of the next one."""
    loss = M.Model.loss
    later = lambda self, x, targets: loss(self, x, targets) + loss(self, x[:, :-1], targets[:, 1:])  # noqa: E731
    patch.setattr(M.Model, "loss", later)


HACKS = {hack.__name__: hack for hack in (keys_of_pairs, z_loss, shifted_targets)}
EXPECTED = {  # where a hack does not compute what one process does: what is said
    ("pp", "keys_of_pairs"): "refused: pp=2 hands on only the stream, and a layer hands k, pair 0",
    ("cp", "shifted_targets"): "loss ",
}


def test_what_a_user_adds_is_right_or_refused_or_seen(tmp_path):
    for layout, found in on_all_layouts([("--pos=rope", hack) for hack in HACKS], tmp_path).items():
        for hack, what in found.items():
            said = EXPECTED.get((layout, hack), "")
            assert what.startswith(said) and bool(what) == bool(said), f"{layout}, {hack}: {what}"
