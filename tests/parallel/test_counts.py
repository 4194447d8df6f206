"""What a step with tensor parallelism moves along its axis: calls and bytes, held against formulas."""

from fractions import Fraction

import numpy as np
import pytest

from models.gpt import GPT, GPTConfig
from models.plans import plan_of
from shardrt.comm import CountedCommunicator, init_device_mesh
from shardrt.parallel import parallelize_module
from tests.ranks import run_ranks

LAYERS, HEADS, WIDTH, BATCH, TIME = 2, 12, 24, 2, 12
X = 4 * BATCH * TIME * WIDTH  # bytes of the activations between two blocks


def moved(size, sequence):
    """{call: (how often, bytes that each rank receives)} of forward, then of backward."""

    def rank():
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",), wrap=CountedCommunicator)
        model = GPT(GPTConfig(n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, block_size=TIME, vocab_size=60))
        parallelize_module(model, mesh, plan_of(model, sequence_parallel=sequence))
        tokens = np.zeros((BATCH, TIME), np.int64)
        counted, told = mesh.communicator("tensor"), []
        loss = None
        for part in ("forward", "backward"):
            counted.reset()
            loss = model(tokens, tokens) if part == "forward" else loss.backward()
            told.append({call: (counted.calls[call], counted.bytes[call]) for call in counted.calls})
        return told

    first, *others = run_ranks(size, rank)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("size", [2, 3, 4])
def test_of_modules_that_are_cut(size):
    """A sum behind each attention, MLP and the embedding; backward before each of the two, and the head."""
    f = Fraction(size - 1, size)
    sums = 2 * LAYERS + 1, (4 * LAYERS + 2) * f * X
    losses = 1, 8 * (size - 1) * BATCH * TIME
    assert moved(size, False) == [{"all_reduce": sums, "all_gather": losses}, {"all_reduce": sums}]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_of_the_sequence_as_well(size):
    """As much; what enters blocks' layers once more in backward; and gradients of what all ranks have."""
    f = Fraction(size - 1, size)
    parts = 2 * LAYERS + 1, (2 * LAYERS + 1) * f * X
    losses = 8 * (size - 1) * BATCH * TIME
    forward, backward = moved(size, True)
    assert forward == {"reduce_scatter": parts, "all_gather": (parts[0] + 1, parts[1] + losses)}
    again = 2 * LAYERS, 2 * LAYERS * f * X
    small = 4 * WIDTH * (6 * LAYERS + 2 + TIME)  # norms, biases of rows, and positions
    assert backward == {
        "reduce_scatter": parts,
        "all_gather": (parts[0] + again[0], parts[1] + again[1]),
        "all_reduce": (6 * LAYERS + 3, 2 * f * small),
    }
