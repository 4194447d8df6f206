"""What every communicator must do: one class, with a thin subclass per backend that says how ranks run.

A body is what each rank does, with the communicator of its world. Expected values come from NumPy on the data
of all ranks, which any rank can make, and must be met to the bit.
"""

import hashlib
import inspect
import re
import threading
import time
from functools import partial, wraps
from itertools import product

import numpy as np
import pytest

from shardrt import device, dtypes
from shardrt.comm import CollectiveMismatch
from shardrt.dtypes import CARRIED
from tests.combinations import noting, pairwise

COUNTS = (0, 1, 7, 1000, 300_001)  # per rank; the last is odd and longer than any chunk
SUMMED = ("float32", "float64", "int32", "int64", "uint8")
SUMS = pairwise(SUMMED, COUNTS, (False, True))
SUMS_OF_BITS = tuple(product((False, True), (0, 7, 300_001), dtypes.LOW))
REDUCTIONS = pairwise(("sum", "max", "min", "prod"), SUMMED, (0, 1, 7, 100_003))
MOVED = tuple(("float32", n) for n in COUNTS) + tuple((dtype, 1000) for dtype in CARRIED[1:])
LITTLE = 1 << 15  # bytes that go along with a call: notices.LITTLE; flags.LITTLE is a quarter of it
CPU = device.get("cpu")
INLINE = CPU.current_stream
_GOLDEN = np.uint64(11400714819323198485)


def values(rank, count, dtype, salt=0, part=None):
    """The data of one rank, or a part of it: element i is a function of (rank, i, salt)."""
    there = range(count)[part or slice(None)]
    index = np.arange(there.start, there.stop, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = (index * np.uint64(2654435761) + np.uint64(rank * 40503 + salt * 9973 + 1)) * _GOLDEN
    if np.dtype(dtype).kind == "f":
        return ((mixed >> np.uint64(11)) * 2.0**-52 - 1.0).astype(dtype)
    return (mixed >> np.uint64(58)).astype(dtype)


def total(size, count, dtype, part, *, output=None, scale=1.0, op="sum"):
    """The reference: all ranks' data, added as the protocol says."""
    parts = [values(rank, count, dtype, part=part) for rank in range(size)]
    pairwise = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}[op]
    return added(tree(parts, pairwise), scale, output)


def tree(parts, pairwise=np.add):
    """Neighbours first, from the bottom up: (0 + 1) + 2, (0 + 1) + (2 + 3)."""
    while len(parts) > 1:
        pairs = [pairwise(*parts[i : i + 2]) for i in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


def added(result, scale, output):
    if result.dtype.kind == "f":
        result = result.dtype.type(scale) * result
    return result if output is None else output + result


def packed(numbers, kind):
    """float32 as the bits of a 16-bit type. bfloat16 is cut off, not rounded: any bits will do here."""
    if kind == "bfloat16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16)
    return numbers.astype(np.float16).view(np.uint16)


def unpacked(bits, kind):
    if kind == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


def own(comm, n):
    return slice(comm.rank * n, (comm.rank + 1) * n)


def same(actual, expected):
    np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))


# Elements that rank s of n sends to rank r; the last three in more than one piece on some backend.
PATTERNS = {
    "balanced": lambda s, r, n: 700,
    "uneven": lambda s, r, n: (3 * s + 5 * r) % 7,
    "empty": lambda s, r, n: 0,
    "to itself": lambda s, r, n: 9 * (s == r),
    "all to one": lambda s, r, n: (1000 + s) * (r == n - 1),
    "one to all": lambda s, r, n: (1000 + r) * (s == 0),
    "ring": lambda s, r, n: 270_001 * ((s + 1) % n == r),
    "skewed": lambda s, r, n: 300_001 if r == 0 else 11 * s + r,
    "skewed by one": lambda s, r, n: (290_000 if r == n - 1 else 30_000) if s == 0 else 0,
}


def exchange(comm, pattern, dtype, memory=None, salt=0):
    """An all_to_all by counts, `pattern(s, r)` from rank s to rank r, and whether it is right.

    memory: of this rank, for what it sends.
    """
    sent = [pattern(comm.rank, r) for r in range(comm.size)]
    received = [pattern(s, comm.rank) for s in range(comm.size)]
    mine = values(comm.rank, sum(sent), dtype, salt)
    buffer = mine.copy() if memory is None else memory[: mine.size]
    buffer[:] = mine
    output = np.full(sum(received), 77, dtype)
    comm.all_to_all(output, buffer, received=received, sent=sent, stream=INLINE)
    same(buffer, mine)
    buffer[:] = 88  # at once: nobody reads it any more
    for s, part in enumerate(np.split(output, np.cumsum(received)[:-1])):
        start = sum(pattern(s, r) for r in range(comm.rank))
        same(part, values(s, start + part.size, dtype, salt, slice(start, None)))


CALLS = {  # as an error prints them
    "all_gather(840 of float32, unit blocks.3)": lambda comm: comm.all_gather(
        np.zeros(840, np.float32), stream=INLINE, tag="blocks.3"
    ),
    "all_gather(840 of float32, unit blocks.4)": lambda comm: comm.all_gather(
        np.zeros(840, np.float32), stream=INLINE, tag="blocks.4"
    ),
    "all_gather(840 of float32)": lambda comm: comm.all_gather(np.zeros(840, np.float32), stream=INLINE),
    "all_gather(1680 of float32)": lambda comm: comm.all_gather(np.zeros(1680, np.float32), stream=INLINE),
    "all_gather(84000 of float32)": lambda comm: comm.all_gather(np.zeros(84000, np.float32), stream=INLINE),
    "all_gather(840 of float64)": lambda comm: comm.all_gather(np.zeros(840), stream=INLINE),
    "all_to_all(840 of float64)": lambda comm: comm.all_to_all(np.ones(840), np.ones(840), stream=INLINE),
    "all_to_all(counts per peer of float64)": lambda comm: exchange(comm, lambda s, r: 840, np.float64),
    "all_reduce(840 of float64, sum)": lambda comm: comm.all_reduce(np.zeros(840), stream=INLINE),
    "all_reduce(840 of float64, max)": lambda comm: comm.all_reduce(np.zeros(840), op="max", stream=INLINE),
    "broadcast(840 of float64, root 0)": lambda comm: comm.broadcast(np.zeros(840), root=0, stream=INLINE),
    "broadcast(840 of float64, root 1)": lambda comm: comm.broadcast(np.zeros(840), root=1, stream=INLINE),
    "reduce_scatter(840 of float32, sum)": lambda comm: comm.reduce_scatter(
        np.zeros(840 // comm.size, np.float32), np.zeros(840, np.float32), stream=INLINE
    ),
    "reduce_scatter(840 of bfloat16, sum)": lambda comm: comm.reduce_scatter(
        np.zeros(840 // comm.size, np.float32), np.zeros(840, np.uint16), kind="bfloat16", stream=INLINE
    ),
    "reduce_scatter(840 of float16, sum)": lambda comm: comm.reduce_scatter(
        np.zeros(840 // comm.size, np.float32), np.zeros(840, np.uint16), kind="float16", stream=INLINE
    ),
    "barrier(unit blocks.3)": lambda comm: comm.barrier(stream=INLINE, tag="blocks.3"),
    "barrier(unit blocks.4)": lambda comm: comm.barrier(stream=INLINE, tag="blocks.4"),
}

DIFFERENCES = {
    "name": ("all_gather(840 of float32, unit blocks.3)", "all_gather(840 of float32, unit blocks.4)"),
    "no name": ("all_gather(840 of float32, unit blocks.3)", "all_gather(840 of float32)"),
    "size": ("all_gather(840 of float32)", "all_gather(1680 of float32)"),
    "little and much": ("all_gather(840 of float32)", "all_gather(84000 of float32)"),
    "much and little": ("all_gather(84000 of float32)", "barrier(unit blocks.3)"),
    "dtype": ("all_gather(840 of float32)", "all_gather(840 of float64)"),
    "order": ("reduce_scatter(840 of float32, sum)", "all_gather(840 of float32)"),
    "call": ("all_to_all(840 of float64)", "broadcast(840 of float64, root 0)"),
    "counts": ("all_to_all(840 of float64)", "all_to_all(counts per peer of float64)"),
    "op": ("all_reduce(840 of float64, sum)", "all_reduce(840 of float64, max)"),
    "root": ("broadcast(840 of float64, root 0)", "broadcast(840 of float64, root 1)"),
    "kind": ("reduce_scatter(840 of bfloat16, sum)", "reduce_scatter(840 of float16, sum)"),
    "barrier": ("barrier(unit blocks.3)", "barrier(unit blocks.4)"),
}


MESSAGES = {  # that are sent, and that are expected
    "what": ((5, "f4", "F3 of stage 2"), (5, "f4", "F2 of stage 2")),
    "no what": ((5, "f4", ""), (5, "f4", "F2 of stage 2")),
    "size": ((600_000, "f4", "F3"), (5, "f4", "F3")),
    "nothing": ((0, "f4", "F3"), (5, "f4", "F3")),
    "dtype": ((5, "f4", "F3"), (5, "i4", "F3")),
}


def on_every_rank(test, least=1):
    """A test of what each rank does with `comm`, that of its world; it needs so many ranks."""
    signature = inspect.signature(test)
    parameters = [each for name, each in signature.parameters.items() if name != "comm"]

    @wraps(test)
    def run(self, **how):
        self.run(lambda comm: comm.size < least or test(self, comm, **how))

    run.__signature__ = signature.replace(parameters=parameters)
    return run


between_ranks = partial(on_every_rank, least=2)


class Contract:
    """Subclasses give `run(body, *args)`: call body(communicator, *args) on every rank."""

    @on_every_rank
    def test_all_gather_collects_every_slice(self, comm):
        for dtype, n in MOVED:
            with noting(dtype, n):
                everything = np.concatenate([values(r, n, dtype) for r in range(comm.size)])
                for buffer in (
                    np.zeros(comm.size * n, dtype),
                    comm.allocate(comm.size * n, dtype, shared=False),
                    comm.allocate(comm.size * n, dtype, shared=True),
                ):
                    buffer[own(comm, n)] = values(comm.rank, n, dtype)
                    comm.all_gather(buffer, stream=INLINE)
                    same(buffer, everything)
                comm.barrier(stream=INLINE)  # peers may still read what lies in this rank's memory

    @pytest.mark.parametrize("shared", [False, True])
    @on_every_rank
    def test_all_gather_reuses_a_part_of_an_allocation(self, comm, shared):
        n, offset = 1000, 100
        buffer = comm.allocate(offset + comm.size * n + 5, np.float32, shared=shared)
        part = buffer[offset : offset + comm.size * n]
        for step in range(20):
            comm.barrier(stream=INLINE)  # peers may still read what the last step gathered
            part[own(comm, n)] = values(comm.rank, n, np.float32, step)
            comm.all_gather(part, stream=INLINE)
            same(part, np.concatenate([values(r, n, np.float32, step) for r in range(comm.size)]))
        assert not buffer[:offset].any() and not buffer[offset + comm.size * n :].any()

    @on_every_rank
    def test_reduce_scatter_sums_by_a_tree_over_the_ranks(self, comm):
        for dtype, n, accumulate in SUMS:
            with noting(dtype, n, accumulate):
                count = comm.size * n
                scale = 0.3 if np.dtype(dtype).kind == "f" else 1.0
                mine, before = values(comm.rank, count, dtype), values(99, n, dtype)
                added_to = before if accumulate else None
                expected = total(comm.size, count, dtype, own(comm, n), output=added_to, scale=scale)
                for buffer in (np.empty(count, dtype), comm.allocate(count, dtype, shared=False)):
                    buffer[:] = mine
                    output = before.copy()
                    comm.reduce_scatter(output, buffer, stream=INLINE, scale=scale, accumulate=accumulate)
                    same(output, expected)
                    same(buffer, mine)

    @on_every_rank
    def test_reduce_scatter_sums_the_bits_of_a_16_bit_type_in_float32(self, comm):
        for accumulate, n, kind in SUMS_OF_BITS:
            with noting(accumulate, n, kind):
                count = comm.size * n
                slices = [values(rank, count, np.float32, part=own(comm, n)) for rank in range(comm.size)]
                parts = [unpacked(packed(numbers, kind), kind) for numbers in slices]
                mine = packed(values(comm.rank, count, np.float32), kind)
                for buffer in (np.empty(count, np.uint16), comm.allocate(count, np.uint16, shared=False)):
                    buffer[:] = mine
                    output = values(99, n, np.float32)
                    expected = added(tree(parts), 0.3, output if accumulate else None)
                    comm.reduce_scatter(
                        output, buffer, stream=INLINE, scale=0.3, accumulate=accumulate, kind=kind
                    )
                    same(output, expected)
                    same(buffer, mine)

    @on_every_rank
    def test_reduce_scatter_into_its_own_slice(self, comm):
        for n in (5, 300_001):
            mine = values(comm.rank, comm.size * n, np.float32)
            for buffer in (mine.copy(), comm.allocate(mine.size, np.float32, shared=False)):
                buffer[:] = mine
                comm.reduce_scatter(buffer[own(comm, n)], buffer, stream=INLINE)
                mine[own(comm, n)] = total(comm.size, mine.size, np.float32, own(comm, n))
                same(buffer, mine)
                mine = values(comm.rank, comm.size * n, np.float32)

    @on_every_rank
    def test_a_buffer_that_was_read_may_be_overwritten_at_once(self, comm):
        n = 20_000
        buffer = comm.allocate(comm.size * n, np.float32, shared=False)
        output, exchanged = np.empty(n, np.float32), np.empty(comm.size * n, np.float32)
        for step in range(30):
            buffer[:] = step + comm.rank
            comm.reduce_scatter(output, buffer, stream=INLINE)
            buffer[:] = np.nan
            assert (output == comm.size * step + sum(range(comm.size))).all()
            buffer[:] = step + comm.rank
            comm.all_to_all(exchanged, buffer, stream=INLINE)
            buffer[:] = np.nan
            assert (exchanged.reshape(comm.size, n).T == step + np.arange(comm.size)).all()
            if step < 5:
                exchange(comm, lambda s, r: 19_000 * (r == 0) + r, np.float32, buffer, step)

    @on_every_rank
    def test_all_reduce_gives_every_rank_the_same_bits(self, comm):
        for op, dtype, count in REDUCTIONS:
            with noting(op, dtype, count):
                mine = values(comm.rank, count, dtype)
                expected = total(comm.size, count, dtype, slice(None), op=op)
                for buffer in (np.empty(count, dtype), comm.allocate(count, dtype, shared=False)):
                    buffer[:] = mine
                    comm.all_reduce(buffer, op=op, stream=INLINE)
                    same(buffer, expected)

    @on_every_rank
    def test_broadcast_from_every_root(self, comm):
        for dtype, count in MOVED:
            with noting(dtype, count):
                for root in range(comm.size):
                    buffer = values(comm.rank, count, dtype)
                    comm.broadcast(buffer, root=root, stream=INLINE)
                    same(buffer, values(root, count, dtype))

    @on_every_rank
    def test_broadcast_on_shared_memory_is_what_root_wrote(self, comm):
        buffer = comm.allocate(1000, np.float64, shared=True)
        if comm.rank == comm.size - 1:
            buffer[:] = 7
        comm.broadcast(buffer, root=comm.size - 1, stream=INLINE)
        assert (buffer == 7).all()

    @on_every_rank
    def test_all_to_all_transposes(self, comm):
        for dtype, n in MOVED:
            with noting(dtype, n):
                count = comm.size * n
                parts = [values(rank, count, dtype, part=own(comm, n)) for rank in range(comm.size)]
                mine, expected = values(comm.rank, count, dtype), np.concatenate(parts)
                for buffer in (np.empty(count, dtype), comm.allocate(count, dtype, shared=False)):
                    buffer[:] = mine
                    output = np.zeros(count, dtype)
                    comm.all_to_all(output, buffer, stream=INLINE)
                    same(output, expected)
                    same(buffer, mine)

    @on_every_rank
    def test_all_to_all_by_counts_per_peer(self, comm):
        for name, pattern in PATTERNS.items():
            with noting(name):
                counts = partial(pattern, n=comm.size)
                exchange(comm, counts, np.float32)
                most = max(sum(counts(s, r) for r in range(comm.size)) for s in range(comm.size))
                memory = comm.allocate(most + comm.size, np.float32, shared=False)
                for salt in range(3):
                    exchange(comm, counts, np.float32, memory[comm.rank :], salt)
                exchange(comm, counts, np.float32, memory if comm.rank else None)

    @on_every_rank
    def test_all_to_all_by_counts_carries_every_type(self, comm):
        for dtype in CARRIED:
            with noting(dtype):
                exchange(comm, lambda s, r: 500 * s + r, dtype)
                exchange(comm, lambda s, r: 70_001 * (s != r), dtype)

    @pytest.mark.parametrize("much", [1, 100_000])
    @on_every_rank
    def test_counts_that_ranks_do_not_agree_on_are_told_to_all_and_nothing_moves(self, comm, much):
        twin, size = comm.duplicate(), comm.size
        if size == 1:
            with pytest.raises(ValueError, match="rank 0 sends 2 elements to itself, and receives 1"):
                twin.all_to_all(np.ones(1), np.ones(2), received=[1], sent=[2], stream=INLINE)
            return
        sent, received = [much] * size, [much] * size
        if twin.rank == 1:
            sent[0] += 4
        output = np.zeros(sum(received))
        with pytest.raises(CollectiveMismatch) as caught:
            twin.all_to_all(
                output, np.ones(sum(sent)), received=received, sent=sent, stream=INLINE, tag="dispatch"
            )
        assert re.fullmatch(
            r"ranks differ in collective \d of this communicator, all_to_all\(unit dispatch\): "
            f"rank 1 sends {much + 4} elements to rank 0, which expects {much}",
            str(caught.value),
        )
        assert not output.any()
        exchange(twin, lambda s, r: much + s, np.float64)  # and it can be used again
        twin.close()

    @pytest.mark.parametrize("count", [0, 1, 300_001])
    @between_ranks
    def test_messages_between_two_ranks_keep_their_order(self, comm, count):
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        sent = np.empty(count, np.float32)
        for salt in range(3):
            sent[:] = values(comm.rank, count, np.float32, salt)
            comm.send(sent, peer=right, stream=INLINE)
        sent[:] = np.nan  # what was sent is the communicator's
        for salt in range(3):
            received = np.zeros(count, np.float32)
            comm.recv(received, peer=left, stream=INLINE)
            same(received, values(left, count, np.float32, salt))

    @pytest.mark.parametrize("count", [0, 5, 1 << 18, 300_001])
    @between_ranks
    def test_direct_messages_have_arrived_when_the_sender_goes_on(self, comm, count):
        """The sender may overwrite what it has sent; 1 << 18 of float32 are a whole piece of a mailbox."""
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for salt in range(5):
            sent = values(comm.rank, count, np.float32, salt)
            received = np.zeros(count, np.float32)
            calls = [
                lambda sent=sent: comm.send(sent, peer=right, stream=INLINE, tag="F3", direct=True),
                lambda sent=sent: sent.fill(np.nan),
                lambda received=received: comm.recv(
                    received, peer=left, stream=INLINE, tag="F3", direct=True
                ),
            ]
            for call in calls if comm.rank % 2 == 0 else (calls[2], *calls[:2]):  # not all send first
                call()
            same(received, values(left, count, np.float32, salt))

    @pytest.mark.parametrize("direct", [False, True])
    @pytest.mark.parametrize("difference", MESSAGES)
    @on_every_rank
    def test_messages_that_differ_from_what_is_expected_are_taken_and_both_ends_named(
        self, comm, difference, direct
    ):
        sent, expected = MESSAGES[difference]
        if comm.rank == 0 and comm.size > 1:
            for count, dtype, what in (sent, (7, "u2", "F9")):
                array = np.ones(count, dtype)
                comm.send(array, peer=1, stream=INLINE, tag=what, direct=direct)
        elif comm.rank == 1:
            array = np.zeros(*expected[:2])
            with pytest.raises(CollectiveMismatch) as caught:
                comm.recv(array, peer=0, stream=INLINE, tag=expected[2], direct=direct)
            noting = [f"{what}, {count} of {np.dtype(dtype)}" for count, dtype, what in (sent, expected)]
            noting = [text.removeprefix(", ") for text in noting]
            assert str(caught.value) == f"rank 0 sent {noting[0]}; rank 1 receives {noting[1]}"
            assert not array.any()
            after = np.zeros(7, np.uint16)  # the next one is found
            comm.recv(after, peer=0, stream=INLINE, tag="F9", direct=direct)
            assert after.all()

    @between_ranks
    def test_ranks_may_send_much_before_they_receive_or_meet(self, comm):
        right, left, count = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, 1 << 22
        for meet in (False, True):
            received = np.zeros(count, np.float32)
            comm.send(np.full(count, comm.rank, np.float32), peer=right, stream=INLINE)
            if meet:
                comm.barrier(stream=INLINE)
            comm.recv(received, peer=left, stream=INLINE)
            assert (received == left).all()

    @pytest.mark.parametrize("longest", [0, 248, 249, 1 << 16])
    @on_every_rank
    def test_all_are_told_what_each_says(self, comm, longest):
        said = [bytes([rank]) * (longest - rank if longest > rank else 0) for rank in range(comm.size)]
        assert comm.all_gather_bytes(said[comm.rank]) == said

    @pytest.mark.parametrize("count", [0, 5, 1 << 20])
    @between_ranks
    def test_exchange_sends_and_receives_at_once(self, comm, count):
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        output = np.zeros(count + left, np.float64)  # of another size than what is sent
        comm.exchange(
            output, values(comm.rank, count + comm.rank, "f8"), to=right, source=left, stream=INLINE
        )
        same(output, values(left, count + left, "f8"))
        output = np.zeros(3 - comm.rank % 2)
        if comm.rank == 0:  # the other end may send and receive
            comm.exchange(output, values(7, 2, "f8"), to=1, source=1, stream=INLINE)
            same(output, values(8, 3, "f8"))
        elif comm.rank == 1:
            comm.send(values(8, 3, "f8"), peer=0, stream=INLINE)
            comm.recv(output, peer=0, stream=INLINE)
            same(output, values(7, 2, "f8"))

    @on_every_rank
    def test_little_data_go_along_with_a_call_up_to_the_last_byte(self, comm):
        edges = LITTLE // 4 // comm.size, LITTLE // 4, LITTLE // comm.size, LITTLE
        for n in (*edges, *(edge + 1 for edge in edges)):
            mine = [values(rank, comm.size * n, np.uint8) for rank in range(comm.size)]
            gathered, exchanged = np.zeros((2, comm.size * n), np.uint8)
            gathered[own(comm, n)] = mine[comm.rank][own(comm, n)]
            comm.all_gather(gathered, stream=INLINE)
            same(gathered, np.concatenate([mine[r][r * n : (r + 1) * n] for r in range(comm.size)]))
            comm.all_to_all(exchanged, mine[comm.rank], stream=INLINE)
            same(exchanged, np.concatenate([theirs[own(comm, n)] for theirs in mine]))
            output = np.zeros(n, np.uint8)
            comm.reduce_scatter(output, mine[comm.rank], stream=INLINE)
            same(output, tree([theirs[own(comm, n)] for theirs in mine]))
            reduced, sent = mine[comm.rank][:n].copy(), mine[comm.rank][:n].copy()
            comm.all_reduce(reduced, op="max", stream=INLINE)
            same(reduced, tree([theirs[:n] for theirs in mine], np.maximum))
            comm.broadcast(sent, root=comm.size - 1, stream=INLINE)
            same(sent, mine[-1][:n])

    @on_every_rank
    def test_barrier_lets_nobody_pass_before_the_last_arrives(self, comm):
        time.sleep(0.02 * comm.rank)
        times = np.zeros((comm.size, 2))
        times[comm.rank, 0] = time.time()  # hosts have one such clock, and others by themselves
        comm.barrier(stream=INLINE)
        times[comm.rank, 1] = time.time()
        comm.all_gather(times.reshape(-1), stream=INLINE)
        assert times[:, 0].max() <= times[:, 1].min()

    @on_every_rank
    def test_split_makes_groups_in_the_order_of_their_keys(self, comm):
        part = comm.split(comm.rank % 2, -comm.rank)
        members = [r for r in reversed(range(comm.size)) if r % 2 == comm.rank % 2]
        assert (part.rank, part.size) == (members.index(comm.rank), len(members))
        buffer = part.allocate(part.size * 3, np.int64, shared=True)
        buffer[own(part, 3)] = comm.rank
        part.all_gather(buffer, stream=INLINE)
        assert buffer.tolist() == np.repeat(members, 3).tolist()
        gradient = np.full(part.size * 3, comm.rank, np.float64)
        output = np.zeros(3)
        part.reduce_scatter(output, gradient, stream=INLINE)
        assert (output == sum(members)).all()
        part.close()

    @on_every_rank
    def test_split_without_a_colour_gives_none(self, comm):
        part = comm.split(None if comm.rank == 0 else 5, comm.rank)
        assert (part is None) == (comm.rank == 0)
        if part is not None:
            one = np.ones(1)
            part.all_reduce(one, stream=INLINE)
            assert one[0] == part.size == comm.size - 1
            part.close()

    @on_every_rank
    def test_a_duplicate_runs_beside_its_origin_in_another_stream(self, comm):
        twin = comm.duplicate()
        streams = [CPU.new_stream("gather"), CPU.new_stream("reduce")]
        n = 5000
        gathered = [comm.allocate(comm.size * n, np.float32, shared=False) for _ in range(20)]
        gradients = [twin.allocate(comm.size * n, np.float32, shared=False) for _ in range(20)]
        outputs = np.zeros((20, n), np.float32)
        for i, (full, gradient) in enumerate(zip(gathered, gradients, strict=True)):
            full[own(comm, n)] = i + comm.rank
            gradient[:] = i * (comm.rank + 1)
        calls = [
            lambda: [comm.all_gather(full, stream=streams[0]) for full in gathered],
            lambda: [
                twin.reduce_scatter(output, gradient, stream=streams[1])
                for output, gradient in zip(outputs, gradients, strict=True)
            ],
        ]
        for call in calls if comm.rank % 2 else reversed(calls):  # ranks differ in which comes first
            call()
        for stream in streams:
            stream.synchronize()
        for i in range(20):
            assert gathered[i].tolist() == np.repeat(np.arange(comm.size) + i, n).tolist()
            assert (outputs[i] == i * sum(range(1, comm.size + 1))).all()
        twin.close()

    @on_every_rank
    def test_a_call_returns_before_its_work_is_done(self, comm):
        stream, gate = CPU.new_stream("late"), threading.Event()
        stream.submit(gate.wait)
        buffer = np.full(comm.size, -1, np.int64)
        comm.broadcast(buffer, root=0, stream=INLINE)
        buffer[comm.rank] = comm.rank
        comm.all_gather(buffer, stream=stream)
        assert (np.delete(buffer, comm.rank) == -1).all()
        gate.set()
        stream.synchronize()
        assert buffer.tolist() == list(range(comm.size))

    @pytest.mark.parametrize("difference", DIFFERENCES)
    @between_ranks
    def test_ranks_that_differ_all_get_an_error_that_names_them_and_their_calls(self, comm, difference):
        others, odd = DIFFERENCES[difference]
        twin = comm.duplicate()
        twin.register_names(["blocks.3", "blocks.4"])
        twin.barrier(stream=INLINE)
        with pytest.raises(CollectiveMismatch, match="collective 2 of this communicator") as caught:
            CALLS[odd if comm.rank == 1 else others](twin)
        message = str(caught.value)
        assert f"rank 1 called {odd}" in message
        everyone_else = "rank 0" if comm.size == 2 else r"ranks 0, 2[^a-z]*(and \d more)?"
        assert re.search(f"{everyone_else} called {re.escape(others)}", message)
        twin.close()

    @between_ranks
    def test_a_call_on_shared_memory_is_compared_as_well(self, comm):
        twin = comm.duplicate()
        twin.register_names(["blocks.3", "blocks.4"])
        buffer = twin.allocate(comm.size * 5, np.float32, shared=True)
        with pytest.raises(CollectiveMismatch, match=r"unit blocks\.3\).*unit blocks\.4\)"):
            twin.all_gather(buffer, stream=INLINE, tag="blocks.4" if comm.rank == 1 else "blocks.3")
        twin.close()

    @between_ranks
    def test_names_are_known_to_duplicates_and_splits_and_else_are_another_unit(self, comm):
        name = "told to none" if comm.rank == 1 else "blocks.3"
        for made in (comm.duplicate(), comm.split(0, comm.rank)):
            with pytest.raises(CollectiveMismatch) as caught:
                made.barrier(stream=INLINE, tag=name)
            assert f"barrier(unit {name})" in str(caught.value)
            assert re.search(r"rank 1 called barrier\((unit told to none|another unit)\)", str(caught.value))
            made.close()
        comm.register_names(["told to none", "blocks.3"])
        for made in (comm.duplicate(), comm.split(0, comm.rank)):
            with pytest.raises(CollectiveMismatch, match=r"unit blocks\.3\).*unit told to none\)"):
                made.barrier(stream=INLINE, tag=name)
            made.close()

    @on_every_rank
    def test_ranks_that_agree_may_use_any_names(self, comm):
        for step in range(20):
            comm.barrier(stream=INLINE, tag=f"blocks.{step // 3}")

    @on_every_rank
    def test_shared_memory_is_one_buffer_where_the_backend_says_so(self, comm):
        shared = comm.allocate(comm.size, np.int64, shared=True)
        private = comm.allocate(comm.size, np.int64, shared=False)
        assert not shared.any() and not private.any() and shared.flags.c_contiguous
        comm.barrier(stream=INLINE)
        shared[comm.rank] = private[comm.rank] = 1
        comm.barrier(stream=INLINE)
        neighbours = shared.sum()
        comm.barrier(stream=INLINE)
        assert private.sum() == 1
        assert (neighbours > 1) == (comm.shares_memory and comm.size > 1)

    @on_every_rank
    def test_an_array_outlives_its_communicator(self, comm):
        twin = comm.duplicate()
        buffer = twin.allocate(1000, np.float32, shared=False)
        twin.close()
        buffer[:] = 3
        assert buffer.sum() == 3000


def digest(comm):
    """A hash of what float32 sums give on this rank: equal for every backend at one world size."""
    result = hashlib.sha256()
    for n in (3, 70_001):
        buffer = comm.allocate(comm.size * n, np.float32, shared=False)
        buffer[:] = values(comm.rank, buffer.size, np.float32)
        output = values(5, n, np.float32)
        comm.reduce_scatter(output, buffer, stream=INLINE, scale=0.7, accumulate=True)
        result.update(output.tobytes())
        comm.all_reduce(buffer, stream=INLINE)
        result.update(buffer.tobytes())
    return result.hexdigest()
