"""Provenance: every gradient enters its optimizer once, and every kernel reads the newest parameters.

    with followed() as follow:
        programs = record(["train.py"], ranks=4096, follow=follow)
    print(follow.findings)

Each recorded rank is followed while its host issues work, in that order: where there is no race, any order
that streams allow has the same values. Copies, casts, sums and collectives move and add terms (terms.py).
Kernels of backward make gradients, which kernels of optimizers use up; updates.py says what must hold.

Ranks of a role are taken to have what this rank has, shifted to their places. What a rank with another role
gives in a collective is a source, which is replaced when all ranks have been recorded. What an operation
without a rule makes of gradients or parameters is unknown, and the report says so.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from shardrt import device
from shardrt.device.simulated import SimulatedDevice
from shardrt.fsdp.options.schedules import each_schedule
from shardrt.simulate.follower import Follower
from shardrt.simulate.losses import Loss, Message
from shardrt.simulate.terms import Gradient, Piece, Received, Term, Unknown, Value, joined
from shardrt.simulate.updates import Finding, Weights

__all__ = ["Finding", "Follow", "Follower", "followed"]


class Follow:
    """The followers of a recording's ranks, and what they found."""

    def __init__(self) -> None:
        self._followers: dict[int, Follower] = {}

    def __call__(self, here: SimulatedDevice) -> None:
        """Follow what a device records from now on. A recording may begin again, of more ranks."""
        here.follower = self._followers[here.program.alike[0]] = Follower(here)

    @property
    def followers(self) -> list[Follower]:
        """Of all recorded ranks."""
        return [self._followers[first] for first in sorted(self._followers)]

    @cached_property
    def findings(self) -> list[Finding]:
        """Of all ranks, now that the recording has ended."""
        for follower in self.followers:
            follower.checks.finish(last=True)
        for follower in self.followers:
            follower.checks.has_written = self._has_written
            follower.checks.settle(partial(self._resolved, follower))
        self._compare_uses()
        self._compare_gathers()
        self._compare_weights()
        found = (sorted(each.checks.findings, key=lambda one: one.place) for each in self.followers)
        return [finding for findings in found for finding in findings]

    def _has_written(self, rank: int, source: Gradient) -> bool:
        """Whether a rank has written a gradient, or the rank that is recorded for it."""
        return all(each.checks.wrote(source) for each in self.followers if rank in each.alike)

    def _resolved(self, follower: Follower, terms: Sequence[Term], count: int) -> list[tuple[int, Value]]:
        """(first element, value from there on) of `count` elements, without what other ranks give."""
        each = [self._given(follower, term, count) for term in terms]
        found: list[tuple[int, Value]] = []
        for edge in sorted({first for parts in each for first, _ in parts}):
            total: list[Term] = []
            for parts in each:
                first, value = [part for part in parts if part[0] <= edge][-1]
                if not isinstance(value, tuple):
                    return [(0, value)]
                total += [term.moved(edge - first) for term in value]
            found.append((edge, joined(total)))
        return found

    def _given(self, follower: Follower, term: Term, count: int) -> list[tuple[int, Value]]:
        """The same for one term."""
        source = term.source
        if not isinstance(source, Received):
            return [(0, (term,))]
        other = next((each for each in self.followers if source.rank in each.alike), None)
        pieces = other.given.get((source.group, source.number), ()) if other is not None else ()
        found: list[tuple[int, Value]] = []
        for piece in pieces:
            first = max(0, piece.start // piece.item - term.base)
            last = min(count, piece.stop // piece.item - term.base)
            if first >= last:
                continue
            value = piece.part((first + term.base) * piece.item, (last + term.base) * piece.item).value
            if not isinstance(value, tuple):
                return [(0, value if isinstance(value, Unknown) else Unknown(str(source)))]
            theirs = [self._as_received(follower, other, each, term) for each in value]
            deeper = self._resolved(follower, theirs, last - first)
            found += [(first + at, each) for at, each in deeper] if theirs else [(first, ())]
        return found or [(0, Unknown(str(source)))]

    def _as_received(self, follower: Follower, other: Follower, given: Term, term: Term) -> Term:
        """A term of another rank, as a rank of this role has it behind the collective."""
        by, ranks, source = term.source.rank - other.rank, given.ranks, given.source
        if isinstance(source, Received):
            source = replace(source, rank=source.rank + by)
        if ranks is not None and term.ranks is not None:
            ranks, _ = ranks.moved(by).spread(term.ranks, follower.rank)
        factors = *given.factors, *term.factors
        return Term(source, given.base, ranks, given.scale * term.scale, factors)

    def _compare_uses(self) -> None:
        """What an update has nothing of, no rank of the sum has written."""
        for follower in self.followers:
            for use in follower.checks.without:
                ranks, name = follower.checks.ranks_of(use.group), follower.checks.source(use.group)
                others = (o for o in self.followers if o is not follower and any(r in ranks for r in o.alike))
                if any(each.checks.wrote_in(name, use.step, use.start, use.stop) for each in others):
                    follower.checks.lost(use)

    def _compare_gathers(self) -> None:
        """Ranks with different roles give parameters of one version, each its own."""
        first: dict[tuple[str, int], tuple[list[Piece], int]] = {}
        for follower in self.followers:
            for call, (pieces, place) in follower.gathered.items():
                known, rank = first.setdefault(call, (pieces, follower.rank))
                if known[0].value != pieces[0].value:
                    said = [
                        f"{t.source} from {t.base} on" for p in (pieces, known) for t in (p[0].value or ())
                    ]
                    what = f"rank {follower.rank} gives other parameters than rank {rank}: {', '.join(said)}"
                    follower.checks.find(what, place)

    def _compare_weights(self) -> None:
        """Each loss has one weight in a step, on all ranks and in all gradients."""
        weights, known = Weights(), {}
        for follower in self.followers:
            checks = follower.checks
            for entry in checks.losses:
                for loss in self._sent(entry.loss, known):
                    if wrong := weights.differing(entry, loss, follower.rank):
                        checks.find(wrong, entry.place)
                    checks.of_losses.add(loss.weight * entry.scale)

    def _sent(self, loss: Loss, known: dict[Message, frozenset[Loss]]) -> list[Loss]:
        """A loss, or those in the message that has it."""
        message = loss.source
        if not isinstance(message, Message):
            return [loss]
        if message not in known:
            sent = [f.losses.sent[message] for f in self.followers if message in f.losses.sent]
            known[message] = frozenset(
                each for some in sent for one in some for each in self._sent(one, known)
            )
        return [replace(each, weight=each.weight * loss.weight) for each in known[message]]


@contextmanager
def followed() -> Iterator[Follow]:
    """Inside, schedules tell the followers their units."""

    def tell(schedule: Any) -> None:
        follower = getattr(device.current(), "follower", None)
        if follower is not None:
            follower.checks.units += schedule.units

    with each_schedule(tell):
        yield Follow()
