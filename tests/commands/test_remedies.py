"""What a refusal names as the remedy is typed, as the line says it, and works."""

import json
import os
import re
import resource
import shlex
import shutil
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import evaluate
import sample
import train
from configurator import parse
from data import corpus
from data.dataset import open_data
from data.errors import user_errors
from data.sources import Source, find_files
from data.text import prepare
from data.tokenizer import ByteTokenizer
from data.writer import ShardWriter
from engine.config import Config
from engine.help import SYNONYMS
from engine.interchange import __main__ as interchange
from tests.data.preparing import args, error, write_records
from tests.helpers import TINY, refused

STEP = ["--max_iters=1", "--warmup_iters=0", "--eval_interval=0", "--eval_iters=1", "--lr_decay_iters=40"]


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "exported"
    interchange.main(["export", str(trained), str(folder)])
    return folder


def prepare_text(argv: list[str]):
    """The command of data/text in this process."""
    with mock.patch.object(sys, "argv", ["prepare.py", *argv]), user_errors():
        prepare.main()


@pytest.fixture
def remedy(capsys):
    """remedy(main, argv, pattern) is what the line with which main refuses argv has in place of the pattern's group."""

    def call(main, argv: list, pattern: str) -> str:
        line = refused(main, argv, capsys)
        found = re.search(pattern, line)
        assert found, line
        return found[1]

    return call


@pytest.mark.parametrize("theirs", ["num_layers", *SYNONYMS])
def test_a_flag_by_the_name_that_other_programs_give_it(theirs, remedy):
    ours = remedy(train.main, [f"--{theirs}=3"], r"no such flag; the nearest is (\w+)")
    assert ours == SYNONYMS[re.sub("^(num|max|n)_", "", theirs)]
    parse(Config, [f"--{ours}={getattr(Config, ours)}"])


def test_a_name_of_another_command_is_no_remedy(remedy):
    """sample.py has no steps."""
    assert "--help" == remedy(sample.main, ["--layers=3"], "no such flag; (--help) lists them")


@pytest.mark.parametrize("typed", ["config/llama_7b", "llama_7b", "llama_7b.py", "./config/llama_7b"])
def test_a_config_file_without_its_ending_or_folder(typed, remedy):
    near = remedy(train.main, [typed], r"no such config file; the nearest is (\S+)")
    assert parse(Config, [near]) == parse(Config, ["config/llama_7b.py"])


def test_a_folder_of_a_run_in_place_of_a_config_file(trained, remedy, capsys):
    flag = remedy(evaluate.main, [trained], r"such as (--out_dir=\S+)")
    evaluate.main([flag, "--device=cpu", "--eval_iters=1"])
    assert "nats per token" in capsys.readouterr().out


def test_a_value_in_quotation_marks(remedy):
    typed = remedy(train.main, ["--compile='False'"], r"compile='False' \(command line\): expected True or (False) or")
    assert parse(Config, [f"--compile={typed}"]).compile is False
    assert remedy(train.main, ["--n_layer='True'"], "n_layer=('True') ")


OTHER_NAMES = [  # of a model: command, flag, what is typed, the remedy in the line
    (sample.main, "out_dir", "{exported}", r"no checkpoint in \S+; a model of Hugging Face is named (hf:\S+)"),
    (evaluate.main, "out_dir", "ema:{exported}", r"a model of Hugging Face is named (hf:\S+)"),
    (sample.main, "out_dir", "hf:{trained}", r"has no config.json; .* a run as (checkpoint:\S+)"),
    (train.main, "init_from", "checkpoint:{exported}", r"a model of Hugging Face is named (hf:\S+)"),
    (train.main, "init_from", "hf:{trained}", r"has no config.json; .* a run as (checkpoint:\S+)"),
]


@pytest.mark.parametrize("main, flag, typed, pattern", OTHER_NAMES)
def test_a_model_by_a_wrong_name(main, flag, typed, pattern, trained, exported, tiny_data, tmp_path, remedy, run):
    more = ["--device=cpu"]
    if main is train.main:
        more = [*STEP, "--device=cpu", f"--out_dir={tmp_path / 'new'}", f"--dataset={tiny_data}", "--batch_size=2"]
    elif main is evaluate.main:
        more += [f"--dataset={tiny_data}", "--eval_iters=1"]
    else:
        more += ["--max_new_tokens=2"]
    name = remedy(main, [f"--{flag}={typed.format(trained=trained, exported=exported)}", *more], pattern)
    main([f"--{flag}={name}", *more])


def test_a_run_without_a_checkpoint(tiny_data, tmp_path, remedy, run, capsys):
    out = tmp_path / "out"
    out.mkdir()
    sampled = [f"--out_dir={out}", "--device=cpu", "--max_new_tokens=2"]
    flag = remedy(sample.main, sampled, r"no checkpoint in \S+; give .*, or train first, with (--init_from=scratch)")
    run(*STEP, flag)
    sample.main(sampled)
    assert capsys.readouterr().out


def test_texts_in_place_of_a_data_set(tmp_path, remedy, monkeypatch):
    """The file's own name is free in data/ here, so following the line replaces nothing."""
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "my novel.txt"
    text.write_text("one two three four\n" * 40)
    (tmp_path / "data").mkdir()
    monkeypatch.setattr("data.command.DATA", tmp_path / "data")
    command = remedy(
        train.main, [*TINY, f"--dataset={text.name}"], r"is a file; prepare it with (python .*), and pass --d"
    )
    program, *flags = shlex.split(command)[1:]
    assert program == "data/text/prepare.py"
    prepare_text([*flags, "--tokenizer=byte"])  # the default is downloaded
    assert len(open_data("my novel").split("train")) > 100
    assert "pass my novel" in error(open_data, "my novel.txt")  # from now on


def test_the_tokenizer_of_a_run(trained, tmp_path, remedy):
    (tmp_path / "a.txt").write_text("one two three\n" * 9)
    wanted = [f"--input={tmp_path / 'a.txt'}", f"--out={tmp_path / 'data'}"]
    pattern = r"export it with python -m engine.interchange (export \S+) DIR, and give hf:DIR"
    typed = remedy(prepare_text, [*wanted, f"--tokenizer=hf:{trained}"], pattern)
    interchange.main([*typed.split(), str(tmp_path / "exported")])
    prepare_text([*wanted, f"--tokenizer=hf:{tmp_path / 'exported'}"])


def test_a_window_of_zstd_that_needs_a_flag(tmp_path):
    """A frame by hand, with a window of 2^31 bytes and one block, which is not compressed."""
    packed = tmp_path / "a b.txt.zst"
    text = b"one two\n" * 4
    packed.write_bytes(bytes.fromhex("28b52ffd00a8") + (8 * len(text) + 1).to_bytes(3, "little") + text)
    message = error(list, Source([str(packed)]).read())
    found = re.search(r"; unpack it with (zstd .*)", message)
    assert found, message
    assert shlex.split(found[1]) == ["zstd", "-d", "--long=31", str(packed)]


@pytest.mark.parametrize("documents, fraction", [(2, None), (30, None), (90, None), (5, 0.99)])
def test_a_split_without_tokens(tmp_path, documents, fraction):
    records = write_records(tmp_path / "a.jsonl", [{"text": f"text {i}"} for i in range(documents)])
    message = error(corpus.prepare, args(tmp_path / "out", val_fraction=fraction or 1e-9), [str(records)])
    found = re.search(
        r"the split (train|val) has 0 tokens, and needs two; add text, .*, or pass --val_fraction=([\d.]+)$", message
    )
    assert found, message
    corpus.prepare(args(tmp_path / "out", val_fraction=float(found[2])), [str(records)])
    assert len(open_data(tmp_path / "out").split("val")) >= 7


def test_a_split_without_tokens_of_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree\n" * 99)
    (tmp_path / "b.jsonl").write_text("")
    files = [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]  # several files, so that the text is not cut in two
    message = error(corpus.prepare, args(tmp_path / "out", val_fraction=0.01), files)
    flag = re.search(r"cut a text into more documents with --documents=(\w+)$", message)
    assert flag, message
    corpus.prepare(args(tmp_path / "out", val_fraction=0.01, documents=flag[1]), files)


def test_more_shards_than_files_may_be_open(tmp_path):
    with ShardWriter(tmp_path, ByteTokenizer(), shard_tokens=10) as out:
        out.add("train", np.arange(200))
        out.add("val", np.arange(20))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 5, hard))
    try:
        assert len(open_data(tmp_path).split("train")) == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


PLAN = ["config/pycode_gpt2.py", "--cooldown_iters=20", "--vocab_size=257", "--plan=True"]


def test_a_plan_is_of_gpus(remedy, capsys, in_this_process):
    """A device that a config file sets is left out."""
    remedy(train.main, [*PLAN, "--device=cpu"], r"device=cpu \(command line\): .*; (leave it out)")
    train.main([*PLAN, "--device=cuda"])
    assert "h100" in capsys.readouterr().out


def test_what_a_changed_flag_of_a_run_was_set_by(trained, tmp_path, remedy, run):
    config = tmp_path / "mine.py"
    config.write_text("# deeper\nn_layer = 3\n")
    out = shutil.copytree(trained, tmp_path / "out")
    resumed = [f"--out_dir={out}", "--init_from=resume", "--max_iters=3", "--lr_decay_iters=40"]
    remedy(train.main, [str(config), *resumed], rf"n_layer=3 \({config}:2\): differs from 2 in .*; (leave it out)")
    train.main(resumed)


def test_an_integer_of_5000_digits_in_a_field_that_is_not_read(tmp_path):
    line = json.dumps({"text": "a", "id": 0}).replace("0", "7" * 5000)
    (tmp_path / "a.jsonl").write_text(f"{line}\n")
    assert [document.text for document in Source([str(tmp_path / "a.jsonl")]).read()] == ["a"]
    message = error(list, Source([str(tmp_path / "a.jsonl")], column="id").read())
    assert "id is 7777" in message
    assert "pass another field" in message


def test_a_pattern_in_a_folder_whose_name_has_brackets(tmp_path, monkeypatch):
    folder = tmp_path / "[data] v1"
    (folder / "deep").mkdir(parents=True)
    for name in ("a.txt", "b.md", "deep/c.txt"):
        (folder / name).write_text("x")
    found = [str(folder / "a.txt"), str(folder / "deep/c.txt")]
    assert find_files([f"{folder}/*.txt"]) == found[:1]
    assert find_files([f"{folder}/**/*.txt"]) == found
    monkeypatch.chdir(folder)
    assert find_files(["[ab].*"]) == ["a.txt", "b.md"]  # no such folder: a pattern


def test_a_short_plan_of_one_rank(capsys, in_this_process):
    train.main([*PLAN, "--max_iters=100"])
    text = capsys.readouterr().out
    assert "traffic" not in text.partition("Assumed")[0]
    assert 0 < float(re.search(r"max_iters=100: .* tokens in ([\d.e-]+) hours", text)[1]) < 0.1
