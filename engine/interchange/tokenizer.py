"""Writes our tokenizers as files of Hugging Face.

    export_tokenizer(tokenizer, folder, 1024)      # tokenizer.json and tokenizer_config.json

AutoTokenizer.from_pretrained(folder) then gives the same ids and the same text back, for every text of valid Unicode:
Hugging Face refuses lone surrogates. Special tokens are the difference: the text <|endoftext|> is the end-of-text token
there, unless split_special_tokens=True, and ordinary text here. Beside a config.json of Qwen2, AutoTokenizer applies
Qwen2's rules whatever the files say; so `keeps_ids` says for which tokenizers this model_type may be written.
"""

import json
import re
from pathlib import Path

from data.base_tokenizer import END_OF_TEXT, LETTERS, Tokenizer
from data.errors import require
from data.files import write_file
from data.tokenizer import ByteTokenizer, CharTokenizer, GPT2Tokenizer, HFTokenizer

QWEN2 = (  # the pattern by which AutoTokenizer splits a text into words beside a config.json of Qwen2
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def keeps_ids(tokenizer: Tokenizer | None, kind: str) -> bool:
    """Whether AutoTokenizer gives the tokenizer's ids beside a config.json of this model_type."""
    if tokenizer is None or kind != "qwen2":
        return True
    if not isinstance(tokenizer, HFTokenizer) or END_OF_TEXT.decode() not in tokenizer.vocabulary:
        return False
    parts = json.loads(tokenizer.content)
    match parts:
        case {
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ]},
        }:  # fmt: skip
            used = {name for name, value in parts["model"].items() if value}
            return pattern == QWEN2 and used == {"type", "vocab", "merges"}
    return False


def export_tokenizer(tokenizer: Tokenizer, folder: Path | str, block_size: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json into `folder`. ValueError if they cannot express it."""
    special = {"model_max_length": block_size}
    if isinstance(tokenizer, HFTokenizer):
        content = tokenizer.content
        special |= {key: value for key, value in tokenizer.special.items() if key != "eos_token_id"}  # config.json's
    else:
        content = converted(tokenizer).to_str(pretty=True).encode()
        if tokenizer.eot is not None:
            special |= dict.fromkeys(("bos_token", "eos_token"), END_OF_TEXT.decode())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | special
    write_file(Path(folder) / "tokenizer.json", content)
    write_file(Path(folder) / "tokenizer_config.json", json.dumps(config, indent=2).encode())


def converted(tokenizer: CharTokenizer | ByteTokenizer | GPT2Tokenizer):
    """The same tokenizer of the library: char as one word per character, which refuses a character that it lacks, as we
    do; byte and gpt2 as byte-level BPE."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    if isinstance(tokenizer, CharTokenizer):
        fact = "the char vocabulary has a lone surrogate, which no tokenizer.json can hold"
        require(not re.search("[\ud800-\udfff]", "".join(tokenizer.chars)), f"{fact}; prepare the data from valid text")
        vocabulary = {c: i for i, c in enumerate(tokenizer.chars)}
        encoding = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="no such token"))
        encoding.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        encoding.decoder = decoders.Fuse()
        return encoding
    letters = {byte: letter for letter, byte in LETTERS.items()}
    names = ["".join(letters[byte] for byte in token) for token in tokenizer.token_bytes[:-1]]
    encoding = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, tokenizer.merges))
    encoding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoding.decoder = decoders.ByteLevel()
    encoding.add_special_tokens([END_OF_TEXT.decode()])  # its id is the next one
    return encoding
