"""Pairs: preparation, packing and batches compared with naive loops over the documents; what is refused."""

import filecmp
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import evaluate
import sample
import train
from data import corpus
from data.dataset import open_data
from data.loader import Loader, eval_batches, windows_per_source
from data.numbers import prepare as numbers
from data.objective import PAIRS
from data.pairs import documents, encode
from data.sources import find_files
from data.tokenizer import ByteTokenizer
from data.writer import ShardWriter
from engine import settle, weights
from engine.config import Config
from engine.evaluation import greedy
from model import Model, ModelConfig
from tests import oracle
from tests.data.preparing import args, error, validates, write_records
from tests.data.test_loader import rows_of, take_rows
from tests.helpers import IN_FLOAT64, TINY, distance, holds_files, read_all, refused, steps_of

EOT = 256
ROWS = [(f"{i} " * (i % 5), "é" * (i % 3) + str(i)) for i in range(60)]  # some sources and no target are empty
CHAT = [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello"), ("user", "?"), ("assistant", "!")]
CHAT = [{"role": role, "content": content} for role, content in [*CHAT, ("user", "never answered")]]
TEXT = {"a": "b", "b": "c"}
DOC = st.tuples(st.integers(1, 9), st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=3))
WORDS = {"ab": "AB", "cde": "CDE", "xyz": "X"}  # two sources of one length have answers of different lengths


def prepare(path: Path, out: Path, pairs: str = "source,target", **flags) -> Path:
    corpus.prepare(args(out, pairs=pairs, **flags), find_files([str(path)]))
    return out


def prepared(folder: Path, rows=ROWS, **flags) -> Path:
    path = write_records(folder / "rows.jsonl", [{"source": a, "target": b} for a, b in rows])
    return prepare(path, folder / "out", **flags)


@pytest.mark.parametrize("name, threads", [("x.jsonl", 1), ("x.jsonl", 3), ("x.parquet", 3)])
def test_shards_and_masks_equal_a_naive_loop(tmp_path, small, name, threads):
    path = write_records(tmp_path / name, [{"question": a, "other": i, "answer": b} for i, (a, b) in enumerate(ROWS)])
    prepare(path, tmp_path / "out", "question,answer", threads=threads, shard_tokens=50)
    expected = {"train": ([], []), "val": ([], [])}
    for number, (source, target) in enumerate(ROWS):
        ids, marks = expected["val" if validates(number, 0.2) else "train"]
        a = list(source.encode()) or [EOT]
        b = [*target.encode(), EOT]
        ids += a + b
        marks += [2, *[0] * (len(a) - 1), *[1] * len(b)]
    data = open_data(tmp_path / "out", verify=True)
    for split, (ids, marks) in expected.items():
        stream = data.split(split)
        assert len(stream.shards) == len(stream.mask.shards) > 1
        assert read_all(stream) == ids
        assert read_all(stream.mask) == marks


def test_a_chat_has_the_assistants_contents_as_targets(tmp_path):
    path = write_records(tmp_path / "chats.parquet", [{"messages": CHAT}] * 9)
    stream = open_data(prepare(path, tmp_path / "out", "messages", val_fraction=0.5)).split("train")
    n = len(stream) // len(documents(stream))
    ids = read_all(stream)[:n]
    marks = read_all(stream.mask)[:n]
    text = "<|system|>\nBe kind.\n<|user|>\nHi\n<|assistant|>\nHello.<|user|>\n?\n<|assistant|>\n!."
    assert bytes(46 if i == EOT else i for i in ids).decode() == text
    assert "".join(c if m & 1 else " " for c, m in zip(text, marks, strict=True)).split() == ["Hello.", "!."]
    assert [m & 2 for m in marks] == [2, *[0] * (n - 1)]


def test_a_source_begins_a_text_and_a_target_goes_on():
    """Where a tokenizer, as Llama 2's, puts <s> and a blank before a text."""

    class Llama(ByteTokenizer):
        prefix = [1]

        def encode(self, text):
            return self.encode_rest(f" {text}")

        def encode_rest(self, text):
            return ByteTokenizer.encode(self, text)

    ids, marks = encode(Llama(), [("ab", False), ("c", True)])
    assert ids.tolist() == [1, *b" abc", EOT]
    assert marks.tolist() == [2, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("record, pairs, flags, words", [
    ({"source": "a"}, "source,target", {}, ":1 has no field 'target'; pass --field or --pairs of source"),
    ({"source": "a", "target": 3}, "source,target", {}, ":1: target is 3, not text; remove it, or pass another field"),
    ({"chat": "Hi"}, "chat", {}, ":1: chat is no chat; write a list of"),
    ({"chat": [CHAT[0] | {"content": None}]}, "chat", {}, "message 1 is None, not text; write a text, or leave the"),
    ({"chat": [3]}, "chat", {}, ":1: chat is no chat; write a list of"),
    ({"chat": CHAT[:2]}, "chat", {}, ":1: chat has no message of the role assistant, so there is nothing to learn; re"),
    (TEXT, "a,b,c", {}, "pairs=a,b,c is not possible"), (TEXT, "a,", {}, "pairs=a, is not possible"),
    (TEXT, "a,b", {"shards": 3}, "shards=3 would cut a pair"),
    (TEXT, "a,b", {"tokenizer": "char"}, "pairs=a,b needs an end-of-text behind each target, and tokenizer=char has n"),
    (None, "a,b", {}, "pairs=a,b is not possible for "),
])  # fmt: skip
def test_what_has_no_pairs_is_refused(tmp_path, record, pairs, flags, words):
    path = tmp_path / "x.txt"
    path.write_text("text")
    if record:
        path = write_records(tmp_path / "x.jsonl", [record])
    message = error(prepare, path, tmp_path / "out", pairs, **flags)
    assert words.replace(":1", f"{path}:1") in message
    assert not holds_files(tmp_path / "out")


def opened(folder: Path, split: str = "train", **flags):
    cfg = Config(dataset=str(folder), **flags)
    data, objective = settle.by_data(cfg)
    return data.split(split), objective, cfg


def written(folder: Path, docs: list[tuple[int, list[tuple[int, int]]]], shard: int) -> Path:
    """A data set of documents (tokens of the source, [(tokens of a target, tokens behind it that are none), ...]), the
    ids of which count up; validation is one pair. Returns the folder."""
    with ShardWriter(folder, ByteTokenizer(), shard_tokens=shard) as out:
        out.add("val", np.array([1, 2, EOT]))
        out.add("val_mask", np.array([2, 1, 1]), 0)
        for i, (source, targets) in enumerate(docs):
            marks = [0] * source
            for n, rest in targets:
                marks += [1] * n + [0] * rest
            marks[0] |= 2
            out.add("train", np.arange(i, i + len(marks)) % 250)
            out.add("train_mask", np.array(marks), 0)
    return folder


@given(st.lists(DOC, min_size=3, max_size=30), st.integers(0, 9), st.integers(5, 50), st.sampled_from([*PAIRS]))
@settings(max_examples=15)
def test_an_epoch_has_every_pair_once_and_whole(tmp_path_factory, docs, more, shard, name):
    folder = tmp_path_factory.mktemp("drawn")
    sizes = []
    for source, targets in docs:
        total = source + sum(a + b for a, b in targets)
        sizes.append([total] if name == "causal" else [source + 1, total - source])
    limit = max(map(max, sizes)) + more
    T = limit - (name == "causal")
    stream, objective, cfg = opened(written(folder, docs, shard), block_size=T, objective=name)
    assert cfg.pairs is True
    assert cfg.doc_mask
    assert cfg.doc_positions
    groups = []
    room = None
    for i, size in enumerate(sizes):
        room = room and [a - b for a, b in zip(room, size, strict=True)]
        if room is None or min(room) < 0:
            groups.append([])
            room = [limit - a for a in size]
        groups[-1].append(i)
    assert sum(windows_per_source(stream, T)) == len(groups)
    ids = read_all(stream)
    marks = read_all(stream.mask)
    learnt = [token if mark & 1 else -1 for token, mark in zip(ids, marks, strict=True)]
    found = documents(stream).tolist()
    check = {"causal": check_causal, "seq2seq": check_seq2seq}[name]
    for group, row in zip(groups, rows_of(eval_batches(stream, objective, 1)), strict=True):
        check(row, [found[i] for i in group], ids, learnt, T)


def check_causal(row: dict, places: list[list[int]], ids: list[int], learnt: list[int], T: int):
    """A window of causal models has these pairs, each from its source on."""
    start = places[0][0]
    end = places[-1][2]
    numbers = []
    for number, (first, _, last) in enumerate(places):
        numbers += [number] * (last - first)
    assert row["idx"] == padded(ids[start:end], T, 0)
    assert row["targets"] == padded(learnt[start + 1 : end], T, -1)
    assert [number - row["docs"][0] for number in row["docs"]] == padded(numbers, T, len(places))


def check_seq2seq(row: dict, places: list[list[int]], ids: list[int], learnt: list[int], T: int):
    """A window of seq2seq models has the sources of these pairs, and their targets behind end-of-text."""
    source = []
    source_docs = []
    idx = []
    targets = []
    numbers = []
    for number, (first, target, end) in enumerate(places):
        source += [*ids[first:target], EOT]
        source_docs += [number] * (target - first + 1)
        idx += [EOT, *ids[target : end - 1]]
        targets += learnt[target:end]
        numbers += [number] * (end - target)
    assert row["source"][: len(source)] == source
    assert row["source_docs"] == padded(source_docs, T, len(places))
    assert row["idx"][: len(idx)] == idx
    assert row["targets"] == padded(targets, T, -1)
    assert row["docs"] == padded(numbers, T, numbers[-1])
    assert len(row["source"]) == len(row["idx"]) == T


def padded(values: list[int], length: int, fill: int) -> list[int]:
    return (values + [fill] * length)[:length]


@pytest.mark.parametrize("name", PAIRS)
def test_samples_are_the_windows_of_both_sources_in_the_order_of_texts(tmp_path, name):
    (tmp_path / "b").mkdir()
    folders = prepared(tmp_path), prepared(tmp_path / "b", [(f"s{i}", "x" * (i % 9)) for i in range(40)])
    flags = dict(block_size=24, objective=name)
    windows = [rows_of(eval_batches(*opened(folder, **flags)[:2], 1)) for folder in folders]
    stream, objective, _ = opened("{}:0.5,{}:0.5".format(*folders), **flags)
    assert rows_of(eval_batches(stream, objective, 1)) == sum(windows, [])
    expected = []
    for number in range(8, 8 + 4 * 20):  # some epochs of each
        mine = windows[number % 2]
        expected.append(mine[oracle.window_of(number // 2, len(mine), 5)])
    for rank in range(2):
        found = take_rows(Loader(stream, objective, 2, 1, rank, 2, seed=5, start=8), 20)
        assert found == [row for i, row in enumerate(expected) if i // 2 % 2 == rank]


@pytest.mark.parametrize("name", PAIRS)
def test_a_step_is_the_mean_over_all_its_targets(tmp_path, run, name):
    flags = [f"--dataset={prepared(tmp_path)}", f"--objective={name}", "--block_size=24", "--max_iters=4", IN_FLOAT64]
    whole = steps_of(run(*flags, "--batch_size=8", "--gradient_accumulation_steps=1", out="whole"))
    halves = steps_of(run(*flags, "--batch_size=4", "--gradient_accumulation_steps=2", out="halves"))
    assert distance(halves, whole) < 1e-9


def test_a_new_run_asks_its_own_data(tmp_path, tiny_data):
    """A model of text goes on with pairs, and that of pairs with text: the new data say which tokens are targets."""
    flags = [*TINY, "--block_size=24", "--max_iters=2", "--eval_interval=0"]
    data = prepared(tmp_path)
    start = ["--init_from=scratch"]
    runs = [("text", tiny_data, "False"), ("pairs", data, "True"), ("again", tiny_data, "False")]
    for name, dataset, settled in runs:
        train.main([*flags, f"--dataset={dataset}", f"--out_dir={tmp_path / name}", *start])
        assert f"\npairs = {settled} " in (tmp_path / name / "config.py").read_text()
        start = [f"--init_from=checkpoint:{tmp_path / name}"]


def test_wrong_masks_are_refused(tmp_path):
    (tmp_path / "other").mkdir()
    out = prepared(tmp_path)
    other = prepared(tmp_path / "other")
    text = (out / "meta.json").read_text()
    mask = out / "train_mask_000000.bin"
    meta = json.loads(text)
    content = mask.read_bytes()
    tokens = np.frombuffer(content[1024:], "<u2")
    n, m = (meta["splits"][split]["tokens"] for split in ("train", "val"))
    for split, change, words in (
        ("val", {"val_mask": {"shards": []}}, "has no split val_mask"),
        ("train", {"train_mask": meta["splits"]["val_mask"]}, f"has {m} marks in train_mask for {n} tokens in train"),
    ):
        (out / "meta.json").write_text(json.dumps(meta | {"splits": meta["splits"] | change}))
        assert words in error(opened, out, split)
    (out / "meta.json").write_text(text)
    for wrong, words in (
        (tokens * 0, "without a source or a target"),  # no document, so no window
        (tokens | 4, "the mark 6"),
    ):
        mask.write_bytes(content[:1024] + wrong.astype("<u2").tobytes())
        for data in out, f"{other}:1,{out}:1":
            assert words in error(opened, data, block_size=10_000)
        assert "was changed: its SHA-256" in error(lambda: open_data(out, verify=True).split("train"))
    mask.unlink()
    assert "train_mask_000000.bin cannot be read" in error(opened, out)


def test_flags_that_do_not_fit_are_refused(tmp_path, tiny_data, capsys):
    out = prepared(tmp_path)
    flags = [*TINY, f"--out_dir={tmp_path}/run", f"--dataset={out}"]
    for name, size in (("causal", 19), ("seq2seq", 13)):  # at most 12 bytes of a source, 6 of a target, and ends
        message = error(opened, out, block_size=11, objective=name)
        enough = int(message.partition("; set block_size to ")[2].split()[0])
        assert f"has a pair of {size} tokens, too long for block_size=11" in message
        opened(out, block_size=enough, objective=name)
        assert "too long" in error(opened, out, block_size=enough - 1, objective=name)
    for more, words in {
        "--objective=masked": "the data are pairs; set objective to causal",
        "--corrupt_ratio=0.2 --objective=seq2seq": ": has no effect on dataset=",
        f"--dataset={out}:0.5,{tiny_data}:0.5": "mixes data of different kinds",
        f"--dataset={tiny_data} --pairs=True": "no mask of targets; prepare them with --pairs",
        "--block=c.joint_slots,p --pos=rope --block_size=24": "doc_mask=True",
    }.items():
        refused(train.main, [*flags, *more.split()], capsys, [words])


def test_pairs_false_trains_on_all_tokens(tmp_path):
    stream, objective, cfg = opened(prepared(tmp_path), block_size=16, pairs=False)
    first = rows_of(eval_batches(stream, objective, 1))[0]
    assert first == {"idx": read_all(stream)[:16], "targets": read_all(stream)[1:17]}
    assert not cfg.doc_mask


@pytest.fixture(scope="module")
def translators(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("translators")
    prepared(folder, [*WORDS.items()] * 20)
    for name, steps in ("causal", 50), ("seq2seq", 60):
        flags = [*TINY, f"--dataset={folder / 'out'}", f"--objective={name}", f"--out_dir={folder / name}"]
        flags += ["--block_size=24", "--batch_size=8", "--gradient_accumulation_steps=1", "--n_layer=1", "--pos=rope"]
        train.main([*flags, f"--max_iters={steps}", "--learning_rate=4e-2", "--eval_interval=0"])
    return folder


@pytest.mark.parametrize("name", PAIRS)
def test_answers_are_those_of_a_loop(translators, name, capsys, tmp_path):
    file = tmp_path / "answers.jsonl"
    flags = [f"--out_dir={translators / name}", "--device=cpu", f"--answers={file}"]
    evaluate.main([*flags, "--json=True", "--batch_size=2"])
    figures = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    stream = open_data(translators / "out").split("val")
    rows = documents(stream).tolist()
    ids = read_all(stream)
    texts = []
    for first, target, end in rows:
        texts.append((bytes(ids[first:target]).decode(), bytes(ids[target : end - 1]).decode()))
    assert [(line["source"], line["target"]) for line in lines] == texts
    assert {*texts} <= {*WORDS.items()}
    assert figures["exact_match"] == np.mean([line["answer"] == line["target"] for line in lines]) > 0.5
    path, model, tokenizer = weights.load_model(str(translators / name), torch.device("cpu"), torch.float32)
    for line in lines:
        source = line["source"].encode()
        out = []
        while len(out) < 24 and out[-1:] != [EOT]:
            if name == "causal":
                logits = model(torch.tensor([[*source, *out]]))
            else:
                logits = model(torch.tensor([[EOT, *out]]), source=torch.tensor([[*source, EOT]]))
            out.append(logits[0, -1, :257].argmax().item())
        assert tokenizer.decode(out[:-1]) == line["answer"]
    evaluate.main(flags)
    assert f"; {figures['exact_match']:.2%} exact matches" in capsys.readouterr().out
    evaluate.main([*flags, "--batch_size=2", "--eval_iters=1"])
    assert [json.loads(line) for line in file.read_text().splitlines()] == lines[:2]
    capsys.readouterr()
    written, greedy = {"causal": ("cdeCDE\n", ["--temperature=0"]), "seq2seq": ("CDE\n", [])}[name]  # a default
    sample.main([f"--out_dir={translators / name}", "--device=cpu", "--start=cde", *greedy])
    assert capsys.readouterr().out == written


def test_an_answer_has_no_token_of_the_padding(monkeypatch):
    model = Model(ModelConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=320)).eval()
    logits = Model.logits
    monkeypatch.setattr(Model, "logits", lambda self, x: logits(self, x) + 1e4 * (torch.arange(320) > EOT))
    [answer] = greedy(model, ByteTokenizer(), torch.tensor([[*b"ab"]]))
    assert all(i < EOT for i in answer)


def test_targets_are_the_likeliest_unless_a_flag_draws_them(translators, monkeypatch):
    seen = []
    monkeypatch.setattr(sample, "choose", lambda x, cfg, generator: seen.append(cfg.temperature) or x.argmax(-1))
    for flag, temperature in (("seed=1", 0), ("top_k=3", 0.8), ("top_p=0.9", 0.8), ("min_p=0.1", 0.8)):
        sample.main([f"--out_dir={translators / 'seq2seq'}", "--device=cpu", "--start=cde", f"--{flag}"])
        assert {*seen} == {temperature}, flag
        seen.clear()


def test_what_has_no_answer_is_refused(trained, translators, capsys, tmp_path):
    causal, seq2seq = (f"--out_dir={translators / name}" for name in ("causal", "seq2seq"))
    other = shutil.copy(trained / "config.py", tmp_path)
    for main, flags, words in (
        (sample.main, [causal, "--blank=x"], "blank=x (command line): has no effect"),
        (sample.main, [seq2seq, "--start=" + "x" * 24], "becomes 25 tokens, more than block_size=24; shorten it"),
        (evaluate.main, [f"--out_dir={trained}", f"--answers={tmp_path / 'x'}"], "needs pairs, and dataset="),
        (evaluate.main, [f"--out_dir={trained}", f"--answers={tmp_path}"], f"{tmp_path}: Not a regular file"),
        (evaluate.main, [f"--out_dir={tmp_path}/no", f"--answers={trained}/best/x"], f"error: {trained}/best/x"),
        (evaluate.main, [causal, "--answers=x", "--file=y"], "here file=y"),
        (evaluate.main, [causal, f"--answers={other}"], f"{other} was not written by this command; "),
    ):
        refused(main, [*flags, "--device=cpu"], capsys, [words])
    assert filecmp.cmp(other, trained / "config.py", shallow=False)


def test_numbers_in_words(call, tmp_path):
    known = {
        0: ("zero", "null"), 1: ("one", "eins"), 17: ("seventeen", "siebzehn"), 30: ("thirty", "dreißig"),
        21: ("twenty-one", "einundzwanzig"), 101: ("one hundred one", "einhunderteins"),
        701_206: ("seven hundred one thousand two hundred six", "siebenhunderteintausendzweihundertsechs"),
    }  # fmt: skip
    assert {n: (numbers.english(n), numbers.german(n)) for n in known} == known
    assert len({numbers.english(n) for n in range(10**4)}) == 10**4
    assert len({numbers.german(n) for n in range(10**4)}) == 10**4
    code, out, _ = call("numbers", f"--out={tmp_path / 'out'}")
    assert code == 0
    assert out.startswith("29,000 + 1,000 pairs, ")
