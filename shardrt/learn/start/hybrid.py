"""Exercise 11: beat full sharding.

512 H100 in 64 nodes of 8 train three wide blocks in bfloat16. A step has 4 micro-batches, the first 3 under
no_sync. Full sharding takes about 88 ms a step. Hybrid sharding keeps `copies` copies of the model, and
shards each over `shards` ranks: copies x shards = 512. Neighbouring ranks shard a copy, so 64x8 shards inside
a node.

No GPU is needed. The simulator records the program and prices it:

    shardrt simulate --ranks 512 --mesh 1x512 -- shardrt.learn.hybrid

Its report has the time of the step, the memory of a rank, and the bytes on links. 1x512 is full sharding.
Find two meshes (copies, shards):

    FAST     a step takes at most 42 ms, and each rank at most 3.15 GB (10^9 bytes)
    FRUGAL   each rank takes at most 4 GB, and the fewest bytes go between nodes

Before you try all of them, think. Which bytes stay in a node? Which grow with the number of micro-batches?
How many steps does a ring of `shards` ranks have? Read more: "Memory and strategies"
(docs/learn/strategies.md) has the bytes; with M micro-batches, multiply its all-gather column by M.
"Simulate" (docs/howto/simulate.md) has the rings.
"""

FAST = (1, 512)
FRUGAL = (1, 512)
