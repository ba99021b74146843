"""What ranks send each other for a save, a resume and a comparison of copies: it does not grow with their number."""

import hashlib
import pickle
import sys
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from configurator import parse
from engine import optim
from engine.checkpoint import file_format
from engine.checkpoint import files as checkpoint
from engine.config import Config
from engine.parallel import ranks as parallel
from engine.parallel.layout import Layout, Slice, place
from engine.parallel.sharded import ShardedModel
from tests.checkpoint.test_checkpoint import STATE
from tests.helpers import ROOT, TINY


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
        self.seconds = [0.0] * size  # of one CPU
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_rank", lambda: self.place.rank)
        patch.setattr(dist, "get_world_size", lambda: size)
        for name in ("all_gather_object", "gather_object", "scatter_object_list"):
            patch.setattr(dist, name, getattr(self, name))

    def run(self, work: Callable):
        """work(0), work(1), ..., each in its thread."""
        errors = []

        def one(rank: int):
            self.place.rank = rank
            try:
                begin = time.thread_time()
                work(rank)
                self.seconds[rank] = time.thread_time() - begin
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
        """The most bytes that a rank but the first has received or sent."""
        return max(self.received[1:] + self.sent[1:])


def weights_on(size: int, flags: list[str]) -> dict[str, Layout]:
    """How `size` ranks share each tensor of a checkpoint, beside random states."""
    init = partial(dist.init_process_group, "fake", store=FakeStore(), rank=0, world_size=size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda *args, **options: init())
        patch.setattr(parallel, "on_first_rank", lambda action: action())
        patch.setenv("WORLD_SIZE", str(size))
        cfg = parse(Config, [*flags, "--device=cpu", "--dtype=float32"])
        sharded = ShardedModel(cfg, parallel.join(cfg))
        states = optim.build(sharded.model, cfg, sharded).state_tensors(sharded.model)
        dist.destroy_process_group()
    found = {f"model.{name}": weight for name, weight in sharded.layouts.items()}
    for name, t in states.items():
        found[f"optim.{name}"] = sharded.layouts[name.rpartition(".")[0]] if t.dim() else Layout((), ())
    return found


@cache
def nothing(*sizes: int) -> torch.Tensor:
    """A tensor of these sizes without memory."""
    return torch.empty(sizes, device="meta")


def parts_of(weights: dict[str, Layout], rank: int) -> dict[str, Slice]:
    """What a rank has in a checkpoint, without memory."""
    parts = {}
    for name, weight in weights.items():
        slices, _ = place(weight, rank)
        tensor = nothing(*(each.stop - each.start for each in slices))
        parts[name] = Slice(tensor, tuple(each.start for each in slices), weight.shape)
    for device, size in (("cpu", 5056), ("cuda", 16)):
        parts[f"rng.{rank}.{device}"] = Slice(nothing(size), (0,), (size,))
    return parts


def write_nothing(file, parts: dict[str, Slice]) -> dict[str, dict]:
    """contents.write, which makes a file that has the size alone."""
    entries = {}
    end = 0
    for name, (x, offsets, shape) in parts.items():
        digest = hashlib.sha256(f"{file.name} {name}".encode()).hexdigest()
        piece = file_format.Piece(file.name, end, [*offsets], [*x.shape], digest)
        entries[name] = {"dtype": file_format.NAMES[x.dtype], "shape": [*shape], "pieces": [piece._asdict()]}
        end += x.nbytes
    with open(file, "wb") as f:
        f.truncate(end)
    return entries


class Work:
    """What a rank of so many does together with the others."""

    def __init__(self, size: int, flags: list[str], folder: Path):
        weights = weights_on(size, flags)
        self.size = size
        self.folder = folder
        self.parts = [parts_of(weights, rank) for rank in range(size)]

    def compare(self, rank: int):
        """Copies of parameters, of which only one number has memory."""
        places = {name: part.offsets for name, part in self.parts[rank].items() if name.startswith("model.")}
        numbers = {name: torch.zeros(1, 1) for name in places}
        model = SimpleNamespace(named_parameters=numbers.items)
        part_of = lambda name, x: Slice(x, places[name], ())  # noqa: E731
        pretended = SimpleNamespace(model=model, counted_by_other_stage=(), slice_of=part_of)
        assert ShardedModel.unequal_copies(pretended) == ""

    def save(self, rank: int):
        checkpoint.save(self.folder, 1, self.parts[rank], STATE)

    def resume(self, rank: int):
        path = checkpoint.find(self.folder)
        checkpoint.read_index(path, checkpoint.read_state(path), self.parts[rank])

    def traffic(self, action: Callable) -> tuple[int, int, float]:
        """Bytes of the first rank, the most of another one, and the seconds that the first one computes."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(file_format, "write", write_nothing)
            ranks = Threads(self.size, patch)
            ranks.run(action)
        return ranks.received[0] + ranks.sent[0], ranks.largest(), ranks.seconds[0]


def test_traffic_of_a_rank_does_not_grow_with_the_number_of_ranks(tmp_path):
    """A comparison of copies, a save, and a resume on half as many ranks."""
    flags = [*TINY, "--parallel=fsdp", "--n_layer=4", "--vocab_size=64", "--gradient_accumulation_steps=16"]
    found = {}
    for size in (4, 16):
        work = Work(size, flags, tmp_path)
        half = Work(size // 2, flags, tmp_path)
        found[size] = [work.traffic(work.compare)[1], work.traffic(work.save)[1], half.traffic(half.resume)[1]]
    for few, many in zip(found[4], found[16], strict=True):
        assert many < 1.2 * few, found


@pytest.mark.slow
def test_of_a_thousand_ranks_only_the_first_has_much_traffic(tmp_path):
    """pytest's option -s shows how much, and how long the first rank computes."""
    work = Work(1024, [str(ROOT / "config/llama_70b.py")], tmp_path)
    for action in (work.compare, work.save, work.resume):
        first, others, took = work.traffic(action)
        print(f"{action.__name__}: first rank {first / 1e6:.0f} MB, {took:.0f} s; others {others / 1e6:.2f} MB")
        assert others < 1e6
        assert action == work.resume or first < 300e6
