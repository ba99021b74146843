"""Checkpoints: bit for bit, in any layout, whole after a kill at any instant, all ranks or none, no code run."""

import contextlib
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import re
import resource
import shutil

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import train
from engine.checkpoint import file_format
from engine.checkpoint import files as checkpoint
from engine.parallel.layout import Slice
from tests.data.preparing import error
from tests.helpers import changes_until_killed, edit_state, refused, tensors_in

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
SCALER = {
    "scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 3
}  # fmt: skip
DATA = {"since": 0, "read": [80], "weights": [1], "hashes": ["x"], "val": ["y"]}
STATE = {
    "flags": {}, "samples": 80, "skipped": 10, "norms": [0.5], "best_val_loss": 1.5, "best_step": 0, "scaler": {},
    "tokenizer": None, "tokenizer_hash": None, "ranks": 1, "data": {},
}  # fmt: skip


def save(out_dir, step, tensors, state=None, **options):
    """checkpoint.save with these keys of the state, beside those that each has; returns the directory."""
    checkpoint.save(out_dir, step, tensors, STATE | (state or {}), **options)
    return out_dir / step_name(step)


def load(path, tensors):
    checkpoint.load(path, tensors, checkpoint.read_index(path, checkpoint.read_state(path), tensors))


def index_of(path):
    return file_format.read_index(path, checkpoint.read_state(path))


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


def holds(path, tensors):
    """Whether the checkpoint, or a run's latest one, has these tensors and no others."""
    return same(tensors_in(path), tensors)


def put(out_dir, step, **options):
    return save(out_dir, step, {"w": torch.full((50,), float(step))}, {"samples": step}, **options)


def nothing(path):
    pass


def value_of(path, state=None, change=nothing):
    """What `put` has saved there; after its index is read, the path changes."""
    state = state or checkpoint.read_state(path)
    loaded = {"w": torch.zeros(50)}
    index = checkpoint.read_index(path, state, loaded)
    change(path)
    checkpoint.load(path, loaded, index)
    assert loaded["w"].tolist() == [state["samples"]] * 50
    return state["samples"]


@contextlib.contextmanager
def full_disk(size=2000):
    """No file grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names(out_dir):
    return sorted(path.name for path in out_dir.iterdir())


def step_name(step):
    return f"step_{step:08d}"


def test_everything_comes_back_bit_for_bit(tmp_path, tensors):
    state = STATE | {"flags": {"n_layer": 2, "bias": True}, "best_val_loss": 0.1 + 0.2, "samples": 2**42}
    path = save(tmp_path / "a" / "b", 1000, tensors, state)
    assert path == checkpoint.find(tmp_path / "a" / "b")
    loaded = zeros(tensors)
    pointers = [tensor.data_ptr() for tensor in loaded.values()]
    load(path, loaded)
    assert same(loaded, tensors) and pointers == [tensor.data_ptr() for tensor in loaded.values()]
    digest = hashlib.sha256((path / "index.json").read_bytes()).hexdigest()
    assert checkpoint.read_state(path) == state | {"step": 1000, "format": 4, "index_sha256": digest}
    assert same(load_file(path / "rank_0.safetensors"), tensors)  # and any other tool can open it


def test_pointers_and_pruning(tmp_path):
    def steps(step, best, keep_last=2):
        """The steps that are left once this one is saved."""
        save(tmp_path, step, {"w": torch.full((2,), float(step))}, {"best_step": best}, keep_last=keep_last)
        return [checkpoint.step_of(path) for path in checkpoint.steps_in(tmp_path)]

    assert steps(10, best=0) == [10]
    assert not (tmp_path / "best").exists()
    assert steps(20, best=20) == [10, 20]
    assert steps(30, best=20) == [20, 30]
    assert steps(40, best=20) == [20, 30, 40]
    assert steps(50, best=50) == [40, 50]
    assert steps(60, best=60, keep_last=1) == [60]
    assert steps(50, best=50) == [50, 60]
    assert steps(55, best=50, keep_last=1) == [50, 55, 60]  # rewound to 50: 60 stays until it is written again
    assert checkpoint.find(tmp_path).name == step_name(55)
    assert checkpoint.find(tmp_path / "best").name == step_name(50)
    assert steps(60, best=0, keep_last=1) == [50, 60]
    assert checkpoint.find(tmp_path / step_name(50)) == tmp_path / step_name(50)
    assert names(tmp_path) == ["best", "latest", step_name(50), step_name(60)]
    assert steps(70, best=50, keep_last=9) == [50, 60, 70]
    assert steps(52, best=50, keep_last=3) == [50, 52, 60, 70]  # the later steps are none of the last three
    assert steps(54, best=50, keep_last=2) == [50, 52, 54, 60, 70]


def test_what_is_missing_or_wrong_is_named(tmp_path, tensors):
    first = save(tmp_path, 1, tensors)
    second = save(tmp_path, 2, tensors)
    assert str(second) in error(checkpoint.find, tmp_path / "best", kind=FileNotFoundError)
    second.rename(tmp_path / "aside")
    assert checkpoint.find(tmp_path) == first
    text = error(checkpoint.read_state, second)
    assert f"{second} is gone" in text
    assert "damaged" not in text
    (tmp_path / "latest").write_bytes(b"../\xff")
    assert checkpoint.find(tmp_path) == first
    for name, wrong in itertools.product(("model.w", "optim.w.exp_avg"), (math.nan, -math.inf)):
        path = save(tmp_path, 3, {name: torch.tensor([1.0, wrong])})
        text = error(load, path, {name: torch.zeros(2)})
        assert f"{name} in checkpoint {path} has numbers that are not finite; use an earlier" in text


@pytest.mark.parametrize("name", ["index.json", "rank_0.safetensors"])
def test_damage_is_found_or_harmless(tmp_path, name):
    saved = {"w": torch.arange(2000.0), "s": torch.tensor(3)}
    path = save(tmp_path, 1, saved)
    file = path / name
    whole = file.read_bytes()
    found = 0
    for at in range(0, len(whole), len(whole) // 50):
        changed = bytearray(whole)
        changed[at] ^= 0x55
        for damaged in (whole[:at], changed):
            file.write_bytes(damaged)
            try:
                assert holds(path, saved)  # a byte that means nothing, such as padding
            except ValueError as e:
                assert re.fullmatch(f"checkpoint {path} is damaged: .*({name}|index.json).*", str(e))
                found += 1
    assert found > 50
    file.unlink()
    assert name in error(load, path, zeros(saved))


@pytest.mark.parametrize("step", [3, 4])  # 3 is there, latest and best: it is replaced
def test_a_kill_at_any_instant_leaves_a_whole_checkpoint(tmp_path, step):
    def write(out_dir, step, value, keep_last):
        tensors = {"w": torch.full((50,), float(value))}
        save(out_dir, step, tensors, {"samples": value, "best_step": step}, keep_last=keep_last)

    before = tmp_path / "before"
    write(before, 2, 2, keep_last=2)
    write(before, 3, 3, keep_last=2)
    run = tmp_path / "run"
    kept = []
    for operation in itertools.count(1):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(before, run)
        begun = changes_until_killed(lambda: write(run, step, 9, keep_last=1), operation)
        kept.append([value_of(checkpoint.find(run / which)) for which in ("latest", "best")])
        latest = (run / "latest").read_text()
        best = (run / "best").read_text()
        assert latest <= best, "a resume from `latest` finds a step better than `best`"
        for path in run.glob("step_????????"):
            value_of(path)
        write(run, 5, 5, keep_last=1)
        assert value_of(checkpoint.find(run)) == 5
        assert names(run) == ["best", "latest", step_name(5)]
        if begun < operation:
            break
    assert operation > 10
    assert kept[0] == [3, 3] and kept[-1] == [9, 9]
    assert kept == sorted(kept), "the new checkpoint was there, and later it was not"


def on_ranks(size, work, tmp_path):
    """[work(0), work(1), ...] in `size` forked processes that share a gloo group."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def run(rank):
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=size)
        dist.barrier()  # no rank leaves while another still connects
        results.put((rank, work(rank)))
        dist.destroy_process_group()

    ranks = [context.Process(target=run, args=(rank,)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=600)
        process.kill()
    assert [process.exitcode for process in ranks] == [0] * size
    (tmp_path / "store").unlink(missing_ok=True)
    return [result for _, result in sorted(results.get() for _ in ranks)]


def test_what_cannot_be_deleted_yet_ends_no_run(tmp_path, monkeypatch):
    """As over NFS, where a file that another process reads stays in its folder under another name."""
    real = shutil.rmtree

    def busy(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(39, "Directory not empty", str(path))

    for step in (1, 2, 3):
        monkeypatch.setattr(shutil, "rmtree", busy if step < 3 else real)
        save(tmp_path, step, {"x": torch.ones(2)}, keep_last=1)
        left = {1: ["latest", "step_00000001"], 2: [".tmp-step_00000001", "latest", "step_00000002"]}
        assert names(tmp_path) == left.get(step, ["latest", "step_00000003"])


def test_what_the_first_rank_does_not_find_is_no_checkpoint(tmp_path, monkeypatch):
    """As where another rank has written its file into a folder of its own: what was saved before stays."""
    first = put(tmp_path, 1)
    write = file_format.write

    def elsewhere(file, parts):
        entries = write(file, parts)
        file.unlink()
        return entries

    monkeypatch.setattr(file_format, "write", elsewhere)
    assert "earlier checkpoints are untouched" in error(put, tmp_path, 2, kind=OSError, keep_last=1)
    assert names(tmp_path) == ["latest", first.name]
    assert value_of(first) == 1


def test_what_is_renamed_is_on_the_disk(tmp_path, monkeypatch):
    """A power failure may keep a name and lose what was not synced before: so files, their step, `latest`, in turn."""
    out = tmp_path / "out"
    synced = []

    def fsync(handle):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{handle}")).removeprefix(".tmp-")
        synced.append((name, (out / step_name(1)).exists(), (out / "latest").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    put(out, 1)
    files = [(name, False, False) for name in ("rank_0.safetensors", "index.json", "state.json", step_name(1))]
    assert synced == [*files, ("out", True, False), ("latest", True, False), ("out", True, True)]


def part(whole, layout, rank):
    """What a rank holds. A layout has for each dimension of the mesh what it cuts, None for copies, and its ranks."""
    tensor = whole
    offsets = [0] * whole.dim()
    places = np.unravel_index(rank, [ranks for _, ranks in layout])
    for (dim, ranks), at in zip(layout, places, strict=True):
        if dim is not None:
            size = tensor.size(dim)
            rows = -(-size // ranks)  # the last pieces are smaller, or empty
            start = min(int(at) * rows, size)
            tensor = tensor.narrow(dim, start, min(rows, size - start))
            offsets[dim] += start
    return Slice(tensor.clone(), tuple(offsets), tuple(whole.shape))


def test_an_error_on_one_rank_is_raised_by_both(tmp_path):
    """And what was saved before stays, also as a kill leaves it between two renames."""
    whole = torch.arange(4000.0).view(1000, 4)
    halves = [(0, 2)]
    path = tmp_path / step_name(1)

    def write(rank):
        tensors = {"w": part(whole, halves, rank), f"rng.{rank}": torch.ones(3)}
        save(tmp_path, 1, tensors)
        if rank == 0:  # which is the first to look at the folder in the next save
            path.rename(f"{path}.old")
        with full_disk() if rank == 1 else contextlib.nullcontext():
            return error(save, tmp_path, 2, tensors, kind=OSError)

    def read(rank):
        changed = error(load, path, {"w": part(0 * whole, halves, rank)})
        absent = error(load, path, {"absent": torch.zeros(1)} if rank == 1 else {})
        return changed, absent

    for said in on_ranks(2, write, tmp_path):
        assert step_name(2) in said
    assert names(tmp_path) == ["latest", step_name(1)]
    assert torch.equal(tensors_in(tmp_path)["w"], whole)
    for piece in index_of(path)["w"].pieces:
        row, _ = piece.offsets
        assert piece.sha256 == hashlib.sha256(whole[row : row + 500].numpy()).hexdigest()
    data = bytearray((path / "rank_1.safetensors").read_bytes())
    data[data.index(whole[900].numpy().tobytes())] ^= 1
    (path / "rank_1.safetensors").write_bytes(data)
    first, second = on_ranks(2, read, tmp_path)
    assert first == second
    changed, absent = first
    assert "absent is absent" in absent
    assert "rank_1.safetensors: w: its bytes are not those that were saved" in changed
    load(path, {"rng.0": torch.zeros(3), "rng.1": torch.zeros(3)})  # whole pieces of the same file


WHOLE = {  # sizes that two, four and two times two ranks share unevenly, or of which some of them get nothing
    "13x5": torch.arange(65.0).view(13, 5),
    "3x7": torch.arange(21).view(3, 7),
    "1x4": torch.arange(4.0).bfloat16().view(1, 4),
    "2x3": torch.arange(6.0).view(2, 3),  # where an empty part begins as the row of another rank does
    "2": torch.arange(2.0),
    "9": torch.arange(9.0),
    "0x3": torch.zeros(0, 3),
}
LAYOUTS = {  # name -> how four ranks share it; tensor parallel outside of FSDP, as train.py does, and others
    "rows_rows": [(0, 2), (0, 2)],
    "columns_rows": [(1, 2), (0, 2)],
    "copies_rows": [(None, 2), (0, 2)],
    "rows_copies": [(0, 2), (None, 2)],
    "copies_copies": [(None, 2), (None, 2)],
    "columns_copies_rows": [(1, 2), (None, 2), (0, 1)],
    "rows": [(0, 4)],
}
OTHER_LAYOUTS = [[(0, 2)], [(1, 2)], [(None, 2)], [(0, 2), (0, 1)], [(1, 1), (0, 2)]]


def test_four_ranks_save_any_layout_and_two_and_one_load_it(tmp_path):
    cases = {"scalar": (torch.tensor(3.5), LAYOUTS["copies_copies"])}
    for (shape, whole), (name, layout) in itertools.product(WHOLE.items(), LAYOUTS.items()):
        if whole.dim() > 1 or "columns" not in name:
            cases[f"{name}.{shape}"] = whole, layout
    wholes = {name: whole for name, (whole, _) in cases.items()} | {"plain": torch.arange(5000.0)}
    path = tmp_path / "run" / step_name(1)

    def write(rank):
        tensors = {name: part(whole, layout, rank) for name, (whole, layout) in cases.items()}
        tensors |= {"plain": wholes["plain"].clone(), f"rng.{rank}": torch.full((2,), rank)}
        save(tmp_path / "run", 1, tensors)

    def read(rank):
        """Whether all is right, for each layout and for what four ranks and one have saved."""
        right = []
        for layout, source in itertools.product(OTHER_LAYOUTS, (path, tmp_path / "single" / step_name(1))):
            dims = 1 + max(dim or 0 for dim, _ in layout)
            fits = {name: whole for name, whole in wholes.items() if whole.dim() >= dims}
            loaded = {name: part(torch.zeros_like(whole), layout, rank) for name, whole in fits.items()}
            load(source, loaded)
            expected = {name: part(whole, layout, rank).tensor for name, whole in fits.items()}
            right.append(same({name: each.tensor for name, each in loaded.items()}, expected))
        return right

    on_ranks(4, write, tmp_path)
    expected = wholes | {f"rng.{rank}": torch.full((2,), rank) for rank in range(4)}
    assert holds(path, expected)
    index = index_of(path)
    written = {"plain": 1, "copies_copies.9": 1, "rows_copies.9": 2, "rows_rows.9": 4, "rng.3": 1}
    for name, pieces in written.items():
        assert len(index[name].pieces) == pieces, f"{name}: what several ranks have is written once"
    assert len({index[f"copies_copies.{shape}"].pieces[0].file for shape in WHOLE}) > 1  # and they take turns
    save(tmp_path / "single", 1, wholes)
    assert on_ranks(2, read, tmp_path) == [[True] * 2 * len(OTHER_LAYOUTS)] * 2


FIRST = {  # keys of state.json that the first version of format 4 wrote, at commit 76155b6
    "step", "samples", "skipped", "ranks", "best_val_loss", "flags", "scaler", "tokenizer", "tokenizer_hash",
    "index_sha256", "format",
}  # fmt: skip
ADDED = {"norms": [], "data": {}, "best_step": 0}  # keys that older checkpoints lack, and what they mean without
COUNTS = ("step", "samples", "skipped", "ranks", "best_step")
IMPOSSIBLE = {  # key of state.json -> values that no run saves
    **dict.fromkeys(COUNTS, [-1, True, 2**43, "10", 10.0, None]),
    "norms": [None, {}, [1], [-1.0], [math.nan], [[1.0]]],
    "best_val_loss": [math.nan, math.inf, True, 2, "1.5"],
    "flags": [None, []],
    "scaler": [None, [], {"scale": 1.0}, SCALER | {"scale": "x"}, SCALER | {"_growth_tracker": -1}],
    "tokenizer": [3, []],
    "tokenizer_hash": [7],
    "index_sha256": [None, 5],
    "data": [None, {"since": 1}, DATA | {"read": [1.0]}, DATA | {"read": [1] * 9}, DATA | {"more": 1}],
    "format": [True, "2", 2.0, None],
}  # fmt: skip


def test_a_state_that_cannot_be_is_refused(tmp_path):
    path = save(tmp_path, 10, {"w": torch.ones(2)})
    file = path / "state.json"
    good = file.read_text()
    for allowed in ({"best_val_loss": None}, {"scaler": SCALER}, {"tokenizer": {}}, {"norms": []}, {"data": DATA}):
        edit_state(path, **allowed)
        assert checkpoint.read_state(path).items() >= allowed.items()
    for key, values in IMPOSSIBLE.items():
        for value in values:
            file.write_text(good)
            edit_state(path, **{key: value})
            text = error(checkpoint.read_state, path)
            assert text.startswith(f"checkpoint {path} is damaged: state.json: {key} is {value!r:.50}")
            assert text.count("; ") == 1

    def without(key):
        state = json.loads(good)
        del state[key]
        return json.dumps(state)

    for key, value in ADDED.items():
        file.write_text(without(key))
        assert checkpoint.read_state(path)[key] == value
    assert file_format.STATE.keys() | {"format"} == FIRST | ADDED.keys()  # a newer key has a default, or FORMAT is 5
    for text in (*map(without, FIRST), "[]", "{}", '{"format": 4', '{"format": "3", "step": 1}', "[" * 100_000):
        file.write_text(text)
        assert f"{path} is damaged: state.json" in error(checkpoint.read_state, path)
    file.unlink()
    assert f"{path} is damaged: state.json" in error(checkpoint.read_state, path)
    for found in (3, 5):
        file.write_text(good)
        edit_state(path, format=found)
        text = error(checkpoint.read_state, path)
        assert f"{path} has format {found}, and this program reads format 4; use the version" in text


def test_random_states_of_garbage_and_a_lost_latest(trained, tiny_data, tmp_path, capsys, in_this_process):
    """A start refuses those, and says once of this one that it is gone."""
    out = shutil.copytree(trained, tmp_path / "out")
    flags = [f"--dataset={tiny_data}", f"--out_dir={out}", "--init_from=resume", "--max_iters=3"]
    state = checkpoint.read_state(checkpoint.find(out))
    tensors = tensors_in(out)
    save(out, 2, tensors | {"rng.0.cpu": torch.full_like(tensors["rng.0.cpu"], 255)}, state)
    assert "is damaged: the state of random numbers: RuntimeError" in refused(train.main, flags, capsys)
    save(out, 2, tensors, state)
    (out / "latest").unlink()
    train.main(flags)
    assert capsys.readouterr().err.count(f"{out}/latest names no checkpoint, the newest one is") == 1


def test_a_step_that_is_pruned_or_replaced_while_it_is_read(tmp_path):
    def prune(path):
        put(tmp_path, int(path.name[5:]) + 1, keep_last=1)

    def replace(path):
        save(tmp_path, int(path.name[5:]), {"w": torch.full((50,), 9.0)}, {"samples": 9})

    def read(change, times):
        """What is read, and in how many attempts, where the first ones see this change."""
        shutil.rmtree(tmp_path, ignore_errors=True)
        put(tmp_path, 1)
        seen = []

        def action(path, state):
            seen.append(path.name)
            return value_of(path, state, change if len(seen) <= times else nothing)

        return checkpoint.read(tmp_path, action), len(seen)

    assert read(prune, 0) == (1, 1)
    assert read(prune, 3) == (4, 4)
    assert read(replace, 1) == (9, 2)
    text = error(read, prune, math.inf, kind=OSError)
    assert "saved to faster" in text and "--keep_last" in text
    assert "damaged" not in text

    put(tmp_path, 7)
    (tmp_path / step_name(7) / "rank_0.safetensors").unlink()  # which stays damaged
    assert "is damaged" in error(checkpoint.read, tmp_path, value_of)


LIES = [  # keys of the first piece of w, of w itself, and what is said
    *(({"file": name}, {}, name) for name in ("../step_00000002/rank_0.safetensors", "/etc/passwd", "state.json")),
    *(({"sha256": digest}, {}, "its bytes are not those") for digest in (None, "0" * 64)),
    ({"offsets": [3, 0]}, {}, "a piece of w lies outside"),
    ({"sizes": [12]}, {}, "index.json: "),
    ({"offsets": [-1, 0]}, {}, "a piece of w has no whole numbers"),
    ({"start": 10.5}, {}, "a piece of w has no whole numbers"),
    ({"start": 10**9}, {}, "rank_0.safetensors is cut off after"),
    ({"sha256": "absent"}, {}, "index.json: TypeError"),
    ({}, {"pieces": []}, "pieces of w are missing"),
    ({}, {"shape": [4, 3]}, "a piece of w lies outside"),
    ({}, {"dtype": "float32"}, "index.json: KeyError"),
    ({}, {"dtype": "F16"}, "w is (3, 4) torch.float16 in checkpoint"),
    ({"sizes": [2, 4]}, {"shape": [2, 4]}, "w is (2, 4) torch.float32 in checkpoint"),
]


def test_shards_that_lie_are_refused(tmp_path):
    """As somebody writes them who wants the index to be taken for whole."""
    saved = {"w": torch.arange(12.0).view(3, 4)}
    save(tmp_path, 2, saved)
    for of_piece, of_tensor, words in LIES:
        path = save(tmp_path, 1, saved)
        index = json.loads((path / "index.json").read_text())
        [piece] = index["w"]["pieces"]
        changed = piece | of_piece
        index["w"]["pieces"] = [{key: value for key, value in changed.items() if value != "absent"}]
        index["w"] |= of_tensor
        text = json.dumps(index)
        (path / "index.json").write_text(text)
        edit_state(path, index_sha256=hashlib.sha256(text.encode()).hexdigest())
        assert words in error(load, path, zeros(saved))
    edit_state(path, index_sha256="0" * 64)
    assert "not the one that was saved" in error(load, path, zeros(saved))
