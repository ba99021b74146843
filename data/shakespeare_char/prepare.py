"""shakespeare_char: nanoGPT's character-level Shakespeare, token for token.

    python data/shakespeare_char/prepare.py                  # input.txt in this folder, or a download
    python data/shakespeare_char/prepare.py --input=my.txt   # your own text, a file or a URL

The first 90 % of the characters train, the rest validate: 1,003,854 and 111,540 tokens, 65 different characters.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the process silently

import hashlib
import sys
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from data.command import Parser, next_command, out_folder, run  # noqa: E402
from data.errors import say  # noqa: E402
from data.files import display_path, open_regular, writing  # noqa: E402
from data.tokenizer import CharTokenizer  # noqa: E402
from data.writer import ShardWriter  # noqa: E402

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SECONDS = 5  # for connecting, and for each read


def download(url: str) -> bytes:
    """Downloads the content of `url` (http, https, ftp or file). ValueError with a remedy if this fails."""
    try:
        with urlopen(url, timeout=SECONDS) as response:
            return response.read()
    except (OSError, HTTPException, ValueError) as e:
        reason = getattr(e, "reason", None) or e or type(e).__name__
        remedy = f"put the text at {display_path(HERE / 'input.txt')} or pass --input=FILE"
        raise ValueError(f"cannot download {url} ({reason}); {remedy}") from e


def shakespeare() -> bytes:
    """Reads input.txt in this folder, after a download if it is missing. ValueError if the download is another text."""
    path = HERE / "input.txt"
    if not path.exists():
        content = download(URL)
        found = hashlib.sha256(content).hexdigest()
        if found != SHA256:
            raise ValueError(f"{URL} has the SHA-256 {found}, not {SHA256}; get it elsewhere and pass --input=FILE")
        temporary = path.with_suffix(".tmp")
        with writing(temporary):
            temporary.write_bytes(content)
        temporary.replace(path)
    return read(path)


def read(path: Path | str) -> bytes:
    with open(path, "rb", opener=open_regular) as f:
        return f.read()


def read_text(source: str | None) -> str:
    """Reads the text at `source`, a file or a URL; None means shakespeare().

    ValueError if it has fewer than 11 characters: the last tenth must have two.
    """
    if source is None:
        content = shakespeare()
    else:
        content = download(source) if "://" in source else read(source)
    name = source or "input.txt"
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{name} is not UTF-8 text (byte {e.start}); convert it, for example with iconv") from e
    if len(text) < 11:
        raise ValueError(f"{name} has {len(text)} characters, too few to split; pass a longer text")
    if hashlib.sha256(content).hexdigest() != SHA256:
        say(f"note: {name} is not nanoGPT's Shakespeare; losses do not compare with published ones")
    return text


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--input", help="text file or its URL (default: input.txt in this folder)")
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
        f"{tokenizer.vocab_size} characters, "
        f"{cut:,} train + {len(tokens) - cut:,} val tokens in {display_path(folder)}; "
        f"next: {next_command(folder, tokenizer.vocab_size, [cut, len(tokens) - cut])}"
    )


if __name__ == "__main__":
    run(main)
