"""Text that a tokenizer loses is counted at the preparation, and bits per byte are those of the whole text."""

import json
import math
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import evaluate
from data.corpus import prepare
from data.dataset import open_data
from tests.data.preparing import args, validates
from tests.data.test_hf_tokenizer import sentencepiece
from tests.helpers import metrics

KNOWN = "abc "
LINES = ["abc é 中中 " * 3, "é", "cab " * 5, "a b c 中"] * 30
SHORT = ["--max_iters=1", "--warmup_iters=0", "--eval_interval=1", "--eval_iters=0"]


def lossy(model: str, blank: str = " ") -> Tokenizer:
    """All but KNOWN is <unk>. A vocabulary may write a blank in another way."""
    pieces = ["<unk>", "</s>", *KNOWN.replace(" ", blank)]
    if model == "unigram":
        tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0, False))
    else:
        tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def prepared(folder: Path, tokenizer: Tokenizer) -> Path:
    """A data set of LINES, each of which is a document."""
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (folder / "lines.txt").write_text("\n".join(LINES), encoding="utf-8")
    prepare(args(folder / "data", f"hf:{folder}", documents="line"), [str(folder / "lines.txt")])
    return folder / "data"


def lines_of(split: str) -> list[str]:
    return [line for i, line in enumerate(LINES) if validates(i, 0.2) == (split == "val")]


def n_bytes(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def without_record(data: Path):
    """As data that an older version has prepared."""
    meta = json.loads((data / "meta.json").read_text())
    for split in meta["splits"].values():
        del split["lost"]
    (data / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize("model", ["bpe", "unigram"])
def test_what_is_lost_is_counted_and_said(tmp_path, model, capsys):
    data = open_data(prepared(tmp_path / "lossy", lossy(model)))
    lost = {split: n_bytes(c for line in lines_of(split) for c in line if c not in KNOWN) for split in ("train", "val")}
    assert {split: entry["lost"] for split, entry in data.meta["splits"].items()} == lost
    assert f"warning: {sum(lost.values()):,} bytes of the text are lost" in capsys.readouterr().err


def test_sentencepiece_loses_what_it_has_no_bytes_for(tmp_path, capsys):
    """It puts a blank before each document, which is none that is lost."""
    data = open_data(prepared(tmp_path / "bytes", sentencepiece(True)))
    assert all(entry["lost"] == 0 for entry in data.meta["splits"].values())
    assert "lost" not in capsys.readouterr().err
    tokenizer = lossy("unigram", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    data = open_data(prepared(tmp_path / "lossy", tokenizer))
    assert data.meta["splits"]["val"]["lost"] == n_bytes(c for line in lines_of("val") for c in line if c not in KNOWN)


def test_bits_per_byte_are_those_of_the_text(tmp_path, run, capsys):
    data = prepared(tmp_path / "lossy", lossy("bpe"))
    out = run(*SHORT, f"--dataset={data}")
    last = metrics(out)[-1]
    per_token = n_bytes(lines_of("val")) / open_data(data).meta["splits"]["val"]["tokens"]
    assert last["val_bpb"] == pytest.approx(last["val_loss"] / math.log(2) / per_token, rel=0.02)

    text = "a" + LINES[0]
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    capsys.readouterr()
    flags = [f"--out_dir={out}", "--device=cpu", "--json=True"]
    evaluate.main([*flags, f"--file={tmp_path / 'text.txt'}"])
    assert json.loads(capsys.readouterr().out)["bytes"] == n_bytes([text]) - 1  # the first token is not predicted

    without_record(data)
    evaluate.main(flags)
    said = capsys.readouterr()
    assert json.loads(said.out)["bits_per_byte"] is None
    assert "data val may lack text; prepare it again, which counts it" in said.err


def test_data_of_older_versions_and_mixtures(tmp_path):
    """Those of a tokenizer that loses nothing have bits per byte as before."""
    folders = {name: prepared(tmp_path / name, lossy("bpe")) for name in ("a", "b")}
    lost = [open_data(folder).split("val").lost for folder in folders.values()]
    mixture = ",".join(f"{folder}:1" for folder in folders.values())
    assert open_data(mixture).split("val").lost == sum(lost) > 0
    without_record(folders["b"])
    assert math.isnan(open_data(mixture).split("val").lost)
    exact = prepared(tmp_path / "exact", sentencepiece(True))
    without_record(exact)
    assert open_data(exact).split("val").lost == 0
