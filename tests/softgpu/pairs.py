"""All features of tests/fsdp/test_pairs.py and their pairs, trained on the GPU emulator.

python -m tests.softgpu.pairs [--all] [-n JOBS]

Each set of features trains on the GPU in more than one order of streams: with the same bits in each, and near
the CPU's numbers. Of 16 bits the CPU has the storage and not the arithmetic, so there the measure is what
PyTorch's own 16 bits change of its own float32 (LOW), and the last place of the loss. `--all`: 1, 2 and 4
ranks, all orders; else 2 ranks (4 of two axes) in two orders, and every feature in one set of few ranks.
Tensor parallelism and a pipeline take twice these ranks each. JOBS processes share the sets. Prints JSON:
{what was trained: what was wrong}.
"""

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from tests.softgpu.start import start

CUDA = start()

import numpy as np  # noqa: E402  after what is below CuPy

from tests import lab  # noqa: E402
from tests.fsdp import test_pairs as pairs  # noqa: E402
from tests.softgpu.cuda import MODES  # noqa: E402

CLOSE = 1e-5, 1e-5  # float32: losses, and weights after three steps
QUANTISED = 5e-3, 5e-3  # a number between two codes may get the other one
# The same of 16 bits, by (float16, SGD): twice what they change where PyTorch 2.13 trains this net.
LOW = {
    (False, False): (2.84e-2, 5.46e-3),
    (False, True): (1.23e-2, 1.35e-3),
    (True, False): (1.57e-3, 1.13e-4),
    (True, True): (5.08e-4, 1.76e-4),
}


def trained(names, ranks, modes):
    """ "" or what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        expected = pairs.train_on(ranks, names, Path(folder))
    first = None
    for mode in modes:
        CUDA.choose(mode, seed=1)
        try:
            with tempfile.TemporaryDirectory() as folder:
                found = pairs.train_on(ranks, names, Path(folder), device="cuda")
            lab.assert_equal(found, first or found)
        except Exception as error:
            return f"{mode}: {type(error).__name__}: {error}"
        first = first or found
    return far(names, found, expected)


def far(names, found, expected):
    """ "" or how far the GPU is from the CPU."""
    losses, weights = distances(found, expected)
    of_losses, of_weights = allowed(names)
    of_losses += last_place(names, np.array(expected[0]).max())
    if losses <= of_losses and weights <= of_weights:
        return ""
    return f"losses off by {losses:.1e} of {of_losses:.1e}, weights by {weights:.1e} of {of_weights:.1e}"


def distances(found, expected):
    """Of losses, the largest; of weights in the norm, relative."""
    losses = np.abs(np.array(found[0]) - np.array(expected[0])).max()
    apart = sum(np.square(found[1][name] - values).sum() for name, values in expected[1].items())
    return losses, np.sqrt(apart / sum(np.square(values).sum() for values in expected[1].values()))


def last_place(names, loss):
    """How far apart losses are that are rounded to neighbours."""
    if not pairs.LOW & set(names):
        return 0.0
    bits = 10 if pairs.LOW & set(names) == {"fp16, scaled"} else 7
    return 2.0 ** (np.floor(np.log2(loss)) - bits)


def allowed(names):
    """(of losses, of weights)."""
    if "quantised" in names:
        return QUANTISED
    low = pairs.LOW & set(names)
    return LOW[low == {"fp16, scaled"}, "SGD" in names] if low else CLOSE


def refused(names):
    """ "" or why a pair that does not go together was not refused as on the CPU."""
    kind, message = pairs.REFUSED[names]
    CUDA.choose("late")
    try:
        with tempfile.TemporaryDirectory() as folder:
            pairs.train_on(pairs.ranks_for(names), names, Path(folder), device="cuda")
    except kind as error:
        return "" if re.search(message, str(error)) else f"told: {error}"
    return "not refused"


def spread(sets):
    """Sets of at most four ranks in which, together, every feature is; a feature of none is one by itself."""
    few = [*(names for names in sets if pairs.ranks_for(names) <= 4), *((name,) for name in pairs.FEATURES)]
    chosen, left = [], set(pairs.FEATURES)
    while left:
        chosen.append(max(few, key=lambda names: len(left.intersection(names)) / pairs.ranks_for(names)))
        left.difference_update(chosen[-1])
    return chosen


def jobs(every):
    """(name, function, arguments) of all there is to do."""
    chosen = [*pairs.TOGETHER, *pairs.IN_TURNS]
    chosen = chosen if every else spread(chosen)
    for index, names in enumerate(chosen):
        other = MODES[1 + index % (len(MODES) - 1)]
        modes = MODES if every else ("late", other)
        if "pipeline" in names:  # over NCCL, two ranks that send to each other at once wait for ever
            modes = tuple(mode for mode in modes if mode != "at once")
        for ranks in sorted({pairs.ranks_for(names, data) for data in ((1, 2, 4) if every else (2,))}):
            yield f"{ranks} ranks, {pairs.readable(names)}", trained, (names, ranks, modes)
    for names in pairs.REFUSED:
        yield f"refused: {pairs.readable(names)}", refused, (names,)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--all", action="store_true")
    parser.add_argument("-n", dest="jobs", type=int, default=1)
    parser.add_argument("--process", type=int, help="which one of the JOBS processes this is")
    options = parser.parse_args()
    if options.jobs > 1 and options.process is None:
        found, code = of_processes(options.jobs)
    else:
        warnings.simplefilter("ignore")
        mine = list(jobs(options.all))[options.process or 0 :: options.jobs]
        found = {}
        for number, (name, work, how) in enumerate(mine, start=1):
            gc.collect()
            gc.freeze()  # what modules hold: each communicator that is made collects garbage
            found[name] = work(*how)
            print(f"{number} of {len(mine)}: {name}: {found[name] or 'right'}", file=sys.stderr, flush=True)
        code = any(found.values())
    print(json.dumps(found, indent=1), flush=True)
    os._exit(code)  # without CuPy's clean-up, which would call CUDA


def of_processes(count):
    """What all of them found together, and the exit code."""
    job = [sys.executable, "-m", "tests.softgpu.pairs", *sys.argv[1:], "--process"]
    running = [
        subprocess.Popen([*job, str(number)], stdout=subprocess.PIPE, text=True) for number in range(count)
    ]
    message = [process.communicate()[0] for process in running]
    found = {name: wrong for text in message if text for name, wrong in json.loads(text).items()}
    return found, max(abs(process.returncode) for process in running)


if __name__ == "__main__":
    main()
