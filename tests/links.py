"""A program on links as a pipeline has them, in numbers that one rank has as well."""

import numpy as np

from shardrt.comm.links import Links

SHAPES = ((3, 7), (40, 300))  # of micro-batches in turn; arrays of the second are of the pool


def rings(ranks):
    """Links around a ring, both ways: two ranks have four of them."""
    return {(r, (r + step) % ranks, kind) for r in range(ranks) for kind, step in (("F", 1), ("B", -1))}


def row(rank, ranks, count, chunks):
    """What a rank does, in order: 1F1B; of several stages all forwards, and then all backwards."""
    if chunks > 1:
        own = range(rank, chunks * ranks, ranks)
        forwards = [("F", stage, m) for stage in own for m in range(count)]
        return forwards + [("B", stage, m) for stage in reversed(own) for m in range(count)]
    warm = min(count, ranks - rank)
    actions = [("F", rank, m) for m in range(warm)]
    for m in range(count):
        actions.append(("B", rank, m))
        if m + warm < count:
            actions.append(("F", rank, m + warm))
    return actions


def batch(step, m):
    shape = SHAPES[m % 2]
    return (np.arange(np.prod(shape), dtype=np.float32) % 97 + step + m / 8).reshape(shape)


def forward(x, stage):
    return x * np.float32(1.25) + np.float32(stage)


def backward(dy, x):
    return dy * np.float32(0.5) + x


def gradient(step, m, stages):
    """What comes out of the backward of the first stage."""
    x = [batch(step, m)]
    for stage in range(stages):
        x.append(forward(x[-1], stage))
    dx = x[-1]
    for stage in reversed(range(stages)):
        dx = backward(dx, x[stage])
    return dx


class Program:
    """What one rank does with links; `before(kind, stage, m)` is called before each action."""

    def __init__(self, mesh, *, chunks=1, count=4, links=None, before=lambda *action: None):
        self.mesh, self.chunks, self.count, self.before = mesh, chunks, count, before
        self.stages = chunks * mesh.size
        held = mesh.size if chunks == 1 else chunks * count  # and not one more: slots are used again
        self.links = links or Links(mesh, rings(mesh.size), slots=held, poison=True)

    def run(self, steps=2):
        """The gradients of the first stage, on the host: by step and micro-batch; [] on other ranks."""
        return [[self.mesh.device.to_numpy(dx) for dx in self.step(step)] for step in range(steps)]

    def step(self, step=0):
        self.kept, gradients = {}, []
        actions = row(self.mesh.rank, self.mesh.size, self.count, self.chunks)
        for kind, stage, m in actions:
            source = self.source(kind, stage)
            if source is not None:
                what = f"{kind}{m} of stage {source}"
                self.links.expect(kind, source % self.mesh.size, key=SHAPES[m % 2], tag=what)
        for kind, stage, m in actions:
            self.before(kind, stage, m)
            if kind == "F":
                self.forward(step, stage, m)
            else:
                dx = self.backward(stage, m)
                if stage:
                    self.send("B", stage - 1, (dx,), m, stage)
                else:
                    gradients.append(dx)
        self.links.finish()
        return gradients

    def forward(self, step, stage, m):
        got, x = None, self.mesh.device.asarray(batch(step, m))
        if stage:
            got = self.receive("F", stage, m)
            x, nothing, number, bits = got.arrays
            assert nothing is None and got.about == ["x", m % 2] and number.shape == ()
            assert (bits.dtype.name, bits.shape) == ("float16", (0, 2) if m % 2 else (3,))
        y = forward(x, stage)
        self.kept[stage, m] = got, x, y
        if stage < self.stages - 1:
            here = self.mesh.device
            small = here.zeros((0, 2) if m % 2 else (3,), np.float16)
            number = here.asarray(np.array(m, np.int64))
            self.send("F", stage + 1, (y, None, number, small), m, stage, about=["x", m % 2])

    def backward(self, stage, m):
        got, x, y = self.kept.pop((stage, m))
        theirs, dy = None, y
        if stage < self.stages - 1:
            theirs = self.receive("B", stage, m)
            (dy,) = theirs.arrays
        dx = backward(dy, x)
        for each in (got, theirs):
            if each is not None:
                each.free()
        return dx

    def source(self, kind, stage):
        """The stage whose output is an input here, if there is one."""
        source = stage - 1 if kind == "F" else stage + 1
        return source if 0 <= source < self.stages else None

    def receive(self, kind, stage, m):
        source = self.source(kind, stage)
        return self.links.receive(kind, source % self.mesh.size, tag=f"{kind}{m} of stage {source}")

    def send(self, kind, to, arrays, m, stage, **about):
        to, what = to % self.mesh.size, f"{kind}{m} of stage {stage}"
        self.links.send(kind, to, arrays, key=SHAPES[m % 2], tag=what, **about)


def check(found, stages):
    """That what the first rank has are the bits of one rank."""
    assert any(found)
    for step, gradients in enumerate(found):
        for m, dx in enumerate(gradients):
            np.testing.assert_array_equal(dx, gradient(step, m, stages))
