"""Imitates the rounding of other CPUs: results of matrix products and of fused attention are off by a last digit.

    python -m pytest --jitter=1            # the whole suite with seed 1; make jitter takes three seeds

Each number of such a result is multiplied by 1 + u eps, where u in {-1, 0, 1} comes from a hash of the seed, the shape,
the number's place and its bits. So the same computation gives the same digits again, in every process, and a run that
is resumed does too; but a sum in another order, or a batch of another size, differs as it does between two CPUs. The
cancellation within a product, which other orders of summation change more, is not imitated. In 16 bits, to which CPUs
round sums that are in float32, u is 0 for 63 of 64 numbers. Tests with the marker no_jitter run without all this.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SEED = "SUPERBLOCK_JITTER"  # in the environment, for ranks and other processes
aten, started = torch.ops.aten, None
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot}
ATTENTION = {  # -> how many of its results are numbers that it has rounded
    aten._scaled_dot_product_flash_attention_for_cpu: 1,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 3,
}
INTEGER = {8: torch.int64, 4: torch.int32, 2: torch.int16}  # of as many bytes as a number


class Jitter(TorchDispatchMode):
    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        if torch.is_inference_mode_enabled():  # elsewhere, autograd divides linear, matmul and einsum into products
            with self:
                parts = f.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        result = f(*args, **(kwargs or {}))
        op = f.overloadpacket
        for x in [result] if op in PRODUCTS else result[: ATTENTION[op]] if op in ATTENTION else ():
            if type(x) is torch.Tensor and x.device.type == "cpu" and x.is_floating_point():  # holds numbers
                x.mul_(1 + self.digits(x) * torch.finfo(x.dtype).eps)
        return result

    def digits(self, x: torch.Tensor) -> torch.Tensor:
        """-1, 0 or 1 for each number of x. Products of integers wrap around, and hashes of integers are the same in
        every process."""
        h = x.contiguous().view(INTEGER[x.itemsize]).long() * -0x61C8864680B583EB
        h += torch.arange(x.numel()).view(x.shape) * -0x40A7B892E31B1A47 + hash((self.seed, *x.shape))
        h = (h ^ h >> 31) * -0x6B2FB644ECCEEE15
        u = (h >> 40) % 3 - 1
        return (u * (h % 64 == 0) if x.itemsize == 2 else u).to(x.dtype)


def start():
    """Jitter in this process, for the rest of its life, if the environment names a seed."""
    global started
    if os.environ.get(SEED) and not started:
        started = Jitter(int(os.environ[SEED]))
        started.__enter__()


@contextmanager
def paused() -> Iterator[None]:
    """No jitter in this process meanwhile, nor in those that it starts."""
    seed = os.environ.pop(SEED, None)
    if started:
        started.__exit__(None, None, None)
    yield
    if started:
        started.__enter__()
        os.environ[SEED] = seed
