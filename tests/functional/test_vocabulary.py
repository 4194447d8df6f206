"""functional/vocabulary.py: a vocabulary cut over ranks against the plain ops on the whole of it."""

import tracemalloc

import numpy as np
import pytest

from shardrt import Tensor
from shardrt import functional as F
from shardrt.comm import create
from shardrt.comm.counter import CollectiveCounter
from shardrt.device.cpu import CPUDevice
from shardrt.functional import collective as C
from shardrt.functional import vocabulary as V
from tests.combinations import pairwise
from tests.gradcheck import leaf, normal
from tests.ranks import run_ranks

SIZES = [2, 3, 4]
VOCABS = [12, 11, 5]  # 11: parts of 6 and 5, of 4, 4 and 3; 5: of 2, 1, 1 and 1
PARTS = [(2, 12), (3, 11), (4, 5)]
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
    [(12, 3, [4, 4, 4]), (11, 2, [6, 5]), (11, 3, [4, 4, 3]), (5, 4, [2, 1, 1, 1]), (1, 3, [1, 0, 0])],
)
def test_parts_are_as_equal_as_can_be(vocab, size, counts):
    parts = [V.rows_of(vocab, rank, size) for rank in range(size)]
    assert [count for _, count in parts] == counts
    assert [first for first, _ in parts] == [sum(counts[:rank]) for rank in range(size)]
    halves = [V.rows_of(vocab, rank, 2 * size)[0] for rank in range(2 * size)]
    assert halves[::2] == [first for first, _ in parts]


@pytest.mark.parametrize(("size", "vocab"), PARTS)
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


@pytest.mark.parametrize(
    ("size", "vocab", "reduction", "inplace"), pairwise(SIZES, VOCABS, REDUCTIONS, (False, True))
)
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


@pytest.mark.parametrize(
    ("size", "vocab", "reduction", "chunk"), pairwise(SIZES, VOCABS, REDUCTIONS, (0, 1, 4, 99))
)
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


@pytest.mark.parametrize("ignore_index", [3, 0, -1, -6])
def test_what_is_ignored_is_so_on_all_ranks_whatever_its_number(ignore_index):
    """A word of the first or of the other part; a number that is a column, counted from the part's end."""
    x, matrix = normal(4, WIDTH), normal(11, WIDTH)
    targets = np.array([ignore_index, 5, 0 if ignore_index else 1, 10])

    def body():
        part, weight = of_rank(create(), matrix)
        given = Tensor(x, requires_grad=True)
        loss = head(given, weight, targets, part, ignore_index=ignore_index)
        loss.backward()
        assert (given.grad[0] == 0).all()
        nothing = np.full(4, ignore_index)
        assert head(given, weight, nothing, part, "sum", ignore_index=ignore_index).item() == 0
        empty = head(given, weight, nothing, part, ignore_index=ignore_index)
        given.grad = None
        empty.backward()
        assert np.isnan(empty.item()) and (given.grad == 0).all()
        return loss.item()

    loss = F.linear_cross_entropy(x, matrix, targets, ignore_index=ignore_index).item()
    assert run_ranks(2, body) == pytest.approx([loss] * 2, rel=1e-13)


@pytest.mark.parametrize("level", [0.0, 1e4, -1e4])
def test_words_that_are_ruled_out_may_be_a_whole_part_and_logits_may_be_large(level):
    logits, targets = normal(3, 12) + level, np.array([0, 3, 7])
    logits[:, 8:] = -np.inf

    def body():
        part, own = of_rank(create(), logits, axis=-1)
        loss = V.cross_entropy(own, targets, part)
        loss.backward()
        return loss.item(), np.array(own.grad)

    whole = Tensor(logits, requires_grad=True)
    expected = F.cross_entropy(whole, targets)
    expected.backward()
    found = run_ranks(3, body)
    assert [each[0] for each in found] == pytest.approx([expected.item()] * 3, rel=1e-11)
    close(joined(found, 1, axis=-1), whole.grad, 1e-11)


def test_a_logit_that_is_no_number_is_seen_by_all_ranks():
    logits = normal(2, 12)
    logits[0, 5] = np.nan

    def body():
        part, own = of_rank(create(), logits, axis=-1)
        return np.isnan(V.cross_entropy(own, [0, 7], part, reduction="none").data).tolist()

    assert run_ranks(3, body) == [[True, False]] * 3


@pytest.mark.parametrize(("size", "dtype"), [(2, np.float64), (3, np.float32)])
def test_two_numbers_per_row_are_gathered_once_whatever_the_chunks_and_no_more_backward(size, dtype):
    x, matrix, targets = normal(10, WIDTH).astype(dtype), normal(11, WIDTH).astype(dtype), np.arange(10)

    def body():
        comm = create()
        counted = CollectiveCounter(comm)
        part, weight = of_rank(comm, matrix)
        given = Tensor(x, requires_grad=True)
        losses = [
            lambda n=n: V.linear_cross_entropy(given, weight, targets, part, chunk=n) for n in (0, 3, 128)
        ]
        losses.append(lambda: V.cross_entropy(F.linear(given, weight), targets, part))
        message = []
        for loss in losses:
            counted.reset()
            loss().backward()
            message.append((dict(counted.calls), dict(counted.bytes)))
        counted.reset()
        V.embedding(targets, weight, part).sum().backward()
        assert not counted.calls
        V.gather_logits(F.linear(given, weight), part).sum().backward()
        return message, dict(counted.calls), dict(counted.bytes)

    itemsize, most = np.dtype(dtype).itemsize, -(-11 // size)
    of_loss = ({"all_gather": 1}, {"all_gather": 2 * itemsize * 10 * (size - 1)})
    of_logits = ({"all_gather": 1}, {"all_gather": itemsize * 10 * most * (size - 1)})
    assert run_ranks(size, body) == [([of_loss] * 4, *of_logits)] * size


def test_nobody_ever_has_an_array_of_all_logits(monkeypatch):
    """What ops ask of the device, and what NumPy takes by itself."""
    rows, vocab, sizes = 512, 1000, []
    original = CPUDevice.empty

    def empty(self, shape, dtype):
        sizes.append(int(np.prod(shape)))
        return original(self, shape, dtype)

    monkeypatch.setattr(CPUDevice, "empty", empty)
    x, matrix = normal(rows, 8).astype(np.float32), normal(vocab, 8).astype(np.float32)

    def body(chunk):
        part, weight = of_rank(create(), matrix)
        given = Tensor(x, requires_grad=True)
        head(given, weight, targets_of((rows,), vocab), part, chunk=chunk).backward()

    for chunk, largest in ((0, rows * vocab // 4), (16, vocab * 8 // 4)):
        sizes.clear()
        tracemalloc.start()
        run_ranks(4, body, chunk)
        taken = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert max(sizes) == max(largest, rows * 8)
        assert taken < 4 * rows * vocab


@pytest.mark.parametrize(("size", "vocab"), PARTS)
def test_logits_are_gathered_where_there_are_no_targets(size, vocab):
    x, matrix = normal(2, 3, WIDTH), normal(vocab, WIDTH)

    def body():
        comm = create()
        part, weight = of_rank(comm, matrix)
        given = Tensor(x, requires_grad=True)
        logits = V.gather_logits(F.linear(C.copy_to(given, comm), weight), part)
        logits.backward(normal(2, 3, vocab, seed=3))
        return np.array(logits.data), np.array(given.grad), np.array(weight.grad)

    given, weight = Tensor(x, requires_grad=True), Tensor(matrix, requires_grad=True)
    logits = F.linear(given, weight)
    logits.backward(normal(2, 3, vocab, seed=3))
    found = run_ranks(size, body)
    for each in found:
        close(each[0], logits.data)
        close(each[1], given.grad)
    close(joined(found, 2), weight.grad)


@pytest.mark.parametrize("frozen", ["x", "weight"])
@pytest.mark.parametrize("chunk", [0, 2])
def test_the_gradient_of_one_of_the_two_alone(frozen, chunk):
    x, matrix = normal(3, WIDTH), normal(5, WIDTH)

    def body():
        part, weight = of_rank(create(), matrix)
        given = Tensor(x, requires_grad=True)
        (given if frozen == "x" else weight).requires_grad = False
        V.linear_cross_entropy(given, weight, [0, 4, 2], part, chunk=chunk).backward()
        return given.grad, weight.grad

    whole, given = Tensor(matrix, requires_grad=True), Tensor(x, requires_grad=True)
    F.linear_cross_entropy(given, whole, [0, 4, 2]).backward()
    found = run_ranks(2, body)
    if frozen == "x":
        assert found[0][0] is None
        close(joined(found, 1), whole.grad)
    else:
        assert found[0][1] is None
        close(found[0][0] + found[1][0], given.grad)


def test_alone_it_is_the_plain_op():
    part, targets = V.VocabularyPart(create(), 5), targets_of((3,), 5)
    x, matrix = normal(3, WIDTH), normal(5, WIDTH)
    np.testing.assert_array_equal(V.embedding([4, 0], matrix, part).data, matrix[[4, 0]])
    np.testing.assert_array_equal(V.gather_logits(x @ matrix.T, part).data, x @ matrix.T)
    for chunk in (0, 2):
        loss = V.linear_cross_entropy(x, matrix, targets, part, chunk=chunk).item()
        assert loss == pytest.approx(F.linear_cross_entropy(x, matrix, targets).item(), rel=1e-14)


def test_no_rows_have_loss_and_gradient_zero():
    def body():
        part, weight = of_rank(create(), normal(5, WIDTH))
        x = Tensor(np.zeros((0, WIDTH)), requires_grad=True)
        for chunk in (0, 128):
            loss = V.linear_cross_entropy(
                x, weight, np.zeros(0, np.int64), part, reduction="sum", chunk=chunk
            )
            loss.backward()
            assert loss.item() == 0 and not weight.grad.any()

    run_ranks(2, body)


@pytest.mark.parametrize("op", ["head", "inplace"])
def test_where_the_gradient_takes_the_memory_of_the_logits_backward_runs_once(op):
    part, x = V.VocabularyPart(create(), 5), Tensor(normal(3, 5), requires_grad=True)
    if op == "head":
        loss = V.linear_cross_entropy(x, normal(5, 5), [0, 4, 2], part, chunk=0)
    else:
        loss = V.cross_entropy(x * 1.0, [0, 4, 2], part, inplace=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Vocabulary"):
        loss.backward()


X, TABLE = normal(2, WIDTH), normal(6, WIDTH)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda p: V.embedding([0], normal(11, WIDTH), p),
            ValueError,
            r"weight \(11, 4\) should have 6 of 11 words, those from 0 on, which rank 0 of 2 has",
        ),
        (lambda p: V.embedding([11], TABLE, p), ValueError, r"indices\[0\] must be in \[0, 11\), got 11"),
        (lambda p: V.embedding([0], normal(6), p), ValueError, r"weight must be \(rows, width\), got \(6,\)"),
        (
            lambda p: V.linear_cross_entropy(X, TABLE, [0, 11], p),
            ValueError,
            r"targets\[1\] must be in \[0, 11\), got 11",
        ),
        (lambda p: V.linear_cross_entropy(X, TABLE[:5], [0, 1], p), ValueError, "should have 6 of 11 words"),
        (lambda p: V.linear_cross_entropy(X, TABLE[:, 1:], [0, 1], p), ValueError, "must be .* and weight"),
        (lambda p: V.linear_cross_entropy(X, TABLE, [0, 1], p, chunk=-1), ValueError, "at least 0, got -1"),
        (lambda p: V.linear_cross_entropy(X, TABLE, [0], p), ValueError, r"need targets \(...\)"),
        (lambda p: V.cross_entropy(normal(2, 5), [0, 1], p), ValueError, r"logits \(2, 5\) should have 6"),
        (lambda p: V.cross_entropy(normal(2, 6), [0, 1], p, reduction="no"), ValueError, "reduction must be"),
        (
            lambda p: V.cross_entropy(leaf(normal(2, 6)), [0, 1], p, inplace=True),
            ValueError,
            "inplace=True would",
        ),
        (lambda p: V.cross_entropy(normal(2, 6), [0, 1], p, label_smoothing=0.1), TypeError, "gather_logits"),
        (lambda p: V.gather_logits(normal(2, 5), p), ValueError, r"logits \(2, 5\) should have 6 of 11"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_gathered(call, error, message):
    def body():
        comm = create()
        if comm.rank == 0:
            with pytest.raises(error, match=message):
                call(V.VocabularyPart(comm, 11))

    run_ranks(2, body)
