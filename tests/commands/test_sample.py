"""Sampling: filters compared with explicit sets, text with uncached forwards, streamed text with complete text."""

import io
import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import sample
from data.tokenizer import ByteTokenizer, CharTokenizer
from engine import weights
from model import Model, ModelConfig
from sample import SampleConfig, choose
from tests.helpers import TINY, refused
from tests.ranks import begin, launch, train_runs

P = [0.5, 0.25, 0.15, 0.07, 0.03]


@pytest.mark.parametrize("flags,kept", [
    ({}, P),
    ({"top_k": 0}, P),
    ({"temperature": 0.0}, [1, 0, 0, 0, 0]),
    ({"temperature": 1e-300}, [1, 0, 0, 0, 0]),
    ({"temperature": 2.0}, [p**0.5 for p in P]),
    ({"temperature": 1e-6}, P[:1]),
    ({"temperature": 1e9, "top_k": 2}, [1, 1]),
    ({"top_p": 1e-300}, P[:1]),
    ({"top_p": 0.9}, P[:3]),
    ({"min_p": 1.0}, P[:1]),
    ({"top_k": 4, "min_p": 0.1, "temperature": 0.5}, [p**2 for p in P[:2]]),  # 0.15^2 / 0.5^2 is below 0.1
], ids=str)  # fmt: skip
def test_choose(flags, kept):
    cfg = SampleConfig(**{"temperature": 1.0} | flags)
    expected = torch.tensor([*kept, *[0.0] * (5 - len(kept))])
    expected = expected / expected.sum()
    place = torch.tensor([3, 0, 4, 1, 2])
    logits = torch.empty(5).scatter(0, place, torch.tensor(P).log()).expand(4000, 5)
    tokens = choose(logits, cfg, torch.Generator().manual_seed(0))
    got = torch.bincount(tokens, minlength=5)[place] / 4000
    assert ((got > 0) == (expected > 0)).all()
    assert torch.allclose(got, expected, atol=0.03)


RUNS = {  # most have more rows than ids
    "causal": [],
    "wide": ["--vocab_size=320", "--pos=rope", "--logit_softcap=20"],
    "masked": ["--vocab_size=320", "--objective=masked", "--block_size=32"],
    "seq2seq": ["--vocab_size=320", "--objective=seq2seq", "--block_size=32", "--corrupt_ratio=0.3", "--span_length=2"],
}


@pytest.fixture(scope="module")
def runs(tiny_data, tmp_path_factory) -> Path:
    """The folder of the runs, whose tokens depend on those around them, as weights begin large."""
    folder = tmp_path_factory.mktemp("sampled")
    flags = [*TINY, "--max_iters=2", "--warmup_iters=1", "--init_std=0.5", f"--dataset={tiny_data}"]
    launch(1, train_runs, folder, [[*flags, *more, f"--out_dir={folder / name}"] for name, more in RUNS.items()])
    return folder


@pytest.fixture
def say(runs, capfd):
    """say(*flags) is what sample.py prints."""

    def call(*flags: str, out: str | Path = "causal") -> str:
        capfd.readouterr()
        sample.main([f"--out_dir={runs / out}", "--device=cpu", *flags])
        return capfd.readouterr().out

    return call


def load(out: Path):
    return weights.load_model(str(out), torch.device("cpu"), torch.float32)


def with_large_weights(monkeypatch, out: Path, seed: int = 7) -> Model:
    """The run's model in float64, which sample.py loads too, with weights so large that a token depends on all before
    it. It writes printable ASCII and sentinels alone, as the weights of other ids are 0."""
    path, model, tokenizer = load(out)
    torch.manual_seed(seed)
    for p in model.parameters():
        p.data.normal_(std=0.5)
    rows = model.wte.weight.data
    rows.copy_(4 * F.normalize(rows))  # otherwise the longest are the likeliest everywhere
    rows[[*range(32), *range(127, 257)]] = 0
    model.double()
    monkeypatch.setattr(weights, "load_model", lambda *_: (path, model, tokenizer))
    return model


@torch.no_grad()
def greedy(model: Model, ids: list[int], n: int) -> list[int]:
    """The ids and the n likeliest bytes after them: one plain forward of the last 16 for each."""
    ids = list(ids)
    for _ in range(n):
        ids.append(model(torch.tensor([ids[-16:]]))[0, -1, :257].argmax().item())
    return ids


@pytest.mark.parametrize("name,prompt", [("causal", "the "), ("causal", "dogs bark; sat on a mat."), ("wide", "the ")])
def test_greedy_text_equals_repeated_forwards(say, runs, monkeypatch, name, prompt):
    """60 bytes, far beyond block_size=16."""
    model = with_large_weights(monkeypatch, runs / name)
    ids = greedy(model, prompt.encode(), 60)
    assert len(set(ids[-60:])) > 4
    assert say(f"--start={prompt}", "--max_new_tokens=60", "--temperature=0") == bytes(ids).decode() + "\n"


@pytest.mark.parametrize("name,prompt,never", [
    ("wide", "the ", range(257, 320)),
    ("masked", "the <mask>at s<mask>", range(256, 320)),
    ("seq2seq", "the <mask> on <mask>.", [256, *range(260, 320)]),
])  # fmt: skip
def test_padding_of_the_vocabulary_is_never_drawn(say, monkeypatch, name, prompt, never):
    """Even if the rows without a token, and in blanks end-of-text (256), have the largest logits."""
    logits = Model.logits
    padding = F.one_hot(torch.tensor(never), 320).sum(0)
    flags = [f"--start={prompt}", "--num_samples=2"]
    if name != "masked":
        flags.append("--max_new_tokens=15")
    for drawn in (["--temperature=100", "--top_k=310"], ["--temperature=0"]):
        texts = []
        for more in (0.0, 1e4):
            monkeypatch.setattr(Model, "logits", lambda self, x, y=more * padding: logits(self, x) + y)
            texts.append(say(*flags, *drawn, out=name))
        assert texts[0] == texts[1]
        assert len(texts[0]) > len(prompt)


def test_samples_are_one_batch_and_seeded(say):
    flags = ["--start=dogs ", "--num_samples=3", "--max_new_tokens=40", "--temperature=1.5"]
    text = say(*flags, "--seed=5")
    assert text == say(*flags, "--seed=5") != say(*flags, "--seed=6")
    parts = text.split("\n---------------\n")
    assert len(parts) == 3 == len(set(parts))
    assert all(part.startswith("dogs ") for part in parts)


@pytest.mark.parametrize("tokenizer, first", [(ByteTokenizer(), 256), (CharTokenizer("\tab\n"), 1)])
def test_an_empty_prompt_is_end_of_text_or_a_newline(say, runs, monkeypatch, tokenizer, first):
    path, model, _ = load(runs / "causal")
    monkeypatch.setattr(weights, "load_model", lambda *_: (path, model, tokenizer))
    read = []
    monkeypatch.setattr(sample, "generate", lambda _, idx, *__, **___: read.append(idx.tolist()) or iter([idx[0]]))
    say()
    assert read == [[[first]]]


def test_stop_ends_a_sample_before_it(say, runs, monkeypatch):
    with_large_weights(monkeypatch, runs / "causal")
    free = say("--start=the ", "--max_new_tokens=80", "--temperature=0")
    stop = free[20:24]
    cut = say("--start=the ", "--max_new_tokens=80", "--temperature=0", f"--stop={stop}")
    assert cut == free[: free.index(stop, 4)] + "\n"
    assert stop not in cut[4:]


def test_pieces_join_to_the_text_and_hold_back():
    """A character split over tokens appears complete. The longest possible beginning of `stop` is held back."""
    s = sample.Sample(stop="\n\nx")
    pieces = ["añ\n\n".encode()[:2], "añ\n\n".encode()[2:], b"y\n", b"\nx"]
    assert [s.add(piece, last=False) for piece in pieces] == ["a", "ñ", "\n\ny", ""]
    assert s.ended
    assert s.text == "añ\n\ny"


def test_a_terminal_sees_the_text_while_it_is_written(runs, monkeypatch, capsys):
    with_large_weights(monkeypatch, runs / "causal")
    flags = [f"--out_dir={runs / 'causal'}", "--start=the cat ", "--max_new_tokens=40", "--device=cpu"]
    sample.main(flags)
    piped = capsys.readouterr().out

    class Terminal(io.StringIO):
        def isatty(self, **options):
            return True

        reconfigure = isatty

        def flush(self):
            lengths.add(self.tell())

    lengths = set()
    monkeypatch.setattr(sys, "stdout", Terminal())
    sample.main(flags)
    assert sys.stdout.getvalue() == piped
    assert len(lengths) > 30
    assert "tokens per second" in capsys.readouterr().err


def test_a_sample_that_ends_within_a_character(capsys):
    cfg = sample.SampleConfig(max_new_tokens=3)
    model = Model(ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=257)).eval()
    sample.continue_text(cfg, model, ByteTokenizer(), "a", torch.tensor([[97]]), lambda logits: torch.tensor([0xC3]))
    assert capsys.readouterr().out == "a\ufffd\ufffd\ufffd\n"


def test_each_sample_of_a_batch_ends_by_itself(capsys, monkeypatch):
    """At any of the ids that end a text, of which a model may have several, while the others go on."""
    monkeypatch.setattr(ByteTokenizer, "ends", {256, ord(".")})
    rows = [*b"x", 256, *b"zz"], [*b"yyyy"], [*b"w.vv"]
    monkeypatch.setattr(sample, "generate", lambda *_: map(torch.tensor, zip(*rows, strict=True)))
    model = SimpleNamespace(cfg=ModelConfig())
    cfg = SampleConfig(num_samples=3, max_new_tokens=4)
    assert sample.continue_text(cfg, model, ByteTokenizer(), "a", torch.tensor([[97]] * 3), None) == 4 * 3
    assert capsys.readouterr().out == sample.SEPARATOR.join(["ax", "ayyyy", "aw"]) + "\n"


def test_a_reader_that_ends_early(runs, tmp_path):
    """The prompt is not UTF-8."""
    flags = [f"--out_dir={runs / 'causal'}", "--start=é\udcff", "--max_new_tokens=40", "--device=cpu"]
    os.mkfifo(tmp_path / "reader")
    process = begin(["sample.py", *flags], tmp_path, stdout=tmp_path / "reader")
    open(tmp_path / "reader").close()
    process.join(600)
    assert process.exitcode == -signal.SIGPIPE
    assert "Error" not in (tmp_path / "stderr").read_text()


def test_masked_fills_the_surest_blank_first(say, runs, monkeypatch):
    """Compared with full forwards and loops over their probabilities. Another order gives another text."""
    model = with_large_weights(monkeypatch, runs / "masked")

    @torch.no_grad()
    def filled(key) -> str:
        ids = [257 if c == "_" else ord(c) for c in "the c_t ____ __ a mat"]
        while 257 in ids:
            p = model(torch.tensor([ids]))[0, :, :256].softmax(-1)  # without end-of-text
            place = max((i for i, t in enumerate(ids) if t == 257), key=lambda i: key(i, p[i]))
            ids[place] = int(p[place].argmax())
        return bytes(ids).decode()

    surest = filled(lambda i, p: p.max())
    assert surest not in (filled(lambda i, p: -i), filled(lambda i, p: -p.max()))
    greedy = ["--temperature=0", "--num_samples=2"]
    text = say("--start=the c_t ____ __ a mat", "--blank=_", *greedy)
    assert text == surest + sample.SEPARATOR + surest + "\n"
    assert say("--start=the c<mask>t " + 4 * "<mask>" + " <mask><mask> a mat", *greedy) == text


def test_seq2seq_fills_spans(say, runs, monkeypatch):
    """Compared with uncached forwards: sentinels 257, 258, ... come in order, and the third one ends the two spans."""
    model = with_large_weights(monkeypatch, runs / "seq2seq", seed=1)
    model.wte.weight.data[257:260] *= 5  # they come soon
    source = torch.tensor([[*b"the ", 257, *b" on a ", 258, *b"."]])
    ids = [257]
    with torch.no_grad():
        while ids[-1] != 259 and len(ids) <= 40:
            logits = model(torch.tensor([ids[-32:]]), source=source)[0, -1]
            allowed = [*range(256), max(ids) + 1]
            ids.append(max(allowed, key=lambda t: logits[t]))
    second = ids.index(258)
    assert ids[-1] == 259
    assert 1 < second < len(ids) - 2
    flags = ["--start=the <mask> on a <mask>.", "--max_new_tokens=40", "--temperature=0"]
    filled = b"the " + bytes(ids[1:second]) + b" on a " + bytes(ids[second + 1 : -1]) + b".\n"
    assert say(*flags) == filled.decode()


def test_each_sample_of_seq2seq_fills_its_blank(capsys, monkeypatch):
    """Samples of one batch whose blanks end after 1, 4 and 2 tokens; what follows the last sentinel is left out."""
    rows = [*b"x", 258, *b"zzz"], [*b"yyyy", 258], [*b"ww", 258, *b"vv"]

    def generate(net, start, n, draw, source):
        for ids in zip(*rows, strict=True):
            logits = torch.zeros(3, 259).scatter_(1, torch.tensor(ids)[:, None], 1.0)
            yield draw(logits)

    source = torch.tensor([[*b"a", 257, *b"b"]] * 3)
    tokenizer = ByteTokenizer()
    cfg = SampleConfig(start="a<mask>b", num_samples=3)
    likeliest = partial(torch.argmax, dim=-1)
    monkeypatch.setattr(sample, "generate", generate)
    assert sample.fill_spans(cfg, None, tokenizer, cfg.start, source, likeliest) == 3 * 5
    assert capsys.readouterr().out == sample.SEPARATOR.join(["axb", "ayyyyb", "awwb"]) + "\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Files that are not prompts."""
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "latin1.txt").write_bytes(b"\xe9t\xe9")
    (folder / "nul.py").write_text("start = 'FILE:a\\0b'\n")
    os.mkfifo(folder / "fifo")
    (folder / "nowhere").symlink_to("nothing")
    with open(folder / "huge.txt", "wb") as f:
        f.truncate(2**40)
    return folder


REFUSED = [  # run, flags, and what the line must name
    ("masked", ["--start=no blank"], ["start='no blank'", "<mask>", "--blank"]),
    ("masked", ["--start=a_", "--blank=_", "--max_new_tokens=3"], ["max_new_tokens=3", "objective=masked"]),
    ("seq2seq", ["--start=a_", "--blank=_", "--stop=x"], ["stop=x", "objective=seq2seq"]),
    ("masked", [f"--start={'a' * 32}<mask>"], ["33 tokens", "block_size=32"]),
    ("masked", [f"--start={'<mask>' * 40}"], ["more blanks than the model knows, 32; fill"]),
    ("masked", ["--start=a_", "--blank="], ["blank"]),
    ("seq2seq", [f"--start={'_ ' * 6}", "--blank=_"], ["more blanks than the model knows, 5; fill"]),
    ("seq2seq", ["--start=\ud800"], ["has no blank"]),
    ("causal", ["--start=a_", "--blank=_"], ["blank=_", "objective=causal"]),
    ("causal", ["--temperature=0", "--top_p=0.5"], ["top_p=0.5", "temperature>0", "temperature=0"]),
    ("causal", ["nul.py"], ["start=FILE:a\\x00b: "]),
]
FILES = {  # --start=FILE:... -> a part of the error line
    "fifo": "Not a regular file", "nowhere": "No such file", "a" * 5000: "too long",
    "/proc/self/mem": "Input/output error", "huge.txt": "more than 16,777,216", "latin1.txt": "UTF-8",
}  # fmt: skip
REFUSED += [("causal", [f"--start=FILE:{name}"], [f"start=FILE:{name}"[:200], part]) for name, part in FILES.items()]
WRONG = ["--top_p=1.0001", "--device=cuda:-1", "--dtype=float16", "--out_dir=/no/such/run", "--out_dir="]
REFUSED += [("causal", [flag], [flag.partition("=")[0][2:]]) for flag in WRONG]


@pytest.mark.parametrize("name,flags,fragments", REFUSED, ids=lambda x: ascii(x)[:40])
def test_what_is_refused(runs, capfd, files, monkeypatch, name, flags, fragments):
    monkeypatch.chdir(files)
    refused(sample.main, [f"--out_dir={runs / name}", "--device=cpu", *flags], capfd, fragments)


@pytest.mark.parametrize("name,start", [("causal", "a"), ("masked", "<mask>"), ("seq2seq", "<mask>")])
def test_weights_that_are_not_finite(runs, monkeypatch, capfd, name, start):
    found = load(runs / name)
    found[1].norm.weight.data.fill_(torch.nan)
    monkeypatch.setattr(weights, "load_model", lambda *_: found)
    for temperature in (0, 1):
        flags = [f"--out_dir={name}", f"--start={start}", f"--temperature={temperature}", "--device=cpu"]
        refused(sample.main, flags, capfd, ["logits are not finite"])


def test_odd_prompts_are_continued(say, runs, monkeypatch, tmp_path):
    """What cannot be printed stands as a question mark."""
    model = with_large_weights(monkeypatch, runs / "causal")
    (tmp_path / "prompt.txt").write_bytes("été\r\n".encode())
    prompts = {start: start for start in ("a\0b", "\ud800", "\udcff", "\ufeffx", "é" * 40, "\r\n", "FILE")}
    prompts[f"FILE:{tmp_path / 'prompt.txt'}"] = "été\r\n"
    for start, prompt in prompts.items():
        two = bytes(greedy(model, ByteTokenizer().encode(prompt).tolist(), 2)[-2:])
        said = say(f"--start={start}", "--max_new_tokens=2", "--temperature=0")
        assert said == prompt.encode(errors="replace").decode() + two.decode() + "\n", ascii(start)
