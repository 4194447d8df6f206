"""Exercise 7: predict the schedule.

With SHARDRT_DEBUG=1 each rank prints what it issues. This is a step of a model with two units, a and b, under
FULL_SHARD with prefetch 1. The outermost unit has no parameters of its own. The lines are shortened: without
"[rank 0]", without those of forward, and "root" stands for "(root)":

    gather root         forward begins
    gather a            a is due
    gather b            the prefetch: b comes next
    release a           a has computed
    release b
    gather b            backward begins with the last unit
    gather a            the prefetch, in the order of backward
    release b
    reduce b            its gradient is complete
    release a
    reduce a
    release root

prefetch is the number of units that are gathered ahead of the unit that is due. With prefetch 0 a unit is
gathered when it is due. With prefetch 2 the next two are gathered ahead, but no unit is gathered twice in one
direction.

Write the function that predicts these lines for any units and any prefetch. The grader runs the real
schedule. To watch it yourself, run a model of yours with SHARDRT_DEBUG=1 and fully_shard(..., prefetch=0).
"""


def events(names, prefetch):
    """The lines of a step, as a list: ["gather root", "gather a", ...]. names: units in order of forward."""
    raise NotImplementedError
