"""What holds for a model of any flags, over rows in which each two values of two flags meet: see `grid`."""

import math

import pytest
import torch
from torch.func import functional_call

import model as M
from engine.decode import generate
from model import Model
from tests.models import DOCS, TINY, T, beside, build, changes, check_decoding, grid, jitter, tokens

over_the_grid = pytest.mark.parametrize("flags", grid(), ids=changes, scope="module")  # a row's tests share its model
PLACE = 6  # of the token that is changed


@pytest.fixture(scope="module")
def built(flags) -> tuple[Model, dict[str, torch.Tensor]]:
    """A model with weights off the initial ones, and those."""
    net = build(**flags)
    initial = {name: p.detach().clone() for name, p in net.named_parameters()}
    jitter(net)
    return net, initial


@pytest.fixture(scope="module")
def model(built) -> Model:
    return built[0]


@pytest.fixture
def text() -> torch.Tensor:
    torch.manual_seed(2)
    return tokens(2, T)


def targets_of(text: torch.Tensor) -> torch.Tensor:
    targets = text.roll(-1, 1)
    targets[0, 3:6] = -1
    targets[1, 10:] = -1
    return targets


@over_the_grid
@torch.no_grad()
def test_the_first_loss_is_that_of_a_uniform_guess(built, text):
    net, initial = built
    loss = functional_call(net, initial, (text, targets_of(text)), beside(net, docs=False))
    assert abs(loss.item() - math.log(TINY["vocab_size"])) < 0.35


@over_the_grid
def test_a_finite_gradient_reaches_each_parameter(model, text):
    """While training: there is no dropout, but a loss may have a part for training alone."""
    model.train()
    loss = model(text, targets_of(text), **beside(model))
    model.eval()
    names = [name for name, _ in model.named_parameters()]
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    sizes = {name: 0.0 if g is None else g.abs().max().item() for name, g in zip(names, gradients, strict=True)}
    assert not [name for name, size in sizes.items() if not 0 < size < math.inf]


@over_the_grid
def test_a_token_sees_those_it_should_and_no_others(model, text):
    check_sight(model, text, docs=False)
    check_sight(model, text, docs=True)


@over_the_grid
@torch.no_grad()
def test_a_text_is_continued_as_it_is_read(model, text):
    if model.cfg.objective == "masked":
        with pytest.raises(ValueError, match="objective=masked does not continue a text"):
            next(generate(model, text, 1, lambda logits: logits.argmax(-1)))
    else:
        check_decoding(model, text[:, : T - 2], 4, **beside(model, docs=False))


@torch.no_grad()
def check_sight(model: Model, text: torch.Tensor, docs: bool):
    """Another token of the text, or of the source, moves the logits of those that see it, and no others."""
    given = beside(model, docs)
    after = torch.arange(T) - PLACE
    seen = after <= reach(model)
    if model.cfg.objective == "masked":
        seen = seen & (after >= -reach(model))
    else:
        seen = seen & (after >= 0)
    here = torch.ones(2, T, dtype=torch.bool)
    if docs:
        here = DOCS == DOCS[:, PLACE, None]
    sights = {"idx": seen & here}
    if model.encoder:
        sights["source"] = torch.ones(2, T, dtype=torch.bool)
        if docs:
            sights["source"] = DOCS == given["source_docs"][:, PLACE, None]
    check_moved(model, {"idx": text} | given, sights)


def reach(model: Model) -> int:
    """How far apart two tokens can be of which one sees the other."""
    total = 0
    for each in [each for block in model.blocks for each in block.sums]:
        readers = [m for m in each.children() if isinstance(m, M.MultiHeadAttention) and m.reader.source == "context"]
        total += max((reader.window - 1 if reader.window else T for reader in readers), default=0)
    return total + sum(m.reach for m in model.blocks.modules() if isinstance(m, M.Neighbours))


def check_moved(model: Model, given: dict, sights: dict[str, torch.Tensor]):
    """Compares the logits of the given rows with those of copies, of which each has another token in one input."""
    given = {name: x.repeat(1 + len(sights), 1) for name, x in given.items()}
    for copy, changed in enumerate(sights, 1):
        given[changed][2 * copy : 2 * copy + 2, PLACE] += 1
        given[changed] %= TINY["vocab_size"]
    before, *after = model(**given).split(2)
    for (changed, seen), logits in zip(sights.items(), after, strict=True):
        moved = (logits - before).abs().amax(dim=2)
        assert (moved[~seen] < 1e-12).all(), f"{changed} is seen where it must not be: {moved}"
        assert (moved[seen] > 1e-12).all(), f"{changed} is not seen where it should be: {moved}"
