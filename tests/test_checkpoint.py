"""Checkpoints: bit for bit, whole after a kill at any instant, all ranks or none, and no code run by reading."""

import contextlib
import io
import json
import math
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from engine import checkpoint


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return {
        "model.w": torch.nn.Parameter(torch.randn(300, 7)),
        "model.t": torch.randn(5, 9).T,
        "model.half": torch.randn(33).bfloat16(),
        "optim.w.step": torch.tensor(1e-45 + 3),
        "optim.empty": torch.zeros(0, 4),
        "rng.0.cpu": torch.get_rng_state(),
    }


def zeros(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def message(kind, call, *args, **kwargs):
    """The one line that the call must raise."""
    with pytest.raises(kind) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


@contextlib.contextmanager
def full_disk():
    """No file grows beyond 2000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(out_dir):
    return sorted(path.name for path in out_dir.iterdir())


def step_name(step):
    return f"step_{step:08d}"


# ---------------------------------------------------------------------------------------------------------------------
# One process


def test_everything_comes_back_bit_for_bit(tmp_path, tensors):
    state = {"flags": {"n_layer": 2, "bias": True}, "best_val_loss": math.inf, "loss": 0.1 + 0.2, "loader": 2**60}
    path = checkpoint.save(tmp_path / "a" / "b", 1000, tensors, state)
    assert path == tmp_path / "a" / "b" / "step_00001000"
    loaded = zeros(tensors)
    pointers = [tensor.data_ptr() for tensor in loaded.values()]
    checkpoint.load(checkpoint.find(tmp_path / "a" / "b"), loaded)
    assert same(loaded, tensors) and pointers == [tensor.data_ptr() for tensor in loaded.values()]
    assert checkpoint.read_state(path) == state | {"step": 1000, "format": 1}
    assert checkpoint.shapes(path) == {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}


def test_loads_some_names_into_parameters(tmp_path, tensors):
    path = checkpoint.save(tmp_path, 1, tensors, {})
    weight = torch.nn.Parameter(torch.zeros(300, 7))
    checkpoint.load(path, {"model.w": weight})
    assert torch.equal(weight, tensors["model.w"]) and weight.is_leaf


def test_wrong_name_shape_or_dtype_is_named(tmp_path, tensors):
    path = checkpoint.save(tmp_path, 1, tensors, {})
    untouched = torch.zeros(300, 7)
    for name, tensor, words in [
        ("model.v", torch.zeros(2), ["model.v", "absent", "(2,)"]),
        ("model.half", torch.zeros(34).bfloat16(), ["model.half", "(33,)", "(34,)"]),
        ("model.half", torch.zeros(33), ["model.half", "torch.bfloat16", "torch.float32"]),
    ]:
        text = message(ValueError, checkpoint.load, path, {"model.w": untouched, name: tensor})
        assert all(word in text for word in [*words, str(path), "flags"])
    assert not untouched.any()


def test_pointers_and_pruning(tmp_path):
    def save(step, best=False, keep_last=2):
        checkpoint.save(tmp_path, step, {"w": torch.full((2,), float(step))}, {}, keep_last, best)
        return [int(name[5:]) for name in names(tmp_path) if name.startswith("step_")]

    assert save(10) == [10]
    assert save(20, best=True) == [10, 20]
    assert save(30) == [20, 30]
    assert save(40) == [20, 30, 40]  # 20 is the best
    assert save(50, best=True) == [40, 50]
    assert save(60, keep_last=1) == [50, 60]
    assert save(55, keep_last=1) == [50, 55, 60]  # rewound to 50: 60 stays until it is written again
    assert checkpoint.find(tmp_path).name == step_name(55)
    assert checkpoint.find(tmp_path, "best").name == step_name(50)
    assert save(60, keep_last=0) == [50, 60]
    assert checkpoint.find(tmp_path / step_name(50)) == tmp_path / step_name(50)
    assert names(tmp_path) == ["best", "latest", step_name(50), step_name(60)]


def test_find_says_what_is_missing(tmp_path, tensors):
    assert "--out_dir" in message(FileNotFoundError, checkpoint.find, tmp_path / "absent")
    assert "no checkpoint" in message(FileNotFoundError, checkpoint.find, tmp_path)
    first = checkpoint.save(tmp_path, 1, tensors, {})
    second = checkpoint.save(tmp_path, 2, tensors, {})
    assert str(second) in message(FileNotFoundError, checkpoint.find, tmp_path, "best")
    shutil.rmtree(second)
    assert checkpoint.find(tmp_path) == first
    (tmp_path / "latest").write_bytes(b"../\xff")
    assert checkpoint.find(tmp_path) == first


def test_damaged_or_newer_state(tmp_path, tensors):
    path = checkpoint.save(tmp_path, 1, tensors, {})
    for text in ['{"format": 1', "[]", "{}", '{"format": "1", "step": 1}', "[" * 100_000]:
        (path / "state.json").write_text(text)
        assert f"{path} is damaged: state.json" in message(ValueError, checkpoint.read_state, path)
    (path / "state.json").write_text(json.dumps({"format": 2, "step": 1}))
    assert "update" in message(ValueError, checkpoint.read_state, path)
    (path / "state.json").unlink()
    assert "damaged" in message(ValueError, checkpoint.read_state, path)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_damage_is_found_or_harmless(tmp_path, name):
    saved = {"w": torch.arange(2000.0), "s": torch.tensor(3)}
    path = checkpoint.save(tmp_path, 1, saved, {})
    file = path / name
    whole = file.read_bytes()
    found = 0
    for at in range(0, len(whole), len(whole) // 50):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :]):
            file.write_bytes(damaged)
            loaded = zeros(saved)
            try:
                checkpoint.load(path, loaded)
                assert same(loaded, saved)  # a byte that means nothing, such as padding
            except ValueError as error:
                assert str(path) in str(error) and "\n" not in str(error)
                assert name == ".metadata" or f"is damaged: {name}" in str(error) or ".metadata" in str(error)
                found += 1
    assert found > 50
    file.unlink()
    assert name in message(ValueError, checkpoint.load, path, zeros(saved))


def test_full_disk_leaves_the_previous_checkpoint(tmp_path, tensors):
    checkpoint.save(tmp_path, 1, tensors, {})
    with full_disk():
        text = message(OSError, checkpoint.save, tmp_path, 2, tensors, {})
    assert step_name(2) in text and "--out_dir" in text
    assert names(tmp_path) == ["latest", step_name(1)]
    loaded = zeros(tensors)
    checkpoint.load(checkpoint.find(tmp_path), loaded)
    assert same(loaded, tensors)
    (tmp_path / "file").write_text("")
    assert "file" in message(OSError, checkpoint.save, tmp_path / "file", 1, tensors, {})


# ---------------------------------------------------------------------------------------------------------------------
# A kill at every instant


def killed_before(operation, action):
    """Runs action in a forked process that SIGKILLs itself before that many-th change of the file system.

    Returns whether it came to that.
    """
    process = os.fork()
    if process == 0:
        seen = 0

        def hook(event, args):
            nonlocal seen
            written = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
            if written or event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir"):
                seen += 1
                if seen == operation:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(process, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("step", [3, 4])  # 3 is there already, and is latest and best: it is replaced
def test_a_kill_at_any_instant_leaves_a_whole_checkpoint(tmp_path, step, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # a killed process loses nothing that it wrote

    def save(out_dir, step, value, **options):
        checkpoint.save(out_dir, step, {"w": torch.full((3,), value)}, {"value": value}, **options)

    def value(path):
        loaded = {"w": torch.zeros(3)}
        checkpoint.load(path, loaded)
        assert loaded["w"].tolist() == [checkpoint.read_state(path)["value"]] * 3
        return loaded["w"][0].item()

    for i in (1, 2, 3):
        save(tmp_path / "before", i, float(i), best=True, keep_last=3)
    operation, killed, kept = 0, True, []
    while killed:
        operation += 1
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(tmp_path / "before", tmp_path / "run")
        killed = killed_before(operation, lambda: save(tmp_path / "run", step, 9.0, best=True, keep_last=1))
        kept.append([value(checkpoint.find(tmp_path / "run", which)) for which in ("latest", "best")])
        for path in (tmp_path / "run").glob("step_????????"):
            value(path)
        save(tmp_path / "run", 5, 5.0, best=True, keep_last=1)
        assert value(checkpoint.find(tmp_path / "run")) == 5
        assert names(tmp_path / "run") == ["best", "latest", step_name(5)]
    assert operation > 10
    assert kept[0] == [3, 3] and kept[-1] == [9, 9] and kept == sorted(kept)  # once the new one is there, it stays


def test_a_kill_during_replacement_and_a_full_disk_after_it(tmp_path, tensors):
    path = checkpoint.save(tmp_path, 1, tensors, {})
    path.rename(tmp_path / f"{path.name}.old")  # what a kill between the two renames leaves
    with full_disk():
        message(OSError, checkpoint.save, tmp_path, 2, tensors, {})
    loaded = zeros(tensors)
    checkpoint.load(checkpoint.find(tmp_path), loaded)
    assert same(loaded, tensors)


# ---------------------------------------------------------------------------------------------------------------------
# Two ranks


def on_two_ranks(work, tmp_path):
    """[work(0), work(1)] in two forked processes that share a gloo group."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def run(rank):
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
        results.put((rank, work(rank)))
        dist.destroy_process_group()

    ranks = [context.Process(target=run, args=(rank,)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=60)
        if process.is_alive():
            process.kill()
            pytest.fail("a rank hangs")
        assert process.exitcode == 0
    (tmp_path / "store").unlink(missing_ok=True)
    return [result for _, result in sorted(results.get() for _ in ranks)]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_two_ranks_keep_their_own_and_write_the_shared_once(tmp_path):
    shared = {f"model.{i}": torch.arange(5000.0) + i for i in range(4)}

    def work(rank):
        own = {f"rng.{rank}": torch.full((3,), rank + 1)}
        path = checkpoint.save(tmp_path / "run", 7, shared | own, {"rank": rank})
        loaded = zeros(shared | own)
        checkpoint.load(path, loaded)
        return same(loaded, shared | own)

    assert on_two_ranks(work, tmp_path) == [True, True]
    path = checkpoint.find(tmp_path / "run")
    assert checkpoint.read_state(path)["rank"] == 0
    loaded = zeros(shared) | {"rng.0": torch.zeros(3).long(), "rng.1": torch.zeros(3).long()}
    checkpoint.load(path, loaded)
    assert same(loaded, shared | {"rng.0": torch.full((3,), 1), "rng.1": torch.full((3,), 2)})
    assert sum(file.stat().st_size for file in path.glob("*.distcp")) < 1.5 * 4 * 5000 * 4


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_error_on_one_rank_is_raised_by_both(tmp_path):
    tensors = {f"model.{i}": torch.arange(5000.0) + i for i in range(4)}
    first = checkpoint.save(tmp_path / "run", 1, tensors, {})

    def work(rank):
        with full_disk() if rank == 1 else contextlib.nullcontext():
            saving = message(OSError, checkpoint.save, tmp_path / "run", 2, tensors, {})
        absent = {"model.9": torch.zeros(1)} if rank == 1 else {}
        return saving, message(ValueError, checkpoint.load, first, tensors | absent)

    for saving, loading in on_two_ranks(work, tmp_path):
        assert step_name(2) in saving
        assert "model.9 is absent" in loading
    assert names(tmp_path / "run") == ["latest", step_name(1)]
    loaded = zeros(tensors)
    checkpoint.load(checkpoint.find(tmp_path / "run"), loaded)
    assert same(loaded, tensors)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_shards_of_two_ranks_load_in_one_process_and_back(tmp_path):
    import torch._dynamo  # noqa: F401  DTensor needs it, and each forked rank would import it again

    whole = torch.arange(35.0).view(5, 7)  # rows split 3 + 2

    def shard(rank, dim):
        local = whole.tensor_split([3 if dim == 0 else 4], dim)[rank].clone()
        mesh = init_device_mesh("cpu", (2,))
        return DTensor.from_local(local, mesh, [Shard(dim)], shape=whole.shape, stride=whole.stride())

    def save(rank):
        checkpoint.save(tmp_path / "run", 1, {"w": shard(rank, 0)}, {})

    def load(rank):
        columns = shard(rank, 1)
        expected = columns.to_local().clone()
        columns.to_local().zero_()
        checkpoint.load(tmp_path / "run" / step_name(1), {"w": columns})
        return torch.equal(columns.to_local(), expected)

    on_two_ranks(save, tmp_path)
    loaded = {"w": torch.zeros(5, 7)}
    checkpoint.load(tmp_path / "run" / step_name(1), loaded)
    assert torch.equal(loaded["w"], whole)
    assert on_two_ranks(load, tmp_path) == [True, True]


# ---------------------------------------------------------------------------------------------------------------------
# Files from strangers


class Bomb:
    """Pickled, a call of os.system."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return os.system, (f"touch {self.proof}",)


def edit_metadata(path, edit):
    metadata = pickle.loads((path / ".metadata").read_bytes())
    edit(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_reading_runs_no_code(tmp_path):
    proof = tmp_path / "ran"
    saved = {"w": torch.arange(4.0)}

    def refused(word, *call):
        assert word in message(ValueError, *call) and not proof.exists()

    def is_live(call):  # the same file, read as DCP reads it
        call()
        proof.unlink()

    # In the metadata.
    path = checkpoint.save(tmp_path, 1, saved, {})
    edit_metadata(path, lambda metadata: setattr(metadata, "planner_data", Bomb(proof)))
    refused("posix.system", checkpoint.shapes, path)
    refused("posix.system", checkpoint.load, path, zeros(saved))
    is_live(lambda: dcp.FileSystemReader(path).read_metadata())

    # In an entry of bytes, which DCP writes for whatever is no tensor.
    path = checkpoint.save(tmp_path, 2, saved, {})
    shutil.rmtree(path)
    dcp.save({"b": Bomb(proof)}, checkpoint_id=path, no_dist=True)
    refused("entry b is no tensor", checkpoint.load, path, {})
    is_live(lambda: dcp.load({"b": 0}, checkpoint_id=path, no_dist=True))

    # In the archive of a tensor.
    path = checkpoint.save(tmp_path, 3, saved, {})
    archive = io.BytesIO()
    torch.save([saved["w"], Bomb(proof)], archive)
    (path / "__0_0.distcp").write_bytes(archive.getvalue())

    def point_to_it(metadata):
        for info in metadata.storage_data.values():
            info.length = len(archive.getvalue())

    edit_metadata(path, point_to_it)
    refused("__0_0.distcp: w: UnpicklingError", checkpoint.load, path, zeros(saved))
    is_live(lambda: torch.load(path / "__0_0.distcp", weights_only=False))


@pytest.mark.parametrize("name", ["../step_00000001/__0_0.distcp", "/etc/passwd", "..", "state.json", "a/b.distcp"])
def test_file_names_stay_inside(tmp_path, name):
    checkpoint.save(tmp_path, 1, {"w": torch.ones(4)}, {})
    path = checkpoint.save(tmp_path, 2, {"w": torch.zeros(4)}, {})

    def redirect(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = name

    edit_metadata(path, redirect)
    assert name in message(ValueError, checkpoint.load, path, {"w": torch.zeros(4)})


def test_shards_that_lie_are_refused(tmp_path):
    saved = {"w": torch.arange(12.0).view(3, 4)}

    def lie(edit, word):
        path = checkpoint.save(tmp_path, 1, saved, {})
        edit_metadata(path, lambda metadata: edit(metadata.state_dict_metadata["w"], metadata.storage_data))
        assert word in message(ValueError, checkpoint.load, path, zeros(saved))

    lie(lambda entry, files: entry.chunks.clear(), "shards of w are missing")
    lie(lambda entry, files: files.clear(), "shards of w are missing")
    lie(lambda entry, files: setattr(entry.chunks[0], "offsets", torch.Size([3, 0])), "shards of w are missing")
    lie(lambda entry, files: setattr(entry.chunks[0], "sizes", torch.Size([2, 6])), "shards of w are missing")
    lie(lambda entry, files: setattr(entry, "size", torch.Size([4, 3])), "shards of w are missing")
    lie(lambda entry, files: setattr(entry.properties, "dtype", "float32"), "shards of w are missing")
    lie(lambda entry, files: setattr(entry.properties, "dtype", torch.float64), "torch.float64")
