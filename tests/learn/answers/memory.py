def held(strategy, parameters, ranks, group):
    shares = {"NO_SHARD": 1, "HYBRID_SHARD": group}.get(strategy, ranks)
    arrays = 4
    return 4 * arrays * parameters / shares


def gathered(strategy, parameters, largest, root, prefetch):
    if strategy == "SHARD_GRAD_OP":
        return 4 * parameters
    buffers = prefetch + 1
    return 4 * (buffers * largest + root)
