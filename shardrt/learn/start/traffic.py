"""Exercise 1: the bytes of a step.

N ranks share a buffer of B bytes. Rank r owns part r of N equal parts.
- all_gather: each rank begins with its own part. At the end each rank has the whole buffer.
- reduce_scatter: each rank begins with a whole buffer. At the end it has its own part of the sum, which it
  adds up itself: from each other rank it receives that part.

Fill in how many bytes ONE rank receives. shardrt's CollectiveCounter counts the same bytes on real ranks.

Then predict a training step of FULL_SHARD. The model has some blocks, and each block is a unit.
- A unit is gathered before its forward and released after it. Backward needs its parameters again.
- The outermost unit (the root) holds the parameters outside the blocks. It stays gathered from forward to
  backward.
- The gradient of each unit is reduced once. It has as many bytes as the parameters.

Read more: docs/learn/from_scratch.md.
"""


def all_gather(nbytes, ranks):
    """Bytes that a rank receives when a buffer of `nbytes` (the whole) is gathered."""
    raise NotImplementedError


def reduce_scatter(nbytes, ranks):
    """Bytes that a rank receives when gradients of `nbytes` (on each rank) are summed and scattered."""
    raise NotImplementedError


def step(blocks, root, ranks):
    """(bytes received in all-gathers, bytes received in reduce-scatters) in one step.

    blocks: a list with the bytes of each block. root: the bytes of the outermost unit.
    """
    raise NotImplementedError
