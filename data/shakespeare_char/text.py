"""The text of Shakespeare, and the command that prepares it by characters and, in `shakespeare`, in GPT-2's tokens."""

import hashlib
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

from data.command import Parser, out_folder
from data.errors import require, say
from data.files import decoded, display_path, read_file, write_file, writing
from data.tokenizer import Tokenizer
from data.writer import ShardWriter

HERE = Path(__file__).resolve().parent
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
LARGEST = 2**28  # bytes of a text
SECONDS = 5  # for connecting, and for each read


def download(url: str) -> bytes:
    """Downloads the content of `url` (http, https, ftp or file). ValueError with a remedy if this fails."""
    try:
        with urlopen(url, timeout=SECONDS) as response:
            size = int(response.headers["Content-Length"] or 0)
            require(size <= LARGEST, f"it has {size:,} bytes, more than {LARGEST:,}")
            return response.read()
    except (OSError, HTTPException, ValueError) as e:
        reason = getattr(e, "reason", None) or e or type(e).__name__
        remedy = f"put the text at {display_path(HERE / 'input.txt')} or pass --input=FILE"
        raise ValueError(f"cannot download {url} ({reason}); {remedy}") from e


def shakespeare() -> bytes:
    """Reads input.txt of shakespeare_char, or downloads it. ValueError if the download is another text."""
    path = HERE / "input.txt"
    if not path.exists():
        content = download(URL)
        found = hashlib.sha256(content).hexdigest()
        fact = f"{URL} has the SHA-256 {found}, not {SHA256}"
        require(found == SHA256, f"{fact}; get it elsewhere and pass --input=FILE")
        with writing(path):
            write_file(path, content)
    return read_file(path, LARGEST)


def prepare(doc: str, here: str, tokenizer_of: Callable[[str], Tokenizer]) -> ShardWriter:
    """Prepares the text of --input, a file or a URL, in the tokens of tokenizer_of(text); returns what was written. The
    first 0.9 of the characters train. ValueError if the rest has less than two characters or tokens."""
    parser = Parser(doc, here)
    parser.add_argument("--input", help="text file or its URL (default: input.txt of shakespeare_char)")
    args = parser.parse_args()
    folder = out_folder(args.out)
    name = args.input or "input.txt"
    if args.input is None:
        content = shakespeare()
    elif "://" in args.input:
        content = download(args.input)
    else:
        content = read_file(Path(args.input).expanduser(), LARGEST)
    text = decoded(name, content)
    require(len(text) > 10, f"{name} has {len(text)} characters, too few to split; pass a longer text")
    if hashlib.sha256(content).hexdigest() != SHA256:
        say(f"note: {name} is not nanoGPT's Shakespeare; losses do not compare with published ones")
    tokenizer = tokenizer_of(text)
    cut = int(len(text) * 0.9)
    val = tokenizer.encode(text[cut:])
    require(len(val) > 1, "the last tenth of the text is one token, and a prediction needs two; pass a longer text")
    with ShardWriter(folder, tokenizer) as out:
        out.add("train", tokenizer.encode(text[:cut]))
        out.add("val", val)
    return out
