"""numbers: pairs of English and German words for numbers below a million, which need no network.

    python data/numbers/prepare.py                   # 30,000 pairs into this folder, 1,000 of them to validate

A pair is "forty-two thousand seven" and "zweiundvierzigtausendsieben", byte by byte. A hash draws the numbers, all of
them different. So a validated number was never trained on.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

import data  # first, because it lets Ctrl-C end the imports without a traceback  # noqa: F401

# isort: split
import numpy as np

from data.command import Parser, out_folder, run
from data.dataset import MASK
from data.hashing import hash64
from data.pairs import encode
from data.tokenizer import ByteTokenizer
from data.writer import ShardWriter

ENGLISH = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen".split()
ENGLISH += "sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety".split()
GERMAN = "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn".split()
GERMAN += "sechzehn siebzehn achtzehn neunzehn zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()


def english(n: int) -> str:
    if n < 100:
        tens, ones = divmod(n, 10)
        return ENGLISH[n] if n < 20 else ENGLISH[18 + tens] + (f"-{ENGLISH[ones]}" if ones else "")
    unit, name = (1000, "thousand") if n >= 1000 else (100, "hundred")
    return f"{english(n // unit)} {name}" + (f" {english(n % unit)}" if n % unit else "")


def german(n: int, end: str = "s") -> str:
    """`end` follows a last "ein": eins, einundzwanzig, eintausend."""
    if n < 100:
        tens, ones = divmod(n, 10)
        return GERMAN[n] + end * (n == 1) if n < 20 else (f"{GERMAN[ones]}und" if ones else "") + GERMAN[18 + tens]
    unit, name = (1000, "tausend") if n >= 1000 else (100, "hundert")
    return german(n // unit, "") + name + (german(n % unit, end) if n % unit else "")


def main() -> None:
    tokenizer = ByteTokenizer()
    drawn = dict.fromkeys((hash64(np.arange(40_000, dtype=np.uint64)) % np.uint64(10**6)).tolist())
    with ShardWriter(out_folder(Parser(__doc__, HERE).parse_args().out), tokenizer) as out:
        for i, n in enumerate([*drawn][:30_000]):
            split = "val" if i < 1000 else "train"
            ids, marks = encode(tokenizer, [(english(n), False), (german(n), True)])
            out.add(split, ids)
            out.add(split + MASK, marks, 0)
    out.report(f"{out.documents()} pairs, ")


if __name__ == "__main__":
    run(main)
