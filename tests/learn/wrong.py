"""Wrong answers: changes of the reference answers, with words of the hint that each must get."""

from typing import NamedTuple


class Wrong(NamedTuple):
    """The reference with `old` replaced by `new`, once. hint: words of the hint that it gets."""

    name: str
    old: str
    new: str
    hint: str


FORMULA = "return nbytes // ranks * (ranks - 1)"
FIRST = "    world.wait()\n    whole"
LAST = "    world.wait()\n    return whole"
NORMS = "all_reduce(total)\n    norm = float(np.sqrt(total[0]))"
GATHER = "ranks.all_gather(shard).reshape(shapes[i])"
AGAIN = "ranks.all_gather(shards[i]).reshape(shapes[i])"
UPDATE = "        shards[i] -= rate * ranks.reduce_scatter(gradient)\n"
BACK = f"        dy = dy @ {AGAIN}.T * (inputs[i] > 0)\n"
CHOICE = "nullcontext() if number == last else no_sync(model)"
PLACES = "        for place, name in enumerate(order):\n"
FREE = "            compute.wait(free[n])\n"
READ = "            reduce.record(free[n])\n"
SUM = "y = h @ B\n    all_reduce(y)\n    return y + b"
MIX = "            direction = np.sign(beta1 * m[part] + (1 - beta1) * gradient[part])\n"
MOVE = "            shard[part] -= lr * (direction + decay * shard[part])\n"
KEEP = "            m[part] = beta2 * m[part] + (1 - beta2) * gradient[part]\n"

WRONG = [
    Wrong("traffic", FORMULA, "return nbytes", "already has its own part"),
    Wrong("traffic", FORMULA, "return nbytes * (ranks - 1)", "not one part"),
    Wrong("traffic", FORMULA, "return nbytes // ranks", "EACH of the other ranks"),
    Wrong("traffic", "2 * all_gather(block", "all_gather(block", "backward gathers the block again"),
    Wrong("traffic", "+ all_gather(root", "+ 2 * all_gather(root", "root stays gathered"),
    Wrong("traffic", "sum(reduce_scatter(unit", "sum(2 * reduce_scatter(unit", "That is an all-reduce"),
    Wrong("memory", "arrays = 4", "arrays = 1", "Add the gradients"),
    Wrong("memory", "arrays = 4", "arrays = 2", "optimizer state is missing"),
    Wrong("memory", "arrays = 4", "arrays = 3", "AdamW keeps two arrays"),
    Wrong("memory", ', "HYBRID_SHARD": group', "", "How many ranks share one copy"),
    Wrong("memory", "buffers = prefetch + 1", "buffers = prefetch", "The unit that computes needs a buffer"),
    Wrong("memory", '== "SHARD_GRAD_OP"', '== "NO_SHARD"', "keeps all units until backward"),
    Wrong("collectives", FIRST, "    whole", "before the others have offered"),
    Wrong("collectives", LAST, "    return whole", "went on after its return"),
    Wrong("collectives", "np.split(total, world.size)[world.rank]", "total", "the whole sum"),
    Wrong("collectives", ".copy()", " / world.size", "returns the mean"),
    Wrong("collectives", "np.zeros_like(full)", "full", "changes its input in place"),
    Wrong("collectives", "[world.rank].copy()", "[-1 - world.rank].copy()", "part of another rank"),
    Wrong("clipping", "    all_reduce(total)\n", "", "never communicates"),
    Wrong(
        "clipping",
        NORMS,
        "total = np.sqrt(total)\n    all_reduce(total)\n    norm = float(total[0])",
        "squares",
    ),
    Wrong(
        "clipping",
        "    all_reduce(total)",
        "    [all_reduce(total / len(shards)) for _ in shards]",
        "One is enough",
    ),
    Wrong("clipping", "if norm > max_norm", "if norm > 0", "never makes a gradient larger"),
    Wrong("clipping", "np.sqrt(total[0])", "total[0]", "The norm is its root"),
    Wrong("clipping", "/ norm)", "/ np.linalg.norm(shard))", "the same factor"),
    Wrong(
        "loop",
        GATHER,
        f"(wholes := locals().get('wholes', []) + [{GATHER}])[-1]",
        "whole layers exist at once",
    ),
    Wrong(
        "loop", "ranks.reduce_scatter(gradient)", "gradient.reshape(-1)[: shards[i].size]", "must be added"
    ),
    Wrong(
        "loop",
        "ranks.reduce_scatter(gradient)",
        "ranks.reduce_scatter(gradient) * len(x) / rows",
        "Divide by nothing",
    ),
    Wrong("loop", BACK + UPDATE, UPDATE + BACK, "before its update"),
    Wrong("loop", AGAIN, f"(0 * ranks.all_gather(shards[i]).reshape(shapes[i]) + {AGAIN})", "twice a step"),
    Wrong("loop", "shards[i] -= rate", "shard = rate", "do not change"),
    Wrong("accumulation", CHOICE, "nullcontext()", "every part but the last inside no_sync"),
    Wrong("accumulation", CHOICE, "no_sync(model)", "outside of no_sync"),
    Wrong("accumulation", " * (1 / len(parts))", " * 1", "times that of the mean loss"),
    Wrong("accumulation", "== last", "!= last", "outside of no_sync"),
    Wrong(
        "accumulation",
        "enumerate(parts)",
        "enumerate(parts[1:], 1)",
        "Each part must go through the model once",
    ),
    Wrong(
        "accumulation",
        "(1 / len(parts))",
        "(1 if number == last else 1 / len(parts))",
        "do not count equally",
    ),
    Wrong("schedule", "while gathered", "while not backward and gathered", "backward gathers it again"),
    Wrong("schedule", "place + prefetch + 1", "max(place, 0) + max(prefetch, 1)", "Before a unit computes"),
    Wrong("schedule", "names[::-1] if backward else names", "names", "in the reverse order"),
    Wrong(
        "schedule",
        'f"reduce {name}")',
        'lines.pop()) or lines.insert(-1, f"reduce {name}")',
        "released first",
    ),
    Wrong("schedule", PLACES, PLACES + "            gathered = place\n", "twice in one direction"),
    Wrong("schedule", "            if backward:", "            if not lines:", "reduces the gradient"),
    Wrong("waits", '("compute reads", "gather writes")', '("gather writes", "compute reads")', "other order"),
    Wrong("waits", '"B": ("gather writes", "compute reads")', '"B": None', "Without wait B there is a race"),
    Wrong("waits", '"C": None', '"C": ("gather writes", "compute writes")', "Its answer is None"),
    Wrong("waits", '"gather reads"', '"compute reads"', "two streams"),
    Wrong(
        "waits", '"compute writes", "gather reads"', '"compute reads", "gather reads"', "two reads never race"
    ),
    Wrong("waits", '"gather reads"', '"gather writes"', "names another pair"),
    Wrong("repair", FREE, "", "still a race: reduce reads and then compute writes"),
    Wrong("repair", FREE, "            reduce.wait(free[n])\n", "Record an event behind the first"),
    Wrong("repair", READ, READ + "            compute.wait(free[n])\n", "overlap is lost"),
    Wrong("repair", FREE, "            reduce.synchronize()\n", "The host waits"),
    Wrong("repair", "range(2)]\n    x", "range(LAYERS)]\n    x", "more memory"),
    Wrong("repair", "        compute.wait(reduced)\n", "", "put the waits that were there back"),
    Wrong(
        "tensor_parallel", SUM, SUM.replace(" + b", "").replace("h @ B", "h @ B + b"), "adds b on each rank"
    ),
    Wrong("tensor_parallel", "    all_reduce(y)\n", "", "Sum over ranks"),
    Wrong("tensor_parallel", "    all_reduce(dx)\n", "", "Sum dx over ranks"),
    Wrong("tensor_parallel", "ranks, axis=1)", "ranks, axis=0)", "COLUMN of A"),
    Wrong("tensor_parallel", "np.split(B, ranks, axis=0)", "np.split(B, ranks, axis=1)", "ROWS of B"),
    Wrong("tensor_parallel", " * (h > 0)", "", "dx differs"),
    Wrong("hybrid", "FAST = (8, 64)", "FAST = (1, 512)", "That is full sharding"),
    Wrong("hybrid", "FAST = (8, 64)", "FAST = (64, 8)", "too much memory"),
    Wrong("hybrid", "FAST = (8, 64)", "FAST = (2, 256)", "too slow"),
    Wrong("hybrid", "FAST = (8, 64)", "FAST = (8, 8)", "must be 512"),
    Wrong("hybrid", "FRUGAL = (64, 8)", "FRUGAL = (16, 32)", "cross nodes"),
    Wrong("hybrid", "FRUGAL = (64, 8)", "FRUGAL = (512, 1)", "Fewer copies"),
    Wrong("lion", MIX + MOVE + KEEP, KEEP + MIX + MOVE, "uses the old m"),
    Wrong("lion", "beta1, beta2 in", "beta2, beta1 in", "mixes with beta2"),
    Wrong("lion", "(direction + decay * shard[part])", "direction", "weight decay is missing"),
    Wrong(
        "lion",
        "direction + decay * shard[part]",
        "direction - decay * shard[part]",
        "Check the direction first",
    ),
    Wrong("lion", "np.sign(", "(", "sign is missing"),
    Wrong("lion", "slice(int(start), int(stop))", "slice(None)", "outside its ranges"),
    Wrong("lion", '{"m": "exp_avg"}', "{}", "names no array"),
    Wrong("lion", '"exp_avg"', '"m"', "as PyTorch does"),
]
