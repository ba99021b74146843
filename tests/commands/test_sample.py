"""Sampling: filters compared with explicit sets, text with uncached forwards, streamed text with complete text."""

import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, TINY, refused
from ranks import launch, train_runs

import evaluate
import sample
from data.tokenizer import ByteTokenizer, CharTokenizer
from data.writer import ShardWriter
from engine.checkpoint import weights
from engine.decode import generate
from engine.parallel.ranks import Ranks
from model import Model, ModelConfig
from sample import SampleConfig, choose

P = [0.5, 0.25, 0.15, 0.07, 0.03]


def drawn(seed=0, n=4000, **flags) -> torch.Tensor:
    """Frequencies of n samples from P, with shuffled token ids."""
    place = torch.tensor([3, 0, 4, 1, 2])
    logits = torch.empty(5).scatter(0, place, torch.tensor(P).log())
    generator = torch.Generator().manual_seed(seed)
    cfg = SampleConfig(**{"temperature": 1.0, "top_k": 0} | flags)
    tokens = choose(logits.expand(n, 5), cfg, generator)
    return torch.bincount(tokens, minlength=5)[place] / n


@pytest.mark.parametrize(
    "flags,kept",
    [
        ({}, P),
        ({"temperature": 0.0}, [1, 0, 0, 0, 0]),
        ({"temperature": 2.0}, [p**0.5 for p in P]),
        ({"temperature": 1e-6}, P[:1]),
        ({"temperature": 1e9, "top_k": 2}, [1, 1]),
        ({"top_k": 2}, P[:2]),
        ({"top_p": 1e-300}, P[:1]),
        ({"top_p": 0.9}, P[:3]),
        ({"min_p": 0.29}, P[:3]),
        ({"min_p": 1.0}, P[:1]),
        ({"top_k": 3, "top_p": 0.8}, P[:2]),  # 0.75 is more than 80 % of the 0.9 that top_k keeps
        ({"top_k": 4, "min_p": 0.1, "temperature": 0.5}, [p**2 for p in P[:2]]),  # 0.15^2 / 0.5^2 is below 0.1
    ],
    ids=str,
)
def test_choose(flags, kept):
    expected = torch.tensor([float(p) for p in kept] + [0.0] * (5 - len(kept)))
    expected = expected / expected.sum()
    got = drawn(**flags)
    assert ((got > 0) == (expected > 0)).all()
    assert torch.allclose(got, expected, atol=0.03)


@pytest.mark.parametrize(
    "flags",
    [
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_p": 0.5, "min_p": 0.1},
        {"temperature": 1.5, "top_k": 30, "top_p": 0.7, "min_p": 0.05},
        {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.3},
    ],
    ids=str,
)
def test_the_distribution_is_that_of_transformers(flags):
    """The distribution equals that of a random GPT-2's generate with the same flags, which applies min_p last."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=1)).eval()
    theirs.lm_head.weight.data.mul_(30)  # logits of a standard deviation of 2
    cfg = SampleConfig(**{"temperature": 1.0, "top_k": 0} | flags)
    options = {name: getattr(cfg, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    options |= {"output_logits": True, "output_scores": True, "return_dict_in_generate": True, "pad_token_id": 0}
    idx = torch.randint(50, (64, 4))
    made = theirs.generate(idx, do_sample=True, max_new_tokens=1, attention_mask=torch.ones_like(idx), **options)
    ours = sample.distribution(made.logits[0], cfg)
    expected = made.scores[0].softmax(-1)
    assert ((ours > 0) == (expected > 0)).all()
    assert torch.allclose(ours / ours.sum(-1, keepdim=True), expected, atol=1e-6)


@pytest.fixture(scope="module")
def train_tiny(tiny_data, tmp_path_factory):
    def call(*flags: str) -> Path:
        folder = tmp_path_factory.mktemp("sampled") / "out"
        flags = [*TINY, "--max_iters=120", "--eval_interval=120", f"--dataset={tiny_data}", *flags]
        launch(1, train_runs, folder.parent, [[*flags, f"--out_dir={folder}"]])
        return folder

    return call


@pytest.fixture(scope="module")
def trained(train_tiny):
    return train_tiny()


@pytest.fixture(scope="module")
def masked(train_tiny):
    return train_tiny("--objective=masked", "--block_size=32")


@pytest.fixture(scope="module")
def seq2seq(train_tiny):
    return train_tiny("--objective=seq2seq", "--block_size=32", "--corrupt_ratio=0.3", "--span_length=2")


@pytest.fixture
def say(trained, capfd):
    def call(*flags: str, out: Path = trained) -> str:
        capfd.readouterr()
        sample.main([f"--out_dir={out}", "--device=cpu", *flags])
        return capfd.readouterr().out

    return call


def text_of(ids: list[int]) -> str:
    """What is printed of these bytes, up to end-of-text."""
    if 256 in ids:
        ids = ids[: ids.index(256)]
    return bytes(ids).decode("utf-8", "replace") + "\n"


@pytest.mark.parametrize("prompt", ["the cat ", "dogs bark; sat on a mat. the cat "])
def test_greedy_text_equals_repeated_forwards(say, trained, prompt):
    """60 bytes, far beyond block_size=16, equal the argmax of one plain forward per byte, also with a long prompt."""
    text = say(f"--start={prompt}", "--max_new_tokens=60", "--temperature=0")
    _, model, tokenizer = sample.load(SampleConfig(out_dir=str(trained)), torch.device("cpu"))
    ids = tokenizer.encode(prompt).tolist()
    for _ in range(60):
        ids.append(model(torch.tensor([ids[-16:]]))[0, -1, :257].argmax().item())
    assert text == text_of(ids)


def test_rolling_text_equals_forwards_with_a_window(say, train_tiny):
    """60 bytes beyond block_size=16 equal the argmax of one plain forward of the whole text with window=16 per byte."""
    out = train_tiny("--pos=rope")
    text = say("--start=the cat ", "--max_new_tokens=60", "--temperature=0", "--overflow=roll", out=out)
    _, model, tokenizer = sample.load(SampleConfig(out_dir=str(out)), torch.device("cpu"))
    whole = Model(replace(model.cfg, block_size=128, window=16))
    whole.load_state_dict(model.state_dict())
    ids = tokenizer.encode("the cat ").tolist()
    with torch.no_grad():
        for _ in range(60):
            ids.append(whole(torch.tensor([ids]))[0, -1, :257].argmax().item())
    assert text == text_of(ids)


@pytest.mark.parametrize(
    "flags,prompt,never",
    [
        ([], "the ", range(257, 320)),
        (["--objective=masked"], "the <mask>at s<mask>", range(256, 320)),
        (
            ["--objective=seq2seq", "--corrupt_ratio=0.3", "--span_length=2"],
            "the <mask> on <mask>.",
            [256, *range(261, 320)],
        ),
    ],
    ids=["causal", "masked", "seq2seq"],
)
def test_padding_of_the_vocabulary_is_never_drawn(run, say, monkeypatch, flags, prompt, never):
    """The tokenizer has 257 of 320 rows, and the objective the next ones. Even if the other rows have the largest
    logits, and in blanks end-of-text (256), the samples stay the same, at a high and at a low temperature."""
    folder, logits = (
        run(*flags, "--vocab_size=320", "--max_iters=1", "--warmup_iters=1", "--eval_iters=1"),
        Model.logits,
    )
    for drawn in (["--temperature=100", "--top_k=310"], ["--top_k=3"], ["--temperature=0"], ["--top_p=0.9"]):
        drawn += [f"--start={prompt}", "--num_samples=4"] + ["--max_new_tokens=40"] * (
            "--objective=masked" not in flags
        )
        texts = []
        for more in (0.0, 1e4):
            padding = F.one_hot(torch.tensor(never), 320).sum(0)
            monkeypatch.setattr(Model, "logits", lambda self, x, y=more * padding: logits(self, x) + y)
            texts.append(say(*drawn, out=folder))
        assert texts[0] == texts[1] and len(texts[0]) > len(prompt)


def test_samples_are_one_batch_and_seeded(say):
    flags = ["--start=dogs ", "--num_samples=3", "--max_new_tokens=40", "--temperature=1.5"]
    text = say(*flags, "--seed=5")
    assert text == say(*flags, "--seed=5") != say(*flags, "--seed=6")
    parts = text.split("\n---------------\n")
    assert len(parts) == 3 == len(set(parts)) and all(part.startswith("dogs ") for part in parts)


@pytest.mark.parametrize("chosen", [False, True])
def test_a_step_of_few_products_takes_one_thread(monkeypatch, chosen):
    """But not the forward of the full context, nor any step if the user has set OMP_NUM_THREADS."""
    model = Model(ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=5), seed=1)
    monkeypatch.setattr("engine.decode.FEW", 4 * model.n_params())
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    used = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    list(generate(model, torch.zeros(1, 2, dtype=torch.int64), 5, lambda logits: logits.argmax(-1)))
    assert used == ([3] if chosen else [1, 1, 1, 3, 3, 3])


def test_start_from_file(say, tmp_path):
    (tmp_path / "prompt.txt").write_text("été ", encoding="utf-8")
    assert say(f"--start=FILE:{tmp_path / 'prompt.txt'}", "--max_new_tokens=3").startswith("été ")


@pytest.mark.parametrize("tokenizer, first", [(ByteTokenizer(), 256), (CharTokenizer("\tab\n"), 1)])
def test_an_empty_prompt_is_end_of_text_or_a_newline(say, trained, monkeypatch, tokenizer, first):
    path, model, _ = sample.load(SampleConfig(out_dir=str(trained)), torch.device("cpu"))
    monkeypatch.setattr(sample, "load", lambda cfg, device: (path, model, tokenizer))
    read = []
    monkeypatch.setattr(sample, "generate", lambda _, idx, *__, **___: read.append(idx.tolist()) or iter([idx[0]]))
    say()
    assert read == [[[first]]]


def test_stop_ends_a_sample_before_it(say):
    free = say("--start=the ", "--max_new_tokens=80", "--temperature=0")
    stop = free[20:24]
    cut = say("--start=the ", "--max_new_tokens=80", "--temperature=0", f"--stop={stop}")
    assert cut == free[: free.index(stop, 4)] + "\n" and stop not in cut[4:]


def test_pieces_join_to_the_text_and_hold_back():
    """A character split over tokens appears complete. A possible beginning of `stop` is held back."""
    s = sample.Sample(stop="END")
    out = [s.add(bytes([b]), last=False) for b in "añE EN€ END".encode()]
    assert "".join(out) == "añE EN€ " == s.text and s.ended
    assert out[1:3] == ["", "ñ"] and out[3] == ""
    s = sample.Sample(stop="END")
    assert s.add(b"x EN", last=False) == "x " and s.add(b"\xe2\x82", last=True) == "EN\ufffd"


def test_a_terminal_sees_the_text_while_it_is_written(trained, monkeypatch, capsys):
    """Each piece is written at once, and the text equals the one written to a pipe."""
    flags = [f"--out_dir={trained}", "--start=the cat ", "--max_new_tokens=40", "--device=cpu"]
    sample.main(flags)
    piped = capsys.readouterr().out

    class Terminal(io.StringIO):
        def reconfigure(self, **options):
            pass

        def isatty(self):
            return True

        def flush(self):
            lengths.add(self.tell())

    lengths = set()
    monkeypatch.setattr(sys, "stdout", Terminal())
    sample.main(flags)
    assert sys.stdout.getvalue() == piped
    assert len(lengths) > 30 and "tokens per second" in capsys.readouterr().err


def test_any_prompt_and_any_terminal(trained):
    """A prompt that is not UTF-8, a terminal with ASCII only, and a reader that ends early."""
    command = [sys.executable, "sample.py", f"--out_dir={trained}", b"--start=\xc3\xa9\xff", "--max_new_tokens=40"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and done.stdout.startswith(b"??")
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert b"Error" not in process.stderr.read() and process.wait() == -signal.SIGPIPE


# ---- scores


@pytest.fixture(scope="module")
def wide(train_tiny):
    return train_tiny("--vocab_size=320", "--pos=rope", "--logit_softcap=20")


@pytest.mark.parametrize("name", ["trained", "wide"])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 18, 24, 25, 26, 70])
def test_scores_equal_log_softmax_of_the_logits(request, say, tmp_path, name, length):
    """Up to block_size + 1 = 17 tokens the context is the whole text; then each window adds 8 tokens to it."""
    out, text = request.getfixturevalue(name), ("the café sat\r\non a mat. " * 5).encode()[:length]
    text = text[:-1] + b"x" if text[-1] > 127 else text
    (tmp_path / "text.txt").write_bytes(text)
    lines = [json.loads(line) for line in say(f"--score={tmp_path / 'text.txt'}", out=out).splitlines()]
    assert [line["token"] for line in lines] == list(text)
    assert [line["byte"] for line in lines] == list(range(length))
    assert [line["text"] for line in lines] == [bytes([b]).decode("utf-8", "replace") for b in text]
    _, model, _ = sample.load(SampleConfig(out_dir=str(out)), torch.device("cpu"))
    expected, ids = [None], torch.tensor(list(text))
    for i in range(1, length):  # the inputs from a multiple of 8 on, of which there are at most 16
        start = max(0, -(-(i - 16) // 8) * 8)
        assert 9 <= i - start <= 16 or start == 0
        logits = model.double()(ids[None, start:i])[0, -1]
        expected.append(logits.log_softmax(-1)[text[i]].item())
    assert lines[0]["logprob"] is None
    assert [line["logprob"] for line in lines[1:]] == pytest.approx(expected[1:], rel=1e-5, abs=1e-6)


def test_scores_of_tokens_of_several_bytes(run, say, tmp_path):
    """`byte` counts the bytes before a token, and the mean of the log-probabilities is evaluate.py's loss."""
    text = "añ€ñ€a" * 2
    with ShardWriter(tmp_path / "chars", CharTokenizer(text)) as writer:
        for split in ("train", "val"):
            writer.add(split, CharTokenizer(text).encode(text * 20))
    out = run("--max_iters=1", "--warmup_iters=1", f"--dataset={tmp_path / 'chars'}")
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    lines = [json.loads(line) for line in say(f"--score={tmp_path / 'text.txt'}", out=out).splitlines()]
    assert "".join(line["text"] for line in lines) == text
    assert [line["byte"] for line in lines] == [len(text[:i].encode()) for i in range(len(text))]
    evaluated = evaluate.EvaluateConfig(file=str(tmp_path / "text.txt"))
    ranks = Ranks(0, 1, torch.device("cpu"), torch.float32, False)
    machine = {"device": "cpu", "eval_only": True, "batch_size": 8}
    given = evaluated, ranks, machine, text
    found = weights.read(str(out), lambda found: evaluate.evaluate_text(*given, found, None))
    assert found["loss"] == pytest.approx(-sum(line["logprob"] for line in lines[1:]) / 11, rel=1e-6)


# ---- blanks


def test_masked_fills_the_surest_blank_first(say, masked, monkeypatch):
    """Compared with full forwards and loops over their probabilities. The random weights are so large that a token
    depends on those around it, so another order gives another text."""
    path, model, tokenizer = sample.load(SampleConfig(out_dir=str(masked)), torch.device("cpu"))
    torch.manual_seed(7)
    for p in model.parameters():
        p.data.normal_()
    monkeypatch.setattr(sample, "load", lambda cfg, device: (path, model, tokenizer))
    monkeypatch.setattr(tokenizer, "decode", lambda ids: str(ids.tolist()))  # random bytes are no UTF-8

    @torch.no_grad()
    def filled(key) -> str:
        ids = [257 if c == "_" else ord(c) for c in "the c_t ____ __ a mat"]
        while 257 in ids:
            p = model(torch.tensor([ids]))[0, :, :256].softmax(-1)  # without end-of-text
            place = max((i for i, t in enumerate(ids) if t == 257), key=lambda i: key(i, p[i]))
            ids[place] = int(p[place].argmax())
        return str(ids)

    surest = filled(lambda i, p: p.max())
    assert surest not in (filled(lambda i, p: -i), filled(lambda i, p: -p.max()))
    greedy = ["--temperature=0", "--num_samples=2"]
    text = say("--start=the c_t ____ __ a mat", "--blank=_", *greedy, out=masked)
    assert text == surest + sample.SEPARATOR + surest + "\n"
    assert say("--start=the c<mask>t " + 4 * "<mask>" + " <mask><mask> a mat", *greedy, out=masked) == text


def test_seq2seq_fills_spans(say, seq2seq):
    """Compared with uncached forwards: sentinels 257, 258, ... come in order, and the third one ends the two spans."""
    _, model, tokenizer = sample.load(SampleConfig(out_dir=str(seq2seq)), torch.device("cpu"))
    source = torch.tensor([[*b"the ", 257, *b" on a ", 258, *b"."]])
    ids = [257]
    with torch.no_grad():
        while ids[-1] != 259 and len(ids) <= 40:
            logits = model(torch.tensor([ids[-32:]]), source=source)[0, -1]
            allowed = [*range(256), max(ids) + 1 if max(ids) >= 257 else 257]
            ids.append(max(allowed, key=lambda t: logits[t]))
    fills, number = {257: [], 258: [], 259: []}, 257
    for t in ids:
        number = max(number, t)
        fills[number] += [t] if t < 256 else []
    first, second = (bytes(fills[n]).decode("utf-8", "replace") for n in (257, 258))
    assert first or second
    flags = ["--start=the <mask> on a <mask>.", "--temperature=0", "--max_new_tokens=40"]
    assert say(*flags, out=seq2seq) == f"the {first} on a {second}.\n"
    several = (
        say(*flags[:1], "--num_samples=3", "--max_new_tokens=40", out=seq2seq).rstrip("\n").split(sample.SEPARATOR)
    )
    assert len(several) == 3
    assert all(text.startswith("the ") and " on a " in text and text.endswith(".") for text in several)


def test_each_sample_of_seq2seq_fills_its_blank(capsys, monkeypatch):
    """Samples of one batch whose blanks end after 1, 4 and 2 tokens; what follows the last sentinel is left out."""
    rows = [*b"x", 258, *b"zzz"], [*b"yyyy", 258], [*b"ww", 258, *b"vv"]

    def generate(net, start, n, draw, source, roll):
        for ids in zip(*rows, strict=True):
            logits = torch.zeros(3, 259).scatter_(1, torch.tensor(ids)[:, None], 1.0)
            yield draw(logits)

    source, tokenizer = torch.tensor([[*b"a", 257, *b"b"]] * 3), ByteTokenizer()
    cfg, greedy = SampleConfig(start="a<mask>b", num_samples=3), lambda logits: logits.argmax(-1)
    monkeypatch.setattr(sample, "generate", generate)
    assert sample.fill_spans(cfg, None, tokenizer, cfg.start, source, greedy) == 3 * 5
    assert capsys.readouterr().out == sample.SEPARATOR.join(["axb", "ayyyyb", "awwb"]) + "\n"


# ---- what cannot be


@pytest.mark.parametrize(
    "objective,flags,fragments",
    [
        ("masked", ["--start=no blank"], ["start='no blank'", "<mask>", "--blank"]),
        ("masked", ["--start=a_", "--blank=_", "--stop=x"], ["stop=x", "objective=masked"]),
        ("trained", ["--overflow=roll"], ["overflow=roll", "pos=learned", "overflow=recompute"]),
        ("seq2seq", ["--start=a_", "--blank=_", "--overflow=roll"], ["overflow=roll", "pos=learned"]),
        ("masked", [f"--start={'a' * 32}<mask>"], ["33 tokens", "block_size=32"]),
        ("masked", [f"--start={'<mask>' * 40}"], ["more blanks than the model knows, 32; fill"]),
        ("masked", ["--start=a_", "--blank="], ["blank"]),
        ("seq2seq", [f"--start={'_ ' * 6}", "--blank=_"], ["more blanks than the model knows, 5; fill"]),
        ("seq2seq", ["--start=\ud800"], ["has no blank"]),
        ("trained", ["--start=a_", "--blank=_"], ["blank=_", "objective=causal"]),
        ("trained", ["--score=empty.txt"], ["score=empty.txt is empty"]),
        ("trained", ["--score=nul.py", "--top_p=0.5"], ["top_p=0.5 (command line): used only with score=''"]),
        ("trained", ["--score=nul.py", "--start=a"], ["start=a (command line)", "score=nul.py"]),
        ("masked", ["--score=nul.py"], ["score=nul.py needs a model of objective=causal, and this is masked"]),
    ],
    ids=ascii,
)
def test_what_a_model_cannot_do(request, capfd, files, monkeypatch, objective, flags, fragments):
    out = request.getfixturevalue(objective)
    monkeypatch.chdir(files)
    error = refused(sample.main, [f"--out_dir={out}", "--device=cpu", *flags], capfd)
    assert all(fragment in error for fragment in fragments), error


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Files that are not prompts."""
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "empty.txt").touch()
    (folder / "latin1.txt").write_bytes(b"\xe9t\xe9")
    (folder / "nul.py").write_text("start = 'FILE:a\\0b'\n")
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    (folder / "nowhere").symlink_to("nothing")
    with open(folder / "huge.txt", "wb") as f:
        f.truncate(2**40)
    return folder


@pytest.mark.parametrize("name, start", [("trained", "a"), ("masked", "<mask>"), ("seq2seq", "<mask>")])
@pytest.mark.parametrize("temperature", [0, 1])
def test_weights_that_are_not_finite(request, monkeypatch, capfd, name, start, temperature):
    load = sample.load

    def broken(*args):
        found = load(*args)
        found[1].norm.weight.data.fill_(torch.nan)
        return found

    monkeypatch.setattr(sample, "load", broken)
    flags = [f"--out_dir={request.getfixturevalue(name)}", f"--start={start}", f"--temperature={temperature}"]
    assert "logits are not finite" in refused(sample.main, [*flags, "--device=cpu"], capfd)


BAD = {  # --start=FILE:... -> a part of the error line
    "fifo": "Not a regular file", "folder": "Not a regular file", "/dev/zero": "Not a regular file",
    "nowhere": "No such file", "a" * 5000: "too long", "~nobody_of_that_name/x": "home directory",
    "/proc/self/mem": "Input/output error", "huge.txt": "more than 16,777,216", "latin1.txt": "UTF-8",
}  # fmt: skip
WRONG = ["--temperature=1e-300", "--top_p=1.0001", "--overflow=wrap", "--device=cuda:-1", "--dtype=float16"]
WRONG += ["--out_dir=/no/such/run", "--out_dir=folder", "--out_dir=", "--block_size=4", "nul.py"]


@pytest.mark.parametrize("name", BAD, ids=lambda name: name[:30])
def test_files_that_are_no_prompt(name, trained, files, capfd, monkeypatch):
    monkeypatch.chdir(files)
    error = refused(sample.main, [f"--out_dir={trained}", "--device=cpu", f"--start=FILE:{name}"], capfd)
    assert f"start=FILE:{name}"[:200] in error and BAD[name] in error


@pytest.mark.parametrize("flag", WRONG)
def test_flags_that_are_wrong(flag, trained, files, capfd, monkeypatch):
    monkeypatch.chdir(files)
    error = refused(sample.main, [f"--out_dir={trained}", "--device=cpu", *flag.split(" ")], capfd)
    assert "start='FILE:a" in error if flag == "nul.py" else flag.partition("=")[0].split()[0].lstrip("-") in error


@pytest.mark.parametrize("prompt", ["a\0b", "\ud800", "\udcff", "\ufeffx", "é" * 40, "\r\n", "FILE"], ids=ascii)
def test_odd_prompts_are_continued(prompt, say):
    assert len(say(f"--start={prompt}", "--max_new_tokens=2")) >= len(prompt) + 1
