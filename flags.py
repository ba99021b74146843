"""Flags: the rules in their comments, how a wrong one is refused, and the readers that a string of --block names.

A flag is a line of a dataclass, `name: type = default  # [rule] doc`. A comment below it that begins with a bracket
continues it. All rules of a flag must hold:

    [pos=rope]      the flag has an effect only then: beside other flags it must keep its default
    [>0] [<1]       what the number itself must be. Without such a rule, it is at least 0. [any] allows all numbers
    [data]          no rule: the flag changes what is learnt from the data, so a model is evaluated with its value

A rule has terms, joined by `and` and `or`. A term is name=value|value, name!=value, name>number or the name of a fact.
A value may hold a *, as in file names. A fact is a bool property of the dataclass; errors quote its docstring. A term
about a flag that the dataclass does not have holds, but the configurator refuses it in the flags of a command.
"""

import ast
import difflib
import inspect
import io
import operator
import re
import textwrap
import tokenize
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import cache
from keyword import iskeyword
from typing import ClassVar, NamedTuple, NoReturn

LIMIT = 2**31  # of every number without a rule such as [<1]
LONGEST = 100  # characters of a flag and its value in an error
MOST = 1000  # characters of a layer's string
TERM = re.compile(r"(\w*)(>=|<=|!=|=|>|<)?(.*)")
COMPARED = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


class Flag(NamedTuple):
    """What the source says about a flag."""

    section: str
    doc: str  # with its rules
    rules: list[str]  # when it has an effect
    limits: list[str]  # what its number must be
    of_data: bool  # whether it changes what is learnt from the data


class Flags:
    """The base class of a dataclass of flags. ValueError names a flag that breaks a rule of its comment."""

    sources = {}  # flag -> where the configurator has found its value, such as config/x.py:3 or a checkpoint
    given = frozenset()  # the flags among them that a file or the command line has set
    left_out = []  # a line of text for each flag that the configurator has left out

    def __post_init__(self):
        check_limits(self)
        for name, rules in unused(self).items():
            if getattr(self, name) != getattr(type(self), name):
                refuse_unused(self, name, rules)


def refuse(cfg: Flags, names: str, why: str) -> NoReturn:
    """Raise ValueError: these flags, their values and where they were set, then why they cannot be so."""
    settings = [setting(name, getattr(cfg, name), cfg.sources.get(name, "")) for name in names.split()]
    raise ValueError(f"{' with '.join(settings)}: {why}")


def setting(name: str, value: object, place: str) -> str:
    """A flag, its value and where it was set, as errors name them. A long value is cut."""
    text = f"{name}={value}"
    if isinstance(value, str) and (iskeyword(value) or not value.isidentifier()):
        text = f"{name}={value!r}"
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}..."
    return f"{text} ({place})" if place else text


def check_limits(cfg: Flags):
    """ValueError names a number that is not within its limits."""
    for name, flag in documented(type(cfg)).items():
        value = getattr(cfg, name)
        if isinstance(value, bool | str):
            continue
        for limit in flag.limits:
            if not holds(cfg, name + limit):
                refuse(cfg, name, f"must be {limit}")


def refuse_unused(cfg: Flags, name: str, rules: list[str]) -> NoReturn:
    """Raise ValueError: these rules of the flag do not hold."""
    words = in_words(type(cfg), " and ".join(rules))
    others = rests_on(cfg, rules)
    if others == [name]:
        refuse(cfg, name, f"needs {words}")
    states = ", ".join(f"{other}={getattr(cfg, other)}" for other in others)
    refuse(cfg, name, f"used only with {words}, and here {states}; leave it out or change {' or '.join(others)}")


def unused(cfg: Flags) -> dict[str, list[str]]:
    """The flags that have no effect beside the others -> their rules that do not hold."""
    found = {}
    for name, flag in documented(type(cfg)).items():
        if rules := [rule for rule in flag.rules if not holds(cfg, rule)]:
            found[name] = rules
    return found


def rests_on(cfg: Flags, rules: list[str]) -> list[str]:
    """The flags that decide whether these rules hold. Facts follow from block and from its layers."""
    names = [name for rule in rules for name in names_in(rule)]
    if any(fact(type(cfg), name) for name in names):
        names += ["block", "n_dense_layer"] if cfg.has_name else ["block"]
    return [name for name in dict.fromkeys(names) if name in cfg.__dataclass_fields__]


def names_in(rule: str) -> list[str]:
    """The flags and facts of a rule."""
    return [TERM.fullmatch(term)[1] for term in re.split(" and | or ", rule)]


def fact(cls: type, name: str) -> str | None:
    """The words of a fact; None if this is the name of none."""
    found = getattr(cls, name, None)
    return found.__doc__ if isinstance(found, property) else None


def in_words(cls: type, rule: str) -> str:
    """The rule, with the words of its facts in quotes."""
    for name in re.findall(r"\w+", rule):
        if words := fact(cls, name):
            rule = re.sub(rf"\b{name}\b", f"'{words}'", rule)
    return rule


def holds(cfg: Flags, rule: str) -> bool:
    return any(all(term_holds(cfg, term) for term in terms.split(" and ")) for terms in rule.split(" or "))


def term_holds(cfg: Flags, term: str) -> bool:
    name, sign, value = TERM.fullmatch(term).groups()
    if not hasattr(cfg, name):
        return True
    found = getattr(cfg, name)
    if sign is None:
        return found
    if sign in COMPARED:
        return COMPARED[sign](found, float(value))
    text = f"{found:g}" if isinstance(found, float) else str(found)
    found_there = any(fnmatchcase(text, pattern.strip("'")) for pattern in value.split("|"))
    return found_there == (sign == "=")


@cache  # reading the source takes 50 ms
def documented(cls: type) -> dict[str, Flag]:
    """What the source says about each flag, in order."""
    found = {}
    for owner in reversed(cls.__mro__):
        if "__dataclass_fields__" in vars(owner):
            found |= read_source(owner)
    in_order = {}
    for each in fields(cls):
        flag = found[each.name]
        doc = re.sub(r"\[.*?\]", lambda rule: in_words(cls, rule[0]), flag.doc)
        in_order[each.name] = flag._replace(doc=doc)
    return in_order


def read_source(owner: type) -> dict[str, Flag]:
    """The flags of one class. ValueError if its source is in no file."""
    try:
        source = textwrap.dedent(inspect.getsource(owner))
    except (OSError, TypeError):
        remedy = "write the class into a file"
        raise ValueError(f"the flags of {owner.__name__} are read from its source; {remedy}") from None
    lines = {}  # number -> the flag that is set there
    for node in ast.parse(source).body[0].body:
        if isinstance(node, ast.AnnAssign):
            lines |= dict.fromkeys(range(node.lineno, node.end_lineno + 1), node.target.id)
    docs = {}
    sections = {}
    section = name = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if line in lines and lines[line] != name:
            name = lines[line]
            docs[name] = ""
            sections[name] = section
        if token.type != tokenize.COMMENT:
            continue
        comment = token.string.lstrip("# ")
        if comment.startswith("---"):
            section = comment.strip("- ")
        elif name and (line in lines or comment.startswith("[")):
            docs[name] = f"{docs[name]} {comment}".strip()
    return {name: flag_of(sections[name], doc) for name, doc in docs.items()}


def flag_of(section: str, doc: str) -> Flag:
    brackets = [re.sub(r"\s*([<>=!|]+)\s*", r"\1", rule.strip()) for rule in re.findall(r"\[(.*?)\]", doc)]
    limits = [rule for rule in brackets if rule[0] in "<>"]
    rules = [rule for rule in brackets if rule not in [*limits, "any", "data"]]
    if "any" in brackets:
        limits.append(f">-{LIMIT}")
    elif not any(limit.startswith(">") for limit in limits):
        limits.append(">=0")
    if not any(limit.startswith("<") for limit in limits):
        limits.append(f"<{LIMIT}")
    return Flag(section, doc.replace("[data] ", ""), rules, limits, "data" in brackets)


def flags_of_data(cls: type) -> list[str]:
    """The flags that say in their comments that they change what is learnt from the data."""
    return [name for name, flag in documented(cls).items() if flag.of_data]


# ---- Layers


class Reader(NamedTuple):
    """A reader in a string of --block: four choices (source to out), slots, and its share of heads or hidden units."""

    name: str = "attn"  # of the module, on which its initial weights depend
    source: str = "context"  # of keys and values: context, memory, parameters, experts (parameters that a router picks)
    query: str = "heads"  # heads: projections of the stream, stream: its slices
    phi: str = "softmax"  # of the scores: softmax, mlp (the map of cfg.mlp) or another map
    out: str = "matrix"  # or none
    slots: str = ""  # beside the context: own_slots have a softmax of their own, joint_slots share that of the context
    share: Fraction = Fraction(1)

    @property
    def units(self) -> bool:
        """Whether the stream itself reads parameters, as in an MLP."""
        return self.source in ("parameters", "experts") and self.query == "stream"

    @property
    def dense(self) -> bool:
        """Whether a token reads every hidden unit, not only those that a router picks."""
        return self.units and self.source == "parameters"

    @property
    def slotted(self) -> bool:
        """Whether heads read learned slots, alone or beside the context."""
        return bool(self.slots) or (self.source, self.query) == ("parameters", "heads")


READER = {  # letter -> what it stands for without switches
    "c": Reader("attn", "context"),
    "m": Reader("cross", "memory"),
    "s": Reader("slots", "parameters"),
    "p": Reader("mlp", "parameters", query="stream", phi="mlp", out="none"),
    "e": Reader("experts", "experts", query="stream", phi="mlp", out="none"),
}
SWITCH = {  # switch -> the choice that it makes; any other switch is a phi
    "heads": "query", "stream": "query", "matrix": "out", "none": "out", "own_slots": "slots", "joint_slots": "slots",
}  # fmt: skip
Sums = tuple[tuple[Reader, ...], ...]  # of a layer: the readers of each sum


@cache
def parsed(string: str) -> Sums:
    """The readers of each sum of a layer. ValueError quotes what is no reader."""
    if len(string) > MOST:
        raise ValueError(f"the string of a layer has more than {MOST} characters; divide its readers among layers")
    names = Counter()
    sums = []
    for words in string.split(","):
        readers = []
        for word in words.split("+"):
            reader = parsed_reader(word)
            names[reader.name] += 1
            number = names[reader.name]
            if number > 1:
                reader = reader._replace(name=f"{reader.name}{number}")
            readers.append(reader)
        sums.append(tuple(readers))
    return tuple(sums)


def parsed_reader(word: str) -> Reader:
    """The reader of a word such as 3c.relu/4."""
    match = re.fullmatch(r"([1-9]\d?)?([a-z])((?:\.\w+)*)(?:/([1-9]\d?))?", word)
    if match is None or match[2] not in READER:
        raise ValueError(f"{word!r} is no reader; write c, p, e, s or m, such as c,p or c.relu/2+p/2 (docs/blocks.md)")
    switches = match[3].split(".")[1:]
    chosen = {SWITCH.get(switch, "phi"): switch for switch in switches}
    if len(chosen) < len(switches):
        raise ValueError(f"{word!r} makes one choice twice; keep one switch")
    return READER[match[2]]._replace(**chosen, share=Fraction(int(match[1] or 1), int(match[4] or 1)))


def check_layer(cfg: "LayerFlags"):
    """ValueError if a string of cfg.block cannot be built, or has no layer."""
    for reader, _ in cfg.readers:
        check_reader(cfg, reader)
    if len(cfg.strings) > cfg.n_layer:
        refuse(cfg, "block n_layer", "there are more strings than layers; leave some out")
    if cfg.doc_mask and cfg.placed_slots:
        why = "a document would have other results at another place in the row; use own_slots"
        refuse(cfg, "doc_mask pos block", why)
    if not cfg.has_name and cfg.objective != "seq2seq" and re.search("(^|[0-9+,;])m", cfg.block):
        refuse(cfg, "block objective", "an m reads an encoder; set objective=seq2seq, or leave m out")


def check_reader(cfg: "LayerFlags", reader: Reader):
    """ValueError if the reader has switches that do not go together, or not with the other flags."""
    if reader.source == "experts":
        if not cfg.n_expert:
            refuse(cfg, "block n_expert", "an e needs experts; set n_expert")
        plain = reader.query == "stream" and reader.out == "none" and reader.phi != "softmax"
        if not plain or reader.share > 1:
            refuse(cfg, "block", "experts may have only another map or a part of the units, such as e.relu2/2")
    if reader.dense and reader.share > 1:
        refuse(cfg, "block", f"{reader.name} takes {reader.share} of the units; write a part, such as /2 or 3p/4")
    if reader.slots and (reader.source != "context" or reader.phi != "softmax"):
        refuse(cfg, "block", f"{reader.name}: slots stand beside the softmax of a c; write c.{reader.slots}")
    if cfg.pos == "alibi" and reader.source == "context":
        if cfg.objective != "causal":
            refuse(cfg, "pos objective", "this was retired, as encoders see both ways; set pos=rope")
        if reader.phi != "softmax":
            refuse(cfg, "block pos", f"a bias of positions needs a softmax, not .{reader.phi}; set pos=rope")
        if reader.share != 1:
            refuse(cfg, "block pos n_head", "the slopes are those of all heads; leave /n out, or set pos=rope")


def fact_of_readers(words: str, test: Callable[[Reader], bool]) -> property:
    """A fact, in these words: whether the test holds for a reader of some layer."""
    return property(lambda cfg: any(test(reader) for reader, _ in cfg.readers), doc=words)


class LayerFlags(Flags):
    """The base class of ModelConfig: what follows from its flags, mostly about the readers of each layer."""

    NAMES: ClassVar[dict[str, dict]] = {"block": {}}  # flag -> names for values of it; model.py sets BLOCK

    @property
    def has_name(self) -> bool:
        """a name of a block"""
        return self.block in self.NAMES["block"]

    @property
    def strings(self) -> list[str]:
        """A string for each layer, in turn. If a function makes the block, c,p stands for its attention and MLP."""
        names = self.NAMES["block"]
        if re.fullmatch(r"[A-Za-z_]\w+", self.block) and not self.has_name:
            near = difflib.get_close_matches(self.block, names, 1) or [", ".join(names)]
            refuse(self, "block", f"no block has this name; write {near[0]}, or readers such as c,p (docs/blocks.md)")
        string = names.get(self.block, self.block)
        if not self.has_name:
            return string.split(";")
        if not isinstance(string, str):
            string = "c,p"
        if not self.n_expert:
            return [string]
        dense = min(self.n_dense_layer, self.n_layer)
        return [string] * dense + [string.replace("p", "e")] * (self.n_layer - dense)

    def sums(self, layer: int) -> Sums:
        return self.sums_of(self.strings[layer % len(self.strings)])

    def sums_of(self, string: str) -> Sums:
        """The readers of each sum of a layer. Without an encoder, each m is left out. With one, a string without an m
        gets a sum that reads the memory: after the first sum with a c, or at the beginning."""
        try:
            sums = parsed(string)
        except ValueError as error:
            refuse(self, "block", str(error))
        if self.objective != "seq2seq":
            sums = [tuple(reader for reader in readers if reader.source != "memory") for readers in sums]
            return tuple(readers for readers in sums if readers)
        sources = [{reader.source for reader in readers} for readers in sums]
        if any("memory" in each for each in sources):
            return sums
        place = next((n for n, each in enumerate(sources, 1) if "context" in each), 0)
        return (*sums[:place], (READER["m"],), *sums[place:])

    @property
    def network(self) -> dict:
        """One value for each flag that can be written in several ways. Equal networks have equal values here."""
        made = self.NAMES["block"].get(self.block)
        if callable(made):
            wiring = [self.block, *self.strings]
        else:
            wiring = [self.sums(layer) for layer in range(max(self.n_layer, self.n_encoder_layer))]
        heads = {"attention": "", "n_kv_head": self.kv_heads, "head_dim": self.head_size}
        return heads | {"block": wiring, "n_dense_layer": 0}

    @property
    def readers(self) -> list[tuple[Reader, int]]:
        """The readers of all strings, each with the number of layers that have it."""
        strings = self.strings
        counts = Counter()
        for i, string in enumerate(strings):
            counts[string] += len(range(i, self.n_layer, len(strings)))
        return [(r, n) for string, n in counts.items() for readers in self.sums_of(string) for r in readers]

    @property
    def outputs(self) -> int:
        """Number of results that the readers of all layers add to the stream. Slots beside a context are one more."""
        return sum(n * (1 + bool(reader.slots)) for reader, n in self.readers)

    @property
    def placed_slots(self) -> bool:
        """Whether slots have the position 0, so that a token's distance to them depends on its place."""
        return self.pos == "rope" and any(reader.slots == "joint_slots" for reader, _ in self.readers)

    def layer_window(self, layer: int) -> int:
        """Sliding window of a layer in tokens, 0 = full attention."""
        kinds = self.window_pattern or "S"
        if not set(kinds) <= set("SL"):
            refuse(self, "window_pattern", "may hold only S (sliding) and L (full), such as SSSL")
        return self.window if kinds[layer % len(kinds)] == "S" else 0

    @property
    def hidden_multiple(self) -> int:
        """Hidden units per piece of an MLP. In each piece, a gated MLP's gates stand before its values."""
        return 64 if self.n_embd % 64 == 0 else 1

    @property
    def vocab_rows(self) -> int:
        """Rows of embedding and head. Config overrides this to add padding rows. No token and no loss uses them."""
        return self.vocab_size

    @property
    def bare(self) -> bool:
        """a simplified block without norms, of which one at the input is kept (He and Hofmann)"""
        return self.block.startswith("simplified") and self.norm_placement == "none"

    @property
    def has_even_c(self) -> bool:
        """a c in layer 0, 2, 4, ..."""
        n_layer = max(self.n_layer, self.n_encoder_layer)
        even = range(0, min(n_layer, 2 * len(self.strings)), 2)  # after which the strings repeat
        return any(reader.source == "context" for layer in even for readers in self.sums(layer) for reader in readers)

    has_p = fact_of_readers("a p in block", lambda reader: reader.dense)
    has_e = fact_of_readers("a layer with experts", lambda reader: reader.source == "experts")
    has_map = fact_of_readers("a p or e without another map", lambda reader: reader.phi == "mlp")
    has_slots = fact_of_readers("slots (s, c.own_slots or c.joint_slots)", lambda reader: reader.slotted)
    has_soft_slots = fact_of_readers("slots with a softmax", lambda reader: reader.slotted and reader.phi == "softmax")
