"""The text of Shakespeare, and the command that prepares it by characters and, in `shakespeare`, in GPT-2's tokens."""

import hashlib
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

from data.command import Parser, out_folder
from data.errors import reason, require
from data.files import decoded, read_file, user_path, write_file
from data.tokenizer import Tokenizer
from data.writer import ShardWriter

TEXT = Path(__file__).resolve().with_name("input.txt")
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
LARGEST = 2**28  # bytes of a text
SECONDS = 5  # for connecting, and for each read


def shakespeare() -> bytes:
    """Reads input.txt, or downloads it. ValueError if this fails, or if the download is another text."""
    if not TEXT.exists():
        try:
            with urlopen(URL, timeout=SECONDS) as response:
                content = response.read()
        except (OSError, HTTPException) as e:
            raise ValueError(f"cannot download {URL} ({reason(e)}); put the text at {TEXT} or pass --input=FILE") from e
        found = hashlib.sha256(content).hexdigest()
        fact = f"{URL} has the SHA-256 {found}, not {SHA256}"
        require(found == SHA256, f"{fact}; get it elsewhere and pass --input=FILE")
        write_file(TEXT, content)
    return read_file(TEXT, LARGEST)


def prepare(doc: str, here: str, tokenizer_of: Callable[[str], Tokenizer]) -> ShardWriter:
    """Prepares the text of --input, a file, in the tokens of tokenizer_of(text); returns what was written."""
    parser = Parser(doc, here)
    parser.add_argument("--input", help="text file (default: input.txt of shakespeare_char)")
    args = parser.parse_args()
    folder = out_folder(args.out)
    require("://" not in (args.input or ""), f"input={args.input} is an address; download it, and pass the file")
    if args.input is None:
        content = shakespeare()
    else:
        content = read_file(user_path(args.input), LARGEST)
    name = args.input or "input.txt"
    text = decoded(name, content)
    tokenizer = tokenizer_of(text)
    cut = int(len(text) * 0.9)
    val = tokenizer.encode(text[cut:])
    require(len(val) > 1, f"the last tenth of {name} has no two tokens, as it needs; pass a longer text")
    with ShardWriter(folder, tokenizer) as out:
        out.add("train", tokenizer.encode(text[:cut]))
        out.add("val", val)
    return out
