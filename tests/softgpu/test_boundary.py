"""Arrays of CuPy at the boundary of a unit: inputs stay as they are, outputs leave the slot."""

import numpy as np
import pytest

from shardrt import Tensor, nn
from shardrt import functional as F
from shardrt.comm import init_device_mesh
from shardrt.fsdp import MixedPrecisionPolicy, fully_shard
from tests import lab

cupy = pytest.importorskip("cupy")


class Returns(nn.Module):
    """Notes the type of its input, and returns an array that lies in the slot of its unit."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        self.taken = type(x), x.dtype
        output = self.linear(F.cast(Tensor(x), "bfloat16"))
        return {"output": output, "weight": self.linear.weight.lent(), "host": np.arange(3)}


def test_arrays_of_cupy_keep_their_type_and_are_copied_out_of_the_slot(gpu):
    """A kernel may need the type: tables of angles stay in float32, whatever a unit computes in."""
    x = gpu.asarray(np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32))
    mesh = init_device_mesh("cuda")
    model = fully_shard(lab.seeded(Returns), mesh=mesh, mp_policy=MixedPrecisionPolicy("bfloat16"))
    found = model(x)
    kind, dtype = model.taken
    assert kind is cupy.ndarray and dtype == np.float32 and found["host"].size == 3
    slots = [arena.slots for arena in lab.arenas_of(model, "gathered")]
    assert not any(cupy.may_share_memory(found["weight"], slot.array) for some in slots for slot in some)
