"""What tests of several ranks have in common, as plain functions: `from tests import lab`.

A test builds a model, runs it on some ranks, and compares what comes out:

    @lab.on_ranks(2)  # the body runs on two threads at once, each a rank
    def test_a_unit_is_gathered_twice():
        counts = lab.Counts()
        model, mesh = lab.build(wrap=counts, strategy="FULL_SHARD")
        lab.backward(model, mesh)
        assert counts.calls("all_gather") == [7]

    def test_strategies_have_the_same_bits():
        lab.assert_equal(lab.train_on(2, strategy="SHARD_OPT"), lab.train_on(2))

nets.py has the small models; training.py builds and trains them; world.py runs functions on ranks;
counting.py counts collectives, slots and bytes; states.py saves and restores; comparing.py compares values
in any nesting; refusing.py makes a test of a table of refusals. jobs.py, which is imported by itself, runs
models.train.
"""

# ruff: noqa: F401  the names that tests use
from tests.lab.comparing import assert_close, assert_equal, assert_near
from tests.lab.counting import Counts, arenas_of, bytes_held, bytes_planned, groups_of, in_use, slots
from tests.lab.nets import (
    Block,
    CalledTwice,
    Frozen,
    Nested,
    Net,
    NeverCalled,
    Outer,
    PartlyUsed,
    Skips,
    TiedInside,
    Viewed,
)
from tests.lab.refusing import refusals
from tests.lab.states import assert_restored_anywhere, give_gradients, saved_or_restored
from tests.lab.training import (
    Trained,
    adamw,
    assert_weights,
    backward,
    backward_raises,
    batches,
    build,
    calls_of_a_step,
    count_step,
    gradients,
    learn,
    loss_of,
    mesh_for,
    momentum,
    rows,
    seeded,
    shard,
    train,
    train_on,
    update,
    whole_gradients,
)
from tests.lab.world import first, on_ranks, printed
