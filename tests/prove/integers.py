"""What a training step computes on real ranks, in small integers that say where they come from.

    truth = truth_of(setting)
    assert truth.differences() == []

The ranks are threads with the CPU's arrays and collectives. Each op writes its gradient of a parameter. Then
integers take its place, made from the rank, step, backward run, use and element. What the optimizer reads
must be the sum of all that the ranks of the parameter wrote, divided by the factor of the loss. Sums of small
integers are exact in float32. After an update the shard gets integers made from the update and the element,
and each read of gathered parameters must find those.
"""

import itertools
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from zlib import crc32

import numpy as np
import pytest

from shardrt import autograd, optim
from shardrt.comm import init_device_mesh, thread, world
from shardrt.fsdp import set_gradient_divide_factor, units
from shardrt.fsdp.gradients import Gradients
from shardrt.fsdp.group import ParameterGroup
from shardrt.kernels import cpu
from tests.fsdp import paired

HIGHEST = 16  # of a gradient's integers: 16 of them add up to at most 256, which bfloat16 has exactly
# What is whole on each rank of "tp", of whose gradient each has a term where tokens are cut over them.
TERMS = ("norm.weight", "norm.bias", ".down.bias", ".attention.output.bias")
PART = 2.0**-10  # parameters are up to 255 of these, which bfloat16 has exactly


@dataclass(frozen=True)
class Setting:
    """One training: axes of the mesh with their sizes, options of tests/fsdp/paired.py, and more.

    factor: what gradients are divided by; 0: the number of ranks of the data.
    twice: the number of a block that each forward calls twice.
    """

    axes: tuple[tuple[str, int], ...]
    options: dict = field(hash=False)
    factor: int = 0
    twice: int | None = None
    steps: int = 2

    @property
    def ranks(self) -> int:
        return int(np.prod([size for _, size in self.axes]))

    @property
    def of_a_stage(self) -> int:
        """Ranks of each stage of a pipeline, or all. Those of one stage follow each other."""
        return self.ranks // dict(self.axes).get("pp", 1)

    @property
    def backwards(self) -> int:
        """Backward runs of a step."""
        return len(paired.turns(self.options)) * (2 if "pipeline" in self.options else 1)

    @property
    def divided_by(self) -> int:
        data = [size for name, size in self.axes if name in ("dp_replicate", "dp_shard", "cp")]
        return self.factor or int(np.prod(data))

    def along(self, rank: int, *names: str) -> list[int]:
        """The ranks that differ from `rank` only along these axes."""
        shape = [size for _, size in self.axes]
        place = np.unravel_index(rank, shape)
        choices = [
            range(size) if name in names else [at] for (name, size), at in zip(self.axes, place, strict=True)
        ]
        return [int(np.ravel_multi_index(each, shape)) for each in itertools.product(*choices)]

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.axes)
        more = [f"factor {self.factor}"] * (self.factor > 0) + [f"twice {self.twice}"] * (
            self.twice is not None
        )
        return "; ".join([axes, str(self.options), *more])


def train(setting: Setting, truth: "Truth | None" = None, begun: Callable | None = None) -> None:
    """Some steps on this rank. begun: called with the mesh, model and optimizer before the first."""
    shape, names = [size for _, size in setting.axes], tuple(name for name, _ in setting.axes)
    mesh = init_device_mesh("cpu", tuple(shape), names)
    model, pipeline = paired.build(setting.options, mesh, None)
    if setting.twice is not None:
        object.__setattr__(model, "block", partial(_block, model.block, setting.twice))
    wholes = pipeline.stages if pipeline else [model]
    if setting.factor:
        for whole in wholes:
            set_gradient_divide_factor(whole, setting.factor)
    optimizer = paired.optimizer_of(setting.options, model)
    scaler = optim.GradScaler(enabled=False)
    run = paired.backward if pipeline is None else partial(paired.by_stages, pipeline)
    if truth is not None:
        truth.begin(wholes)
    if begun is not None:
        begun(mesh, model, optimizer)
    rows = paired.rows_of(mesh)
    for step, batch in enumerate(paired.batches(rows, setting.options)[: setting.steps]):
        if "unused" in setting.options and step:  # some ranks leave a block out, or all
            model.left_out = 2 if "all" in setting.options["unused"] or rows.rank % 2 else None
        run(model, setting.options, scaler, *batch, paired.cut_of(mesh))
        optimizer.step()
        optimizer.zero_grad()
        if truth is not None:
            truth.stepped()


def _block(once: Callable, twice: int, number: int, x, positions):
    y = once(number, x, positions)
    return once(number, y, positions) if number == twice else y


def integers(count: int, highest: int, *source) -> np.ndarray:
    """`count` integers of 1 to `highest`, which depend on the source alone."""
    x = np.arange(count, dtype=np.uint64) + np.uint64(crc32(repr(source).encode()) << 20)
    for shift, factor in (
        (30, 0xBF58476D1CE4E5B9),
        (27, 0x94D049BB133111EB),
    ):  # Steele et al., SplitMix, 2014
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (1 + (x ^ (x >> np.uint64(31))) % np.uint64(highest)).astype(np.float32)


class Truth:
    """What the ranks of one run have written, updated with and read."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.rank_of: dict[ParameterGroup, int] = {}
        self.steps: Counter[int] = Counter()
        # By (rank, step, parameter): the sum of its integers; how many it is of.
        self.made: dict[tuple[int, int, str], np.ndarray] = {}
        self.count: Counter[tuple[int, int, str]] = Counter()
        self.runs: dict[tuple[int, int, str], dict[int, None]] = defaultdict(dict)  # that wrote it
        self.kept: list = []  # runs stay, so that no two have one id
        self.updated: list[tuple[int, int, ParameterGroup, int, np.ndarray]] = []
        self.reads: list[tuple[int, int, ParameterGroup, int, np.ndarray]] = []
        self.most = self.failed = 0
        self._pending: dict[int, list] = defaultdict(list)  # by rank

    # -- on the ranks

    def begin(self, wholes) -> None:
        rank = world.current().rank
        for whole in wholes:
            for unit in units(whole):
                for group in unit.groups:
                    self.rank_of[group] = rank
                    for parameter in group.parameters:
                        with parameter.writing():
                            pass
                    group.shard[...] = self._parameters(group, 0, *self._own(group))
        self.steps[rank] = 0

    def stepped(self) -> None:
        self.steps[world.current().rank] += 1

    def written(self, group: ParameterGroup, position: int, array: np.ndarray, accumulate: bool) -> None:
        """An op is about to write the gradient of a parameter to an array, or to add it."""
        rank, op = self.rank_of[group], self._op()
        self.settle(rank, op)
        before = array.copy() if accumulate else 0
        self._pending[rank].append((op, array, before, self.credit(group, position).reshape(array.shape)))

    def credit(self, group: ParameterGroup, position: int) -> np.ndarray:
        """The integers of one more use of a parameter in this backward run, which count from now on."""
        rank, name = self.rank_of[group], group.parameters[position].name
        key = rank, self.steps[rank], name
        run = autograd.running().outermost
        self.kept.append(run)
        number = self.runs[key].setdefault(id(run), len(self.runs[key]))
        use = self.count[key]
        self.count[key] += 1
        numbers = integers(group.layout.entries[position].size, HIGHEST, *key, number, use)
        self.made[key] = self.made.get(key, 0) + numbers.astype(np.float64)
        return numbers

    def settle(self, rank: int, op=None) -> None:
        """Put the integers where ops have written, but for those of `op`, which may be under way."""
        waiting = self._pending[rank]
        self._pending[rank] = [entry for entry in waiting if entry[0] == op and op is not None]
        for other, array, before, numbers in waiting:
            if other != op or op is None:
                array[...] = before + numbers

    @staticmethod
    def _op():
        run = autograd.running()
        return id(run), run.position

    def update(self, group: ParameterGroup, start: int, gradient: np.ndarray) -> None:
        """The optimizer updates elements from `start` on of a rank's shard with a gradient."""
        rank = self.rank_of[group]
        first = self._own(group)[0] + start
        self.updated.append((rank, self.steps[rank], group, first, gradient.astype(np.float64)))
        group.shard[start : start + len(gradient)] = self._parameters(
            group, self.steps[rank] + 1, first, first + len(gradient)
        )

    def read(self, group: ParameterGroup, position: int, array: np.ndarray) -> None:
        """An op reads gathered parameters."""
        rank = self.rank_of[group]
        self.reads.append((rank, self.steps[rank], group, position, numbers_of(array).copy()))

    @staticmethod
    def _own(group: ParameterGroup) -> tuple[int, int]:
        size, rank = group.layout.shard_size, group.ranks.rank
        return rank * size, (rank + 1) * size

    def _parameters(self, group: ParameterGroup, version: int, start: int, stop: int) -> np.ndarray:
        """The integers of elements [start, stop) of the flat buffer; 0 in gaps."""
        found = np.zeros(stop - start, np.float32)
        for position, entry in enumerate(group.layout.entries):
            first, last = max(start, entry.offset), min(stop, entry.stop)
            if first < last:
                numbers = self._parameter(group, position, version)
                found[first - start : last - start] = numbers[first - entry.offset : last - entry.offset]
        return found

    @staticmethod
    def _parameter(group: ParameterGroup, position: int, version: int) -> np.ndarray:
        whose = int(group.settings.mesh.ranks.min()), group.parameters[position].name
        return integers(group.layout.entries[position].size, 255, *whose, version) * np.float32(PART)

    # -- afterwards

    def mates(self, group: ParameterGroup, name: str) -> list[int]:
        """The ranks whose gradients of a parameter are added up, as the program says.

        They are those of the data, or of experts' own mesh. With tokens cut over "tp", each of its ranks has
        a term of parameters that are whole on each. Two stages of "pp" have a term of the embedding each.
        """
        rank, options = self.rank_of[group], self.setting.options
        axes = ["dp_replicate", "dp_shard", "cp"]
        if name.endswith(TERMS) and "sequence" in options.get("parallel", []):
            axes.append("tp")
        if ".router." in name or (".experts." in name and not paired.spread(options)):
            axes.append("tp")
        if name == "embed.weight":
            axes.append("pp")
        if ".experts." in name and paired.spread(options):
            return group.settings.mesh.ranks.ravel().tolist()
        return self.setting.along(rank, *axes)

    def differences(self) -> list[str]:
        """Where an update or a read has not had the right values: nothing if the step is right."""
        return [*self._wrong_updates(), *self._wrong_reads()]

    def _wrong_updates(self) -> Iterator[str]:
        done: dict[tuple[int, int, str], list[tuple[int, int]]] = defaultdict(list)
        for rank, step, group, start, gradient in self.updated:
            for entry, parameter in zip(group.layout.entries, group.parameters, strict=True):
                first, last = max(start, entry.offset), min(start + len(gradient), entry.stop)
                if first >= last:
                    continue
                own = slice(first - entry.offset, last - entry.offset)
                done[rank, step, parameter.name].append((own.start, own.stop))
                mates = self.mates(group, parameter.name)
                all_of_it = [self.made.get((other, step, parameter.name)) for other in mates]
                wanted = sum((each[own] for each in all_of_it if each is not None), np.zeros(last - first))
                found = gradient[first - start : last - start] * self.setting.divided_by
                wrong = np.flatnonzero(~(np.abs(found - wanted) < 0.25))
                if len(wrong):
                    at = wrong[0]
                    yield (
                        f"step {step}, rank {rank}: element {own.start + at} of {parameter.name} is updated "
                        f"with {found[at]:g}, not {wanted[at]:g} ({len(wrong)} of {last - first} are wrong)"
                    )
        yield from self._left_out(done)

    def _left_out(self, done) -> Iterator[str]:
        for group, rank in self.rank_of.items():
            low, high = self._own(group)
            for step in range(self.steps[rank]):
                for entry, parameter in zip(group.layout.entries, group.parameters, strict=True):
                    first, last = max(low, entry.offset), min(high, entry.stop)
                    mates = self.mates(group, parameter.name)
                    used = any((other, step, parameter.name) in self.made for other in mates)
                    if not used or first >= last:
                        continue
                    count = np.zeros(entry.size)
                    for start, stop in done[rank, step, parameter.name]:
                        count[start:stop] += 1
                    if (count[first - entry.offset : last - entry.offset] != 1).any():
                        yield f"step {step}, rank {rank}: {parameter.name} is not updated once"

    def _wrong_reads(self) -> Iterator[str]:
        updates: dict[tuple[int, str], set[int]] = defaultdict(
            set
        )  # steps in which a rank's group was updated
        for _, step, group, _, _ in self.updated:
            for other in group.settings.mesh.ranks.ravel().tolist():
                updates[other, group.label].add(step)
        known: dict = {}
        for rank, step, group, position, numbers in self.reads:
            before = [each for each in updates[rank, group.label] if each < step]
            version = max(before) + 1 if before else 0
            place = group, position, version
            if place not in known:
                known[place] = self._parameter(group, position, version)
            if not np.array_equal(numbers.ravel(), known[place]):
                yield (
                    f"step {step}, rank {rank}: {group.parameters[position].name} is read, and is not what "
                    f"{version} updates made"
                )

    def uses(self) -> dict[tuple[int, int, str], tuple[int, int]]:
        """(backward runs that wrote it, writes) by rank, step and parameter."""
        return {key: (len(self.runs[key]), self.count[key]) for key in self.made}


def numbers_of(array: np.ndarray) -> np.ndarray:
    """Values, also of bits of bfloat16."""
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array


@contextmanager
def observed(truth: Truth) -> Iterator[None]:
    """Inside, `truth` sees what ranks do, and puts integers in the place of values."""
    target, put_rows, lent_bits = (
        ParameterGroup.gradient_target,
        ParameterGroup.put_rows,
        ParameterGroup.lent_bits,
    )
    reduce, have_slots = Gradients.reduce, Gradients.have_slots

    def gradient_target(self, parameter):
        array, accumulate, token = target(self, parameter)
        truth.written(self, self.position[id(parameter)], array, accumulate)
        return array, accumulate, token

    def rows(self, parameter, fill):
        truth.settle(truth.rank_of[self])
        numbers = truth.credit(self, self.position[id(parameter)]).reshape(parameter_shape(self, parameter))

        def filled(first, stop, out, accumulate):
            before = out.copy() if accumulate else 0
            fill(first, stop, out, accumulate)
            out[...] = before + numbers[first:stop]

        return put_rows(self, parameter, filled)

    def lent(self, parameter):
        array = lent_bits(self, parameter)
        truth.read(self, self.position[id(parameter)], array)
        return array

    def reduced(self, group):
        truth.settle(truth.rank_of[group])
        reduce(self, group)

    def made(self, own_slots=False):
        truth.settle(world.current().rank)
        have_slots(self, own_slots)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParameterGroup, "gradient_target", gradient_target)
        patch.setattr(ParameterGroup, "put_rows", rows)
        patch.setattr(ParameterGroup, "lent_bits", lent)
        patch.setattr(Gradients, "reduce", reduced)
        patch.setattr(Gradients, "have_slots", made)
        patch.setattr(cpu.adamw, "step", _updating(truth, cpu.adamw.step, 2))
        patch.setattr(cpu.sgd, "step", _updating(truth, cpu.sgd.step, 1))
        yield


def parameter_shape(group: ParameterGroup, parameter) -> tuple[int, ...]:
    return group.layout.entries[group.position[id(parameter)]].shape


def _updating(truth: Truth, step: Callable, ranges_at: int) -> Callable:
    """A kernel of an optimizer: step(shard, gradient, ..., ranges, ...)."""

    def updated(shard, gradient, *more):
        before, ranges = gradient.copy(), more[ranges_at][:, :2].astype(int).tolist()
        step(shard, gradient, *more)
        start = shard.__array_interface__["data"][0]
        for group in truth.rank_of:
            own = group.shard.__array_interface__["data"][0]
            if own <= start < own + group.shard.nbytes:
                moved = (start - own) // shard.itemsize
                for first, last in ranges:
                    truth.update(group, moved + first, before[first:last])
        rounded, kind = more[ranges_at + 1 :][:2] if step.__module__.endswith("adamw") else (None, "")
        if rounded is not None and rounded.dtype == np.uint16:
            cpu.cast.pack(shard, rounded, kind)
        elif rounded is not None:
            rounded[...] = shard

    return updated


_one_at_a_time = threading.Lock()  # classes are patched


def truth_of(setting: Setting, begun: Callable | None = None) -> Truth:
    """Train on real ranks. Raises what a rank raises."""
    truth = Truth(setting)
    with _one_at_a_time, warnings.catch_warnings(), np.errstate(all="ignore"), observed(truth):
        warnings.simplefilter("ignore")
        thread.run(setting.ranks, train, setting, truth, begun)
    return truth


def with_options(setting: Setting, **options) -> Setting:
    return replace(setting, options={**setting.options, **options})
