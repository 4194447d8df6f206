"""Exercise 11: beat full sharding.

512 H100 in 64 nodes of 8 train three wide blocks in bfloat16, with 4 micro-batches a step under no_sync.
Full sharding takes about 88 ms a step. Hybrid sharding keeps `copies` copies of the model, and shards each
over `shards` ranks: copies x shards = 512. Neighbouring ranks shard a copy, so 64x8 shards inside a node.

No GPU is needed. The simulator records the program and prices it:

    shardrt simulate --ranks 512 --mesh 1x512 -- shardrt.learn.hybrid

Its report has the time of the step, the memory of a rank, and the bytes on links. 1x512 is full sharding.
Find

    FAST     (copies, shards) of a step of at most 42 ms that takes at most 3.15 GB (10^9 bytes) on each rank
    FRUGAL   (copies, shards) with the fewest bytes between nodes, of meshes that take at most 4 GB

Before you try all of them, think: which bytes stay in a node? Which grow with `shards`, and which with the
number of micro-batches? Read more: docs/learn/strategies.md.
"""

FAST = (1, 512)
FRUGAL = (1, 512)
