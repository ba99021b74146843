"""Tokenizers of Hugging Face, read and written, compared with transformers' AutoTokenizer."""

import hashlib
import json
import shutil
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers  # whose classes are loaded when they are asked for: a second in each worker
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import sample
from data import corpus
from data.dataset import open_data
from data.tokenizer import ByteTokenizer, CharTokenizer, HFTokenizer, build, from_spec, train_bpe
from engine.interchange.families import choose
from engine.interchange.huggingface import write_hf, write_json
from engine.interchange.tokenizer import export_tokenizer
from model import ModelConfig
from sample import SampleConfig
from tests.data.preparing import args, error, gpt2_of_other_merges, splits_of
from tests.helpers import ROOT, metrics
from tests.interchange.test_families import CHOICES

TEXTS = [(ROOT / "README.md").read_text()[:20000], "naïve «été» 中文字 \U0001f600\r\n\t\t x  y\n\n\n" * 4]
BYTES = [f"<0x{i:02X}>" for i in range(256)]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MIXED = "Hello world, it's naïve.  \n\n  def f(x):\t# 中文 \U0001f600 <s> </s> <|endoftext|>"
SENTENCES = [*TEXTS, MIXED, " a", "e\u0301", "it's\n\n \n2026", "a<|endoftext|>b</s>c", "<tool>x"]


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    first = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=first)
    return tokenizer


def byte_level(prefix_space: bool = False, words: str = "") -> Tokenizer:
    """As GPT-2's, or with other words than GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["</s>", "<s>"]
    options = dict(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=500, **options))
    if words:
        split = pre_tokenizers.Split(Regex(words), behavior="isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    return tokenizer


def llama3() -> Tokenizer:
    tokenizer = byte_level(words=LLAMA3)
    tokenizer.add_special_tokens(["<|far|>"])
    return with_bos(tokenizer)


def qwen2(words: str = "", nfc: bool = True, end_of_text: bool = True, ignore_merges: bool = False) -> Tokenizer:
    """Its rules; or all but one, so that transformers' class for Qwen2 gives other ids."""
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    tokenizer = byte_level(words=words or PRETOKENIZE_REGEX)
    if ignore_merges:
        vocabulary = tokenizer.get_vocab(with_added_tokens=False)
        tokenizer.model = models.BPE(vocab=vocabulary, merges=[("t", "h")], ignore_merges=True)
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(["<|endoftext|>"] * end_of_text)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def sentencepiece(prefix: bool) -> Tokenizer:
    """As Llama 2's with the prefix, as Gemma's without."""
    special = ["<unk>", "<s>", "</s>"]
    trained = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    options = dict(special_tokens=[*special, *BYTES], show_progress=False, limit_alphabet=60)
    trained.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=700, **options))
    tokenizer = Tokenizer(trained.model)
    tokenizer.add_special_tokens(special)  # and no bytes: a <0x0A> in a text is text
    blanks = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        blanks = normalizers.Sequence([normalizers.Prepend("▁"), blanks])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.normalizer = blanks
    tokenizer.decoder = decoders.Sequence(steps)
    return with_bos(tokenizer)


def unigram() -> Tokenizer:
    """As XGLM's: an unknown character becomes <unk>, and a blank at the beginning is lost."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    options = dict(special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainers.UnigramTrainer(vocab_size=300, **options))
    return tokenizer


KINDS = {
    "gpt2": byte_level,
    "roberta": lambda: byte_level(prefix_space=True),
    "llama3": llama3,
    "qwen2": qwen2,
    "llama2": lambda: sentencepiece(True),
    "gemma": lambda: sentencepiece(False),
    "unigram": unigram,
}
CHARS = "".join(sorted({*TEXTS[0], *TEXTS[1], *"\x00\u2028<|>"}))
OURS = {
    "char": CharTokenizer(CHARS),
    "byte": ByteTokenizer(),
    "our gpt2": gpt2_of_other_merges(TEXTS),
    "bpe": train_bpe([*TEXTS, "  " * 200, "a" * 50, "ab" * 40] * 2, 900),
}
NEARLY_QWEN2 = {
    "with Llama 3's words": lambda: qwen2(LLAMA3),
    "without NFC": lambda: qwen2(nfc=False),
    "without <|endoftext|>": lambda: qwen2(end_of_text=False),
    "ignoring merges": lambda: qwen2(ignore_merges=True),
}
EXACT = ["gpt2", "llama3", "llama2", "gemma"]  # give back every text


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """folder(kind): a folder with the tokenizer of this kind, one of ours as we write it for a Llama."""

    @cache
    def make(kind: str) -> Path:
        path = tmp_path_factory.mktemp(kind)
        if kind in OURS:
            export_tokenizer(OURS[kind], path, 77)
            transformers.LlamaConfig(num_hidden_layers=1).save_pretrained(path)
        else:
            (KINDS | NEARLY_QWEN2)[kind]().save(str(path / "tokenizer.json"))
            config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}
            (path / "tokenizer_config.json").write_text(json.dumps(config))
        return path

    return make


@cache
def both(path: Path):
    return HFTokenizer.from_folder(path), transformers.AutoTokenizer.from_pretrained(path)


def tokenizer_of(folder, kind: str):
    return OURS.get(kind) or both(folder(kind))[0]


def theirs(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids


WORDS = st.sampled_from([*" \n▁é中\U0001f600", "  ", "it's", "the", "<s>", "</s>", "<0x0A>", "e\u0301"])
SAME_LETTERS = st.text("ab ", max_size=40)  # tokens overlap in many ways
ANY = st.lists(st.text(max_size=3) | WORDS, max_size=8).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(text=ANY, more=ANY)
@example(text="  the", more="  it")
def test_ids_and_text_are_those_of_transformers(folder, kind, text, more):
    ours, reference = both(folder(kind))
    ids = ours.encode(text)
    assert ids.dtype == np.int64
    assert ids.tolist() == theirs(reference, text)
    assert ours.eot not in ids or kind == "unigram"
    if kind in EXACT:
        same = text
        whole = text + more
        if kind in ("llama2", "gemma"):
            same = same.replace("▁", " ")
            whole = whole.replace("▁", " ")
        assert ours.decode(ids) == same == reference.decode(ids, clean_up_tokenization_spaces=False)
        assert ours.byte_lengths[ids].sum() == len(same.encode()) + (kind == "llama2" and text != "")
        assert not ours.decode_bytes(ours.encode_rest("the")).startswith(b" ")
        assert ours.decode([*ids, *ours.encode_rest(more)] if text else ours.encode(more)) == whole
    elif not text.startswith((" ", "▁")):
        assert ours.decode(ids) == reference.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("kind", KINDS)
def test_attributes_are_those_of_transformers(folder, kind, tmp_path):
    reference = both(folder(kind))[1]
    new = build(f"hf:{folder(kind)}", lambda: pytest.fail("read the texts"))
    new.save(tmp_path / "new")
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == (folder(kind) / "tokenizer.json").read_bytes()
    again = from_spec(json.loads(json.dumps(new.spec)), tmp_path / "new" / "step_00000001")
    assert (again.spec, again.hash) == (new.spec, new.hash)
    for ours in (new, again):
        assert (ours.vocab_size, ours.eot) == (len(reference), reference.eos_token_id)
        assert [*ours.prefix, *ours.encode(MIXED)] == reference(MIXED, split_special_tokens=True).input_ids
        assert ours.prefix == ([reference.bos_token_id] if kind in ("llama2", "gemma", "llama3") else [])
        assert ours.token_bytes[ours.eot] == b"</s>"
        assert ours.byte_lengths[ours.eot] == 0


def changed(change) -> bytes:
    parts = json.loads(byte_level().to_str())
    change(parts)
    return json.dumps(parts).encode()


def test_gaps_in_the_vocabulary_and_tokens_beyond_it():
    """The library numbers an added token by the size of the vocabulary, whatever the file says."""

    def change(parts: dict):
        vocabulary = parts["model"]["vocab"]
        parts["model"]["merges"] = []
        vocabulary[max(vocabulary, key=vocabulary.get)] = 530
        parts["added_tokens"].append(parts["added_tokens"][0] | {"id": 500, "content": "<|far|>"})

    tokenizer = HFTokenizer(changed(change), {"eos_token": "<|far|>"}, "x")
    reference = Tokenizer.from_str(changed(change).decode())
    assert (tokenizer.vocab_size, tokenizer.eot) == (531, reference.token_to_id("<|far|>"))
    assert tokenizer.token_bytes[505] == b""
    assert tokenizer.byte_lengths[505] == 0
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"


def test_random_dropout_truncation_and_padding_of_the_file_are_off():
    reference = byte_level()
    ids = reference.encode("the parallel block").ids
    reference.model.dropout = 0.9
    reference.enable_truncation(2)
    reference.enable_padding(length=99)
    tokenizer = HFTokenizer(reference.to_str().encode(), {"eos_token": "</s>"}, "x")
    assert tokenizer.encode("the parallel block").tolist() == ids


@pytest.mark.parametrize("configs", [
    {"tokenizer_config.json": {"eos_token": "</s>"}},
    {"special_tokens_map.json": {"eos_token": {"content": "</s>", "lstrip": False}}},
    {"generation_config.json": {"eos_token_id": [0, 1]}},
    {"config.json": {"eos_token_id": 0}},
    {"tokenizer_config.json": {"eos_token": "</s>", "bos_token": None}, "config.json": {"eos_token_id": 7}},
], ids=str)  # fmt: skip
def test_where_end_of_text_is_found(folder, tmp_path, configs):
    for name, config in configs.items():
        (tmp_path / name).write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes((folder("gpt2") / "tokenizer.json").read_bytes())
    tokenizer = HFTokenizer.from_folder(tmp_path)
    assert (tokenizer.eot, tokenizer.special["eos_token"]) == (0, "</s>")
    assert tokenizer.ends == ({0, 1} if "generation_config.json" in configs else {0})  # where a sample ends


def unknown_first() -> dict:
    """A post-processor that puts <s> before a text, with an id that no token has."""
    text = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    known = {"<s>": {"id": "<s>", "ids": [2**31], "tokens": ["<s>"]}}
    return {"type": "TemplateProcessing", "single": text, "pair": text, "special_tokens": known}


WORDPIECE = {"type": "WordPiece", "prefix": "##", "cleanup": True}
WHOLE = changed(lambda parts: None)


@pytest.mark.parametrize("content, config, words", [
    (b"\x80\x04K*.", "{}", "is damaged"),  # a pickle
    (b"[" * 100_000, "{}", "is damaged"),
    (changed(lambda parts: parts["model"].update(continuing_subword_prefix="<s>")), "{}", "is damaged"),  # a panic
    (changed(lambda parts: parts.update(post_processor=unknown_first())), "{}", "has the largest id 214748"),
    (changed(lambda parts: parts.update(decoder=None)), "{}", "has no decoder"),
    (changed(lambda parts: parts.update(decoder=WORDPIECE)), "{}", "WordPiece, so its tokens have no bytes; use a"),
    (changed(lambda parts: parts.update(pre_tokenizer={"type": "Whitespace"})), "{}", "drops the blanks"),
    (WHOLE, '{"eos_token": "<eos>"}', "has no end-of-text token"),
    (WHOLE, "{", "tokenizer_config.json is damaged"),
    (None, "{}", "lacks tokenizer.json; `hf download NAME"),
])  # fmt: skip
def test_bad_files_are_one_line(tmp_path, content, config, words):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_text(config)
    message = error(build, f"hf:{tmp_path}", list)
    assert words in message
    assert len(message) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("name, value", {"sha256": "0", "vocab_size": 7, "file": "/etc/passwd", "special": {}}.items())
def test_a_spec_that_does_not_fit(folder, tmp_path, name, value):
    tokenizer, _ = both(folder("gpt2"))
    tokenizer.save(tmp_path)
    assert hashlib.sha256(tokenizer.content).hexdigest() == tokenizer.spec["sha256"]
    words = {"special": "no end-of-text"}.get(name, "was changed: its SHA-256, ids or special tokens are not the rec")
    assert words in error(from_spec, tokenizer.spec | {name: value}, tmp_path)


def same_ids(path: Path, tokenizer) -> bool:
    """Whether AutoTokenizer and the tokenizer give the same ids for texts, and for texts with the first tokens."""
    reference = transformers.AutoTokenizer.from_pretrained(path)
    texts = ["".join(c for c in text if tokenizer.spec["kind"] != "char" or c in CHARS) for text in SENTENCES]
    ours = [tokenizer.encode(text).tolist() for text in texts]
    whole = [reference(text, split_special_tokens=True).input_ids for text in texts]
    same = [theirs(reference, text) for text in texts] == ours and whole == [[*tokenizer.prefix, *ids] for ids in ours]
    return same and len(reference) == tokenizer.vocab_size and reference.eos_token_id == tokenizer.eot


CASES = [("qwen2", "qwen2")]
CASES += [  # an eighth, as all families write a tokenizer in the same way
    (kind, family)
    for i, kind in enumerate([*OURS, *KINDS])
    for j, family in enumerate([*CHOICES, "superblock"])
    if family != "qwen2" and (i + j) % 8 == 0
]


def model_config(tokenizer, **flags) -> ModelConfig:
    return ModelConfig(n_layer=3, n_head=4, n_embd=32, block_size=24, vocab_size=tokenizer.vocab_size, **flags)


@pytest.mark.parametrize("kind, family", CASES)
def test_exports_of_every_family_keep_the_ids(folder, tmp_path, kind, family):
    tokenizer = tokenizer_of(folder, kind)
    flags = {}
    if family in CHOICES:
        flags = CHOICES[family][0]
    export_tokenizer(tokenizer, tmp_path, 77)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == 77
    cfg = model_config(tokenizer, **flags)
    remote = family == "superblock"
    write_hf(tmp_path, cfg, lambda _: None, torch.float32, tokenizer, remote_code=remote)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == family
    assert same_ids(tmp_path, tokenizer)
    assert config["bos_token_id"] == [*tokenizer.prefix, tokenizer.eot][0]
    if isinstance(tokenizer, HFTokenizer):
        assert (tmp_path / "tokenizer.json").read_bytes() == tokenizer.content
    if kind in OURS:
        again = HFTokenizer.from_folder(tmp_path)
        assert again.encode(MIXED).tolist() == tokenizer.encode(MIXED).tolist()
        assert again.decode(tokenizer.encode(MIXED)) == MIXED
        assert again.eot == tokenizer.eot
        assert [name for name, each in OURS.items() if again.same_tokens(each)] == [kind]


@pytest.mark.parametrize("kind", ["bpe", "qwen2", *NEARLY_QWEN2])
def test_a_qwen2_has_a_tokenizer_of_its_own(folder, tmp_path, kind):
    """Beside its config.json, transformers ignores the rules of others: they are written as a Llama's, or refused."""
    tokenizer = tokenizer_of(folder, kind)
    plain, windows = (model_config(tokenizer, **flags) for flags in CHOICES["qwen2"])
    export_tokenizer(tokenizer, tmp_path, 77)
    write_json(tmp_path / "config.json", {"model_type": "qwen2"})
    assert same_ids(tmp_path, tokenizer) == (kind == "qwen2")
    if kind == "qwen2":
        assert choose(plain, tokenizer)[1] == choose(windows, tokenizer)[1] == "qwen2"
    else:
        assert choose(plain, tokenizer)[1] == "llama"
        message = error(choose, windows, tokenizer)
        assert "no family of Hugging Face has window_pattern=LLS" in message
        assert "--remote_code=True" in message


def test_what_cannot_be_written(tmp_path):
    said = error(export_tokenizer, CharTokenizer("a\ud800"), tmp_path, 8)
    assert "the char vocabulary has a lone surrogate, which no" in said
    assert not list(tmp_path.iterdir())


def test_a_run_with_a_tokenizer_of_hugging_face(folder, run, tmp_path, capfd, monkeypatch):
    """From texts to a sample. Long documents are cut; the file travels with the shards and with the run."""
    monkeypatch.setattr(corpus, "JOB_CHARACTERS", 40)
    path = tmp_path / "model"
    text = tmp_path / "a.txt"
    shutil.copytree(folder("llama2"), path)
    text.write_text("".join(TEXTS))
    corpus.prepare(args(tmp_path / "data", f"hf:{path}", documents="line"), [str(text)])
    shutil.rmtree(path)
    data = open_data(tmp_path / "data")
    (_, reference) = both(folder("llama2"))
    found = sum(splits_of(tmp_path / "data").values(), [])
    documents = [[*ids] for end, ids in groupby(found, lambda i: i == reference.eos_token_id) if not end]
    assert sorted(documents) == sorted(theirs(reference, line) for line in text.read_text().split("\n") if line.strip())
    out = run(f"--dataset={tmp_path}/data", "--max_iters=2", "--warmup_iters=1", "--eval_interval=2")
    assert (out / "tokenizer.json").read_bytes() == data.tokenizer.content
    assert metrics(out)[-1]["val_bpb"] > 0
    (out / "tokenizer.json").unlink()
    run(f"--dataset={tmp_path}/data", "--max_iters=4", "--warmup_iters=1", "--init_from=resume")
    shutil.rmtree(tmp_path / "data")
    capfd.readouterr()
    for where in (out, out / "step_00000004"):
        sample.main([f"--out_dir={where}", "--start=the été", "--max_new_tokens=5", "--device=cpu"])
        assert capfd.readouterr().out.startswith("the été")


def test_spans_keep_blanks(folder, capsys, monkeypatch):
    ours = tokenizer_of(folder, "llama2")
    V = ours.vocab_size
    rest = ours.encode_rest(" a hill").tolist()
    written = [*ours.encode("the café").tolist(), V + 1, *rest, V + 2]
    monkeypatch.setattr(sample, "generate", lambda *_: (torch.tensor([x]) for x in written))
    sample.fill_spans(SampleConfig(), None, ours, "<mask> on<mask>", torch.tensor([[V, V + 1]]), None)
    assert capsys.readouterr().out == "the café on a hill\n"
