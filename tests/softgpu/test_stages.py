"""Stages of a pipeline on the GPU emulator: the numbers of the CPU, in any order of streams."""

import numpy as np
import pytest

import shardrt
from models.gpt import GPT, GPTConfig
from shardrt import optim
from shardrt.checkpoint import full_state_dict
from shardrt.comm import init_device_mesh, thread
from shardrt.fsdp import check_replicas
from shardrt.nn.utils import clip_grad_norm_, clip_grad_norm_on_device_
from shardrt.parallel import pipeline_stages, sum_tied
from tests.parallel import pipes

pytest.importorskip("cupy")


def trained(device, rank_of, communicator="auto"):
    """(norms, weights) of two steps of a GPT, whose embedding is on two stages."""
    mesh = init_device_mesh(device, (2, 1), mesh_dim_names=("pp", "dp_shard"), communicator=communicator)
    shardrt.manual_seed(3)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=13, init_std=0.1))
    stages = pipeline_stages(model, mesh["pp"], stages=len(rank_of), placement=rank_of)
    pipes.sharded(stages, mesh["dp_shard"])
    optimizer, norms = optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3), []
    for step in range(2):
        text = np.random.default_rng(step).integers(0, 13, (2, 2, 9))
        batches = [{"tokens": rows[:, :-1], "targets": rows[:, 1:]} for rows in text]
        pipes.run(stages, mesh["pp"], batches, rank_of)
        sum_tied(model)
        norms.append(clip_grad_norm_on_device_(model.parameters(), 1.0).item())
        norms.append(clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        check_replicas(model, optimizer)
    return norms, full_state_dict(model)


@pytest.mark.parametrize("rank_of", [[0, 1], [0, 1, 1, 0]], ids=["two copies", "a twin"])
def test_what_two_stages_share_is_trained_as_on_the_cpu_however_late_streams_are(software, rank_of):
    (norms, weights), _ = thread.run(2, trained, "cpu", rank_of)
    first = None
    for mode in ("late", "compute first"):
        software.choose(mode, seed=1)
        found, _ = thread.run(2, trained, "cuda", rank_of, "nccl")
        first = first or found
        assert found[0] == first[0] and found[0] == pytest.approx(norms, rel=1e-5)
        for name, values in weights.items():
            np.testing.assert_array_equal(found[1][name], first[1][name], err_msg=name)
            np.testing.assert_allclose(found[1][name], values, rtol=0, atol=2e-5, err_msg=name)
