"""Exercise 3: collectives with threads.

Ranks are threads of one process. Write the two collectives of FSDP. Each rank calls them with its `world`:

    world.rank, world.size
    world.arrays    a list with one place per rank, the same list for all ranks
    world.wait()    a barrier: returns when all ranks have called it

A rank offers an array by `world.arrays[world.rank] = array`, and reads those of the others. It must not read
before the others have offered. After your function returns, the caller may overwrite its array at once, so no
rank may still read it. A collective must not change its input.

Read more: "FSDP from scratch" (docs/learn/from_scratch.md).

The grader runs the ranks one at a time, in several orders. A missing barrier shows in one of them.
"""

import numpy as np


def all_gather(world, shard):
    """The shards of all ranks, one after the other: a new array of size world.size * shard.size."""
    raise NotImplementedError


def reduce_scatter(world, full):
    """This rank's part of the sum of all arrays `full`: a new array of size full.size // world.size."""
    raise NotImplementedError
