"""What `plan` tries: the options of a training command in other settings, all with the same global batch.

    for candidate in candidates(recipe, given={"batch_size"}, ranks=64, node=8):
        candidate.options

Options and their words are those of the command line (train/options.py). What of two candidates needs more
memory, or saves more at the cost of time, is said by numbers that are compared one by one, so that `search`
can leave candidates out. It says nothing of options that this file does not know.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from shardrt.fsdp.strategy import ShardingStrategy
from shardrt.train.config import plain
from shardrt.train.recipe import Recipe

__all__ = ["Candidate", "candidates", "combinations", "words_for", "words_of"]

Options = dict[str, str]

MESH = ("parallel.tp", "parallel.sequence", "parallel.pp", "parallel.cp", "parallel.ep")
AXES = ("parallel.tp", "parallel.pp", "parallel.cp")
_STATES = ("memory.offload_optimizer", "memory.offload_gradients", "memory.offload_parameters")
_ACTIVATIONS = "memory.offload_activations"
_KEPT = {"full": 0, "matmul": 1, "none": 2}  # of what a block computes
_EVERY = 1 << 20  # blocks from one that is recomputed to the next, where none is
_MOST = 4 * _EVERY  # more than is kept of any block
_MOST_PARTS = 16  # micro-batches of a rank
_FALSE, _TRUE = "False", "True"


@dataclass(frozen=True, eq=False)
class Candidate:
    """Settings of options, and what is known of them beside others before they run.

    Attributes:
        kind: of two that have this alike, one of which no number in `needs` is lower takes no less memory.
        saves: of two that have `beside` alike, one of which no number here is higher is no faster.
        computes: of two that have this alike, one of which no number in `keeps` is higher computes no less in
            forward and backward, and reduces gradients as often; strategies and units may differ.
        mesh: whose ranks have the same parts.
        states: whose parameters, gradients and optimizer state are in as many parts and in the same places.
    """

    options: Options
    kind: Hashable = None
    needs: tuple[int, ...] = ()
    saves: tuple[int, ...] = ()
    beside: Hashable = None
    computes: Hashable = None
    keeps: tuple[int, ...] = ()
    mesh: Hashable = None
    states: Hashable = None

    @property
    def words(self) -> list[str]:
        """All its options as words of a command line."""
        return words_for(self.options)


def words_for(options: Mapping[str, str]) -> list[str]:
    """Options as words of a command line."""
    each = ((f"--{name.replace('_', '-')}", word) for name, word in options.items())
    return [part for pair in each for part in pair]


def combinations(vary: Mapping[str, Sequence[str]]) -> list[Candidate]:
    """All settings of these options, of which nothing is known."""
    each = product(*vary.values())
    return [Candidate(dict(zip(vary, words, strict=True)), kind=words, beside=words) for words in each]


def candidates(
    recipe: Recipe,
    *,
    given: Collection[str],
    ranks: int,
    node: int,
    vary: Mapping[str, Sequence[str]] | None = None,
    only: bool = False,
    offload: bool = True,
) -> list[Candidate]:
    """Settings of a recipe on `ranks`, `node` of them on one: strategies, meshes, units, what saves memory.

    Args:
        given: options that stay as they are.
        vary: words for options, whatever is given.
        only: vary nothing else.
        offload: whether a host has memory of its own.

    Raises:
        ValueError: for an option that there is not, and a word that is no number where one is meant.
    """
    space = _Space(recipe, set(given), ranks, node, dict(vary or {}), only, offload)
    return list(space.all())


class _Space:
    def __init__(
        self,
        recipe: Recipe,
        given: set[str],
        ranks: int,
        node: int,
        vary: dict[str, Sequence[str]],
        only: bool,
        offload: bool,
    ) -> None:
        self._recipe, self._ranks, self._node, self._vary = recipe, ranks, node, vary
        self._offload = offload
        self._words = words_of(recipe)
        if unknown := sorted(vary.keys() - self._words.keys()):
            raise ValueError(f"--vary: unknown option {unknown[0]}")
        if "parallel.micro_batches" in given:
            given = given | {"micro_batches"}
        self._fixed = set(self._words) if only else given
        self._copies = "fsdp.copies" not in given and ("fsdp.strategy" in vary or not only)

    def all(self) -> Iterator[Candidate]:
        """With what differs in strategy alone one after the other.

        Not compared in memory: one micro-batch and several, which add up whole gradients on each rank;
        NO_SHARD and the rest; meshes; what is recomputed where activations are on the host.
        """
        inner = self._choices("fsdp.prefetch", "12"), self._choices("fsdp.blocks", "12")
        saving = [(again, away) for again in self._recomputed() for away in self._offloaded()]
        rest = list(product(*inner, self._others()))
        for mesh in self._meshes():
            shardings = [(sharding, *_held(sharding)) for sharding in self._shardings(mesh)]
            for parts in self._parts(mesh):
                count = _number("micro_batches", parts["micro_batches"])
                on = tuple(mesh.values()), parts["micro_batches"]
                for (again, away), (prefetch, blocks, others) in product(saving, rest):
                    saves = _saves(again, away)
                    offloaded = away[_ACTIVATIONS].lower() == "true"
                    apart = offloaded, tuple(again.values()) if offloaded or saves[0] < 0 else ()
                    # On the host, less is copied of what is recomputed: neither is known to be faster.
                    kept = _EVERY * saves[0] + saves[1]
                    copied = (kept, -kept) if offloaded else (_MOST, _MOST)
                    extra = tuple(others.values())
                    # In a pipeline more micro-batches are faster; else each makes matmuls smaller.
                    alike, fewer = (on, 0) if mesh["parallel.pp"] != "1" else (on[0], -count)
                    keeps = fewer, int(parts["reduce_each"].lower() != "true"), *saves
                    computes = alike, tuple(again.values()) if saves[0] < 0 else (), extra
                    ahead = tuple(_number(*each) for each in (*prefetch.items(), *blocks.items()))
                    for sharding, whole, held in shardings:
                        like = on[0], parts["reduce_each"], extra
                        cut = tuple(mesh[name] for name in ("parallel.tp", "parallel.pp", "parallel.ep"))
                        places = tuple(word for name, word in away.items() if name != _ACTIVATIONS)
                        yield Candidate(
                            mesh | parts | sharding | again | away | prefetch | blocks | others,
                            kind=(like, whole, count == 1, apart),
                            needs=(*ahead, *held, -count, *saves),
                            saves=(*saves, *copied),
                            beside=(like, on[1], tuple(sharding.values()), ahead),
                            computes=computes,
                            keeps=keeps,
                            mesh=on,
                            states=(cut, tuple(sharding.values()), places, extra),
                        )

    def _choices(self, name: str, usual: Sequence[str]) -> list[Options]:
        return [{name: word} for word in self._of(name, usual)]

    def _of(self, name: str, usual: Sequence[str]) -> list[str]:
        """The words to try for an option: those of --vary; or else the present one, with `usual` if free."""
        if name in self._vary:
            return list(dict.fromkeys(self._vary[name]))
        now = self._words[name]
        return [now] if name in self._fixed else list(dict.fromkeys([now, *usual]))

    def _free(self, *names: str) -> bool:
        return not any(name in self._fixed or name in self._vary for name in names)

    # -- ranks

    def _meshes(self) -> Iterator[Options]:
        """One axis besides sharding, or tensor parallelism in the nodes and a pipeline of them."""
        heads = _powers(min(self._node, self._ranks))
        each = [self._of(name, heads) for name in AXES]
        experts = getattr(getattr(self._recipe, "model", None), "experts", 0)
        spread = self._of("parallel.ep", _powers(min(self._node, experts, self._ranks)))
        cut = self._of("parallel.sequence", [_FALSE, _TRUE])
        for words in product(*each):
            moved = [
                name
                for name, word in zip(AXES, words, strict=True)
                if name not in self._vary and word != self._words[name]
            ]
            tp, pp, cp = (_number(name, word) for name, word in zip(AXES, words, strict=True))
            nodes = moved == ["parallel.tp", "parallel.pp"] and tp == self._node
            if len(moved) > 1 and not nodes or (moved and self._ranks % (tp * pp * cp)):
                continue
            for ep, sequence in product(spread, cut[-1:] if nodes else cut if tp > 1 else cut[:1]):
                yield dict(zip(MESH, (words[0], sequence, words[1], words[2], ep), strict=True))

    def _parts(self, mesh: Options) -> Iterator[Options]:
        """Micro-batches that the batch can be cut into, reduced together or each."""
        data, pp = self._data(mesh), int(mesh["parallel.pp"])
        share = self._recipe.batch_size // data if self._recipe.batch_size % data == 0 else 0
        usual = [parts for parts in map(int, _powers(min(_MOST_PARTS * pp, share))) if share % parts == 0]
        if pp > 1:
            usual = [parts for parts in (2 * pp, pp) if share and share % parts == 0][:1] or [2 * pp]
        if self._recipe.invariant or not self._free("micro_batches"):
            counts = self._of("micro_batches", ())
        else:
            usual = usual or [self._recipe.micro_batches]
            counts = [str(parts) for parts in sorted(usual)]
        may = not (self._recipe.invariant or self._recipe.optimizer.in_backward)
        for count in counts:
            several = _number("micro_batches", count) > 1 and pp == 1
            each = self._of("reduce_each", [_FALSE, _TRUE] if may else ())
            for word in each if several else dict.fromkeys([_FALSE, *self._vary.get("reduce_each", ())]):
                yield {"micro_batches": count, "reduce_each": word}

    def _shardings(self, mesh: Options) -> Iterator[Options]:
        """Strategies; hybrids with copies of shards that span a node at least."""
        data, cp, tp = self._data(mesh), int(mesh["parallel.cp"]), int(mesh["parallel.tp"])
        spread = [
            copies
            for copies in _powers(data // 2)[1:]
            if data % int(copies) == 0
            and data // int(copies) * cp > 1
            and (self._ranks <= self._node or data // int(copies) * cp * tp >= self._node)
        ]
        strategies = self._of("fsdp.strategy", [each.name for each in _LEANEST_FIRST])
        kept = self._words["fsdp.copies"]
        for name in strategies:
            known = ShardingStrategy.__members__.get(name)
            hybrid = known is not None and known.rules.shard_over == "last axis"
            if "fsdp.copies" in self._vary:
                several = self._of("fsdp.copies", ())
            elif not self._copies:
                several = [kept] if hybrid == (kept != "1") or "fsdp.strategy" in self._vary else []
            elif hybrid:
                several = spread if int(mesh["parallel.ep"]) == 1 else []
            else:
                several = ["1"]
            for copies in several:
                yield {"fsdp.strategy": name, "fsdp.copies": copies}

    def _data(self, mesh: Options) -> int:
        """How many ranks have slices of the batch."""
        return max(1, self._ranks // prod(_number(name, mesh[name]) for name in AXES))

    # -- what saves memory

    def _recomputed(self) -> Iterator[Options]:
        mode, every = "memory.recompute", "memory.recompute_every"
        if self._free(mode, every):
            for words in (("none", "1"), ("matmul", "1"), ("full", "2"), ("full", "1")):
                yield dict(zip((mode, every), words, strict=True))
            return
        for kept in self._of(mode, list(_KEPT)):
            for word in self._of(every, ()) if kept != "none" else [self._words[every]]:
                yield {mode: kept, every: word}

    def _offloaded(self) -> Iterator[Options]:
        where = "memory.update_on"
        usual = [_FALSE, _TRUE] if self._offload else ()
        activations = self._choices(_ACTIVATIONS, usual)
        if self._free(*_STATES, where) and self._offload and not self._recipe.memory.directory:
            none, all_of = (dict.fromkeys(_STATES, word) for word in (_FALSE, _TRUE))
            device, host = {where: "device"}, {where: "host"}
            some = none | {"memory.offload_optimizer": _TRUE}
            states = [none | device, some | device, all_of | device, all_of | host]
        else:
            states = [
                _joined(each) for each in product(*(self._choices(name, ()) for name in (*_STATES, where)))
            ]
        for each in product(activations, states):
            yield _joined(each)

    def _others(self) -> list[Options]:
        """Whatever else --vary names."""
        names = [name for name in self._vary if name not in _KNOWN]
        return [dict(zip(names, words, strict=True)) for words in product(*(self._vary[n] for n in names))]


_LEANEST_FIRST = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.HYBRID_SHARD_GRAD_OP,
    ShardingStrategy.SHARD_OPT,
    ShardingStrategy.NO_SHARD,
)


def words_of(recipe: Any) -> Options:
    """Every setting by the name of its option, as a word of the command line; no lists, and no None."""

    def each(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
        for name, value in table.items():
            if isinstance(value, dict):
                yield from each(value, f"{prefix}{name}.")
            elif not isinstance(value, list):
                yield prefix + name, str(value)

    return dict(each(plain(recipe), ""))


def _held(sharding: Options) -> tuple[str, tuple[int, int]]:
    """(a strategy that is not compared with others, how much of a model a rank has)."""
    name, copies = sharding["fsdp.strategy"], _number("fsdp.copies", sharding["fsdp.copies"])
    strategy = ShardingStrategy.__members__.get(name, ShardingStrategy.NO_SHARD)
    if strategy is ShardingStrategy.NO_SHARD:
        return name, (copies, 0)
    return "", (copies, strategy.rules.keep_after_forward + strategy.rules.keep_gradient)


def _saves(again: Options, away: Options) -> tuple[int, ...]:
    """Lower where more is saved; the first is -1 for what is not known."""
    kept = _KEPT.get(again["memory.recompute"], -1)
    every = _EVERY if kept == 2 else _number("memory.recompute_every", again["memory.recompute_every"])
    offloads = (int(word.lower() != "true") for name, word in away.items() if name != "memory.update_on")
    return kept, every, *offloads, int(away["memory.update_on"] != "host")


# What decides when and where things are, not what blocks compute.
_ASIDE = {
    *("fsdp.strategy", "fsdp.copies", "fsdp.prefetch", "fsdp.blocks", "reduce_each", "memory.update_on"),
    *(_ACTIVATIONS, *_STATES),
}
_KNOWN = {*_ASIDE, *MESH, "micro_batches", "memory.recompute", "memory.recompute_every"}


def _number(name: str, word: str) -> int:
    try:
        return max(1, int(word)) if name in AXES else int(word)
    except ValueError:
        raise ValueError(f"--vary {name}: must be an integer, got {word!r}") from None


def _powers(most: int) -> list[str]:
    """Of two, from 1 up to `most`."""
    return [str(1 << place) for place in range(max(1, most).bit_length())]


def _joined(each: Sequence[Options]) -> Options:
    return {name: word for options in each for name, word in options.items()}
