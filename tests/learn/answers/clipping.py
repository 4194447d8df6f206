import numpy as np


def clip(shards, all_reduce, max_norm):
    total = np.zeros(1)
    for shard in shards:
        total += (shard.astype(np.float64) ** 2).sum()
    all_reduce(total)
    norm = float(np.sqrt(total[0]))
    if norm > max_norm:
        for shard in shards:
            shard *= np.float32(max_norm / norm)
    return norm
