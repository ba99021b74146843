"""Flags: config files against plain Python, the record of a run read back equal, and one clear line per mistake."""

import os
import re
import sys
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configurator import check_rules, parse, read_flags, resolve
from data.errors import user_errors
from engine import retired
from engine.config import Config
from engine.help import dump
from engine.interchange.__main__ import ExportConfig
from evaluate import EvaluateConfig
from flags import documented
from sample import SampleConfig
from tests.model.test_ignored import has_effect
from tools.bench import BenchConfig
from tools.compare.trainings import CompareConfig
from tools.curves import PlotConfig
from tools.lens import LensConfig


@dataclass
class Sampling:
    """Another script's flags, with every kind of type."""

    # --- text
    start: str = "\n"  # prompt; a "#" in a doc is kept
    label: str = "a # b"  # the default holds a number sign
    num_samples: int = 10  # how many
    # an ordinary comment
    # --- chance
    temperature: float = 0.8  # 0 = greedy
    top_k: int | Literal["all"] = 200  # candidates
    fast: bool | Literal["auto"] = "auto"  # quick or not
    kind: Literal[
        "one",  # the first,
        "two",  # and the second
    ] = "one"
    bare: int = 2


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_command_line_beats_files_and_later_beats_earlier(tmp_path):
    a = write(tmp_path / "a.py", "n_layer = 2\nn_head = 2\nn_embd = 8\nbatch_size = 3\n\nbatch_size = 4\n")
    b = write(tmp_path / "b.py", "# nothing\nn_layer = 5\n")
    cfg = parse(Config, ["--n_embd=16", a, "--seed=1", b, "--seed=2"])
    assert (cfg.n_layer, cfg.n_head, cfg.n_embd, cfg.batch_size, cfg.seed) == (5, 2, 16, 4, 2)
    typed = dict.fromkeys(("n_embd", "seed"), "command line")
    assert cfg.sources == typed | {"n_layer": f"{b}:2", "n_head": f"{a}:2", "batch_size": f"{a}:6"}
    assert parse(Config, [b, a]).n_layer == 2
    assert parse(Config, []) == Config()
    assert parse(Config, []).sources == {}


def test_the_command_line_drops_what_a_file_sets_for_another_choice(tmp_path):
    """But a file or a command line that contradicts itself is refused."""
    for flags, other in (
        ("window = 8\nwindow_pattern = 'SL'\n", ["--window=0"]),
        ("block = 'c,s'\nn_slot = 3\n", ["--block=c,p", "--block=superblock"]),
        ("conv = 4\nconv_lr = 0.5\n", ["--objective=masked"]),
        ("optimizer = 'muon'\nmuon_lr = 0.5\n", ["--optimizer=adamw"]),
    ):
        file = write(tmp_path / "a.py", flags)
        assert parse(Config, [file, *other]) == parse(Config, other)
    assert parse(Config, [file]).muon_lr == 0.5
    conv = write(tmp_path / "c.py", "objective = 'masked'\nconv_lr = 0.5\n")
    with pytest.raises(ValueError, match="conv_lr=0.5 .*: used only with conv>0"):  # as the file says, not the user
        resolve(Config, read_flags(Config, [conv]), {"conv": 4})
    for argv in ([write(tmp_path / "b.py", "muon_lr = 0.5\n")], [file, "--optimizer=adamw", "--muon_lr=0.5"]):
        assert "used only with optimizer=muon" in mistake(argv)


def test_defaults_are_nanogpts():
    cfg = Config()
    assert (cfg.out_dir, cfg.eval_interval, cfg.eval_iters, cfg.eval_only) == ("out", 2000, 200, False)
    assert (cfg.always_save_checkpoint, cfg.init_from, cfg.gradient_accumulation_steps) == (True, "scratch", 40)
    assert (cfg.batch_size, cfg.block_size, cfg.n_layer, cfg.n_head, cfg.n_embd) == (12, 1024, 12, 12, 768)
    assert (cfg.dropout, cfg.bias, cfg.learning_rate, cfg.max_iters, cfg.weight_decay) == (0, False, 6e-4, 600000, 0.1)
    assert (cfg.beta1, cfg.beta2, cfg.grad_clip, cfg.warmup_iters, cfg.min_lr) == (0.9, 0.95, 1.0, 2000, 6e-5)


ARITHMETIC = ["2 ** -1 * 4", "-2 ** 2 + 10", "2 ** 3 ** 2", "-7 // 2 + 20", "-7 % 3", "0x10", "+(3 - -4) * 2 / 0.5"]


@pytest.mark.parametrize("text", ARITHMETIC)
def test_arithmetic_equals_python(tmp_path, text):
    a = write(tmp_path / "a.py", f"num_samples = {text}")
    b = write(tmp_path / "b.py", f"_a = {text}\nnum_samples = _a")
    for argument in (a, b, f"--num_samples={text}"):
        assert parse(Sampling, [argument]).num_samples == eval(text)


@pytest.mark.parametrize("argument, name, value", [
    ("--start=def main(", "start", "def main("),
    ("--start='a\\n'", "start", "'a\\n'"),
    ("--num_samples=1e3", "num_samples", 1000),
    ("--temperature=.5e-1", "temperature", 0.05),
    ("--fast=false", "fast", False),
    ("--fast=auto", "fast", "auto"),
])  # fmt: skip
def test_values_on_the_command_line(argument, name, value):
    got = getattr(parse(Sampling, [argument]), name)
    assert got == value
    assert type(got) is type(value)


NANOGPT = """
'''What it is.'''
wandb_log = True
wandb_run_name = 'small-' + '1'
log_interval = 10 # often
init_from = 'gpt2-xl'
gradient_accumulation_steps = 5 * 8
learning_rate = 3e-5
backend = 'nccl'
dtype = 'float16'
compile = False
decay_lr = False
_run = "out/" 'gpt'
out_dir = _run + "-" + "2"
"a remark"
"""


def test_a_file_of_nanogpt_loads(tmp_path):
    found = {}
    exec(NANOGPT, {}, found)
    wanted = {name: value for name, value in found.items() if name[0] != "_" and name != "decay_lr"}
    wanted |= {"schedule": "constant", "warmup_iters": 0, "init_from": "hf:openai-community/gpt2-xl"}
    assert asdict(parse(Config, [write(tmp_path / "c.py", NANOGPT)])) == asdict(Config()) | wanted
    for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"):
        assert parse(Config, [f"--init_from={name}"]).init_from == f"hf:openai-community/{name}"


def test_last_decay_lr_counts(tmp_path):
    tune = write(tmp_path / "tune.py", NANOGPT + "min_lr = 1e-6\nlr_decay_iters = 5000\n")
    cfg = parse(Config, [tune, "--init_from=scratch", "--decay_lr=True", "--warmup_iters=2"])
    assert (cfg.schedule, cfg.warmup_iters) == ("cosine", 2)
    assert parse(Config, ["--schedule=wsd", "--decay_lr=True"]).schedule == "wsd"
    assert parse(Config, ["--schedule=wsd", "--decay_lr=False"]).schedule == "constant"
    assert parse(Config, ["--schedule=wsd", "--decay_lr=False", "--schedule=cosine"]).schedule == "cosine"


COMMAND_LINE_MISTAKES = [  # flags, and what the line must name; others are in test_errors.py
    ("--learning-rate=3", ["learning-rate=3 (command line)", "no such flag", "nearest is learning_rate"]),
    ("out/x", ["out/x: no such config file", "--out_dir=out/x"]),
    ("--n_head=5 --n_embd=764", ["n_embd=764 (command line)", "n_head=5 (command line)", "such as 770,"]),
    ("--batch_size=64.5", ["batch_size=64.5 (command line)", "expected int, such as 12"]),
    ("--batch_size=" + "(" * 250 + "1", ["batch_size='(((", "expected int"]),
    ("--batch_size 32", ["--batch_size (command line)", "--name=value"]),
    ("batch_size=32", ["batch_size=32", "--name=value"]),
    ("--eval_only=1", ["eval_only=1 (command line)", "expected True or False"]),
    ("--optimizer=a\nb", ["'a\\nb' (command line)", "adamw or muon"]),
    ("--muon_lr=0.1", ["muon_lr=0.1 (command line)", "optimizer=muon", "optimizer=adamw", "change optimizer"]),
    ("--pos=alibi --objective=masked", ["pos=alibi (command line)", "objective=masked", "retired"]),
    ("--warmup_iters=90 --schedule=wsd --max_iters=100", ["warmup_iters=90 (", "cooldown of 20", "max_iters=100 ("]),
    ("--min_lr=1e-3", ["min_lr=0.001 (command line)", "learning_rate=0.0006", "a tenth is usual"]),
    ("--warmup_iters=7 --max_iters=9 --lr_decay_iters=5", ["warmup_iters=7 (", "lr_decay_iters=5 (", "set warmup"]),
]
NO_FLOAT = {"nan": "nan", "10**999": "'10**999'", "1/0": "'1/0'", "9007199254740993": "90071992547409"}
COMMAND_LINE_MISTAKES += [(f"--beta1={text}", [f"beta1={shown}", "expected float"]) for text, shown in NO_FLOAT.items()]


def mistake(argv: list[str], cls: type = Config) -> str:
    with pytest.raises((ValueError, OSError)) as error:
        parse(cls, argv)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 900
    return message


@pytest.mark.parametrize("flags, fragments", COMMAND_LINE_MISTAKES, ids=lambda x: str(x)[:40])
def test_mistakes_on_the_command_line(flags, fragments):
    message = mistake(flags.split(" "))
    assert len(message) < 300 and all(fragment in message for fragment in fragments), message


FILE_MISTAKES = [
    ("import time", ":1: import time", "name = value"),
    ("out_dir = '%99999999d' % 1", ":1: '%99999999d' % 1", "literal or arithmetic"),
    ("lr_decay_iters = max_iters", ":1: max_iters is not set earlier in this file", "literal or arithmetic"),
    ("seed = 9**9**9", ":1: ", "too large"),
    ("learning_rate = (-8) ** 0.5", ":1)", "expected float"),
    ("n_l\u0430yer = 2", "no such flag", "nearest is n_layer"),
    ("# x\n\nseed = (3", ":3: ", "name = value"),
    ("seed = " + "(" * 500 + "1" + ")" * 500, ":1: ", ""),
    ("# x\n\nbatch_size = -5 * 2", "batch_size=-10 (", "must be >0"),
]


@pytest.mark.parametrize("text, what, remedy", FILE_MISTAKES, ids=lambda x: x[:30])
def test_mistakes_in_files(tmp_path, text, what, remedy):
    path = write(tmp_path / "c.py", text)
    message = mistake([path])
    assert what in message and remedy in message, message
    line = next(i for i, line in enumerate(text.splitlines(), 1) if line not in ("", "# x") and line[0] != "_")
    assert f"{path}:{line}" in message


def test_files_are_never_executed(tmp_path):
    trace = tmp_path / "trace"
    for text in (
        f"__import__('pathlib').Path({str(trace)!r}).touch()",
        f"seed = __import__('pathlib').Path({str(trace)!r}).touch() or 3",
        f"seed = (lambda: open({str(trace)!r}, 'w'))()",
        f"class A:\n    open({str(trace)!r}, 'w')",
    ):
        mistake([write(tmp_path / "c.py", text)])
        assert not trace.exists()
        exec(text, {})
        assert trace.exists()
        trace.unlink()


def test_binary_or_large_files_are_refused(tmp_path):
    path = tmp_path / "c.bin"
    for data in (b"seed = 1\0", b"\xff\xfe\x00", b"\x93NUMPY"):
        path.write_bytes(data)
        assert f"{path}:1: " in mistake([str(path)])
    path.write_text("_a = 'x'\n" + "_a = _a + _a\n" * 60)  # a text of 2^60 characters
    assert ":11: the result is too large" in mistake([str(path)])
    os.truncate(path, 20 * 10**9)
    assert "has more than 1,048,576 bytes; a config file holds only name = value" in mistake([str(path)])


COMMANDS = [Config, SampleConfig, EvaluateConfig, BenchConfig, CompareConfig, LensConfig, PlotConfig, ExportConfig]


@pytest.mark.parametrize("cls", COMMANDS)
def test_rules_name_flags_or_facts(cls):
    check_rules(cls)
    for name, flag in documented(cls).items():
        assert all(re.fullmatch(r"[<>]=?-?\d+(e\d+)?", limit) for limit in flag.limits), name
    for targets in getattr(cls, "NANOGPT", {}).values():
        assert set(targets) <= {field.name for field in fields(cls)}


RULES = """
from dataclasses import dataclass
from engine.config import Config

@dataclass
class Hacked(Config):
    new: int = 0  # what it does
"""


@pytest.mark.parametrize("line", [
    "new: int = 0  # [poss=rope] what it does",
    "new: int = 0  # [pos=rope or posss=alibi] what it does",
    "new:int = 0 # [poss = rope] what it does",
    "new: int = (\n        0  # [poss=rope] what it does\n    )",
])  # fmt: skip
def test_a_mistyped_rule_is_refused_and_blanks_in_a_rule_are_not(tmp_path, monkeypatch, line):
    """Where no flag has the name that a rule gives, the rule would always hold."""
    monkeypatch.syspath_prepend(tmp_path)
    for name, flag in (("wrong", line), ("right", re.sub("posss?", "pos", line))):
        (tmp_path / f"hack_{name}.py").write_text(RULES.replace("new: int = 0  # what it does", flag))
        sys.modules.pop(f"hack_{name}", None)
    with pytest.raises(ValueError, match=r"Hacked.new: its rule \[.*\] names 'posss?', which is no flag"):
        parse(import_module("hack_wrong").Hacked, [])
    hacked = import_module("hack_right").Hacked
    assert parse(hacked, []).new == 0
    assert parse(hacked, ["--pos=rope"]).pos == "rope"
    assert "new=1 (command line): used only with pos=rope" in mistake(["--new=1"], hacked)
    assert "what it does" in documented(hacked)["new"].doc


@pytest.mark.parametrize("flag, others", [
    ({"block": "c,m,p"}, {"block": "m,c,p", "objective": "seq2seq"}),
    ({"mlp_ratio": 2.0}, {"block": "c.own_slots"}),
    ({"rope_theta": 50.0}, {"pos": "rope", "pos_pattern": "LG"}),
    ({"norm_eps": 0.1}, {"norm_placement": "none", "block": "simplified"}),
    ({"norm_bias": True}, {"norm_placement": "none", "block": "simplified"}),
], ids=str)  # fmt: skip
def test_a_flag_that_is_used_is_accepted(flag, others):
    assert has_effect(others, others | flag)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.builds(Sampling, st.text(), st.text(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)))
def test_any_text_and_number_reads_back_equal(tmp_path, flags):
    dump(flags, tmp_path / "config.py")
    assert parse(Sampling, [str(tmp_path / "config.py")]) == flags


def test_checkpoint_flags_stand_in_for_defaults(tmp_path):
    flags = ["--pos=rope", "--rope_theta=5000", "--n_layer=3", "--max_iters=9", "--warmup_iters=0"]
    stored = asdict(parse(Config, flags))
    path = write(tmp_path / "c.py", "init_from = 'resume'\nout_dir = 'elsewhere'\n")
    given = read_flags(Config, [path, "--max_iters=20", "--rope_theta=7"])  # rope_theta is used: pos comes from stored
    in_file = [("init_from", "resume", f"{path}:1"), ("out_dir", "elsewhere", f"{path}:2")]
    assert [*given.values()] == [*in_file, ("max_iters", 20, "command line"), ("rope_theta", 7.0, "command line")]
    cfg = resolve(Config, given, stored, "out/step_00000001")
    assert asdict(cfg) == stored | {name: value for name, value, _ in given.values()}
    places = {name: place for name, _, place in given.values()}
    assert cfg.sources == dict.fromkeys(stored, "out/step_00000001") | places
    assert cfg.given == places.keys()
    with pytest.raises(ValueError, match=r"max_iters=9 \(out/step_00000001\): .* set warmup_iters"):
        resolve(Config, {}, stored | {"schedule": "wsd", "warmup_iters": 99}, "out/step_00000001")
    switched = resolve(Config, read_flags(Config, [path, "--pos=alibi"]), stored)  # rope_theta is not the user's
    assert (switched.pos, switched.rope_theta, switched.n_layer) == ("alibi", Config.rope_theta, 3)
    for wrong in ([0.0], {}, None):
        with pytest.raises(ValueError, match=r"dropout=.* \(out/step_00000001\): expected float"):
            resolve(Config, {}, stored | {"dropout": wrong}, "out/step_00000001")
    with pytest.raises(ValueError, match=r"gone=1 \(out/step_00000001\): no such flag"):
        resolve(Config, {}, {"gone": 1}, "out/step_00000001")


def test_a_flag_of_a_file_that_the_command_line_leaves_without_effect_has_its_default(tmp_path):
    path = write(tmp_path / "c.py", "block = 'c.own_slots'\nmlp = 'swiglu'\n")
    assert parse(Config, [path]).mlp == "swiglu"  # which decides how many slots there are
    assert parse(Config, [path, "--n_slot=5"]).mlp == Config.mlp
    path = write(tmp_path / "d.py", "balance_rate = 0.01\n")  # [router_balance=bias], which is not --bias
    for flags in ([path], [path, "--bias=True"]):
        with pytest.raises(ValueError, match="balance_rate=0.01 .* change n_expert or router_balance$"):
            parse(Config, flags)


ENCODER = {"objective": "seq2seq", "n_encoder_layer": 5}
IDLE = [  # a flag, a value that has no effect beside others, a similar one that has, and what is said
    ("window", 64, {"block_size": 64}, 63, "no token is farther away than block_size=64"),
    (
        "window_pattern",
        "SSSSSL",
        {"window": 5, "n_layer": 3} | ENCODER,
        "SSSSL",
        "it has more letters than the 5 layers",
    ),
    ("pos_pattern", "GGGN", {"pos": "rope", "n_layer": 3}, "GGN", "it has more letters than the 3 layers"),
    ("pos_pattern", "GL", {"pos": "rope"}, "LN", "G and L are the same, as rope_theta and rope_theta_local are 10000"),
]


@pytest.mark.parametrize("name, idle, others, used, why", IDLE, ids=str)
def test_a_flag_that_has_no_effect_but_in_a_checkpoint(tmp_path, name, idle, others, used, why):
    """Typed it is refused, and a file's is left out with a line. A checkpoint or config.json keeps it."""
    typed = [f"--{other}={value}" for other, value in others.items()]
    message = mistake([*typed, f"--{name}={idle}"])
    assert message.startswith(f"{name}={idle} (command line): {why}")
    assert message.endswith("; leave it out")
    path = write(tmp_path / "c.py", f"# one\n{name} = {idle!r}\n")
    in_file = write(tmp_path / "d.py", "".join(f"{other} = {value!r}\n" for other, value in others.items()))
    for argv in ([path, *typed], [path, in_file]):
        cfg = parse(Config, argv)
        [line] = cfg.left_out
        assert getattr(cfg, name) == getattr(Config, name)
        assert line.startswith(f"{name}={idle} ({path}:2) is left out: {why}")
    assert getattr(parse(Config, [*typed, f"--{name}={used}"]), name) == used
    stored = asdict(Config()) | others | {name: idle}
    for argv in ([], [path]):
        assert getattr(resolve(Config, read_flags(Config, argv), stored), name) == idle
    assert getattr(Config(**others | {name: idle}), name) == idle
    assert f"{name}={idle} (command line)" in mistake([*typed, path, f"--{name}={idle}"])


def test_every_command_says_what_it_leaves_out(tmp_path, capsys):
    path = write(tmp_path / "sample.py", "top_k = 5\n")
    assert parse(SampleConfig, [path, "--temperature=0"]).top_k == SampleConfig.top_k
    assert capsys.readouterr().err == f"top_k=5 ({path}:1) is left out: it does not go with temperature=0.0\n"


def test_what_rests_on_a_flag_that_is_left_out_is_left_out_too(tmp_path):
    path = write(tmp_path / "c.py", "window = 64\nwindow_pattern = 'SL'\nmuon_lr = 0.5\noptimizer = 'muon'\n")
    cfg = parse(Config, [path, "--block_size=32", "--optimizer=adamw"])
    assert (cfg.window, cfg.window_pattern, cfg.muon_lr) == (0, "", Config.muon_lr)
    assert cfg.left_out == [
        f"window=64 ({path}:1) is left out: no token is farther away than block_size=32",
        f"window_pattern=SL ({path}:2) is left out: it does not go with window=0",
        f"muon_lr=0.5 ({path}:3) is left out: it does not go with optimizer=adamw",
    ]
    assert parse(Config, [path]).left_out == []
    assert resolve(Config, {}, {"muon_lr": 0.5, "window": 9, "block_size": 9}).left_out == []
    equal = ["--pos=rope", "--pos_pattern=GL", "--rope_theta=500", "--rope_theta_local=500"]
    assert "pos_pattern=GL (command line): G and L are the same" in mistake(equal)
    assert parse(Config, [*equal, "--rope_scaling=linear:2"]).pos_pattern == "GL"


def test_retired_flags(tmp_path, monkeypatch):
    """At the value that the program has now they are dropped; the others are refused wherever they are set."""
    monkeypatch.setitem(retired.RETIRED, "old_idea", "skip")
    path = tmp_path / "x.py"
    path.write_text("old_idea = 'skip'\nn_layer = 3\n")
    assert parse(Config, [str(path)]).n_layer == 3
    assert parse(Config, ["--old_idea=skip"]).n_layer == Config.n_layer
    assert resolve(Config, {}, {"old_idea": "skip"}, "out").n_layer == Config.n_layer
    assert "this flag was retired; leave it out" in mistake(["--old_idea=skip"], SampleConfig)  # which trains nothing
    path.write_text("old_idea = 'roll'\n")
    for argument, shown in {
        str(path): f"old_idea=roll ({path}:1): this flag was retired",
        "--old_idea=roll": "old_idea=roll (command line): this flag was retired",
        "--norm=none": "norm=none (command line): this was replaced; write --norm_placement=none",
        "--layer=c,p;c+p": "layer='c,p;c+p' (command line): this was replaced; write --block=c,p;c+p",
    }.items():
        assert shown in mistake([argument])
    path.write_text("block = 'superblock'\nlayer = 'c,p'\n")
    assert f"layer='c,p' ({path}:2): this was replaced; write --block=c,p" in mistake([str(path)])


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_every_flag(capsys, flag):
    with pytest.raises(SystemExit) as stop:
        parse(Config, ["--nonsense=3", flag], doc="How to run.\n\n    torchrun train.py\n    ")
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert text.startswith("How to run.\n\n    torchrun train.py\n\n")
    assert all(len(line) < 100 for line in text.splitlines())
    for field in fields(Config):
        assert re.search(rf"^  --{field.name}={re.escape(str(field.default))} ", text, re.M), field.name
        assert re.search(rf"^  --{field.name}=\S* +[^:]+:\s+\S", text, re.M), f"{field.name} has no doc"
    assert "[n_expert=0 or 'a layer with experts']" in " ".join(text.split())  # has_e, in words


def test_user_errors(capsys):
    with pytest.raises(SystemExit) as stop, user_errors():
        raise ValueError("a\x1b[31mname\x07\n  of\té")
    assert stop.value.code == 2
    assert capsys.readouterr() == ("", "error: a\\x1b[31mname\\x07 of é\n")
    with pytest.raises(RuntimeError, match="a mistake of ours"), user_errors():
        raise RuntimeError("a mistake of ours")


def test_flags_of_a_class_that_stands_in_no_file_are_refused():
    """Its comments, which have the rules, cannot be read."""
    names = {"__name__": "stdin"}
    exec(RULES, names)
    with pytest.raises(ValueError, match="the flags of Hacked are read from its source; write the class into a file"):
        parse(names["Hacked"], [])
