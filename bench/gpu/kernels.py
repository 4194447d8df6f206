"""Memory-bound kernels: bytes that must move, over the time they take, beside the copy rate of this GPU."""

from ..kernels.case import Case, Maker, Sizes
from ..kernels.ops import OPS
from .clock import Clock
from .state import Run

FORWARD, REDUCING = 0.85, 0.75  # of the copy rate: single passes; those with sums across rows
LOWER = {FORWARD: 0.80, REDUCING: 0.65}  # what must hold
_SUMS = {"gelu_bias backward", "column_sum forward", "power_sums forward"}
_SUMS |= {f"{op} backward" for op in ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm")}
_NO_AIM = {"embedding backward", "normal forward"}  # scattered; arithmetic
# Large enough that nothing stays in the cache from one call to the next.
LARGE = Sizes(tokens=65536, classified=16384, elements=1 << 27)
_OPS = (
    *("gelu", "gelu_bias", "silu", "add", "dropout", "layer_norm", "add_layer_norm", "rms_norm"),
    *("add_rms_norm", "softmax", "cross_entropy", "embedding"),
    *("cast", "normal", "adamw", "sgd", "column_sum", "sum_ranks", "power_sums"),
)


def measure(run: Run, sizes: Sizes = LARGE) -> None:
    """A row for each pass, in bfloat16 but for what is float32 by its nature."""
    clock, make = Clock(), Maker(sizes, "bfloat16")
    clock.device.warm_up()
    for op in _OPS:
        with run.guarded(op):
            for case in OPS[op](make):
                with run.guarded(case.name):
                    _measure(run, clock, case)


def _measure(run: Run, clock: Clock, case: Case) -> None:
    rate = case.nbytes / clock.seconds(case.ours) / 1e9
    goal = None if case.name in _NO_AIM else REDUCING if case.name in _SUMS else FORWARD
    aims = {} if goal is None else {"at_least": LOWER[goal], "goal": goal}
    run.add(case.name, rate, "GB/s", beside="device copy", theirs=run.ceilings.get("copy"), **aims)
