"""shakespeare_char: nanoGPT's character-level Shakespeare, token for token.

    python data/shakespeare_char/prepare.py                  # input.txt in this folder, else a download
    python data/shakespeare_char/prepare.py --input=my.txt   # any text of one's own, a file or an address

The first 90 % of the characters train, the rest validate: 1,003,854 and 111,540 tokens, 65 different characters.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends it without a word

import hashlib
import sys
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from data.command import Parser, next_command, out_folder, run  # noqa: E402
from data.files import regular, shown  # noqa: E402
from data.tokenizer import CharTokenizer  # noqa: E402
from data.writer import ShardWriter  # noqa: E402

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SECONDS = 5  # for connecting, and for each read


def download(url: str) -> bytes:
    """The content at `url` (http, https, ftp or file). ValueError with the remedy if it cannot be had."""
    try:
        with urlopen(url, timeout=SECONDS) as response:
            return response.read()
    except (OSError, HTTPException, ValueError) as e:
        reason = getattr(e, "reason", None) or e or type(e).__name__
        remedy = f"put the text at {shown(HERE / 'input.txt')} or pass --input=FILE"
        raise ValueError(f"cannot download {url} ({reason}); {remedy}") from e


def shakespeare() -> bytes:
    """input.txt of this folder, downloaded if it is not there. ValueError if the download is not the known text."""
    path = HERE / "input.txt"
    if not path.exists():
        content = download(URL)
        found = hashlib.sha256(content).hexdigest()
        if found != SHA256:
            raise ValueError(f"{URL} has the SHA-256 {found}, not {SHA256}; get it elsewhere and pass --input=FILE")
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(content)
        temporary.replace(path)
    return read(path)


def read(path: Path | str) -> bytes:
    with open(path, "rb", opener=regular) as f:
        return f.read()


def read_text(source: str | None) -> str:
    """The text at `source`, a file or an address, or shakespeare(). ValueError if it is no text of 11 characters, of
    which the last tenth has two."""
    if source is None:
        content = shakespeare()
    else:
        content = download(source) if "://" in source else read(source)
    name = source or "input.txt"
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{name} is no UTF-8 text (byte {e.start}); convert it, for example with iconv") from e
    if len(text) < 11:
        raise ValueError(f"{name} has {len(text)} characters, too few to split; pass a longer text")
    if hashlib.sha256(content).hexdigest() != SHA256:
        print(f"note: {name} is not nanoGPT's Shakespeare; losses do not compare with published ones")
    return text


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--input", help="text file or its address (default: input.txt in this folder)")
    parser.add_argument("--out", default=str(HERE), help="NAME (data/NAME) or a path with a / (default: this folder)")
    args = parser.parse_args()

    folder, text = out_folder(args.out), read_text(args.input)
    tokenizer = CharTokenizer(text)
    tokens = tokenizer.encode(text)
    cut = int(len(tokens) * 0.9)
    with ShardWriter(folder, tokenizer) as out:
        out.add("train", tokens[:cut])
        out.add("val", tokens[cut:])
    print(
        f"{tokenizer.vocab_size} characters, {cut:,} train + {len(tokens) - cut:,} val tokens in {shown(folder)}; "
        f"next: {next_command(folder, tokenizer.vocab_size, [cut, len(tokens) - cut])}"
    )


if __name__ == "__main__":
    run(main)
