"""Exercise 2: the memory of a strategy.

A model trains in float32 with AdamW on N ranks. Predict the bytes on one rank.

held(...): what the rank keeps between steps: parameters, gradients and AdamW's state. AdamW keeps two arrays
as long as the parameters (the two moments). All arrays are float32.
- NO_SHARD: every rank has everything (DDP).
- SHARD_GRAD_OP and FULL_SHARD: each rank has 1/N of everything.
- HYBRID_SHARD: the N ranks form N/G groups of G ranks. Each group shards a copy of everything.

gathered(...): the most bytes of gathered (whole) parameters at once.
- FULL_SHARD releases a unit after use. While a unit computes, the next `prefetch` units are gathered already.
  Each of these units has a buffer, as large as the largest unit. The outermost unit (root) has a buffer of
  its own.
- SHARD_GRAD_OP keeps every unit from forward to backward.

shardrt's memory_plan computes these bytes before anything is allocated. Read more: docs/learn/strategies.md.
"""


def held(strategy, parameters, ranks, group):
    """Bytes on one rank. parameters: how many the model has. ranks, group: N and G."""
    raise NotImplementedError


def gathered(strategy, parameters, largest, root, prefetch):
    """Bytes, for FULL_SHARD and SHARD_GRAD_OP. largest, root: how many parameters these units have."""
    raise NotImplementedError
