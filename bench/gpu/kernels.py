"""Memory-bound kernels: bytes that must move, over the time they take, beside the copy rate of this GPU."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.gpu.clock import Clock, blank, filled
from bench.gpu.state import Run
from shardrt import device as devices

FORWARD, REDUCING = 0.85, 0.75  # of the copy rate: single passes; backward with sums across rows
LOWER = {FORWARD: 0.80, REDUCING: 0.65}  # what must hold


@dataclass(frozen=True)
class Sizes:
    """Large enough that nothing stays in the cache from one call to the next."""

    rows: int = 65536  # tokens
    width: int = 768
    wide: int = 3072
    classified: int = 16384  # tokens of the loss
    vocab: int = 50304
    flat: int = 1 << 27  # elements of a shard


@dataclass(frozen=True)
class Case:
    """A kernel's call, the bytes it must move, and the part of the copy rate that it aims at, if any."""

    name: str
    nbytes: float
    work: Callable[[], Any]
    goal: float | None = FORWARD


def measure(run: Run, sizes: Sizes | None = None) -> None:
    """A row for each kernel, in bfloat16 but where it says float32."""
    clock = Clock()
    clock.device.warm_up()
    for family in (_activations, _norms, _rows, _embedding, _flat, _optimizers, _sums):
        with run.guarded(family.__name__.strip("_")):
            for case in family(clock.device.kernels, sizes or Sizes()):
                with run.guarded(case.name):
                    _measure(run, clock, case)


def _measure(run: Run, clock: Clock, case: Case) -> None:
    rate = case.nbytes / clock.seconds(case.work) / 1e9
    copy, goal = run.ceilings.get("copy"), case.goal
    aims = {} if goal is None else {"at_least": LOWER[goal], "goal": goal}
    run.add(case.name, rate, "GB/s", beside="device copy", theirs=copy, **aims)


def _activations(kernels: Any, sizes: Sizes) -> Iterator[Case]:
    count = sizes.rows * sizes.wide
    x, dy, y = filled(count), filled(count, seed=1), blank(count)
    nbytes = kernels.activation.bytes_moved(count, 2)
    for name in ("gelu_tanh", "silu"):
        forward = getattr(kernels.activation, f"{name}_forward")
        backward = getattr(kernels.activation, f"{name}_backward")
        yield Case(f"{name} forward", nbytes, lambda f=forward: f(x, y))
        yield Case(f"{name} backward", 1.5 * nbytes, lambda b=backward: b(dy, x, y))
    rows = (sizes.rows, sizes.wide)
    dbias, linear = blank(sizes.wide, dtype=np.float32), kernels.linear
    yield Case(
        "gelu_tanh backward and its sum over rows",
        1.5 * nbytes,
        lambda: linear.backward_gelu(dy.reshape(rows), x.reshape(rows), y.reshape(rows), dbias, False),
        REDUCING,
    )
    added = kernels.elementwise.bytes_moved(count, 2)
    yield Case("add", added, lambda: kernels.elementwise.add(x, dy, y))
    words = (0.1, 7, 3, 0)
    nbytes = kernels.dropout.bytes_moved(count, 2)
    yield Case("dropout forward", nbytes, lambda: kernels.dropout.forward(x, y, *words))


def _norms(kernels: Any, sizes: Sizes) -> Iterator[Case]:
    shape, width = (sizes.rows, sizes.width), sizes.width
    x, dy, y = filled(*shape), filled(*shape, seed=1), blank(*shape)
    weight, bias = filled(width, seed=2), filled(width, seed=3)
    mean, rstd = (blank(sizes.rows, dtype=np.float32) for _ in range(2))
    dweight, dbias = (blank(width, dtype=np.float32) for _ in range(2))
    layer, rms = kernels.layer_norm, kernels.rms_norm
    nbytes = layer.bytes_moved(*shape, 2)
    yield Case("layer norm forward", nbytes, lambda: layer.forward(x, weight, bias, y, mean, rstd, 1e-5))
    yield Case(
        "layer norm backward",
        1.5 * nbytes,
        lambda: layer.backward(dy, x, weight, mean, rstd, y, dweight, dbias, False),
        REDUCING,
    )
    total = blank(*shape)
    yield Case(
        "layer norm of a sum, forward",
        2 * nbytes,
        lambda: layer.forward(x, weight, bias, y, mean, rstd, 1e-5, dy, total),
    )
    yield Case(
        "layer norm of a sum, backward",
        2 * nbytes,
        lambda: layer.backward(dy, x, weight, mean, rstd, y, dweight, dbias, False, total),
        REDUCING,
    )
    nbytes = rms.bytes_moved(*shape, 2)
    yield Case("RMS norm forward", nbytes, lambda: rms.forward(x, weight, y, rstd, 1e-5))
    yield Case(
        "RMS norm backward",
        1.5 * nbytes,
        lambda: rms.backward(dy, x, weight, rstd, y, dweight, False),
        REDUCING,
    )


def _rows(kernels: Any, sizes: Sizes) -> Iterator[Case]:
    shape = (sizes.rows, 1024)
    x, dy, y = filled(*shape), filled(*shape, seed=1), blank(*shape)
    nbytes = kernels.softmax.bytes_moved(*shape, 2)
    yield Case("softmax forward", nbytes, lambda: kernels.softmax.forward(x, y))
    yield Case("softmax backward", 1.5 * nbytes, lambda: kernels.softmax.backward(dy, x, y))
    loss, shape = kernels.cross_entropy, (sizes.classified, sizes.vocab)
    logits, targets = filled(*shape), _tokens(sizes.classified, sizes.vocab)
    losses, lse = (blank(sizes.classified, dtype=np.float32) for _ in range(2))
    nbytes = loss.bytes_moved(*shape, 2)
    yield Case("cross entropy forward", nbytes, lambda: loss.forward(logits, targets, losses, lse, -100))
    scale = devices.current().asarray(np.full(1, 1e-4))
    work = lambda: loss.backward(logits, targets, lse, logits, scale, -100)  # noqa: E731
    yield Case("cross entropy backward, in place", 2 * nbytes, work)


def _embedding(kernels: Any, sizes: Sizes) -> Iterator[Case]:
    rows, width = sizes.rows, sizes.width
    table, indices = filled(sizes.vocab, width), _tokens(rows, sizes.vocab)
    touched = len(np.unique(devices.current().to_numpy(indices)))
    y, dtable = filled(rows, width), filled(sizes.vocab, width, dtype=np.float32)
    nbytes = kernels.embedding.bytes_moved(rows, width, 2)
    yield Case("embedding forward", nbytes, lambda: kernels.embedding.forward(indices, table, y))
    nbytes = 2 * rows * width + 2 * 4 * touched * width  # y read; of the table, read and written
    work = lambda: kernels.embedding.backward(indices, y, dtable)  # noqa: E731
    yield Case("embedding backward into float32", nbytes, work, None)


def _flat(kernels: Any, sizes: Sizes) -> Iterator[Case]:
    count = sizes.flat
    exact, bits = filled(count, dtype=np.float32), blank(count, dtype=np.uint16)
    nbytes = kernels.cast.bytes_moved(count)
    yield Case("float32 to bfloat16", nbytes, lambda: kernels.cast.pack(exact, bits, "bfloat16"))
    yield Case("bfloat16 to float32", nbytes, lambda: kernels.cast.unpack(bits, exact, "bfloat16"))
    nbytes = kernels.philox.bytes_moved(count)
    yield Case("normal random float32", nbytes, lambda: kernels.philox.normal(exact, 7, 3, 0, 0.0, 1.0), None)


def _optimizers(kernels: Any, sizes: Sizes) -> Iterator[Case]:
    count = sizes.flat
    param, grad, m, v = (filled(count, dtype=np.float32, seed=seed) for seed in range(4))
    v.fill(1)
    here = devices.current()
    ranges = here.asarray(np.array([[0, count, 0.9999, 1e-3, 1.0, 1.0]]))
    with_betas = here.asarray(np.array([[0, count, 0.9999, 1e-3, 1.0, 0.9, 0.95, 1e-8]]))
    adamw, sgd = kernels.adamw, kernels.sgd
    yield Case(
        "AdamW, all float32",
        adamw.bytes_moved(count),
        lambda: adamw.step(param, grad, m, v, with_betas),
    )
    yield Case(
        "SGD with momentum, float32",
        sgd.bytes_moved(count),
        lambda: sgd.step(param, grad, m, ranges, 0.9, False),
    )


def _sums(kernels: Any, sizes: Sizes) -> Iterator[Case]:
    reduce, shape = kernels.reduce, (sizes.rows, sizes.wide)
    x, out = filled(*shape), blank(sizes.wide, dtype=np.float32)
    work = lambda: reduce.column_sum(x, out, False)  # noqa: E731
    yield Case("bias gradient", x.size * 2, work, REDUCING)
    parts = [filled(sizes.flat // 4, dtype=np.float32, seed=seed) for seed in range(4)]
    total = blank(sizes.flat // 4, dtype=np.float32)
    nbytes = reduce.bytes_moved(len(parts), total.size)
    yield Case("sum of 4 ranks' slices", nbytes, lambda: reduce.sum_into(total, parts, 0.25, False))
    flat = filled(sizes.flat, dtype=np.float32)
    yield Case("sum of squares", flat.size * 4, lambda: reduce.power_sums(flat, 2.0), REDUCING)


def _tokens(count: int, vocab: int) -> Any:
    return devices.current().asarray(np.random.default_rng(0).integers(0, vocab, count))
