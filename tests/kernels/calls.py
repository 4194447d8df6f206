"""Calls of every kernel, for what tests/kernels/test_cost.py says of all of them.

CASES: "module.function" -> functions that make the arguments of one call, by name, from a maker of arrays.
"""

import numpy as np

RANGES = {"adamw": 8, "lion": 6, "sgd": 6}  # columns


class Arrays:
    """Makes the arrays of a call. dtype: of what may have 16 bits; `exact` gives what then has 32."""

    def __init__(self, dtype=np.float32):
        self.dtype, self.double = np.dtype(dtype), np.dtype(dtype) == np.float64
        self._random = np.random.default_rng(3)

    def lay(self, values):
        """An array with these elements."""
        return values

    def real(self, *shape, dtype=None):
        """Random numbers."""
        return self.lay(self._random.standard_normal(shape).astype(dtype or self.dtype))

    def exact(self, *shape):
        """Random numbers above 0.5, as statistics are; of the type that 16 bits are summed in."""
        numbers = 0.5 + self._random.random(shape)
        return self.lay(numbers.astype(np.float64 if self.double else np.float32))

    def ints(self, high, *shape, dtype=np.int64):
        """Random integers below `high`."""
        return self.lay(self._random.integers(0, high, shape).astype(dtype))

    def out(self, *shape, dtype=None):
        """To be written."""
        return self.real(*shape, dtype=dtype)

    def ranges(self, op, count):
        """Two that cover a shard."""
        rows = self._random.uniform(0.1, 0.9, (2, RANGES[op]))
        rows[:, :2] = (0, count // 2), (count // 2, count)
        return self.lay(rows)


def _flat(*names, size=1000, **more):
    return lambda a: {name: a.real(size) for name in names} | more


def _words(**more):
    return lambda a: {"out": a.out(999), "seed": 5, "stream": 3, "offset": 7} | more


def _dropout(x, y, place):
    def made(a):
        where = a.ints(1 << 40, 2, dtype=np.uint64) if place else None
        return {x: a.real(999), y: a.out(999), "p": 0.5, "seed": 5, "call": 3, "offset": 7, "place": where}

    return made


def _adamw(size=700, low=False, kind=""):
    def made(a):
        m = a.ints(1 << 14, size, dtype=np.uint16) if low else a.real(size)
        arrays = {"param": a.exact(size), "grad": a.real(size), "m": m, "v": a.exact(size)}
        rounded = a.out(size, dtype=np.float32) if kind else None
        return arrays | {"ranges": a.ranges("adamw", size), "rounded": rounded, "kind": kind}

    return made


def _lion(a):
    return {"param": a.exact(700), "grad": a.real(700), "m": a.real(700), "ranges": a.ranges("lion", 700)}


def _sgd(buffered, nesterov=False):
    def made(a):
        buffer = a.real(700) if buffered else None
        arrays = {"param": a.exact(700), "grad": a.real(700), "momentum_buffer": buffer}
        return arrays | {"ranges": a.ranges("sgd", 700), "momentum": 0.9, "nesterov": nesterov}

    return made


def _attention(back=False, heads=4, kv_heads=2, time=24, keys=24, width=16, starts=False, **how):
    how = {"causal": True, "scale": 0.3} | how

    def made(a):
        def like(count, length, make=a.real):
            return make(2, length, count, width).transpose(0, 2, 1, 3)

        q, k, v = like(heads, time), like(kv_heads, keys), like(kv_heads, keys)
        arrays = {"q": q, "k": k, "v": v, "y": like(heads, time), "lse": a.exact(2, heads, time)}
        if back:
            gradients = {"dq": like(heads, time), "dk": like(kv_heads, keys), "dv": like(kv_heads, keys)}
            arrays = {"dy": like(heads, time)} | arrays | gradients
        begins = a.lay(np.repeat(np.array([[0, 10], [0, 17]]), [10, time - 10], axis=1)) if starts else None
        return arrays | how | {"starts": begins}

    return made


def _both_attentions(back):
    none_seen = {"time": 8, "offsets": (0, 12)}
    shapes = ({}, {"causal": False, "keys": 30}, {"starts": True}, {"width": 12}, {"width": 160}, none_seen)
    shapes = (*shapes, {"heads": 2, "offsets": (3,), "time": 20}, {"heads": 2, "starts": True})
    return [_attention(back, **shape) for shape in shapes]


def _channels(*names, of=("x",), to=(), dtype=None):
    """Arrays named `of` are (batch, channels, pixels), `names` (channels,); `to` are written as `of` are."""

    def made(a):
        return {n: a.real(3, 5, 14) for n in (*of, *to)} | {n: a.exact(5) for n in names}

    return made


def _cast(of, to, kind):
    def made(a):
        x = a.ints(1 << 14, 999, dtype=of) if of is np.uint16 else a.real(999, dtype=of)
        return {"x": x, "out": a.lay(np.zeros(999, to)), "kind": kind}

    return made


def _convolution(op, groups=1, bias=True, accumulate=False, batch=3):
    def made(a):
        x, weight, y = (batch, 4, 9, 8), (6, 4 // groups, 3, 2), (batch, 6, 4, 4)
        how = {"stride": (2, 2), "padding": (0, 0), "dilation": (1, 1), "groups": groups}
        if op == "forward":
            arrays = {"x": a.real(*x), "weight": a.real(*weight), "bias": a.real(6) if bias else None}
            return arrays | {"y": a.out(*y)} | how
        if op == "input":
            return {"dy": a.real(*y), "weight": a.real(*weight), "dx": a.out(*x)} | how
        return {
            "x": a.real(*x),
            "dy": a.real(*y),
            "dweight": a.exact(*weight),
            "accumulate": accumulate,
        } | how

    return made


def _entropy(of, rows=9, vocab=40, scale=1, **more):
    def made(a):
        losses = {"losses": a.exact(rows), "lse": a.exact(rows)}
        targets = np.append(np.arange(rows - 1) * 7 % vocab, -100)[:rows]
        arrays = {"logits": a.real(rows, vocab), "targets": a.lay(targets)}
        factor = {0: None, 1: a.lay(np.array(0.25)), 2: a.lay(np.arange(1.0, rows + 1))}[scale]
        if of == "forward":
            return arrays | losses | {"ignore_index": -100}
        if of == "part":
            how = {"ignore_index": -100, "first": 10, "vocab": vocab + 20}
            return arrays | {"chosen": losses["losses"], "lse": losses["lse"]} | how
        if of == "join":
            how = {"targets": arrays["targets"], "ignore_index": -100}
            return {"parts": a.exact(3, 2, rows)} | losses | how
        back = arrays | {"lse": losses["lse"], "scale": factor, "ignore_index": -100}
        return back | ({"dlogits": a.out(rows, vocab), "first": 2} if of == "backward" else {})

    return made


def _scale_rows(each):
    return lambda a: {
        "x": a.real(9, 40),
        "factor": a.lay(np.arange(2.0, 11) if each else np.array(3.0)),
        "out": a.out(9, 40),
    }


def _embedding(back=False, rows=50, vocab=300, first=0, width=24):
    def made(a):
        indices = {"indices": a.ints(vocab, rows)}
        if back:
            return indices | {"dy": a.real(rows, width), "dweight": a.exact(vocab, width), "first": first}
        total = None if not first else vocab + first
        return indices | {
            "weight": a.real(vocab, width),
            "y": a.out(rows, width),
            "first": first,
            "vocab": total,
        }

    return made


def _grouped(of, counts=(5, 0, 9), rows=20, accumulate=False, exact=True):
    def made(a):
        x, y, weight = (rows, 16), (rows, 24), (len(counts), 24, 16)
        if of == "forward":
            return {"x": a.real(*x), "weight": a.real(*weight), "counts": counts, "y": a.out(*y)}
        if of == "input":
            return {"dy": a.real(*y), "weight": a.real(*weight), "counts": counts, "dx": a.out(*x)}
        dweight = a.exact(*weight) if exact else a.real(*weight)
        arrays = {"x": a.real(*x), "dy": a.real(*y), "counts": counts, "dweight": dweight}
        return arrays | {"accumulate": accumulate}

    return made


def _layer_norm(rows=70, bias=True, added=False):
    def made(a):
        arrays = {"x": a.real(rows, 24), "weight": a.real(24), "bias": a.real(24) if bias else None}
        more = {name: a.real(rows, 24) if added else None for name in ("added", "total")}
        outs = {"y": a.out(rows, 24), "mean": a.exact(rows), "rstd": a.exact(rows)}
        return arrays | outs | {"eps": 1e-5} | more

    return made


def _layer_norm_backward(rows=70, dx=True, sums="wb", accumulate=False, more=False):
    def made(a):
        arrays = {"dy": a.real(rows, 24), "x": a.real(rows, 24), "weight": a.real(24)}
        statistics = {"mean": a.exact(rows), "rstd": a.exact(rows)}
        into = {n: a.exact(24) if n[1] in sums else None for n in ("dweight", "dbias")}
        others = {"accumulate": accumulate, "dtotal": a.real(rows, 24) if more else None}
        return arrays | statistics | {"dx": a.out(rows, 24) if dx else None} | into | others

    return made


def _without(made, *names):
    return lambda a: {name: value for name, value in made(a).items() if name not in names}


def _linear(of, rows=70, inputs=24, outputs=32, bias=True, accumulate=False, accumulate_bias=False):
    def made(a):
        x, weight = {"x": a.real(rows, inputs)}, {"weight": a.real(outputs, inputs)}
        dy, vector = {"dy": a.real(rows, outputs)}, a.real(outputs) if bias else None
        if of == "forward":
            return x | weight | {"bias": vector, "y": a.out(rows, outputs)}
        if of == "forward_gelu":
            y = {"inner": a.out(rows, outputs), "y": a.out(rows, outputs)}
            return x | weight | {"bias": vector} | y
        if of == "backward_gelu":
            inner = {"inner": a.real(rows, outputs), "dinner": a.out(rows, outputs)}
            return dy | inner | {"dbias": a.exact(outputs) if bias else None, "accumulate": accumulate}
        if of == "backward_input":
            return dy | weight | {"dx": a.out(rows, inputs)}
        if of == "backward_input_gelu":
            return dy | weight | {"inner": a.real(rows, inputs), "dinner": a.out(rows, inputs)}
        into = {"dweight": a.exact(outputs, inputs), "accumulate": accumulate}
        if of == "backward_weight":
            return x | dy | into
        sums = {"dbias": a.exact(outputs)}
        if of == "backward_bias":
            return dy | sums | {"accumulate": accumulate}
        return x | dy | into | sums | {"accumulate_bias": accumulate_bias}

    return made


def _linears(of, *how):
    return [_linear(of, **each) for each in ({}, {"rows": 0}, *how)]


_NO_BIAS, _ADDED, _ODD = {"bias": False}, {"accumulate": True}, {"inputs": 25, "outputs": 33}


def _matmul(shape_a, shape_b, accumulate=False, view=lambda x: x):
    def made(a):
        out = (*shape_a[:-1], shape_b[-1])
        arrays = {"a": view(a.real(*shape_a)), "b": a.real(*shape_b), "out": a.exact(*out)}
        return arrays | {"accumulate": accumulate}

    return made


def _copied(shape_a, shape_b):
    """a is a view of every second element."""
    return _matmul((shape_a[0], 2 * shape_a[1]), shape_b, view=lambda x: x[:, ::2])


def _pool(kind, back):
    def made(a):
        x, y, how = (6, 9, 8), (6, 4, 4), {"window": (2, 2), "stride": (2, 2), "padding": (0, 0)}
        index = {"index": a.ints(72, *y, dtype=np.int32)} if kind == "max" else {}
        if back:
            return {"dy": a.real(*y)} | index | {"dx": a.out(*x)} | how
        return {"x": a.real(*x), "y": a.out(*y)} | index | how

    return made


def _sum(parts, accumulate=False, size=1000, kind=""):
    def made(a):
        if kind:
            each = [a.ints(1 << 14, size, dtype=np.uint16) for _ in range(parts)]
        else:
            each = [a.real(size) for _ in range(parts)]
        how = {"scale": 0.5, "accumulate": accumulate} | ({"kind": kind} if kind else {})
        return {"out": a.out(size, dtype=np.float32 if kind else None), "parts": each} | how

    return made


def _sums(size, p=None, out=(), rows=None):
    def made(a):
        place = {"out": a.lay(np.full(rows, 3.0, np.float64)) if rows else None} if out else {}
        return {"x": a.real(size, dtype=np.float32)} | ({"p": p} if p else {}) | place

    return made


def _pairs(rows, **how):
    return lambda a: {"pairs": a.lay(np.ones((rows, 2))), **how, "out": a.lay(np.full(2, 3.0))}


def _column_sum(rows, accumulate=False):
    return lambda a: {"x": a.real(rows, 24), "out": a.exact(24), "accumulate": accumulate}


def _rms_norm(rows=70, added=False):
    return _without(_layer_norm(rows, added=added), "bias", "mean")


def _rms_norm_backward(**how):
    return _without(_layer_norm_backward(**how), "mean", "dbias")


def _rotary(x, y):
    def made(a):
        return {x: a.real(12, 40), "cos": a.exact(6, 4), "sin": a.exact(6, 4), y: a.out(12, 40), "heads": 3}

    return made


def _route(of, tokens=30, k=2, count=6, dropped=False, weights=True):
    """Experts 0, 1 and 4, which have different numbers of copies; two of those of expert 4 are dropped."""

    def made(a):
        experts = a.lay(np.array([[0, 4], [1, 4], [0, 1]] * (tokens // 3)).reshape(tokens, k))
        numbers = {"scores": a.real(tokens, count)}
        places = np.arange(tokens * k).reshape(tokens, k)
        if dropped:
            places[:3, 1] = -1
        places, factors = a.lay(places), a.real(tokens, k) if weights else None
        copies = a.lay(np.append(np.random.default_rng(0).permutation(tokens * k), [-1, -1]))
        rows, to = a.real(tokens * k, 24), {"experts": experts}
        return {
            "top_k": lambda: numbers | {"experts": a.ints(count, tokens, k)},
            "take": lambda: numbers | to | {"y": a.out(tokens, k)},
            "put": lambda: {"dy": a.real(tokens, k)} | to | {"dscores": a.out(tokens, count)},
            "order": lambda: (
                to
                | {"priority": a.exact(tokens, k) if dropped else None, "capacity": 15}
                | {
                    "places": a.ints(9, tokens, k),
                    "copies": a.ints(9, tokens * k),
                    "counts": a.ints(9, 2, count),
                }
            ),
            "spread": lambda: (
                {"x": a.real(tokens, 24), "weights": factors, "copies": copies, "k": k}
                | {"y": a.out(tokens * k + 2, 24)}
            ),
            "collect": lambda: {"x": rows, "weights": factors, "places": places, "y": a.out(tokens, 24)},
            "weights_backward": lambda: (
                {"dy": a.real(tokens, 24), "x": rows, "places": places} | {"dweights": a.out(tokens, k)}
            ),
        }[of]()

    return made


def _rows(*names, width=24):
    return lambda a: {name: a.real(70, width) for name in names}


def _swiglu(*names, back=False):
    return lambda a: {n: a.real(70, 24 if n in ("y", "dy") else 48) for n in names}


_BOTH = ("bfloat16", "float16")
_X, _DX = ("x", "y"), ("dy", "x", "dx")
CASES = {
    **{
        f"activation.{n}_forward": [_flat(*_X), _flat(*_X, size=0)]
        for n in ("gelu_tanh", "gelu_erf", "silu", "relu")
    },
    "activation.erf_forward": [_flat(*_X)],
    **{f"activation.{n}_backward": [_flat(*_DX)] for n in ("gelu_tanh", "gelu_erf", "silu", "relu")},
    "adamw.step": [_adamw(), _adamw(low=True), _adamw(kind="bfloat16")],
    "attention.forward": _both_attentions(back=False),
    "attention.backward": _both_attentions(back=True),
    "batch_norm.statistics": [_channels("mean", "squares")],
    "batch_norm.forward": [_channels("mean", "rstd", "weight", "bias", to=("y",))],
    "batch_norm.backward_sums": [_channels("mean", "rstd", "dweight", "dbias", of=("dy", "x"))],
    "batch_norm.backward_input": [
        _channels("mean", "rstd", "weight", "along", "level", of=("dy", "x"), to=("dx",))
    ],
    "cast.round_to": [_cast(np.float32, np.float32, kind) for kind in _BOTH],
    "cast.pack": [_cast(np.float32, np.uint16, kind) for kind in _BOTH],
    "cast.unpack": [_cast(np.uint16, np.float32, kind) for kind in _BOTH],
    "conv2d.forward": [_convolution("forward"), _convolution("forward", 2, bias=False)],
    "conv2d.backward_input": [_convolution("input"), _convolution("input", 2)],
    "conv2d.backward_weight": [
        _convolution("weight"),
        _convolution("weight", 2),
        _convolution("weight", accumulate=True),
    ],
    "conv2d.backward_bias": [
        lambda a: {"dy": a.real(3, 6, 4, 5), "dbias": a.exact(6), "accumulate": False},
        lambda a: {"dy": a.real(3, 6, 4, 5), "dbias": a.exact(6), "accumulate": True},
    ],
    "cross_entropy.forward": [_entropy("forward"), _entropy("forward", rows=0)],
    "cross_entropy.forward_part": [_entropy("part")],
    "cross_entropy.join": [_entropy("join")],
    "cross_entropy.backward": [_entropy("backward"), _entropy("backward", scale=0)],
    "cross_entropy.forward_in_place": [_entropy("forward"), _entropy("forward", rows=2, vocab=60_000)],
    "cross_entropy.backward_in_place": [_entropy("in_place", scale=scale) for scale in (0, 1, 2)],
    "cross_entropy.scale_rows": [_scale_rows(False), _scale_rows(True)],
    "dropout.forward": [_dropout("x", "y", False), _dropout("x", "y", True)],
    "dropout.backward": [_dropout("dy", "dx", False), _dropout("dy", "dx", True)],
    "elementwise.add": [_flat("first", "second", "out"), _flat("first", "second", "out", size=0)],
    "elementwise.scale_": [_flat("x", factor=3.0)],
    "elementwise.scale_by_": [lambda a: {"x": a.real(1000), "factor": a.lay(np.array(3.0))}],
    "elementwise.unscale_": [_flat("x", factor=3.0), _flat("x", factor=3.0, size=0)],
    "elementwise.clamp_": [_flat("x", limit=0.5)],
    "embedding.forward": [_embedding(), _embedding(first=7), _embedding(rows=0)],
    "embedding.backward": [
        *(_embedding(True), _embedding(True, first=7), _embedding(True, rows=0)),
        *(_embedding(True, vocab=255), _embedding(True, rows=3000, vocab=70_000, width=4)),
    ],
    "grouped.forward": [_grouped("forward"), _grouped("forward", (20, 0)), _grouped("forward", (0, 0))],
    "grouped.backward_input": [_grouped("input"), _grouped("input", (20, 0))],
    "grouped.backward_weight": [
        *(_grouped("weight"), _grouped("weight", accumulate=True), _grouped("weight", (0, 0))),
        *(_grouped("weight", accumulate=accumulate, exact=False) for accumulate in (False, True)),
    ],
    "layer_norm.forward": [_layer_norm(), _layer_norm(bias=False, added=True), _layer_norm(rows=0)],
    "layer_norm.backward": [
        *(_layer_norm_backward(), _layer_norm_backward(accumulate=True, more=True)),
        *(_layer_norm_backward(sums="w"), _layer_norm_backward(sums=""), _layer_norm_backward(rows=0)),
        _layer_norm_backward(dx=False, rows=7000),
    ],
    "linear.forward": _linears("forward", _NO_BIAS),
    "linear.forward_gelu": _linears("forward_gelu", _NO_BIAS, _ODD),
    "linear.backward_gelu": _linears("backward_gelu", _NO_BIAS, _ADDED, _ODD),
    "linear.backward_input": _linears("backward_input"),
    "linear.backward_input_gelu": _linears("backward_input_gelu", _ODD),
    "linear.backward_weight": _linears("backward_weight", _ADDED),
    "linear.backward_bias": _linears("backward_bias", _ADDED),
    "linear.backward_parameters": _linears(
        "backward_parameters",
        _ADDED,
        {"accumulate_bias": True},
        {"accumulate": True, "accumulate_bias": True},
    ),
    "lion.step": [_lion],
    "matmul.matmul": [
        *(_matmul((9, 12), (12, 7)), _matmul((9, 12), (12, 7), True), _copied((9, 12), (12, 7))),
        *(_matmul((3, 9, 12), (3, 12, 7)), _matmul((9, 0), (0, 7)), _matmul((9, 0), (0, 7), True)),
    ],
    "philox.uniform": [_words()],
    "philox.normal": [_words(mean=0.5, std=2.0)],
    "pool.max_forward": [_pool("max", False)],
    "pool.max_backward": [_pool("max", True)],
    "pool.mean_forward": [_pool("mean", False)],
    "pool.mean_backward": [_pool("mean", True)],
    "reduce.sum_into": [
        *(_sum(parts) for parts in (1, 2, 3, 5, 9)),
        *(_sum(2, accumulate=True), _sum(9, accumulate=True), _sum(70)),
    ],
    "reduce.sum_packed": [
        *(_sum(parts, kind="bfloat16") for parts in (1, 3, 9)),
        _sum(3, accumulate=True, kind="bfloat16"),
    ],
    "reduce.column_sum": [_column_sum(200), _column_sum(200, True), _column_sum(0)],
    "reduce.power_sums": [
        *(_sums(100_000, 2.0, True, (2, 2)), _sums(100_000, 2.0, True), _sums(0, 2.0, True)),
    ],
    "reduce.add_pairs": [_pairs(rows) for rows in (0, 1, 1000)],
    "reduce.clip_factor": [_pairs(rows, limit=0.5, leave_nonfinite=False) for rows in (0, 1000)],
    "reduce.exact_power_sums": [_sums(100_000, 2)],
    "reduce.abs_max": [*(_sums(size, None, True, rows) for size in (0, 1000) for rows in (None, 1))],
    "rms_norm.forward": [_rms_norm(), _rms_norm(added=True)],
    "rms_norm.backward": [
        *(_rms_norm_backward(), _rms_norm_backward(accumulate=True, more=True)),
        *(_rms_norm_backward(sums=""), _rms_norm_backward(rows=0)),
    ],
    "rotary.forward": [_rotary("x", "y")],
    "rotary.backward": [_rotary("dy", "dx")],
    "route.top_k": [_route("top_k")],
    "route.take": [_route("take")],
    "route.put": [_route("put")],
    "route.order": [_route("order"), _route("order", dropped=True)],
    "route.spread": [_route("spread"), _route("spread", weights=False)],
    "route.collect": [_route("collect", dropped=True), _route("collect", weights=False)],
    "route.weights_backward": [_route("weights_backward", dropped=True)],
    "sgd.step": [_sgd(False), _sgd(True), _sgd(True, nesterov=True)],
    "softmax.forward": [_rows("x", "y")],
    "softmax.backward": [_rows("dy", "y", "dx")],
    "swiglu.forward": [_swiglu("x", "y")],
    "swiglu.backward": [_swiglu("dy", "x", "dx", back=True)],
}
