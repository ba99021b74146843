"""The parts of a pipeline; test_layouts.py compares whole trainings with one process."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.testing._internal.distributed.fake_pg import FakeStore

from engine.parallel.pipeline import Chunk, keep_stages
from engine.parallel.stages import layers, passes
from model import Model, ModelConfig


def test_blocks_are_spread_evenly_and_a_later_stage_begins_with_the_stream():
    for n_layer, ranks, chunks, sizes in (
        (5, 4, 1, [2, 1, 1, 1]), (6, 4, 1, [2, 1, 2, 1]), (4, 2, 1, [2, 2]), (3, 3, 1, [1, 1, 1]), (7, 2, 2, [4, 3]),
    ):  # fmt: skip
        found = []
        for rank in range(ranks):
            model = Model(ModelConfig(n_layer=n_layer, n_head=4, n_embd=16, block_size=12, vocab_size=31, dropout=0.5))
            keep_stages(model, rank, ranks, chunks)
            found.append(len(model.blocks))
            x = torch.randn(2, 12, 16)
            for blocks in layers(n_layer, rank, ranks, chunks)[rank == 0 :]:
                again, t = Chunk(model, blocks, nullcontext).embed(x, torch.zeros(2, 12), 3, None)
                assert again is x and t.tolist() == list(range(3, 15))  # no second dropout
        assert found == sizes
    assert layers(7, 0, 2, 2) == [range(2), range(4, 6)] and layers(7, 1, 2, 2) == [range(2, 4), range(6, 7)]


@pytest.mark.parametrize("ranks, chunks, n_micro", [(2, 1, 2), (4, 1, 5), (2, 2, 2), (2, 3, 4), (4, 2, 4), (3, 2, 9)])
def test_passes_are_those_of_the_schedule(ranks, chunks, n_micro):
    """In PyTorch's own list of each rank's actions, which it writes for a tiny model."""
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        mine = [i * ranks + rank for i in range(chunks)]
        stages = [PipelineStage(torch.nn.Identity(), i, ranks * chunks, torch.device("cpu")) for i in mine]
        if chunks == 1:
            order = Schedule1F1B(stages[0], n_micro)._get_pipeline_order()[rank]
        else:
            order = ScheduleInterleaved1F1B(stages, n_micro).pipeline_order[rank]
        dist.destroy_process_group()
        order = [a for a in order if a and a.microbatch_index is not None]  # without waits and reductions
        actions = [(mine.index(a.stage_index), a.computation_type.name == "FORWARD") for a in order]
        assert [*passes(rank, ranks, chunks, n_micro)] == actions
