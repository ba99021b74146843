"""evaluate.py: losses compared with train.py's, and with plain loops in float64 over the same windows."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import evaluate
import sample
from data.tokenizer import CharTokenizer, GPT2Tokenizer
from engine import weights
from engine.evaluation import Loss
from engine.interchange.nanogpt import from_nanogpt
from model import Model
from tests.data.preparing import tokens_of, write_set, write_text
from tests.data.test_hf_tokenizer import llama3
from tests.helpers import TINY, metrics, refused
from tests.interchange.test_families import build
from tests.interchange.test_nanogpt import nanogpt_state, write
from tests.ranks import launch, train_runs

RUNS = {
    "causal": ["--pos=rope", "--doc_mask=True"],
    "some": ["--eval_iters=3", "--batch_size=2", "--seed=5"],  # windows, which the seed draws
    "masked": ["--objective=masked", "--corrupt_ratio=0.3"],
    "seq2seq": ["--objective=seq2seq", "--corrupt_ratio=0.3", "--span_length=2"],
}


@pytest.fixture(scope="module")
def runs(tiny_data, tmp_path_factory) -> Path:
    """The folder of these runs, which evaluate at their end, most of them the whole validation set."""
    folder = tmp_path_factory.mktemp("evaluated")
    flags = [*TINY, "--max_iters=6", "--eval_interval=0", "--eval_iters=0", f"--dataset={tiny_data}"]
    launch(1, train_runs, folder, [[*flags, *more, f"--out_dir={folder / name}"] for name, more in RUNS.items()])
    return folder


@pytest.fixture
def figures(capsys):
    """figures(*flags) is the JSON object that evaluate.py prints."""

    def call(*flags: str) -> dict:
        capsys.readouterr()
        evaluate.main(["--device=cpu", "--json=True", *flags])
        return json.loads(capsys.readouterr().out)

    return call


def model_of(where: Path) -> Model:
    return weights.load_model(str(where), torch.device("cpu"), torch.float32)[1].double()


@torch.no_grad()
def total_nats(model: Model, ids: torch.Tensor, rest: bool = True, T: int = 16) -> tuple[float, list[int]]:
    """Sum of -log p over windows of T, and the targets, each of which is predicted once; perhaps without the rest."""
    whole = (len(ids) - 1) // T * T
    batches = [ids[: whole + 1].unfold(0, T + 1, T)] if whole else []
    if rest and whole < len(ids) - 1:
        batches.append(ids[None, whole:])
    nats = 0.0
    targets = []
    for batch in batches:
        logits = model(batch[:, :-1]).flatten(0, 1)
        nats += F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum").item()
        targets += batch[:, 1:].flatten().tolist()
    return nats, targets


@pytest.mark.parametrize("name", RUNS)
def test_a_data_set_has_the_loss_of_training(runs, figures, name):
    last = metrics(runs / name)[-1]
    found = figures(f"--out_dir={runs / name}", *["--eval_iters=3", "--batch_size=2"] * (name == "some"))
    assert found["loss"] == pytest.approx(last["val_loss"], rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(last["val_loss"]), rel=1e-6)
    assert found["bits_per_byte"] == (last["val_bpb"] and pytest.approx(last["val_bpb"], rel=1e-6))
    assert (last["val_bpb"] is None) == (name in ("masked", "seq2seq"))


@pytest.mark.parametrize("split, T", [("val", 16), ("train", 16), ("val", 8)])
def test_a_data_set_equals_a_loop_in_float64(tiny_data, figures, runs, split, T):
    """Also at a shorter context than that of the model."""
    out = runs / "some"
    nats, targets = total_nats(model_of(out), torch.tensor(tokens_of(tiny_data, split)), rest=False, T=T)
    n_bytes = sum(t != 256 for t in targets)
    found = figures(f"--out_dir={out}", f"--split={split}", "--batch_size=5", f"--block_size={T}")
    assert found["loss"] == pytest.approx(nats / len(targets), rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-6)
    assert (found["tokens"], found["bytes"]) == (len(targets), n_bytes)
    assert found["model"] == str(out / "step_00000006")
    assert found["data"].endswith(split)


def test_a_text_of_any_length_equals_a_loop_in_float64(runs, figures, tmp_path):
    """Every token but the first is predicted once; the characters have one or two bytes."""
    model = model_of(runs / "causal")
    for length, batch_size in ((2, 3), (16, 3), (17, 100), (18, 3), (33, 3), (34, 3), (150, 3), (150, 100)):
        text = ("the café sat\r\n" * 20).encode()[:length]
        text = text[:-1] + b"x" if text[-1] > 127 else text
        (tmp_path / "text.txt").write_bytes(text)
        nats, targets = total_nats(model, torch.tensor(list(text)))
        assert targets == list(text[1:])
        where = f"--out_dir={runs / 'causal'}", f"--file={tmp_path / 'text.txt'}"
        found = figures(*where, f"--batch_size={batch_size}")
        assert found["loss"] == pytest.approx(nats / (length - 1), rel=1e-6)
        assert found["bits_per_byte"] == pytest.approx(nats / (length - 1) / math.log(2), rel=1e-6)
        assert found["tokens"] == found["bytes"] == length - 1


def evaluations(all_flags: list[list[str]]):
    """evaluate.py with each of these flags, in the same processes."""
    evaluate.leave = lambda: None
    for flags in all_flags:
        evaluate.main(["--device=cpu", "--json=True", *flags])


def test_two_ranks_find_what_one_finds(runs, figures, tmp_path):
    (tmp_path / "short.txt").write_text("a cat")
    (tmp_path / "long.txt").write_text("the cat sat on a mat. " * 9)
    cases = [
        ["--batch_size=3", "--parallel=fsdp"], ["--eval_iters=3", "--batch_size=2"],
        [f"--file={tmp_path / 'short.txt'}"], [f"--file={tmp_path / 'long.txt'}", "--batch_size=2"],
    ]  # fmt: skip
    cases = [[f"--out_dir={runs / 'causal'}", *case] for case in cases]
    cases.append([f"--out_dir={runs / 'seq2seq'}", "--batch_size=3"])
    launch(2, evaluations, tmp_path, cases)
    said = [json.loads(line) for line in (tmp_path / "rank 0").read_text().splitlines() if line.startswith("{")]
    assert len(said) == len(cases)
    assert "{" not in (tmp_path / "rank 1").read_text()
    for case, two in zip(cases, said, strict=True):
        one = figures(*case)
        assert one.keys() == two.keys()
        for name, value in one.items():
            assert two[name] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), (case, name)


ARGS = dict(n_layer=2, n_head=2, n_embd=8, block_size=16, vocab_size=257, bias=True, dropout=0.1)


def nanogpt_file(file: Path, **config) -> Model:
    """Writes nanoGPT's checkpoint with random weights; returns our model of it, in float64."""
    torch.manual_seed(0)
    state = nanogpt_state(**ARGS)
    write(file, model=state, model_args=ARGS, config=config)
    weights = from_nanogpt(ARGS, dict(state))
    model = Model(weights.cfg)
    model.load_state_dict(dict(weights), strict=False)
    return model.double().eval()


def test_nanogpts_file(tmp_path, tiny_data, figures, capsys, monkeypatch):
    """It holds no tokenizer: that of the data set of its config, if there is one, reads texts."""
    file = tmp_path / "ckpt.pt"
    text = tmp_path / "text.txt"
    model = nanogpt_file(file, dataset="mine")
    where = f"--out_dir=nanogpt:{file}"
    nats, targets = total_nats(model, torch.tensor(tokens_of(tiny_data, "val")), rest=False)
    found = figures(where, f"--dataset={tiny_data}")
    assert found["loss"] == pytest.approx(nats / len(targets), rel=1e-6)
    assert found["model"] == str(file)
    text.write_text("the cat sat on a mat.")
    of_text = ["--device=cpu", where, f"--file={text}"]
    refused(evaluate.main, of_text, capsys, ["data/mine has none of 257 ids"])

    (tmp_path / "mine").symlink_to(tiny_data)
    monkeypatch.setattr("engine.weights.DATA", tmp_path)
    nats, targets = total_nats(model, torch.tensor(list(text.read_bytes())))
    assert figures(where, f"--file={text}")["loss"] == pytest.approx(nats / len(targets), rel=1e-6)
    sample.main([where, "--device=cpu", "--max_new_tokens=3", "--start=the"])
    assert capsys.readouterr().out.startswith("the")
    nanogpt_file(file, dataset="../mine")
    refused(evaluate.main, of_text, capsys, ["holds no tokenizer"])


@pytest.mark.parametrize("size", [50257, 50304])
def test_a_vocabulary_of_gpt2s_size_is_gpt2s(size, tmp_path):
    """Which nanoGPT pads to 50304."""
    args = ARGS | {"vocab_size": size, "n_layer": 1}
    write(tmp_path / "ckpt.pt", model=nanogpt_state(**args), model_args=args, config={"dataset": "openwebtext"})
    tokenizer = weights.read(f"nanogpt:{tmp_path / 'ckpt.pt'}", lambda found: found.tokenizer())
    assert isinstance(tokenizer, GPT2Tokenizer)


def write_llama(folder: Path):
    """A folder of Hugging Face with a random Llama and a tokenizer that puts <s> before a text; returns both."""
    import transformers

    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=llama3(), bos_token="<s>", eos_token="</s>")
    sizes = dict(vocab_size=len(theirs), hidden_size=16, intermediate_size=32, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16)
    model = build("llama", spread=0.3, **sizes)
    for each in (model, theirs):
        each.save_pretrained(folder)
    return model.double(), theirs


def test_a_folder_of_hugging_face(figures, tmp_path, capsys):
    """Losses and greedy text are those of transformers, which puts <s> before the text too."""
    folder = tmp_path / "llama"
    model, tokenizer = write_llama(folder)
    text = "the cat sat on a mat. été, dogs, " * 2
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    where = f"--out_dir=hf:{folder}"
    ids = tokenizer(text, return_tensors="pt").input_ids
    nats, targets = total_nats(lambda idx: model(idx).logits, ids[0])
    found = figures(where, f"--file={tmp_path / 'text.txt'}")
    assert ids[0, 0] == tokenizer.bos_token_id
    assert targets == ids[0, 1:].tolist()
    assert (found["tokens"], found["bytes"]) == (len(targets), len(text.encode()))
    assert found["loss"] == pytest.approx(nats / len(targets), rel=1e-5)

    prompt = tokenizer("the cat", return_tensors="pt")
    theirs = model.generate(**prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)[0]
    sample.main([where, "--device=cpu", "--start=the cat", "--max_new_tokens=8", "--temperature=0"])
    assert capsys.readouterr().out == tokenizer.decode(theirs, skip_special_tokens=True) + "\n"
    refused(evaluate.main, ["--device=cpu", where], capsys, ["set --dataset=NAME or --file=TEXT"])
    tokenizer.add_tokens(["sat on"])
    tokenizer.save_pretrained(folder)
    said = f"has token id {len(tokenizer) - 1}, and the model has {len(tokenizer) - 1};"
    refused(sample.main, [where, "--device=cpu", "--start=the cat sat on"], capsys, [said])
    refused(evaluate.main, ["--device=cpu", where, f"--file={tmp_path / 'text.txt'}"], capsys, [said])


def test_a_loss_without_a_perplexity(runs, figures, monkeypatch):
    monkeypatch.setattr(evaluate, "mean_loss", lambda *_: Loss(1000.0, None, 5, 0))
    assert figures(f"--out_dir={runs / 'causal'}")["perplexity"] is None


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Texts, and data sets of 20 and 300 characters, and of bytes by a tokenizer that is not known."""
    folder = tmp_path_factory.mktemp("files")
    for name, content in {"one": b"a", "text": b"the cat"}.items():
        (folder / f"{name}.txt").write_bytes(content)
    for name, chars in {"chars": 20, "large": 300}.items():
        text = "".join(chr(1000 + i) for i in range(chars)) * 2
        write_text(folder / name, CharTokenizer(text), text)
    write_set(folder / "bytes")
    (folder / "bytes" / "meta.json").write_text('{"vocab_size": 257}')
    return folder


REFUSED = [  # run, flags, and what the line must name
    ("causal", ["--dataset=nowhere"], ["no data set 'nowhere'"]),
    ("causal", ["--dataset=nowhere", "--file=x"], ["dataset=nowhere (command line): used only with file=''", "file=x"]),
    ("causal", ["--file=x", "--eval_iters=3"], ["eval_iters=3", "file=x"]),
    ("causal", ["--file=one.txt"], ["file=one.txt has 1 tokens"]),
    ("masked", ["--file=text.txt"], ["objective=causal"]),
    ("causal", ["--block_size=17"], ["block_size=17", "16"]),
    ("causal", ["--out_dir=hf", "--answers=x"], ["no directory hf"]),
    ("masked", ["--dataset=chars"], ["chars has another tokenizer than the model", "prepare the data"]),
    ("causal", ["--dataset=large"], ["300", "vocab_size=257", "the tokenizer of the model"]),
]


@pytest.mark.parametrize("name,flags,fragments", REFUSED, ids=lambda x: " ".join(x))
def test_what_cannot_be_evaluated(runs, files, capsys, monkeypatch, name, flags, fragments):
    monkeypatch.chdir(files)
    refused(evaluate.main, ["--device=cpu", f"--out_dir={runs / name}", *flags], capsys, fragments)


def test_a_text_needs_a_tokenizer(files, capsys, run):
    out = run("--max_iters=1", "--warmup_iters=1", f"--dataset={files / 'bytes'}")
    flags = [f"--out_dir={out}", "--device=cpu"]
    refused(evaluate.main, [*flags, f"--file={files / 'text.txt'}"], capsys, ["without a tokenizer"])
    evaluate.main(flags)
    out, err = capsys.readouterr()
    assert "nats per token, perplexity" in out
    assert err.startswith("no bits per byte: ")


@pytest.mark.parametrize("nats", [math.nan, math.inf])
def test_a_loss_that_is_not_finite(runs, capsys, monkeypatch, nats):
    monkeypatch.setattr(evaluate, "mean_loss", lambda *_: Loss(nats, None, 944, 0))
    with pytest.raises(SystemExit) as stop:
        evaluate.main([f"--out_dir={runs / 'causal'}", "--device=cpu"])
    out, err = capsys.readouterr()
    assert stop.value.code == 1
    assert not out
    fact = f"error: the loss of {runs / 'causal'}/step_00000006 is {nats}, over 944 tokens"
    assert err == f"{fact}; use an earlier checkpoint\n"
