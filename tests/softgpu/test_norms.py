"""Clipping on several ranks of the GPU emulator: where the norm is summed, who waits for it, its bits."""

from math import inf, isfinite, nan
from threading import get_ident

import numpy as np
import pytest

from shardrt import device, optim
from shardrt.comm import init_device_mesh, thread
from shardrt.nn.utils import clip_grad_norm_, clip_grad_norm_on_device_
from tests.cuda.small_gpt import made
from tests.test_norms import gradients, parameters_with

pytest.importorskip("cupy")
MODES = ("late", "side first", "compute first")


MODELS = {
    "sharded": (2, {}),
    "copies of shards": (4, {"shape": (2, 2), "strategy": "HYBRID_SHARD"}),
    "cut along tp": (4, {"shape": (2, 2), "tp": True}),
}


@pytest.mark.parametrize("which", MODELS)
def test_the_host_waits_for_nothing_between_backward_and_the_update(waits, which):
    ranks, settings = MODELS[which]

    def rank():
        _, model = made("cuda", communicator="nccl", **settings)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        tokens = device.current().zeros((2, 4), np.int64)
        for _ in range(2):  # the first step makes what the second one uses
            model(tokens, tokens).backward()
            waits[get_ident()].clear()
            norm = clip_grad_norm_on_device_(model.parameters(), 1e-3)
            optimizer.step()
            waited = list(waits[get_ident()])
            optimizer.zero_grad()
        return waited, norm.item()

    found = thread.run(ranks, rank)
    assert [waited for waited, _ in found] == [[]] * ranks
    assert found[0][1] > 1e-3 and len({norm for _, norm in found}) == 1


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("bad", "mode"), [*((0.5, mode) for mode in MODES), (nan, "late"), (inf, "late")])
def test_it_gives_the_norm_and_the_gradients_of_clipping_by_the_host(software, ranks, mode, bad):
    """To the bit, whatever the order of a sum over ranks is."""
    software.choose(mode, seed=1)

    def clipped(mesh, clip, scale):
        values = gradients(scale=scale)
        values[-1][-1] = bad  # on the last rank only
        parameters = parameters_with(values, [mesh.communicator("control"), None])
        for storage in (parameters[0].storage, parameters[1].storage):
            storage._gradient = mesh.device.asarray(storage.gradient)
        parameters[0].storage.whole_mesh = mesh
        norm = float(clip(parameters, 0.1))
        return [norm, *mesh.device.to_numpy(parameters[0].storage.gradient)]

    def rank(clip):
        mesh = init_device_mesh("cuda", communicator="nccl")
        return [clipped(mesh, clip, scale) for scale in np.linspace(0.5, 1.5, 8 if bad == 0.5 else 1)]

    expected = thread.run(ranks, rank, clip_grad_norm_)
    assert isfinite(expected[0][0][0]) == isfinite(bad)
    for own, wanted in zip(thread.run(ranks, rank, clip_grad_norm_on_device_), expected, strict=True):
        np.testing.assert_array_equal(own, wanted)
