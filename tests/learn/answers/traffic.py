def all_gather(nbytes, ranks):
    return nbytes // ranks * (ranks - 1)


def reduce_scatter(nbytes, ranks):
    return nbytes // ranks * (ranks - 1)


def step(blocks, root, ranks):
    gathered = sum(2 * all_gather(block, ranks) for block in blocks) + all_gather(root, ranks)
    reduced = sum(reduce_scatter(unit, ranks) for unit in [*blocks, root])
    return gathered, reduced
