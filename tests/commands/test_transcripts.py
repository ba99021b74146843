"""All that a command prints, against a transcript whose numbers come from elsewhere: from metrics.jsonl, a fake clock,
the tokens, closed forms."""

import math
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import evaluate
import sample
import train
from engine import weights
from engine.checkpoint.saver import Checkpoints
from engine.evaluation import Evaluation
from tests.commands.test_sample import greedy
from tests.data.preparing import tokens_of
from tests.helpers import metrics

CPU = torch.device("cpu")
DECIMAL = r"(-?\d+\.\d+(?:e-\d+)?)"


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """A clock that stands still; what a test times moves it."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def takes(monkeypatch, clock, owner, name: str, seconds: float):
    """From now on each call of owner.name takes so many seconds of the clock."""
    plain = getattr(owner, name)

    def slow(*args, **kwargs):
        clock.now += seconds
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, slow)


def assert_same_text(said: str, expected: str):
    """The words are the same, and decimal numbers are equal but for their last digits."""
    words = re.split(DECIMAL, said)
    expected_words = re.split(DECIMAL, expected)
    assert words[::2] == expected_words[::2]
    numbers = [float(word) for word in words[1::2]]
    assert numbers == pytest.approx([float(word) for word in expected_words[1::2]], rel=1e-3, abs=1e-3)


# ---- a training


def evaluated(row: dict, best: bool = False) -> str:
    """The line of an evaluation, from its row in metrics.jsonl."""
    text = f"step {row['step']}: train loss {row['train_loss']:.4f}, val loss {row['val_loss']:.4f}"
    return f"{text}, bpb {row['val_bpb']:.4f}{' (the best so far)' if best else ''}"


def trained_step(row: dict, times: str, lr: float) -> str:
    """The line of a step."""
    return f"iter {row['step']}: loss {row['loss']:.4f}, {times}, lr {lr:.2e}, grad norm {row['grad_norm']:.3f}"


def ending(folder: Path, best: str, duration: str, further: int) -> list[str]:
    return [
        f"done; the best val loss is {best}, after {duration}; next, for example:",
        f"  python sample.py --out_dir={folder}",
        f"  python -m tools.plot {folder} --y=loss,val_loss  # after pip install -e .[plots]",
        f"  python train.py --out_dir={folder} --init_from=resume --max_iters={further}",
    ]


def rate(step: int) -> float:
    """From 0 in 5 steps to 0.01, then half a cosine to 6e-5 in step 26."""
    if step < 5:
        return 0.01 * (step + 1) / 6
    return 6e-5 + (0.01 - 6e-5) * (1 + math.cos(math.pi * min(1, (step - 5) / 21))) / 2


@pytest.fixture
def paced(clock, monkeypatch):
    """Trainings on a device of 1e9 FLOP/s: steps take 0.5 s, evaluations 30 s and saves 100 s, and these are the
    validation losses."""
    losses = Evaluation.losses
    of_val = iter([5.0, 3.0, 4.0, 2.5, 2.75, 2.0])

    def scripted(self, stop):
        of_train, measured = losses(self, stop)
        return of_train, measured._replace(nats=next(of_val))

    monkeypatch.setattr(Evaluation, "losses", scripted)
    takes(monkeypatch, clock, Evaluation, "losses", 30.0)
    takes(monkeypatch, clock, Checkpoints, "save", 100.0)
    takes(monkeypatch, clock, train.Run, "train_step", 0.5)
    monkeypatch.setattr(train, "peak_flops", lambda *_: 1e9)


MATRICES = 257 * 16 + 2 * 12 * 16**2  # the numbers of the head's, and of those of two layers


def first_line(data: Path) -> str:
    parameters = MATRICES + 16 * 16 + 5 * 16  # and positions and norms
    windows = (len(tokens_of(data, "train")) - 1) // 16
    sizes = f"{parameters:,} parameters; 128 tokens per step from {data} train, {windows} windows"
    return f"{sizes}; 1 x cpu, float32; attention: full (2 layers)"


def test_a_run_and_its_resume(run, paced, capsys, tiny_data):
    """Evaluations and saves count in the duration alone."""
    flops = 6 * MATRICES + 2 * 12 * 16 * 16  # of a token; scores and values of two layers
    times = f"time 500.00ms, tok/s 256, mfu {256 * flops / 1e9:.2%}"  # 2 micro-batches of 4 texts of 16 tokens a step
    flags = ["--log_interval=10", "--eval_interval=10", "--lr_decay_iters=26"]
    folder = run(*flags, "--max_iters=21")
    rows = {(row["step"], row["kind"]): row for row in metrics(folder)}
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        first_line(tiny_data),
        evaluated(rows[0, "eval"], best=True),
        trained_step(rows[0, "train"], times, rate(0)),
        evaluated(rows[10, "eval"], best=True),
        trained_step(rows[10, "train"], times, rate(10)),
        evaluated(rows[20, "eval"]),
        trained_step(rows[20, "train"], times, rate(20)),
        evaluated(rows[21, "eval"], best=True),
        *ending(folder, "2.5000, of step_00000021", "7 min 10 s", 42),  # 21 steps, 4 evaluations, 3 saves
    ]
    assert err == ""

    run(*flags, "--init_from=resume", "--max_iters=31")
    rows = {(row["step"], row["kind"]): row for row in metrics(folder)}
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        first_line(tiny_data),
        evaluated(rows[30, "eval"]),
        trained_step(rows[30, "train"], times, 6e-5),
        evaluated(rows[31, "eval"], best=True),
        *ending(folder, "2.0000, of step_00000031", "4 min 25 s", 62),  # 10 steps, 2 evaluations, 2 saves
    ]
    assert err == ""


# ---- what is done with a trained model


def test_an_evaluation(trained, tiny_data, capsys):
    """Of the batches that the run itself has evaluated last: two of 4 sequences of 16 tokens."""
    evaluate.main([f"--out_dir={trained}", "--device=cpu", "--eval_iters=2", "--batch_size=4"])
    out, err = capsys.readouterr()
    row = metrics(trained)[-1]
    expected = (
        f"{trained}/step_00000002 on {tiny_data} val: loss {row['val_loss']:.4f} nats per token, "
        f"{row['val_bpb']:.4f} bits per byte, perplexity {math.exp(row['val_loss']):.4g}, over 128 tokens\n"
    )
    assert_same_text(out, expected)
    assert err == ""


def test_eight_samples(trained, clock, monkeypatch, capsys):
    """Of 5 tokens each, which take 2 s together."""
    takes(monkeypatch, clock, sample, "generate", 2.0)
    flags = ["--num_samples=8", "--max_new_tokens=5", "--temperature=0", "--start=the "]
    sample.main([f"--out_dir={trained}", "--device=cpu", *flags])
    out, err = capsys.readouterr()
    model = weights.load_model(str(trained), CPU, torch.float32)[1]
    text = bytes(greedy(model, [*b"the "], 5)).decode(errors="replace")
    assert out == "\n---------------\n".join(8 * [text]) + "\n"
    assert err == (f"{trained}/step_00000002, 10,592 parameters, on cpu: 40 tokens in 2.00 s, 20.0 tokens per second\n")
