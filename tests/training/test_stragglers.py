"""The slowest rank is named, and the one that waits for data: both are made slow here."""

import errno
import re
import threading
import time

from helpers import TINY, metrics
from ranks import launch

import train
from data import loader
from engine.metrics import Metrics
from engine.step import Spikes
from engine.stragglers import PRODUCTS, Stragglers


def train_slowly(flags: list[str]):
    from engine.parallel.ranks import environment

    rank, batch, seconds = environment().rank, loader._batch, Stragglers.seconds
    Stragglers.EVERY = 0.0
    if rank == 1:
        Stragglers.seconds = lambda self: seconds(self) + 100
    else:
        wanted, get = threading.Semaphore(0), loader.Loader.__next__

        def late(*args):
            """A batch of training that is not begun before it is asked for, however busy the machine is."""
            if threading.current_thread().name == "loader" and wanted.acquire(timeout=5):
                time.sleep(0.3)
            return batch(*args)

        loader._batch, loader.Loader.__next__ = late, lambda self: wanted.release() or get(self)
    train.main(flags)


def test_slow_ranks_are_named(tiny_data, tmp_path):
    flags = [*TINY, f"--dataset={tiny_data}", "--max_iters=6", "--log_interval=2", "--log_ranks=True"]
    launch(2, train_slowly, tmp_path, [*flags, f"--out_dir={tmp_path / 'out'}"])
    said = (tmp_path / "rank 0").read_text()
    named = re.findall(r"slowest, rank (\d) on \S+; rank (\d) on \S+ has waited", said)
    assert named == [("1", "0")] * 3, said
    rows = [row for row in metrics(tmp_path / "out") if row["kind"] == "ranks"]
    assert [row["step"] for row in rows] == [0, 2, 4]
    for row in rows:
        fast, slow = row["product_ms"]
        assert 0 < fast < 1e5 / PRODUCTS < slow
        assert row["data_wait_s"][0] > 0.2


def train_on_a_full_disk(flags: list[str]):
    """The first rank cannot write the line of step 2."""
    log = Metrics.log

    def full(self, step, *args, **kwargs):
        if step == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return log(self, step, *args, **kwargs)

    Stragglers.EVERY, Metrics.log = 0.0, full
    train.main(flags)


def test_a_rank_that_cannot_write_looks_with_the_others(tiny_data, tmp_path):
    flags = [*TINY, f"--dataset={tiny_data}", "--max_iters=4", "--log_ranks=True", "--on_save_error=continue"]
    launch(2, train_on_a_full_disk, tmp_path, [*flags, f"--out_dir={tmp_path / 'out'}"])
    assert "training goes on because of --on_save_error=continue" in (tmp_path / "rank 0").read_text()
    rows = [row["step"] for row in metrics(tmp_path / "out") if row["kind"] == "ranks"]
    assert rows == [0, 1, 2, 3]


def test_norms_of_zero_have_no_spike():
    spikes = Spikes(10.0, [0.0] * 20)
    assert spikes.ratio(1.0) is None and spikes.norms[-1] == 1.0
