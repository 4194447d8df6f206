"""functional/vocabulary.py: a vocabulary cut over ranks against the plain ops on the whole of it."""

import numpy as np
import pytest

from shardrt import Tensor, device, no_grad
from shardrt import functional as F
from shardrt.comm import create
from shardrt.comm.counted import CountedCommunicator
from shardrt.functional import collective as C
from shardrt.functional import vocabulary as V
from tests.gradcheck import STEP, normal
from tests.ranks import run_ranks

SIZES = [2, 3, 4]
VOCABS = [12, 11, 5]  # 11 and 5: parts of 6 and 5, 4, 4 and 3; of 2, 2, 1 and none
REDUCTIONS = ["mean", "sum", "none"]
WIDTH = 4
IGNORED = -100


def targets_of(shape, vocab, seed=0):
    """Of all parts; one is ignored."""
    targets = np.random.default_rng([seed, *shape]).integers(0, vocab, shape)
    targets.reshape(-1)[1] = IGNORED
    return targets


def of_rank(comm, whole, axis=0):
    """(the part, this rank's values of `whole` as a leaf)."""
    part = V.VocabularyPart(comm, whole.shape[axis])
    own = np.take(whole, range(part.first, part.first + part.count), axis)
    return part, Tensor(own.astype(whole.dtype), requires_grad=True)


def joined(found, place, axis=0):
    """What the ranks have, one behind the other."""
    return np.concatenate([each[place] for each in found], axis)


def upstream(loss):
    return np.asarray(normal(*loss.shape, seed=7), loss.dtype)


def close(found, expected, rtol=1e-12):
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol * np.abs(expected).max(initial=1e-3))


@pytest.mark.parametrize(
    ("vocab", "size", "counts"),
    [(12, 3, [4, 4, 4]), (11, 2, [6, 5]), (11, 3, [4, 4, 3]), (5, 4, [2, 2, 1, 0]), (1, 3, [1, 0, 0])],
)
def test_parts_are_as_equal_as_full_ones_allow(vocab, size, counts):
    parts = [V.rows_of(vocab, rank, size) for rank in range(size)]
    assert [count for _, count in parts] == counts
    assert [first for first, _ in parts] == [sum(counts[:rank]) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("sequence", [False, True])
def test_embedding_and_its_gradient_are_those_of_the_whole_table(size, vocab, sequence):
    """sequence: each rank goes on with its rows of the sum, as with sequence parallelism."""
    table, indices = normal(vocab, WIDTH), np.arange(12).reshape(12) * 5 % vocab
    dy = normal(12, WIDTH, seed=1)

    def body():
        comm = create()
        part, weight = of_rank(comm, table)
        y = V.embedding(indices, weight, part)
        y = C.reduce_scatter_to(y, comm) if sequence else C.reduce_from(y, comm)
        y.backward(np.split(dy, size)[comm.rank] if sequence else dy)
        return np.array(y.data), np.array(weight.grad)

    whole = Tensor(table, requires_grad=True)
    y = F.embedding(indices, whole)
    y.backward(dy)
    found = run_ranks(size, body)
    rows = joined(found, 0) if sequence else found[-1][0]
    np.testing.assert_array_equal(rows, y.data)
    np.testing.assert_array_equal(joined(found, 1), whole.grad)


def test_a_row_of_another_part_is_zero_and_has_no_gradient():
    def body():
        comm = create()
        part, weight = of_rank(comm, np.ones((6, 2)))
        y = V.embedding([0, 3, 3], weight, part)
        y.sum().backward(retain_graph=True)
        y.sum().backward()  # added where a gradient is already
        return y.data.tolist(), weight.grad[:, 0].tolist()

    one, other = run_ranks(2, body)
    assert one == ([[1, 1], [0, 0], [0, 0]], [2, 0, 0])
    assert other == ([[0, 0], [1, 1], [1, 1]], [4, 0, 0])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("inplace", [False, True])
def test_cross_entropy_and_its_gradient_are_those_of_all_logits(size, vocab, reduction, inplace):
    logits, targets = 3 * normal(2, 3, vocab), targets_of((2, 3), vocab)

    def body():
        part, own = of_rank(create(), logits, axis=-1)
        loss = V.cross_entropy(own * 1.0, targets, part, reduction=reduction, inplace=inplace)
        loss.backward(upstream(loss))
        return np.array(loss.data), np.array(own.grad)

    whole = Tensor(logits, requires_grad=True)
    expected = F.cross_entropy(whole, targets, reduction=reduction)
    expected.backward(upstream(expected))
    found = run_ranks(size, body)
    for each in found:
        close(each[0], expected.data)
        np.testing.assert_array_equal(each[0], found[0][0])
    close(joined(found, 1, axis=-1), whole.grad)


def head(x, weight, targets, part, reduction="mean", chunk=128, ignore_index=-100):
    """The loss as a layer has it: x is the same on all ranks, and so is its gradient."""
    x = C.copy_to(x, part.communicator)
    return V.linear_cross_entropy(x, weight, targets, part, ignore_index, reduction, chunk)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("chunk", [0, 1, 4, 99])
def test_the_heads_loss_and_gradients_are_those_of_the_whole_weight(size, vocab, reduction, chunk):
    x, matrix, targets = normal(2, 3, WIDTH), normal(vocab, WIDTH), targets_of((2, 3), vocab)

    def body():
        part, weight = of_rank(create(), matrix)
        given = Tensor(x, requires_grad=True)
        first = (weight**2).sum() * 0.5  # the weight's gradient is added to another
        loss = head(given, weight, targets, part, reduction, chunk)
        (first + (loss * upstream(loss)).sum()).backward()
        return np.array(loss.data), np.array(given.grad), np.array(weight.grad)

    given, weight = Tensor(x, requires_grad=True), Tensor(matrix, requires_grad=True)
    loss = F.linear_cross_entropy(given, weight, targets, reduction=reduction)
    ((weight**2).sum() * 0.5 + (loss * upstream(loss)).sum()).backward()
    found = run_ranks(size, body)
    for each in found:
        close(each[0], loss.data)
        close(each[1], given.grad)
        np.testing.assert_array_equal(each[1], found[0][1])
    close(joined(found, 2), weight.grad)
