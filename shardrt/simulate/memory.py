"""What is lent of memory when it is most: of each place, by category and by the module that has it."""

from collections import Counter, defaultdict

from shardrt.device.program import Free, Program, Take

__all__ = ["by_category", "by_module", "peaks"]

Peak = Counter[tuple[str, str]]  # (category, module) -> bytes


def peaks(program: Program, first: int, last: int) -> dict[str, Peak]:
    """By place, what is lent when that place has most between two items."""
    lent: dict[int, Take] = {}
    total: Counter[str] = Counter()
    most: dict[str, tuple[int, int]] = {}  # bytes, after which item
    for index, item in enumerate(program.items[: last + 1]):
        if isinstance(item, Take):
            lent[item.memory.start] = item
            total[item.place] += item.memory.stop - item.memory.start
        elif isinstance(item, Free) and item.start in lent:
            gone = lent.pop(item.start)
            total[gone.place] -= gone.memory.stop - gone.memory.start
        if index == first or index > first and isinstance(item, Take):
            for place, nbytes in total.items():
                if nbytes > most.get(place, (0, 0))[0]:
                    most[place] = nbytes, index
    return {place: _lent(program, place, index) for place, (_, index) in sorted(most.items())}


def _lent(program: Program, place: str, index: int) -> Peak:
    """After an item."""
    lent: dict[int, Take] = {}
    for item in program.items[: index + 1]:
        if isinstance(item, Take):
            lent[item.memory.start] = item
        elif isinstance(item, Free):
            lent.pop(item.start, None)
    found: Peak = Counter()
    for take in lent.values():
        if take.place == place:
            found[take.category, take.owner] += take.memory.stop - take.memory.start
    return found


def by_category(peak: Peak) -> dict[str, int]:
    """The largest first."""
    found: Counter[str] = Counter()
    for (category, _), nbytes in peak.items():
        found[category] += nbytes
    return dict(found.most_common())


def by_module(peak: Peak) -> dict[str, dict[str, int]]:
    """Module -> category -> bytes, those with most first; "" is what no module has alone."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for (category, module), nbytes in peak.items():
        found[module][category] += nbytes
    ordered = sorted(found, key=lambda module: -found[module].total())
    return {module: dict(found[module].most_common()) for module in ordered}
