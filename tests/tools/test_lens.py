"""lens.py: units against contextual_mlp, which has tests of its own, and the model without them; and the command."""

import pytest
import torch

import model as M
from data.tokenizer import ByteTokenizer, CharTokenizer
from engine import weights
from tests.helpers import refused
from tests.models import build
from tests.tools.test_contextual import sharp, text
from tools import lens
from tools.lens import read_units


def tokenizer_of(n: int) -> CharTokenizer:
    return CharTokenizer("abcdefghijklmnopqrstuvwxyz"[:n])


@pytest.mark.parametrize("kind, softmaxes", [("own", 2), ("joint", 1)])
def test_shares_are_weights_of_attention(kind, softmaxes):
    """Slots with a softmax of their own have shares of it; the units of the largest shares are shown."""
    net = build(block=f"c.{kind}_slots", n_slot=3)
    with torch.no_grad():
        net.blocks[1].sums[0].attn.slot_k.mul_(30)
    idx = torch.arange(6)
    units, n, _ = read_units(net, tokenizer_of(6), idx, layer=1, head=0, position=5)
    slots = [unit for unit in units if unit.name.startswith("slot")]
    tokens = [unit for unit in units if not unit.name.startswith("slot")]
    assert (len(slots), len(tokens), n) == (3, 6, 9)
    for part in [slots, tokens] if softmaxes == 2 else [units]:
        total = sum(unit.activation for unit in part)
        assert [unit.share for unit in part] == pytest.approx([unit.activation / total for unit in part], rel=1e-9)
    few, _, _ = read_units(net, tokenizer_of(6), idx, layer=1, head=0, position=5, most=4)
    best = sorted(units, key=lambda unit: -unit.share)[:4]
    assert [unit.name for unit in few] == [unit.name for unit in units if unit in best]  # in the order of the text


def log_p(net: M.Model, stream: torch.Tensor) -> torch.Tensor:
    """Of the 26 letters."""
    return net.logits(net.norm(stream))[:26].log_softmax(0)


@pytest.mark.parametrize("norm, softcap", [("layernorm", 0.0), ("rmsnorm", 2.0)])
def test_a_unit_promotes_what_the_stream_loses_without_it(norm, softcap):
    """log p of the final stream, minus log p without the unit's vector in it."""
    net = sharp(norm=norm, logit_softcap=softcap)
    letters = "abcdefghijklmnopqrstuvwxyz"
    final = []
    idx = text(net) % 26
    with net.norm.register_forward_pre_hook(lambda _, args: final.append(args[0][0, 5])), torch.no_grad():
        net.hidden(idx[None])
    units, _, total = read_units(net, tokenizer_of(26), idx, 1, 2, 5)
    incoming, outgoing, hidden = lens.contextual_mlp(net, idx, 1, 2, 5)
    assert [unit.name for unit in units] == [f"{i} '{letters[token]}'" for i, token in enumerate(idx[:6])]
    assert [unit.activation for unit in units] == pytest.approx(hidden.tolist(), rel=1e-9)
    for name, rows in (("incoming", incoming), ("outgoing", outgoing)):
        assert [getattr(unit, name) for unit in units] == pytest.approx(rows.norm(dim=1).tolist(), rel=1e-9)
    vectors = hidden[:, None] * outgoing
    with torch.no_grad():
        found = [unit.promotes for unit in units]
        for promotes, vector in zip([*found, total], [*vectors, vectors.sum(0)], strict=True):
            now = log_p(net, final[0])
            then = log_p(net, final[0] - vector)
            best = (now.exp() - then.exp()).topk(lens.PROMOTED).indices.tolist()
            assert [letters.index(token[1]) for token, _ in promotes] == best
            assert [value for _, value in promotes] == pytest.approx((now - then)[best].tolist(), rel=1e-6)


def test_tokens_are_spelled_in_characters_that_can_be_printed():
    byte = ByteTokenizer()
    tokens = [ord("a"), 10, 0xC3, 0, ord("'"), 300]
    assert [lens.spelled(byte, t) for t in tokens] == ["'a'", r"'\n'", r"'\xc3'", r"'\x00'", "'''", "<id 300>"]


READ = ["--start=the cat sat", "--layer=1", "--device=cpu"]
SHORT = ["--max_iters=1", "--warmup_iters=0", "--eval_interval=0", "--eval_iters=0"]


def output(capsys, *flags: str) -> list[str]:
    lens.main(list(flags))
    return capsys.readouterr().out.splitlines()


def test_units_have_the_names_of_what_is_read(run, capsys):
    """Slots, the tokens that the query sees, hidden units, a line above them; two readers of the context in a layer."""
    flags = {"slots": ["--block=c.own_slots", "--n_slot=3", "--window=4"]}
    flags["readers"] = ["--block=c/2+p,c.relu/2,s", "--n_slot=3"]
    flags["encoder"] = ["--block=simplified", "--objective=seq2seq", "--n_encoder_layer=1"]
    runs = {name: run(*SHORT, *each, out=name) for name, each in flags.items()}
    tokens = [f"{i} '{letter}'" for i, letter in enumerate("the cat sat")]
    slots = ["slot 0", "slot 1", "slot 2"]
    capsys.readouterr()
    for name, more, title, units in (
        ("slots", ["--head=1", "--position=4"], "context, head 1, query 4 'c'", slots + tokens[1:5]),
        ("encoder", ["--position=4", "--source=on a mat."], "context, head 0, query 4 'c'", tokens[:5]),
        ("readers", ["--reader=attn2"], "attn2, head 0, query 10 't'", tokens),
        ("readers", ["--reader=slots"], "slots, head 0, query 10 't'", slots),
        ("readers", ["--reader=mlp", "--units=99"], "mlp, head 0, query 10 't'", [f"unit {i}" for i in range(64)]),
    ):
        lines = output(capsys, f"--out_dir={runs[name]}", *READ, *more)
        assert f"layer 1, {title}: {len(units)} units, which together promote " in lines[0]
        assert [line.split("  ")[0] for line in lines[2:]] == units
        assert not any("nan" in line for line in lines)  # in attn2, nothing may pass the relu


def row(width: int, unit: lens.Unit) -> str:
    """A unit's line."""
    promoted = "  ".join(f"{token} {nats:+.3f}" for token, nats in unit.promotes)
    numbers = f"{unit.activation:10.4g}  {unit.share:7.4f}  {unit.incoming:7.4g}  {unit.outgoing:7.4g}"
    return f"{unit.name:<{width}}  {numbers}  {promoted}"


@pytest.fixture
def read(trained):
    """The six units of the largest shares that READ shows, and what all eleven promote together."""
    _, model, tokenizer = weights.load_model(str(trained), torch.device("cpu"), torch.float32)
    idx = torch.tensor(list(b"the cat sat"))
    units, n, together = read_units(model, tokenizer, idx, layer=1, head=0, position=10, most=6)
    assert n == 11
    return units, together


def test_all_that_is_printed(trained, read, capsys):
    units, together = read
    promoted = "  ".join(f"{token} {nats:+.3f}" for token, nats in together)
    width = max(len(unit.name) for unit in units)
    assert output(capsys, f"--out_dir={trained}", *READ, "--units=6") == [
        f"{trained}/step_00000002, layer 1, context, head 0, query 10 't': 11 units, which together promote {promoted}",
        f"{'unit':{width}}  activation    share     |in|    |out|  promotes",
        *(row(width, unit) for unit in units),
        "5 more units have smaller shares; --units=11 shows them",
    ]


def test_the_bars_of_the_picture(read):
    """A row for each unit, and beside it the tokens that it promotes."""
    pytest.importorskip("matplotlib", reason="needs matplotlib; run pip install -e .[test]")
    units, _ = read
    figure = lens.picture(units, "the title")
    *bars, tokens = figure.axes
    assert [axes.get_xlabel() for axes in bars] == [label for label, _, _ in lens.BARS.values()]
    for axes, field in zip(bars, ("share", "incoming", "outgoing"), strict=True):
        assert [bar.get_width() for bar in axes.patches] == pytest.approx([getattr(unit, field) for unit in units])
        assert [bar.get_y() + bar.get_height() / 2 for bar in axes.patches] == pytest.approx(range(len(units)))
    assert [label.get_text() for label in bars[0].get_yticklabels()] == [unit.name for unit in units]
    expected = [(i, f"{token} {nats:+.3f}") for i, unit in enumerate(units) for token, nats in unit.promotes]
    assert [(text.get_position()[1], text.get_text()) for text in tokens.texts] == expected


def test_a_picture_is_written(trained, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib; run pip install -e .[test]")
    file = tmp_path / "head.png"
    output(capsys, f"--out_dir={trained}", *READ, f"--out={file}")
    assert file.read_bytes().startswith(b"\x89PNG")


def test_wrong_flags(trained, capsys):
    for flags, words in (
        ([], ["--start is missing", "give a text"]),
        (["--start=x", "--reader=mlp2"], ["reader=mlp2", "it has attn, mlp"]),
        (["--start=abcdefghijklmnopq"], ["17 tokens", "block_size=16"]),
        (["--start=x", "--source=y"], ["source=y", "objective=causal has no encoder; leave it out"]),
        (["--start=x", "--out=a.jpg"], ["out=a.jpg", ".png or .svg"]),
    ):
        refused(lens.main, [f"--out_dir={trained}", *flags], capsys, words)
