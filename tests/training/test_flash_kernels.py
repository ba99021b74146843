"""Newer kernels of FlashAttention, without a GPU: stand-ins of PyTorch's functions and of the packages."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import attention

from engine import flash
from model import ModelConfig
from ops import takes_flash

CUDA = torch.device("cuda")


@pytest.fixture
def card(monkeypatch):
    """A GPU of a compute capability whose kernels give numbers: those that each name has in `computes`, or an error."""
    card = SimpleNamespace(major=9, active=None, tried=[], computes={None: 1.0})

    def activate(name):
        card.tried.append(name)
        if name not in card.computes:
            raise ModuleNotFoundError(f"No module named '{name.lower()}'\nand more")
        card.active = name

    def results(cfg, device):
        number = card.computes[card.active]
        if isinstance(number, Exception):
            raise number
        return [torch.tensor([3.0, -4.0]), torch.tensor([number])]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (card.major, 0))
    monkeypatch.setattr(torch._C, "_get_flash_sdp_enabled", lambda: True)
    monkeypatch.setattr(attention, "activate_flash_attention_impl", activate)
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: card.active)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", lambda: setattr(card, "active", None))
    monkeypatch.setattr(flash, "results", results)
    return card


@pytest.mark.parametrize(
    "major, computes, said, active",
    [
        (9, {"FA3": 1.001, "FA4": 1.0}, ", by FA3", "FA3"),
        (9, {"FA4": 1.0}, ", by FA4", "FA4"),
        (9, {}, ", by PyTorch's kernels (FA3: No module named 'fa3'; FA4: No module named 'fa4')", None),
        (9, {"FA3": RuntimeError("no backward")}, "(FA3: no backward; FA4: No module named 'fa4')", None),
        (9, {"FA3": 1.03}, "(FA3: its results differ; FA4: No module named 'fa4')", None),
        (9, {"FA3": float("nan"), "FA4": 1.0}, ", by FA4", "FA4"),
        (10, {"FA3": 1.0, "FA4": 1.0}, ", by FA4", "FA4"),
        (8, {"FA3": 1.0, "FA4": 1.0}, "", None),
        (12, {"FA4": 1.0}, "", None),
    ],
)
def test_the_newest_kernel_that_works(card, major, computes, said, active):
    card.major = major
    card.computes |= computes
    found = flash.newest(ModelConfig(), CUDA, torch.bfloat16)
    assert found.endswith(said) and bool(found) == bool(said) and card.active == active


def test_runs_that_take_none(card, monkeypatch):
    card.computes |= {"FA3": 1.0}
    for flags, device, dtype in (
        ({"dropout": 0.1}, CUDA, torch.bfloat16),
        ({"pos": "alibi"}, CUDA, torch.bfloat16),
        ({"head_dim": 36}, CUDA, torch.bfloat16),
        ({}, CUDA, torch.float32),
        ({}, torch.device("cpu"), torch.bfloat16),
    ):
        assert flash.newest(ModelConfig(**flags), device, dtype) == "" and not card.tried
    assert takes_flash("cuda", torch.bfloat16, 64)
    monkeypatch.delattr(attention, "activate_flash_attention_impl")  # an older torch
    assert flash.newest(ModelConfig(), CUDA, torch.bfloat16) == ""
