"""What ranks send each other for a save, a resume and a comparison of copies: it does not grow with their number."""

import hashlib
import pickle
import sys
import threading
import time
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from configurator import parse
from engine import optim
from engine.checkpoint import contents
from engine.checkpoint import files as checkpoint
from engine.config import Config
from engine.parallel import ranks as parallel
from engine.parallel.owners import Part, Weight, place
from engine.parallel.sharded import ShardedModel
from tests.checkpoint.test_checkpoint import STATE
from tests.helpers import ROOT


class Threads:
    """Ranks that are threads of this process, and the bytes that each has received and sent, as PyTorch's collectives
    of objects send them: all padded to the largest, after the sizes, and to all ranks in a ring."""

    def __init__(self, size: int, patch: pytest.MonkeyPatch):
        self.size = size
        self.barrier = threading.Barrier(size)
        self.place = threading.local()
        self.given = [None] * size  # what each rank gives to the present collective
        self.received = [0] * size
        self.sent = [0] * size
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_rank", lambda: self.place.rank)
        patch.setattr(dist, "get_world_size", lambda: size)
        for name in ("all_gather_object", "gather_object", "scatter_object_list"):
            patch.setattr(dist, name, getattr(self, name))

    def run(self, work) -> list:
        """[work(0), work(1), ...], each in its thread."""
        results = [None] * self.size
        errors = []

        def one(rank: int):
            self.place.rank = rank
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()  # an error of all other ranks

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000)  # a thread runs until it waits: a thousand that run in turn would be slow
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        sys.setswitchinterval(interval)
        if errors:
            raise errors[0]
        return results

    def exchanged(self, value) -> list:
        """What all ranks give, when all have given theirs."""
        self.given[self.place.rank] = value
        self.barrier.wait()
        given = self.given[:]
        self.barrier.wait()
        return given

    def count(self, received: int, sent: int):
        self.received[self.place.rank] += received
        self.sent[self.place.rank] += sent

    def all_gather_object(self, values: list, value):
        given = self.exchanged(pickle.dumps(value))
        passed_on = (self.size - 1) * (8 + max(map(len, given)))
        self.count(passed_on, passed_on)
        values[:] = map(pickle.loads, given)

    def gather_object(self, value, values: list | None):
        given = self.exchanged(pickle.dumps(value))
        largest = max(map(len, given))
        others = self.size - 1
        self.count(8 * others, 8 * others)
        if self.place.rank:
            self.count(0, largest)
        else:
            self.count(others * largest, 0)
            values[:] = map(pickle.loads, given)

    def scatter_object_list(self, mine: list, values: list | None):
        pickled = [] if self.place.rank else [pickle.dumps(value) for value in values]
        pickled = self.exchanged(pickled)[0]
        largest = 8 + max(map(len, pickled))
        if self.place.rank:
            self.count(largest, 0)
        else:
            self.count(0, (self.size - 1) * largest)
        mine[0] = pickle.loads(pickled[self.place.rank])

    def largest(self) -> int:
        """The most bytes that a rank but the first has received or sent since the last call."""
        found = max(self.received[1:] + self.sent[1:])
        self.received = [0] * self.size
        self.sent = [0] * self.size
        return found


WHOLES = {f"model.{kind}.{i}": torch.arange(64.0).view(32, 2) + i for i in range(50) for kind in ("whole", "cut")}


def parts_of(size: int, rank: int) -> dict[str, Part]:
    """What a rank of so many holds: a copy of each tensor, or some of its rows."""
    parts = {}
    for name, whole in WHOLES.items():
        weight = Weight((32, 2), ((size, 0 if ".cut." in name else None),))
        slices, _ = place(weight, rank)
        parts[name] = Part(whole[slices].clone(), tuple(each.start for each in slices), weight.shape)
    return parts


def copies_differ(parts: dict[str, Part]) -> str:
    """What a rank with these parts says of copies."""
    parameters = [(name, part.tensor) for name, part in parts.items()]
    model = SimpleNamespace(named_parameters=lambda: parameters)
    rank = SimpleNamespace(model=model, counted_elsewhere=(), part=lambda name, _: parts[name])
    return ShardedModel.unequal_copies(rank)


def index_of(folder, parts: dict[str, Part]) -> dict[str, contents.Saved]:
    """What a rank with these parts gets of the index."""
    path = checkpoint.find(folder)
    return checkpoint.read_index(path, checkpoint.read_state(path), parts)


def traffic(size: int, folder) -> list[int]:
    """The largest traffic of a rank but the first, for a comparison of copies, a save, and resumes on as many ranks and
    on half as many."""

    def compare(ranks: int, rank: int):
        assert copies_differ(parts_of(ranks, rank)) == ""

    def save(ranks: int, rank: int):
        checkpoint.save(folder, 1, parts_of(ranks, rank), STATE)

    def resume(ranks: int, rank: int):
        parts = parts_of(ranks, rank)
        for part in parts.values():
            part.tensor.zero_()
        checkpoint.load(checkpoint.find(folder), parts, index_of(folder, parts))
        for name, part in parts_of(ranks, rank).items():
            assert torch.equal(parts[name].tensor, part.tensor)

    found = []
    for work, n in ((compare, size), (save, size), (resume, size), (resume, size // 2)):
        with pytest.MonkeyPatch.context() as patch:
            ranks = Threads(n, patch)
            ranks.run(partial(work, n))
            found.append(ranks.largest())
    return found


def test_traffic_of_a_rank_does_not_grow_with_the_number_of_ranks(tmp_path):
    few = traffic(4, tmp_path)
    many = traffic(16, tmp_path)
    assert all(more < 1.2 * less for less, more in zip(few, many, strict=True)), (few, many)


# ---- A thousand ranks, which have no memory for tensors and write no bytes


def weights_of_llama_70b(monkeypatch) -> dict[str, Weight]:
    """What a checkpoint of config/llama_70b.py has on 1,024 ranks, beside random states: how they share each tensor."""
    init = partial(dist.init_process_group, "fake", store=FakeStore(), rank=0, world_size=1024)
    with monkeypatch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda *args, **options: init())
        patch.setattr(parallel, "of_first_rank", lambda action: action())
        patch.setenv("WORLD_SIZE", "1024")
        cfg = parse(Config, [str(ROOT / "config/llama_70b.py"), "--device=cpu", "--dtype=float32"])
        sharded = ShardedModel(cfg, parallel.join(cfg))
        states = optim.build(sharded.model, cfg, sharded).state_tensors(sharded.model)
        dist.destroy_process_group()
    found = {f"model.{name}": weight for name, weight in sharded.weights.items()}
    for name, t in states.items():
        found[f"optim.{name}"] = sharded.weights[name.rpartition(".")[0]] if t.dim() else Weight((), ())
    return found


@cache
def nothing(*sizes: int) -> torch.Tensor:
    """A tensor of these sizes without memory."""
    return torch.empty(sizes, device="meta")


def empty_parts_of(weights: dict[str, Weight], rank: int) -> dict[str, Part]:
    parts = {}
    for name, weight in weights.items():
        slices, _ = place(weight, rank)
        tensor = nothing(*(each.stop - each.start for each in slices))
        parts[name] = Part(tensor, tuple(each.start for each in slices), weight.shape)
    for device, size in (("cpu", 5056), ("cuda", 16)):
        parts[f"rng.{rank}.{device}"] = Part(nothing(size), (0,), (size,))
    return parts


def write_nothing(file, parts: dict[str, Part]) -> dict[str, dict]:
    """contents.write, which makes a file that has the size alone."""
    entries = {}
    end = 0
    for name, (x, offsets, shape) in parts.items():
        digest = hashlib.sha256(f"{file.name} {name}".encode()).hexdigest()
        piece = contents.Piece(file.name, end, [*offsets], [*x.shape], digest)
        entries[name] = {"dtype": contents.NAMES[x.dtype], "shape": [*shape], "pieces": [piece._asdict()]}
        end += x.nbytes
    with open(file, "wb") as f:
        f.truncate(end)
    return entries


@pytest.mark.slow
def test_of_a_thousand_ranks_only_the_first_has_much_traffic(tmp_path, monkeypatch):
    """Its option -s shows how much, and the seconds of one CPU that the first rank computes."""
    weights = weights_of_llama_70b(monkeypatch)
    monkeypatch.setattr(contents, "write", write_nothing)
    ranks = Threads(1024, monkeypatch)

    def compare(rank: int):
        numbers = {name: torch.zeros(1, 1) for name in weights if name.startswith("model.")}
        parts = {name: Part(x, places[rank][name].offsets, ()) for name, x in numbers.items()}
        assert copies_differ(parts) == ""

    def save(rank: int):
        checkpoint.save(tmp_path, 1, places[rank], STATE)

    def resume(rank: int):
        """A rank gets one piece of each of its parts, which is the part."""
        index = index_of(tmp_path, places[rank])
        assert index.keys() == places[rank].keys()
        for name, part in places[rank].items():
            found = [(*piece.offsets, *piece.sizes) for piece in index[name].pieces]
            assert found == [(*part.offsets, *part.tensor.shape)]

    def seconds(work, rank: int) -> float:
        begin = time.thread_time()
        work(rank)
        return time.thread_time() - begin

    places = [empty_parts_of(weights, rank) for rank in range(1024)]
    for work in (compare, save, resume):
        took, *_ = ranks.run(partial(seconds, work))
        of_first = ranks.received[0] + ranks.sent[0]
        of_others = ranks.largest()
        print(f"{work.__name__}: first rank {of_first / 1e6:.0f} MB, {took:.0f} s; others {of_others / 1e6:.2f} MB")
        assert of_others < 1e6
        assert work is resume or of_first < 300e6
