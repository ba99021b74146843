"""tools.kernels: counts that are known from the shapes."""

import torch
from helpers import refused
from torch._subclasses.fake_tensor import FakeTensorMode

import ops
from tools import coords, kernels


def counted(f) -> tuple[int, int, int]:
    with FakeTensorMode():
        tensors = torch.empty(2, 3), torch.empty(3, 5), torch.empty(100, 4), torch.empty(6, dtype=torch.int64)
        with kernels.Kernels() as found:
            f(*tensors)
    return found.n, found.read, found.written


def test_kernels_of_operations():
    """Views and empty tensors cost nothing; sums in place read and write; a table is read where there are ids."""
    assert counted(lambda a, *_: torch.empty_like(a.T.expand(4, 3, 2))) == (0, 0, 0)
    assert counted(lambda a, b, *_: a @ b) == (1, 4 * (6 + 15), 4 * 10)
    assert counted(lambda a, *_: a.add_(a[:1].expand(2, 3))) == (1, 4 * (6 + 3 + 3), 4 * 6)
    assert counted(lambda a, *_: a.zero_()) == (1, 0, 24) == counted(lambda a, *_: torch.zeros(2, 3))
    assert counted(lambda a, b, *_: torch.mm(a, b, out=torch.empty(2, 5))) == (1, 4 * 21, 4 * 10)
    assert counted(lambda a, b, table, ids: torch.nn.functional.embedding(ids, table)) == (1, 4 * 24 + 48, 4 * 24)


def test_parts_of_a_model(capsys, monkeypatch):
    """The optimizer reads weight, gradient and two moments, and writes all but the gradient. The head's bytes
    follow from its products."""
    for name in ("product_", "takes_flash"):
        monkeypatch.setattr(ops, name, getattr(ops, name))  # restored afterwards
    flags = "--n_layer=1 --n_embd=512 --n_head=8 --block_size=768 --batch_size=1 --vocab_size=40000 --pos=rope"
    kernels.main([*flags.split(), "--loss_chunk=256", "--gradient_accumulation_steps=1"])
    rows = {line[:16].strip(): line[16:].split() for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows.keys() == {"embedding", "a block", "head and loss", "optimizer"}
    weights = 40_000 * 512 + 12 * 512**2
    n, read, written = map(float, rows["optimizer"])
    assert n <= 4 and abs(read - 16 * weights / 1e9) < 0.002 and abs(written - 12 * weights / 1e9) < 0.002
    logits, W = 768 * 40_000, 40_000 * 512
    n, read, written = map(float, rows["head and loss"])
    # The logits are read by the loss, their gradient by two products. W is cast, then read twice in each of 3 chunks.
    # Its gradient is read by two sums, by the scaling, and by the sum with the gradient of an earlier micro-step.
    assert abs(read - (2 * 3 * logits + W * (4 + 3 * 2 * 2 + 4 * (2 + 1 + 2))) / 1e9) < 0.01
    assert abs(written - (2 * 2 * logits + W * (2 + 4 * (3 + 1 + 1))) / 1e9) < 0.01


def test_what_is_not_counted_is_refused(capsys):
    for flags in (["--objective=seq2seq"], ["--fp8=True"], ["--tp=2"], ["--activation_checkpoint=full"]):
        assert "tools.kernels counts one stack" in refused(kernels.main, flags, capsys)
    assert "tools.coords sets n_embd, dtype itself" in refused(coords.main, ["--n_embd=96", "--dtype=float32"], capsys)
