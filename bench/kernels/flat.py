"""Passes over flat shards: copies, casts, random numbers, sums, optimizers. Memory-bound."""

from collections.abc import Iterator
from functools import partial
from math import inf, sqrt

import numpy as np

from bench.gpu.clock import blank, filled
from bench.kernels import plain
from bench.kernels.case import Array, Case, Maker, needs, placed, shape_of, value
from shardrt import device as devices
from shardrt.kernels.costs import ON_GPU as costs

PARTS = (2, 4)  # ranks whose slices are added up


def copy(make: Maker) -> Iterator[Case]:
    count = make.sizes.elements
    x, y = make.numbers(count), make.blank(count)
    yield Case(
        *("copy", "forward", str(count), 2 * x.nbytes, 0),
        ours=lambda: devices.current().copy(y, x),
        results=(y,),
        inputs=(x,),
        plain=lambda x: (x.copy(),),
        peer=lambda torch, x: partial(_copied, torch.empty_like(x), x),
    )


def _copied(target, source):
    return (target.copy_(source),)


def cast(make: Maker) -> Iterator[Case]:
    """Between float32 and the bits of the 16-bit types; NumPy has no bfloat16."""
    module, count = make.kernels.cast, make.sizes.elements
    exact, bits, found = _exact(count), blank(count, dtype=np.uint16), blank(count, dtype=np.float32)
    for kind in ("bfloat16", "float16"):
        yield Case(
            *("cast", f"to {kind}", str(count), *needs(costs.cast.pack(exact, bits, kind))),
            ours=partial(module.pack, exact, bits, kind),
            results=(bits,),
            inputs=(exact,),
            plain=partial(_packed, kind=kind),
            peer=value(lambda torch, x, kind=kind: x.to(getattr(torch, kind)).view(torch.uint16)),
            dtype="float32",
        )
        module.pack(exact, bits, kind)
        yield Case(
            *("cast", f"from {kind}", str(count), *needs(costs.cast.unpack(bits, found, kind))),
            ours=partial(module.unpack, bits, found, kind),
            results=(found,),
            inputs=(bits,),
            plain=partial(_unpacked, kind=kind),
            peer=value(lambda torch, x, kind=kind: x.view(getattr(torch, kind)).float()),
            dtype="float32",
        )


def _packed(x: Array, kind: str) -> tuple:
    x = x.astype(np.float32)
    if kind == "float16":
        return (x.astype(np.float16).view(np.uint16),)
    bits = x.view(np.uint32)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16),)


def _unpacked(bits: Array, kind: str) -> tuple:
    if kind == "float16":
        return (bits.view(np.float16).astype(np.float32),)
    return ((bits.astype(np.uint32) << 16).view(np.float32),)


def normal(make: Maker) -> Iterator[Case]:
    """From a counter: each element by itself; the others' depend on those before."""
    count = make.sizes.elements // 4
    given, random = (blank(count, dtype=np.float32), 7, 3, 0, 0.0, 1.0), np.random.default_rng(0)
    yield Case(
        *("normal", "forward", str(count), *needs(costs.philox.normal(*given))),
        ours=lambda: make.kernels.philox.normal(*given),
        results=given[:1],
        inputs=(),
        plain=lambda: (random.standard_normal(count, np.float32),),
        peer=lambda torch: partial(_drawn, torch.empty(count)),
        dtype="float32",
        judge=_not_normal,
    )


def _drawn(target):
    return (target.normal_(),)


def _not_normal(inputs: tuple, results: tuple) -> float:
    """0, or infinity where mean or variance are further off than six of their deviations."""
    (x,) = results
    return 0.0 if abs(x.mean()) < 6 / sqrt(x.size) and abs(x.var() - 1) < 6 * sqrt(2 / x.size) else inf


def sum_ranks(make: Maker) -> Iterator[Case]:
    """What a reduce_scatter adds up: slices of 2 and of 4 ranks, in float32 and sent in bfloat16."""
    module, count = make.kernels.reduce, make.sizes.elements
    out, scale = blank(count, dtype=np.float32), 0.25
    for ranks in PARTS:
        parts = tuple(_exact(count, seed) for seed in range(ranks))
        yield Case(
            *("sum_ranks", f"of {ranks}", str(count)),
            *needs(costs.reduce.sum_into(out, parts, scale, False)),
            ours=partial(module.sum_into, out, list(parts), scale, False),
            results=(out,),
            inputs=parts,
            plain=lambda *parts: (_sum(parts) * scale,),
            peer=value(lambda torch, *parts: _sum(parts).mul_(scale)),
            dtype="float32",
        )
        bits = tuple(blank(count, dtype=np.uint16) for _ in parts)
        for part, packed in zip(parts, bits, strict=True):
            make.kernels.cast.pack(part, packed, "bfloat16")
        yield Case(
            *("sum_ranks", f"of {ranks}, bfloat16", str(count)),
            *needs(costs.reduce.sum_packed(out, bits, scale, False, "bfloat16")),
            ours=partial(module.sum_packed, out, list(bits), scale, False, "bfloat16"),
            results=(out,),
            inputs=bits,
            plain=lambda *parts: (_sum([_unpacked(part, "bfloat16")[0] for part in parts]) * scale,),
            peer=value(lambda torch, *parts: _sum([_float(torch, part) for part in parts]).mul_(scale)),
            dtype="float32",
        )


def _sum(parts):
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def _float(torch, bits):
    return bits.view(torch.bfloat16).float()


def column_sum(make: Maker) -> Iterator[Case]:
    """A bias' gradient."""
    x, out = make.numbers(make.sizes.tokens, make.sizes.wide), make.exact(make.sizes.wide)
    yield Case(
        *("column_sum", "forward", shape_of(*x.shape), *needs(costs.reduce.column_sum(x, out, False))),
        ours=lambda: make.kernels.reduce.column_sum(x, out, False),
        results=(out,),
        inputs=(x,),
        plain=lambda x: (x.sum(axis=0),),
        peer=value(lambda torch, x: x.sum(0)),
    )


def power_sums(make: Maker) -> Iterator[Case]:
    """For the norm of gradients: exact to 100 bits; the others' in float64, for in float32 they are wrong."""
    x = make.numbers(make.sizes.elements)
    yield Case(
        *("power_sums", "forward", str(x.size), *needs(costs.reduce.power_sums(x, 2.0))),
        ours=lambda: (make.kernels.reduce.power_sums(x, 2.0).sum().reshape(1),),
        results=(),
        inputs=(x,),
        plain=lambda x: (np.square(x, dtype=np.float64).sum().reshape(1),),
        peer=value(lambda torch, x: torch.linalg.vector_norm(x, dtype=torch.float64).square().reshape(1)),
    )


def adamw(make: Maker) -> Iterator[Case]:
    """All float32."""
    count, lr, decay, betas, eps = make.sizes.elements, 1e-3, 0.1, (0.9, 0.95), 1e-8
    param, grad, m, v = _exact(count), _exact(count, 1), _exact(count), _exact(count)
    m.fill(0)
    v.fill(0)
    inputs = (placed(param), grad)
    own = [0, count, 1 - lr * decay, lr / (1 - betas[0]), (1 - betas[1]) ** -0.5, *betas, eps]
    ranges = devices.current().asarray(np.array([own]))
    given, module = (param, grad, m, v, ranges), make.kernels.adamw

    def peer(torch, param, grad):
        param.requires_grad_().grad = grad
        optimizer = torch.optim.AdamW([param], lr, betas, eps, decay, fused=True)

        def call():
            optimizer.step()
            state = optimizer.state[param]
            return param.detach(), state["exp_avg"], state["exp_avg_sq"]

        return call

    yield Case(
        *("adamw", "step", str(count), *needs(costs.adamw.step(*given))),
        ours=lambda: module.step(*given),
        results=(param, m, v),
        inputs=inputs,
        plain=lambda *arrays: plain.adamw(*arrays, lr, decay, *betas, eps),
        peer=peer,
        dtype="float32",
    )


def lion(make: Maker) -> Iterator[Case]:
    """All float32; beside four of PyTorch's calls, which has no Lion."""
    count, lr, decay, betas = make.sizes.elements, 1e-4, 0.1, (0.9, 0.99)
    param, grad, m = _exact(count), _exact(count, 1), _exact(count)
    m.fill(0)
    inputs = (placed(param), grad)
    ranges = devices.current().asarray(np.array([[0, count, 1 - lr * decay, lr, *betas]]))
    given, module = (param, grad, m, ranges), make.kernels.lion

    def peer(torch, param, grad):
        moving = torch.zeros_like(param)

        def call():
            sign = moving.lerp(grad, 1 - betas[0]).sign_()
            moving.lerp_(grad, 1 - betas[1])
            return param.mul_(1 - lr * decay).sub_(sign, alpha=lr), moving

        return call

    yield Case(
        *("lion", "step", str(count), *needs(costs.lion.step(*given))),
        ours=lambda: module.step(*given),
        results=(param, m),
        inputs=inputs,
        plain=lambda *arrays: plain.lion(*arrays, lr, decay, *betas),
        peer=peer,
        dtype="float32",
    )


def sgd(make: Maker) -> Iterator[Case]:
    """With momentum, all float32."""
    count, lr, decay, momentum = make.sizes.elements, 1e-3, 1e-4, 0.9
    param, grad, buffer = _exact(count), _exact(count, 1), _exact(count)
    buffer.fill(0)
    inputs = (placed(param), grad)
    ranges = devices.current().asarray(np.array([[0, count, lr, decay, momentum, 1.0]]))
    given, module = (param, grad, buffer, ranges, momentum, False), make.kernels.sgd

    def peer(torch, param, grad):
        param.requires_grad_().grad = grad
        optimizer = torch.optim.SGD([param], lr, momentum, weight_decay=decay, fused=True)

        def call():
            optimizer.step()
            return param.detach(), optimizer.state[param]["momentum_buffer"]

        return call

    yield Case(
        *("sgd", "step", str(count), *needs(costs.sgd.step(*given))),
        ours=lambda: module.step(*given),
        results=(param, buffer),
        inputs=inputs,
        plain=lambda *arrays: plain.sgd(*arrays, lr, decay),
        peer=peer,
        dtype="float32",
    )


def _exact(count: int, seed: int = 0) -> Array:
    return placed(filled(count, dtype=np.float32, seed=seed))


OPS = {
    function.__name__: function
    for function in (copy, cast, normal, sum_ranks, column_sum, power_sums, adamw, lion, sgd)
}
