"""Workers of torchrun that are killed come back, from the last checkpoint; one that fails ends them all."""

import runpy
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from engine.parallel import connection
from tests.helpers import IN_FLOAT64, ROOT, TINY, distance, losses, refused
from tests.ranks import BACKWARD, act_in, launch, torchrun, train_until


def test_a_killed_worker_is_started_again_and_goes_on(run, tiny_data, tmp_path):
    """The flags say init_from=scratch; the losses are those of one process that nobody disturbed."""
    flags = ["--max_iters=12", "--eval_interval=6", "--save_interval=3", IN_FLOAT64]
    common = [*TINY, f"--dataset={tiny_data}", f"--out_dir={tmp_path / 'out'}"]
    said = launch(1, partial(torchrun, max_restarts=1), tmp_path, train_until, 8, signal.SIGKILL, [*common, *flags])
    assert said.count("step 0:") == 1 and said.count("parameters;") == 2, said
    undisturbed = losses(run(*flags, out="whole"))
    assert len(undisturbed) == 15
    assert distance(losses(tmp_path / "out"), undisturbed) < 1e-9


def test_a_start_goes_on_only_with_its_own_run(run, tmp_path, monkeypatch, capsys):
    """With --max_restarts a checkpoint in out_dir may be ours; one with other flags is of an older run, and refused."""
    run("--max_iters=4")
    before = losses(tmp_path / "out")
    others = [["--max_iters=4"], ["--max_iters=5"], ["--max_iters=4", "--learning_rate=2e-2"]]
    for flags, restarts in zip(others, "033", strict=True):
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        assert "already holds a run" in refused(lambda flags: run(*flags), flags, capsys)
    run("--max_iters=4")
    assert "is at step 4" in capsys.readouterr().out
    assert losses(tmp_path / "out") == before
    run("--max_iters=4", out="new")  # killed before its first checkpoint: from the start
    assert losses(tmp_path / "new") == before


def test_a_start_reads_nothing_of_the_one_before(monkeypatch):
    """torchrun keeps its store; a rank that is early must not take what the dead ones wrote for what the late will."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for name, value in [("ADDR", "localhost"), ("PORT", server.port)]:
        monkeypatch.setenv(f"MASTER_{name}", str(value))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    def join(rank, late):
        time.sleep(0.2 * (rank == late))
        return connection.fresh_store(rank, 3, timedelta(seconds=60))

    for late in (0, 1, 2, 1):  # four starts
        with ThreadPoolExecutor(3) as threads:
            stores = list(threads.map(join, range(3), [late] * 3))
        assert not any(store.check(["address"]) for store in stores)
        assert not server.check(["exception_dump"])
        server.set("exception_dump", "1")  # by the watchdog of NCCL, which would end the next start after some minutes
        stores[late].set("address", f"{late}")
        assert all(store.check(["address"]) for store in stores)  # get would wait
        assert [store.get("address") for store in stores] == [f"{late}".encode()] * 3
    with pytest.raises(RuntimeError, match="a rank did not start within 0 seconds"):  # only its old keys are there
        connection.fresh_store(0, 3, timedelta(seconds=0.2))


def train_and_fail(flags: list[str]):
    """train.py as a program, whose second rank raises an error in its fifth step."""

    def fail(*_):
        raise RuntimeError("planted failure")

    act_in(5, BACKWARD, fail)
    sys.argv = ["train.py", *flags]
    try:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    except RuntimeError:
        sys.excepthook(*sys.exc_info())  # as in a process of its own
        sys.exit(1)


def torchrun_train_and_fail(flags: list[str]):
    with pytest.raises(ChildFailedError) as failed:
        torchrun(train_and_fail, flags)
    print(failed.value)  # torchrun's table


def test_a_rank_that_raises_takes_the_others_down_and_its_error_is_told_first_and_last(tiny_data, tmp_path):
    flags = [*TINY, f"--dataset={tiny_data}", f"--out_dir={tmp_path / 'out'}"]
    all_said = launch(1, torchrun_train_and_fail, tmp_path, [*flags, "--save_interval=1"])
    said, _, rest = all_said.partition("RuntimeError: planted failure")
    assert "SIGKILL" not in rest
    assert "forcefully" not in rest  # which torchrun sends after 30 s
    tracebacks = [line for line in said.splitlines() if "Traceback" in line]
    assert len(tracebacks) == 1 and "rank1" in tracebacks[0], said
    # In torchrun's table too, which of forked workers has only the first one to end
    lost, _, table = rest.partition(" FAILED\n")
    assert "planted failure" in table or "rank 0 has lost another rank" in lost
