"""A resume on other data: each source goes on, the best loss begins anew, and what changed is said."""

import shutil

import numpy as np

from data.dataset import TokenStream
from data.loader import Loader, order
from data.objective import Causal
from engine.checkpoint import files as checkpoint
from tests.data.preparing import write_set
from tests.helpers import edit_state, metrics, state_of

SHORT = ["--eval_interval=4", "--warmup_iters=1", "--lr_decay_iters=40"]


def loader(sizes, weights, **place):
    """Of sources with so many windows of 4 tokens."""
    tokens = [4 * size + 1 for size in sizes]
    stream = TokenStream("test", [np.zeros(sum(tokens), np.int64)], 9, [*zip("abc", tokens, weights, strict=False)])
    made = Loader(stream, Causal(9, None, 4), 1, **place)
    made.close()
    return made


def test_each_source_goes_on_where_the_weights_change():
    """Of each source, the windows are those of a run on it alone, whatever the weights were, and none comes twice."""
    sizes = (70, 50, 30)
    samples = 0
    read = (0, 0, 0)
    found = [[], [], []]
    for weights, n in (((7, 2, 1), 40), ((1, 1, 8), 25), ((1, 1, 8), 30), ((3, 3, 1), 50)):
        since = samples
        if samples == 65:  # the same weights as before: the mixture goes on in the middle of its period
            since = 40
        made = loader(sizes, weights, since=since, start=samples, read=[*read])
        for window in made.windows(np.arange(samples, samples + n)).tolist():
            source = int(np.searchsorted(np.cumsum(sizes), window, "right"))
            found[source].append(window - sum(sizes[:source]))
        samples += n
        read = made.samples_by_source(samples).tolist()
    assert [len(windows) for windows in found] == read
    assert sum(read) == samples
    for windows, size in zip(found, sizes, strict=True):
        assert windows == order(np.arange(len(windows)), size, 0).tolist()
    whole = loader(sizes, (1, 1, 8))
    two = loader(sizes, (1, 1, 8), since=0, start=25, read=[*whole.samples_by_source(25)])
    assert (whole.windows(np.arange(25, 95)) == two.windows(np.arange(25, 95))).all()


def test_a_resume_with_other_weights_of_the_mixture(run, tiny_data, more_data, capsys):
    folder = run(f"--dataset={tiny_data}:1,{more_data}:1", *SHORT, "--max_iters=8")
    assert state_of(folder)["data"]["read"] == [32, 32]
    changed = f"--dataset={tiny_data}:3,{more_data}:1"
    run(changed, *SHORT, "--max_iters=12", "--init_from=resume")
    said = capsys.readouterr().out
    assert f"the data have changed: weight 3 of {tiny_data}, of which 32 samples are read" in said
    assert "best loss" not in said
    data = state_of(folder)["data"]
    assert (data["since"], data["read"], data["weights"]) == (64, [56, 40], [3, 1])
    run(changed, *SHORT, "--max_iters=14", "--init_from=resume")
    assert "have changed" not in capsys.readouterr().out
    data = state_of(folder)["data"]
    assert (data["since"], data["read"], data["weights"]) == (64, [68, 44], [3, 1])


def test_a_resume_on_data_that_were_prepared_again(run, tmp_path, capsys):
    """They begin, and no loss on the old ones decides what is kept: after them, no loss would be the best one."""
    flags = [f"--dataset={tmp_path / 'data'}", *SHORT, "--always_save_checkpoint=False", "--keep_last=1"]
    first, second = np.random.default_rng(0).integers(0, 256, (2, 400))
    write_set(tmp_path / "data", first, first)
    folder = run(*flags, "--max_iters=4")
    edit_state(folder, best_val_loss=0.5)
    shutil.rmtree(tmp_path / "data")
    write_set(tmp_path / "data", second, second)
    run(*flags, "--max_iters=12", "--init_from=resume")
    said = capsys.readouterr().out
    assert "data train, of which 0 samples are read" in said
    assert "the best loss begins anew, as the validation data may have changed" in said
    rows = [row for row in metrics(folder) if row["kind"] == "eval" and row["step"] >= 4]
    evaluations = {row["step"]: row["val_loss"] for row in rows}
    best = min(evaluations, key=evaluations.get)
    assert (folder / "best").read_text() == f"step_{best:08d}\n"
    assert checkpoint.find(folder).name == "step_00000012"
    state = state_of(folder)
    assert state["best_val_loss"] == evaluations[best]
    assert state["data"]["read"] == [64]
    assert state["samples"] == 96


def test_the_best_loss_is_of_one_evaluation(run, tmp_path, capsys):
    folder = run(*SHORT, "--max_iters=4", "--objective=seq2seq", "--corrupt_ratio=0.3")
    edit_state(folder, best_val_loss=0.5)
    of_evaluation = ("eval_iters=3", "batch_size=2", "seed=5", "corrupt_ratio=0.25", "span_length=5")
    for flag in (*of_evaluation, "keep_last=3"):
        again = shutil.copytree(folder, tmp_path / flag)
        capsys.readouterr()
        run(*SHORT, f"--{flag}", "--max_iters=8", "--init_from=resume", out=flag)
        said = capsys.readouterr().out
        name, _, _ = flag.partition("=")
        anew = flag in of_evaluation
        assert (f"the best loss begins anew, as {name} may have changed" in said) == anew
        assert (state_of(again)["best_val_loss"] != 0.5) == anew
        assert ("seed=5 draws the data in another order" in said) == (flag == "seed=5")


def test_a_tokenizer_that_the_data_are_given_later(run):
    """A run on data without one, as the remedy of sample.py says, goes on with theirs."""
    folder = run(*SHORT, "--max_iters=4")
    edit_state(folder, tokenizer=None, tokenizer_hash=None)
    run(*SHORT, "--max_iters=6", "--init_from=resume")
    assert checkpoint.read_state(checkpoint.find(folder))["tokenizer"]["kind"] == "byte"
