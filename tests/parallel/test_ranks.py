"""Ranks that cannot work together: their flags differ, one is not there, or one is lost."""

import logging
import os
import re
import signal
import socket
from pathlib import Path

import pytest

from configurator import parse
from data import errors
from engine.config import Config
from engine.parallel import ranks as parallel
from tests.helpers import TINY
from tests.ranks import exit_codes, launch, train_main, train_until

DIFFERING = ["tp=2", "dataset=other", "dropout=0.1", "gradient_accumulation_steps=4", "mlp=swiglu", "ema_decay=0.9"]
NOWHERE = "no.such.host.invalid"


def join_with_other_flags():
    default = parse(Config, TINY)
    for flag in DIFFERING:
        cfg = parse(Config, [*TINY, "--vocab_size=64", *[f"--{flag}"] * int(os.environ["RANK"])])
        name, _, _ = flag.partition("=")
        mine = getattr(parse(Config, [*TINY, f"--{flag}"]), name)
        said = f"{name}={getattr(default, name)!r} on rank 0 and {mine!r} on rank 1; "
        with pytest.raises(ValueError, match=re.escape(said)):
            parallel.join(cfg)
    ranks = parallel.join(parse(Config, [*TINY, "--vocab_size=64", "--collective_timeout=7"]))
    assert ranks.size == 2
    for group in ranks.mesh.get_all_groups():
        assert group._get_backend(ranks.device).options._timeout.total_seconds() == 7
    default.device = f"cuda:{ranks.rank}"
    parallel.check_same_flags(default)  # each may name a GPU of its own


def test_ranks_with_different_flags_are_refused(tmp_path):
    launch(2, join_with_other_flags, tmp_path)


def test_a_lost_rank_leaves_a_line_that_resumes(tiny_data, tmp_path):
    out = tmp_path / "out"
    flags = [*TINY, f"--dataset={tiny_data}", f"--out_dir={out}", "--collective_timeout=120"]
    assert exit_codes(2, train_until, tmp_path, 4, signal.SIGKILL, flags) == [1, -signal.SIGKILL]
    said = (tmp_path / "rank 0").read_text()
    [line] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in said and line.startswith("error: rank 0 has lost another rank")
    assert line.endswith(f"--out_dir={out} and --init_from=resume")


def train_in_a_folder_of_its_own(flags: list[str], folder: Path):
    own = folder / f"node {os.environ['RANK']}"
    own.mkdir()
    os.chdir(own)
    errors.FIRST_RANK_SPEAKS = 0
    train_main(flags)


def test_nodes_that_do_not_share_out_dir_are_refused_at_the_start(tiny_data, tmp_path):
    flags = [*TINY, f"--dataset={tiny_data}", "--out_dir=out"]
    assert exit_codes(2, train_in_a_folder_of_its_own, tmp_path, flags, tmp_path) == [2, 2]
    said = (tmp_path / "rank 0").read_text().splitlines()
    assert said == ["error: out_dir=out is another folder on rank 1; give one on a file system that all ranks share"]
    assert not [*tmp_path.glob("node */out/.shared*")]


def train_alone(flags: list[str], rank: str, host: str):
    os.environ |= {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": host}
    errors.FIRST_RANK_SPEAKS = 0
    logging.disable(logging.DEBUG)  # which pytest alone shows
    train_main(flags)


def train_on_a_port_in_use(flags: list[str]):
    with socket.create_server(("", int(os.environ["MASTER_PORT"]))):
        train_alone(flags, "0", "localhost")


@pytest.mark.parametrize("how, place, words", [
    (train_on_a_port_in_use, (), "address already in use; start .*, or set .* in MASTER_ADDR and MASTER_PORT"),
    (train_alone, ("0", NOWHERE), f"^error: rank 0 cannot join the 2 ranks at {NOWHERE}:"),
    (train_alone, ("1", "localhost"), "^error: rank 1 cannot join the 2 ranks at localhost:"),
])  # fmt: skip
def test_ranks_that_do_not_meet_say_one_line(how, place, words, tiny_data, tmp_path):
    flags = [*TINY, f"--dataset={tiny_data}", f"--out_dir={tmp_path / 'out'}", "--collective_timeout=1"]
    assert exit_codes(1, how, tmp_path, flags, *place) == [2]
    [line] = (tmp_path / "rank 0").read_text().splitlines()
    assert re.search(words, line)
