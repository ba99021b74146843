"""The parts of a pipeline; test_layouts.py compares whole trainings with one process."""

from contextlib import nullcontext

import torch

from engine.parallel.pipeline import StageModel, keep_stage
from engine.parallel.stages import layers
from model import Model, ModelConfig


def test_blocks_are_spread_evenly_and_a_later_stage_begins_with_the_stream():
    for n_layer, ranks, sizes in ((5, 4, [2, 1, 1, 1]), (6, 4, [2, 1, 2, 1]), (4, 2, [2, 2]), (3, 3, [1, 1, 1])):
        found = []
        for rank in range(ranks):
            model = Model(ModelConfig(n_layer=n_layer, n_head=4, n_embd=16, block_size=12, vocab_size=31, dropout=0.5))
            keep_stage(model, rank, ranks)
            found.append(len(model.blocks))
            assert [*model.blocks._modules] == [str(layer) for layer in layers(n_layer, rank, ranks)]
            if rank > 0:
                stage = StageModel(model, nullcontext, first=False)
                stage.received = torch.randn(2, 12, 16)
                again, t = model.embed(torch.zeros(2, 12), 3, None)
                assert again is stage.received and t.tolist() == list(range(3, 15))  # no second dropout
        assert found == sizes
