"""Orders of three backwards in halves, for tests of whatever they run on: the bits of usual ones.

losses(number) runs the forward of a micro-batch. reduces(number) is a context around what makes its weight
gradients: see reducing_last.
"""

from contextlib import nullcontext

from shardrt.deferred_gradients import DeferredGradients
from shardrt.fsdp import no_sync

MICRO_BATCHES = 3


def reducing_last(model):
    """Where gradients are reduced with those of the last micro-batch alone."""
    return lambda number: nullcontext() if number == MICRO_BATCHES - 1 else no_sync(model)


def always(number):
    return nullcontext()


def usual(losses, reduces=always):
    for number in range(MICRO_BATCHES):
        with reduces(number):
            losses(number).backward()


def each_at_its_end(losses, reduces=always):
    for number in range(MICRO_BATCHES):
        late = DeferredGradients()
        losses(number).backward(deferred=late)
        with reduces(number):
            late.flush()


def as_a_pipeline(losses, reduces=always):
    """F0 F1 I0 F2 I1 W0 I2 W1 W2. What `reduces` says counts when a late half runs."""
    first, second = losses(0), losses(1)
    lates = [DeferredGradients() for _ in range(MICRO_BATCHES)]
    first.backward(deferred=lates[0])
    third = losses(2)
    second.backward(deferred=lates[1])
    with reduces(0):
        lates[0].flush()
    third.backward(deferred=lates[2])
    for number in (1, 2):
        with reduces(number):
            lates[number].flush()


def all_inputs_first(losses, reduces=always):
    lates = [DeferredGradients() for _ in range(MICRO_BATCHES)]
    for loss, late in zip([losses(number) for number in range(MICRO_BATCHES)], lates, strict=True):
        with reduces(0):
            loss.backward(deferred=late)
    for number, late in enumerate(lates):
        with reduces(number):
            late.flush()
