"""numbers: pairs of English and German words for numbers below a million, which need no network.

    python data/numbers/prepare.py                   # 30,000 pairs into this folder, 1,000 of them to validate

A pair is "forty-two thousand seven" and "zweiundvierzigtausendsieben", byte by byte. A hash draws the numbers, all of
them different. So a validated number was never trained on.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(os.path.dirname(HERE)))

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
    for unit, name in ((1000, "thousand"), (100, "hundred")):
        if n >= unit:
            words = f"{english(n // unit)} {name}"
            if n % unit:
                words += f" {english(n % unit)}"
            return words
    if n < 20:
        return ENGLISH[n]
    tens = ENGLISH[18 + n // 10]
    if n % 10:
        return f"{tens}-{ENGLISH[n % 10]}"
    return tens


def german(n: int, one: str = "eins") -> str:
    """`one` is the word for a last 1: eins, but einundzwanzig and eintausend."""
    for unit, name in ((1000, "tausend"), (100, "hundert")):
        if n >= unit:
            word = german(n // unit, "ein") + name
            if n % unit:
                word += german(n % unit, one)
            return word
    if n == 1:
        return one
    if n < 20:
        return GERMAN[n]
    tens = GERMAN[18 + n // 10]
    if n % 10:
        return f"{german(n % 10, 'ein')}und{tens}"
    return tens


def main():
    tokenizer = ByteTokenizer()
    args = Parser(__doc__, HERE).parse_args()
    drawn = hash64(np.arange(40_000, dtype=np.uint64)) % np.uint64(10**6)
    different = list(dict.fromkeys(drawn.tolist()))
    with ShardWriter(out_folder(args.out), tokenizer) as out:
        for split, numbers in (("val", different[:1000]), ("train", different[1000:30_000])):
            pairs = [encode(tokenizer, [(english(n), False), (german(n), True)]) for n in numbers]
            ids, marks = map(np.concatenate, zip(*pairs, strict=True))
            out.add(split, ids, len(numbers))
            out.add(split + MASK, marks, 0)
    out.report(f"{out.documents()} pairs, ")


if __name__ == "__main__":
    run(main)
