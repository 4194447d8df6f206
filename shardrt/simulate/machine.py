"""A machine that programs are priced on: what its processors, links and host can do, from a TOML file.

Times are seconds, sizes bytes; bandwidths are bytes per second and rank, of links each way. A file says where
its figures come from (`origin`, `date`) and whether they were measured on that machine (`measured`):
otherwise a priced program is an estimate.

    machine = Machine.load("h100-8")            # of shardrt/simulate/machines
    machine = Machine.load("mine.toml")
"""

import tomllib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import ceil, inf, log, prod
from pathlib import Path
from typing import Any

from shardrt.device.program import Work

__all__ = ["Machine"]

FOLDER = Path(__file__).parent / "machines"

_SIZED = ("linear.", "matmul.")  # matmuls whose three sizes are m, n, k

Curve = Sequence[Sequence[float]]  # (size, efficiency) at ascending sizes; straight between, over log size


@dataclass(frozen=True)
class Kernel:
    """Kernels whose names begin with `name`: which part of the peaks they reach.

    The longest name that fits counts; "" fits all.

    Attributes:
        flops: over their number.
        bandwidth: over bytes.
        dtype: that they compute in; "" is any that no other one of this name has.
        tile: of products, whose sizes are m, n, k: how m and n are cut; none: not at all.
        narrow: of products, over the smallest of m, n and k, besides `flops`.
    """

    name: str = ""
    dtype: str = ""
    flops: Curve = ((1, 1),)
    bandwidth: Curve = ((1, 1),)
    tile: Sequence[int] = ()
    narrow: Curve = ((1, 1),)


@dataclass(frozen=True)
class Processor:
    """What runs kernels: a GPU, or the cores of a rank.

    Attributes:
        flops: the peak by dtype; "" is that of kernels that name none.
        constant: seconds of each launch, in addition.
        units: how many tiles of a matmul run at once.
        whole: a kernel keeps the processor to itself, though it may wait for memory; else other streams use
            what it leaves.
    """

    flops: Mapping[str, float]
    bandwidth: float
    constant: float = 0.0
    kernels: Sequence[Kernel] = (Kernel(),)
    units: int = 1
    whole: bool = False

    def demands(self, work: Work) -> tuple[float, float]:
        """Seconds for which a kernel needs the units, and the memory, were it alone; without the constant."""
        fitting = (k for k in self.kernels if work.name.startswith(k.name) and k.dtype in ("", work.dtype))
        kernel = max(fitting, key=lambda k: (len(k.name), k.dtype))
        computing = moving = 0.0
        if work.flops:
            peak = self.flops.get(work.dtype, self.flops[""])
            part = at(kernel.flops, work.flops) * self._filled(kernel, work)
            if len(work.sizes) == 3 and work.name.startswith(_SIZED):
                part *= at(kernel.narrow, min(work.sizes))
            computing = work.flops / (peak * part)
        if work.nbytes:
            moving = work.nbytes / (self.bandwidth * at(kernel.bandwidth, work.nbytes))
        return computing, moving

    def _filled(self, kernel: Kernel, work: Work) -> float:
        """The fraction of the units that the tiles of a matmul keep busy; the last wave may be small."""
        if not kernel.tile or len(work.sizes) < 3:
            return 1.0
        rows, columns = (ceil(size / each) for size, each in zip(work.sizes, kernel.tile, strict=False))
        tiles = rows * columns * prod(work.sizes[3:])
        return tiles / (ceil(tiles / self.units) * self.units)


@dataclass(frozen=True)
class Link:
    """A way out of a rank.

    Attributes:
        latency: of a step from one rank to the next.
        bandwidth: each way.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Switch:
    """What connects a node, where it adds and copies itself (NVLS).

    Attributes:
        efficiency: the part of the node's bandwidth.
        latency: of a collective.
        hop: of each level of a tree of nodes, in addition.
    """

    latency: float
    hop: float
    efficiency: float


@dataclass(frozen=True)
class Host:
    """The thread that issues.

    Attributes:
        item: seconds of each item.
        launch: of each launch, in addition.
        touch: of each time that it reads values itself, in addition to their bytes at its memory's bandwidth.
    """

    item: float = 0.0
    launch: float = 0.0
    touch: float = 0.0


@dataclass(frozen=True)
class Collectives:
    """base: seconds of each call. processor: the part of the processor that one keeps while it runs.

    memory: bytes that move through a rank's memory for each that it sends. eager: a message of more bytes
    waits for its receiver to come; others leave at once. calls: by name, what was measured between ranks of a
    node: bytes per second that a rank sends, over the bytes that it sends, in place of the link's bandwidth.
    parallel_trees: seconds of NCCL's PAT for each rank; 0 where it is not there.
    """

    base: float = 0.0
    processor: float = 0.0
    memory: float = 2.0
    eager: float = inf
    calls: Mapping[str, Curve] = field(default_factory=dict)
    parallel_trees: float = 0.0


@dataclass(frozen=True)
class Machine:
    """ranks_per_node: neighbouring ranks that `node` connects; `network` connects nodes. switch: of a node.

    host_link: between a GPU and host memory; without one the machine is of CPUs. host_streams: whose work the
    host does itself, in its thread. host: the processor of what the host computes.
    """

    name: str
    origin: str
    date: str
    measured: bool
    ranks_per_node: int
    device: Processor
    node: Link
    network: Link
    switch: Switch | None = None
    host: Host = Host()
    host_processor: Processor | None = None
    host_link: Link | None = None
    host_streams: Sequence[str] = ()
    collectives: Collectives = field(default_factory=Collectives)

    @property
    def of_cpus(self) -> bool:
        """Whether ranks compute in host memory."""
        return self.host_link is None

    @classmethod
    def load(cls, name: str | Path) -> "Machine":
        """A machine of this package by its name, or of a TOML file by its path.

        Raises:
            FileNotFoundError: if the file does not exist.
            ValueError: for what is no machine: it names the file and the key.
        """
        path = Path(name)
        if path.suffix != ".toml":
            path = FOLDER / f"{name}.toml"
            if not path.exists():
                known = sorted(each.stem for each in FOLDER.glob("*.toml"))
                raise FileNotFoundError(
                    f"unknown machine {str(name)!r}; known: {', '.join(known)}, or pass the path of a .toml"
                )
        try:
            return _made(cls, tomllib.loads(path.read_text(encoding="utf-8")), "")
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(f"{path}: {error}") from None


_PARTS = {
    "device": Processor,
    "host_processor": Processor,
    "node": Link,
    "network": Link,
    "switch": Switch,
    "host_link": Link,
    "host": Host,
    "collectives": Collectives,
}


def _made(kind: type, table: Mapping[str, Any], where: str) -> Any:
    known = {each.name for each in fields(kind)}
    if unknown := sorted(table.keys() - known):
        raise ValueError(f"{where}{unknown[0]}: unknown key; known: {', '.join(sorted(known))}")
    given = dict(table)
    for key, value in table.items():
        if key in _PARTS and kind is Machine:
            given[key] = _made(_PARTS[key], value, f"{key}.")
        elif key == "kernels":
            given[key] = [_made(Kernel, each, f"{where}kernels.") for each in value]
        elif key == "flops" and kind is Processor and not isinstance(value, Mapping):
            given[key] = {"": value}
        elif key == "date":
            given[key] = str(value)
    if kind is Processor and "" not in given.get("flops", {}):
        raise ValueError(f'{where}flops: the key "" is missing, which kernels without a dtype use')
    if kind is Processor and not any(
        each.name == each.dtype == "" for each in given.get("kernels", [Kernel()])
    ):
        given["kernels"] = [*given["kernels"], Kernel()]
    return kind(**given)


def at(curve: Curve, size: float) -> float:
    """The value of a curve at a size; beyond its ends as there."""
    place = bisect_right([point[0] for point in curve], size)
    if place in (0, len(curve)):
        return curve[max(place - 1, 0)][1]
    (low, first), (high, last) = curve[place - 1 : place + 1]
    return first + (last - first) * log(size / low) / log(high / low)
