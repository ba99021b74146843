"""Writes our tokenizers as files of Hugging Face.

    export_tokenizer(tokenizer, folder)      # tokenizer.json and tokenizer_config.json

AutoTokenizer.from_pretrained(folder) then gives the same ids and the same text back, for every text of valid Unicode:
Hugging Face refuses lone surrogates. Special tokens are the difference: the text <|endoftext|> is the end-of-text token
there, unless split_special_tokens=True, and ordinary text here. Beside a config.json of Qwen2, AutoTokenizer applies
Qwen2's rules whatever the files say; so `keeps_ids` says for which tokenizers this model_type may be written.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from data.base_tokenizer import END_OF_TEXT, Tokenizer
from data.errors import require
from data.files import write_file
from data.hf_tokenizer import LETTERS

QWEN2 = (  # the pattern by which AutoTokenizer splits a text into words beside a config.json of Qwen2
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def keeps_ids(tokenizer: Tokenizer | None, kind: str) -> bool:
    """Whether AutoTokenizer gives the tokenizer's ids beside a config.json of this model_type."""
    if tokenizer is None or kind != "qwen2":
        return True
    parts = getattr(tokenizer, "parts", None) or {"model": {}}
    steps = (parts.get("pre_tokenizer") or {}).get("pretokenizers", [])
    rules = [step | {"trim_offsets": True} for step in steps] == [split(QWEN2) | {"trim_offsets": True}, LEVEL]
    rules = rules and parts.get("normalizer") == {"type": "NFC"} and END_OF_TEXT.decode() in tokenizer.vocabulary
    return rules and {key for key, x in parts["model"].items() if x} == {"type", "vocab", "merges"}


def export_tokenizer(tokenizer: Tokenizer, folder: Path | str) -> None:
    """Writes tokenizer.json and tokenizer_config.json into `folder`. ValueError if they cannot express it."""
    kind = tokenizer.spec["kind"]
    special = tokenizer.spec.get("special") or {}
    if kind != "hf" and tokenizer.eot is not None:
        special = {"bos_token": END_OF_TEXT.decode(), "eos_token": END_OF_TEXT.decode()}
    content = tokenizer.content if kind == "hf" else char(tokenizer) if kind == "char" else byte_level(tokenizer)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | special
    write_file(Path(folder) / "tokenizer.json", content)
    write_file(Path(folder) / "tokenizer_config.json", json.dumps(config, indent=2).encode())


def char(tokenizer) -> bytes:
    """One token per character; Hugging Face refuses a character that the vocabulary lacks, as we do."""
    surrogates = [c for c in tokenizer.chars if "\ud800" <= c <= "\udfff"]
    fact = f"the char vocabulary has the lone surrogate {ascii(surrogates[:1])[1:-1]}"
    require(not surrogates, f"{fact}, which no tokenizer.json can hold; prepare the data from valid text")
    model = {"type": "WordLevel", "vocab": {c: i for i, c in enumerate(tokenizer.chars)}, "unk_token": "no such token"}
    return tokenizer_json(model, split(r"[\s\S]"), {"type": "Fuse"}, None)


def byte_level(tokenizer: Tokenizer) -> bytes:
    """Byte-level BPE, whose tokens are in the order of the merges. Only a pattern splits the text into words."""
    tokens, pattern = tokenizer.token_bytes[:-1], getattr(tokenizer, "PATTERN", None)
    letters = {byte: letter for letter, byte in LETTERS.items()}
    names = ["".join(letters[byte] for byte in token) for token in tokens]
    merges = [tuple("".join(letters[byte] for byte in part) for part in pair) for pair in merged_pairs(tokens)]
    model = {"type": "BPE", "vocab": {name: i for i, name in enumerate(names)}, "merges": merges}
    steps = [split(pattern), LEVEL] if pattern else [LEVEL]
    return tokenizer_json(model, {"type": "Sequence", "pretokenizers": steps}, LEVEL, tokenizer.eot)


def merged_pairs(tokens: list[bytes]) -> Iterable[tuple[bytes, bytes]]:
    """The two tokens of which the merges make each longer token. tiktoken merges any two neighbours whose union is a
    token, the earliest token first; Hugging Face merges the listed pairs. Both are the same, if the earlier tokens make
    exactly two parts of each token."""
    rank = {token: i for i, token in enumerate(tokens)}
    for token in tokens:
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            best, at = min((rank.get(parts[i] + parts[i + 1], len(tokens)), i) for i in range(len(parts) - 1))
            fact = f"the token {token!r:.80} is not the union of two earlier tokens"
            require(best < rank[token], f"{fact}, so no list of merges makes it; train the tokenizer with bpe:N")
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def split(pattern: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def tokenizer_json(model: dict, pre_tokenizer: dict, decoder: dict, eot: int | None) -> bytes:
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [] if eot is None else [{"id": eot, "content": END_OF_TEXT.decode()} | token]
    parts = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None}
    parts |= {"pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": decoder, "model": model}
    return json.dumps(parts, ensure_ascii=False, indent=1).encode()
