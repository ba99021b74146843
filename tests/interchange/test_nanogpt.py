"""nanoGPT's checkpoints: the mapping against GPT-2 of transformers; reading runs no code."""

import math
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers  # whose classes are loaded when they are asked for

import train
from engine.interchange import __main__ as commands
from engine.interchange.huggingface import read_hf
from engine.interchange.nanogpt import from_nanogpt, read_nanogpt
from model import Model
from tests.data.preparing import tokens_of
from tests.helpers import TINY, Bomb, metrics

ARGS = dict(n_layer=2, n_head=3, n_embd=12, block_size=8, vocab_size=11, bias=True, dropout=0.0)


def nanogpt_state(n_layer, n_embd, block_size, vocab_size, bias, **_):
    C = n_embd
    state = {}

    def add(name, *shape):
        state[f"transformer.{name}.weight"] = torch.randn(shape) * 0.3
        if bias and name not in ("wte", "wpe"):
            state[f"transformer.{name}.bias"] = torch.randn(shape[0]) * 0.3

    add("wte", vocab_size, C)
    add("wpe", block_size, C)
    for i in range(n_layer):
        add(f"h.{i}.ln_1", C)
        add(f"h.{i}.attn.c_attn", 3 * C, C)
        add(f"h.{i}.attn.c_proj", C, C)
        add(f"h.{i}.ln_2", C)
        add(f"h.{i}.mlp.c_fc", 4 * C, C)
        add(f"h.{i}.mlp.c_proj", C, 4 * C)
    add("ln_f", C)
    return state | {"lm_head.weight": state["transformer.wte.weight"]}


@torch.no_grad()
def gpt2_logits(state, args, idx):
    """transformers' GPT-2 in float64. Its matrices lie the other way, and it always has biases. idx (B, T)."""
    sizes = {name: args[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size")}
    config = transformers.GPT2Config(n_positions=args["block_size"], activation_function="gelu", **sizes)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    for name, p in model.named_parameters():
        x = state.get(name, torch.tensor(0.0))
        if ".h." in name:
            x = x.t()
        p.copy_(x)
    return model(idx).logits


def write(path, **changes):
    torch.manual_seed(0)
    checkpoint = dict(
        model=nanogpt_state(**ARGS),
        optimizer={"state": {0: {"exp_avg": torch.zeros(3)}}},
        model_args=ARGS,
        iter_num=2000,
        best_val_loss=torch.tensor(1.5),
        config={"dataset": "shakespeare_char", "learning_rate": 1e-3},
    )
    kept = {key: value for key, value in (checkpoint | changes).items() if value is not None}
    torch.save(kept, path)
    return path


@pytest.mark.parametrize("bias", [True, False])
def test_logits_equal_gpt2s(bias):
    torch.manual_seed(1)
    args = ARGS | {"bias": bias}
    state = nanogpt_state(**args)
    tensors = from_nanogpt(args, state)
    model = Model(tensors.cfg)
    assert tensors.keys() == dict(model.named_parameters()).keys()
    model.load_state_dict(dict(tensors), strict=False)
    idx = torch.randint(args["vocab_size"], (2, args["block_size"]))
    expected = gpt2_logits(state, args, idx)
    assert expected.std() > 0.1
    torch.testing.assert_close(model.double().eval()(idx), expected, atol=1e-9, rtol=0)


def test_training_starts_from_a_nanogpt_checkpoint(in_this_process, tiny_data, tmp_path):
    """The model is the file's, without a flag that says so, and its first validation loss that of GPT-2."""
    sizes = dict(n_layer=3, n_head=4, n_embd=24, block_size=16, vocab_size=260, bias=True)
    file = write(tmp_path / "ckpt.pt", model=(weights := nanogpt_state(**sizes)), model_args=sizes | {"dropout": 0.3})
    of_the_model = ("--n_layer", "--n_head", "--n_embd", "--block_size")
    flags = [flag for flag in TINY if not flag.startswith(of_the_model)]
    flags += ["--dropout=0.0", "--max_iters=5", "--eval_iters=0", f"--dataset={tiny_data}"]
    train.main([*flags, "--warmup_iters=1", f"--out_dir={tmp_path / 'out'}", f"--init_from=nanogpt:{file}"])
    rows = torch.tensor(tokens_of(tiny_data, "val")).unfold(0, 17, 16)
    logits = gpt2_logits(weights, sizes, rows[:, :-1])
    expected = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()
    found = [line["val_loss"] for line in metrics(tmp_path / "out") if "val_loss" in line]
    assert found[0] == pytest.approx(expected, abs=1e-5)
    assert found[-1] < found[0]


@pytest.mark.parametrize("prefix", ["", "module._orig_mod.", "_orig_mod.module."])
def test_reads_what_nanogpt_writes(tmp_path, prefix):
    state = nanogpt_state(**ARGS)
    file = write(tmp_path / "ckpt.pt", model={prefix + name: t for name, t in state.items()})
    model_args, tensors, config = read_nanogpt(file)
    assert model_args == ARGS
    assert tensors.keys() == state.keys()
    assert config["dataset"] == "shakespeare_char"
    assert all(torch.equal(tensors[name], state[name]) for name in state)


def test_export(tmp_path, capsys):
    file = write(tmp_path / "ckpt.pt", config={"dataset": "unknown"})
    commands.main(["export", f"nanogpt:{file}", str(tmp_path / "out")])
    assert "no tokenizer is written: " in capsys.readouterr().err
    tensors = from_nanogpt(*read_nanogpt(file)[:2])
    exported = read_hf(tmp_path / "out")
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[name], x) for name, x in tensors.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_older_checkpoints_and_other_dtypes(dtype):
    """They lack bias and dropout, and hold the mask. All numbers become float32."""
    args = {name: value for name, value in ARGS.items() if name not in ("bias", "dropout")}
    state = {name: torch.nn.Parameter(tensor.to(dtype)) for name, tensor in nanogpt_state(**ARGS).items()}
    state["lm_head.weight"] = state["transformer.wte.weight"]
    wide = {name: tensor.detach().float() for name, tensor in state.items()}
    state["transformer.h.1.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
    expected = from_nanogpt(ARGS, wide)
    tensors = from_nanogpt(args, state)
    assert tensors.flags == expected.flags
    assert expected.flags["bias"] is True
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert torch.equal(tensors["head.weight"], tensors["wte.weight"])


def test_refuses_by_name():
    for change, args, words in (
        ({"transformer.h.1.ln_2.bias": None}, {}, ["transformer.h.1.ln_2.bias", "absent", "(12,)"]),
        ({"transformer.h.0.mlp.c_fc.weight": torch.zeros(3, 12)}, {}, ["h.0.mlp.c_fc.weight", "(3, 12)", "(48, 12)"]),
        ({"lm_head.weight": torch.zeros(11, 12)}, {}, ["lm_head.weight", "transformer.wte.weight"]),
        ({}, {"n_head": 5}, ["n_head=5", "n_embd=12"]),
        ({}, {"n_layer": True}, ["n_layer=True", "int"]),
    ):
        state = nanogpt_state(**ARGS) | change
        with pytest.raises(ValueError) as error:
            dict(from_nanogpt(ARGS | args, {name: tensor for name, tensor in state.items() if tensor is not None}))
        assert all(word in str(error.value) for word in words)
        assert "\n" not in str(error.value)


WPE = torch.arange(96.0).reshape(8, 12)  # of the shape that the model asks for
STRANGE = [  # integers, no numbers, numbers that take no memory, and such as no weight is
    lambda: WPE.long(),
    lambda: WPE.to("meta"),
    lambda: WPE.to_sparse(),
    lambda: torch.zeros(1).expand(2**31 - 1, 12),
    lambda: WPE.where(WPE > 3, math.nan),
    lambda: WPE.double() * 1e300,
]


@pytest.mark.filterwarnings("ignore")
def test_names_a_tensor_that_holds_no_weights(tmp_path, recwarn):
    for make in STRANGE:
        model = nanogpt_state(**ARGS) | {"transformer.wpe.weight": make()}
        file = write(tmp_path / "ckpt.pt", model=model)
        recwarn.clear()
        with pytest.raises(ValueError, match="transformer.wpe.weight") as error:
            dict(from_nanogpt(*read_nanogpt(file)[:2]))
        assert "\n" not in str(error.value)
        assert all("Sparse invariant checks" in str(each.message) for each in recwarn.list)  # torch 2.11's own, once


def test_runs_no_code_and_names_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "ckpt.pt"

    def zipped():
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("notes.txt", "hello")

    for kind, make in (
        ("UnpicklingError", lambda: write(file, optimizer=Bomb())),
        ("RuntimeError", lambda: torch.save(Bomb(), file, _use_new_zipfile_serialization=False)),
        ("Error", zipped),
        ("KeyError", lambda: write(file, config=None)),
        ("TypeError", lambda: torch.save([1, 2], file)),
    ):
        make()
        with pytest.raises(ValueError, match=rf"is damaged, holds more .*, or lacks .* .\w*{kind}.; give") as error:
            read_nanogpt(file)
        assert str(file) in str(error.value)
        assert "\n" not in str(error.value)
        assert not Path("BOOM").exists()
    with pytest.raises(FileNotFoundError, match="ckpt.pt that nanoGPT"):
        read_nanogpt(tmp_path / "absent.pt")
