"""A vocabulary cut over ranks, by CUDA's kernels: emulated, and on the GPU emulator with CuPy and NCCL."""

import numpy as np
import pytest

from shardrt import Tensor, device
from shardrt import functional as F
from shardrt.comm import create, init_device_mesh
from shardrt.functional import collective as C
from shardrt.functional import vocabulary as V
from tests.cuda.numbers import assert_close, dtype_of, normal
from tests.cuda.test_head import Emulated
from tests.ranks import run_ranks

WIDTH, ROWS = 16, 6


def values(element, vocab):
    """tokens, targets of which one is ignored, and the weight: float64 that `element` holds exactly."""
    tokens, targets = np.random.default_rng(0).integers(0, vocab, (2, ROWS))
    targets[3] = -100
    return tokens, targets, normal(vocab, WIDTH).astype(dtype_of(element)).astype(np.float64)


def on_ranks(size, communicator, element, reduction, chunk, vocab):
    """(loss, part of the gradient, all logits of the whole weight) of each rank, in float64."""
    tokens, targets, matrix = values(element, vocab)

    def body():
        here, comm = communicator()
        part = V.VocabularyPart(comm, vocab)
        own = matrix[part.first : part.first + part.count].astype(dtype_of(element))
        weight = Tensor(here.asarray(own), requires_grad=True)
        x = C.reduce_from(V.embedding(tokens, weight, part), comm)
        x = C.copy_to(x, comm)
        loss = V.linear_cross_entropy(x, weight, targets, part, reduction=reduction, chunk=chunk)
        loss.sum().backward()
        logits = V.gather_logits(F.linear(x.detach(), weight.detach()), part)
        here.wait_here()
        return [here.to_numpy(array) for array in (loss.data, weight.grad, logits.data)]

    return run_ranks(size, body)


def expected(element, reduction, vocab):
    """The same of the whole weight in float64."""
    tokens, targets, matrix = values(element, vocab)
    with device.use(device.get("cpu")):
        weight = Tensor(matrix, requires_grad=True)
        x = F.embedding(tokens, weight)
        loss = F.linear_cross_entropy(x, weight, targets, reduction=reduction)
        loss.sum().backward()
        return loss.data, weight.grad, F.linear(x.detach(), weight.detach()).data


def check(size, communicator, element, reduction, chunk, vocab=57):
    found = on_ranks(size, communicator, element, reduction, chunk, vocab)
    loss, gradient, logits = expected(element, reduction, vocab)
    for each in found:
        np.testing.assert_array_equal(each[0], found[0][0])
        assert each[0].dtype == np.float32
        assert_close(each[0].astype(dtype_of(element)), loss)
        assert_close(each[2], logits)
    assert_close(np.concatenate([each[1] for each in found]), gradient, 2)


@pytest.mark.parametrize("element", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("reduction", "size", "chunk", "vocab"),
    [("mean", 2, 0, 57), ("none", 3, 4, 57), ("mean", 4, 2, 3), ("none", 4, 0, 3)],
    ids=["whole", "chunks", "a rank without rows, chunks", "a rank without rows"],
)
def test_loss_and_gradients_are_those_of_the_whole_weight(emulated, element, reduction, size, chunk, vocab):
    def communicator():
        device.set_current(Emulated())  # in a thread that ends with the rank
        return device.current(), create()

    check(size, communicator, element, reduction, chunk, vocab)


def test_each_rank_reads_its_logits_once_and_writes_their_gradient_once(emulated):
    tokens, targets, matrix = values("float32", 57)
    with device.use(Emulated()):
        part = V.VocabularyPart(create("single"), 57)
        x, weight = (
            Tensor(array.astype(np.float32), requires_grad=True) for array in (matrix[tokens], matrix)
        )
        V.linear_cross_entropy(x, weight, targets, part, chunk=0).backward()
    assert emulated.launches == ["forward", "join", "backward"]


@pytest.mark.parametrize(("size", "chunk"), [(2, 0), (3, 4)])
def test_with_cupy_and_nccl(gpu, size, chunk):
    def communicator():
        mesh = init_device_mesh("cuda", communicator="nccl")
        device.set_current(mesh.device)
        return mesh.device, mesh.communicator("gather")

    check(size, communicator, "float32", "none", chunk)
