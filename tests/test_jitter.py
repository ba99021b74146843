"""--jitter changes the products of every mode, direction and process, and the same product in the same way."""

import os
import subprocess
import sys

import jitter
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT

pytestmark = pytest.mark.no_jitter  # these tests switch it on themselves

A, B = (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
HEADS = torch.randn(3, 1, 2, 8, 4, generator=torch.Generator().manual_seed(2))
PRODUCTS = {
    "linear": lambda: F.linear(A, B),
    "linear_bias": lambda: F.linear(A, B, B[0]),
    "matmul": lambda: A @ B,
    "batches": lambda: HEADS[0] @ HEADS[1].mT,
    "vector": lambda: A @ B[0],
    "einsum": lambda: torch.einsum("ij,kj->ik", A, B),
    "attention": lambda: F.scaled_dot_product_attention(*HEADS, is_causal=True),
    "masked_attention": lambda: F.scaled_dot_product_attention(*HEADS, attn_mask=torch.ones(8, 8).tril().bool()),
}
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("mode", MODES)
def test_products_change_by_last_digits(product, mode):
    with MODES[mode]():
        exact = PRODUCTS[product]()
        with jitter.Jitter(1):
            first, again = PRODUCTS[product](), PRODUCTS[product]()
        with jitter.Jitter(2):
            other = PRODUCTS[product]()
    assert not torch.equal(first, exact) and not torch.equal(first, other)
    assert torch.equal(first, again)
    torch.testing.assert_close(first, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("product", ["linear", "attention"])
def test_gradients_change(product):
    def gradient() -> torch.Tensor:
        x = (A if product == "linear" else HEADS[0]).clone().requires_grad_()
        y = F.linear(x, B) if product == "linear" else F.scaled_dot_product_attention(x, HEADS[1], HEADS[2])
        return torch.autograd.grad(y, x, torch.ones_like(y))[0]

    exact = gradient()
    with jitter.Jitter(1):
        first, again = gradient(), gradient()
    assert not torch.equal(first, exact) and torch.equal(first, again)


def test_other_processes_have_the_same_jitter_unless_it_is_paused(monkeypatch):
    program = """if True:
        import sys, torch
        x = torch.arange(1.0, 65.0).view(8, 8).sin()
        def product(): return (x @ x).flatten().tolist()
        numbers = [product()]
        if "jitter" in sys.modules:
            with sys.modules["jitter"].paused(), torch.inference_mode():
                numbers.append(product())
            numbers.append(product())
        print(*numbers, sep=chr(10))
    """

    x = torch.arange(1.0, 65.0).view(8, 8).sin()
    exact = str((x @ x).flatten().tolist())
    with jitter.Jitter(1):
        here = str((x @ x).flatten().tolist())
    paths = [str(ROOT / "tests" / "every_process"), os.environ.get("PYTHONPATH")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv(jitter.SEED, "1")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [here, exact, here] and here != exact
