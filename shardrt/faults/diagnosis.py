"""Which rank waits where, and for which ranks: read from the flights of a run that hangs or has ended.

A collective has the same number on every rank of its communicator. So a rank that waits in number 42 of
"gather" waits for the ranks whose latest call there has a lower number. The rank that is behind waits for no
rank.
"""

import re
from collections.abc import Mapping, Sequence

from shardrt.comm.recording import MESSAGES
from shardrt.faults.flight import Flight, members

__all__ = ["behind", "blame", "blamed", "ranks", "waits_for"]

SILENT = 1.5  # seconds without a beat, of which there are two and more in a second, after which a rank stands


def waits_for(flight: Flight, flights: Sequence[Flight]) -> list[int]:
    """The ranks that have not come to the collective in which this one is, or whose message it awaits."""
    waiting = flight.open_call
    if waiting is None:
        return []
    name, number = waiting.communicator, waiting.call
    group = members(name, flight.size)
    if waiting.operation in MESSAGES:
        peer = waiting.peer(flight.size)
        return [] if peer is None else [peer]
    return [
        other.rank
        for other in flights
        if other is not flight
        and _reached(other, name) < number
        and (other.rank in group if group is not None else _reached(other, name))
    ]


def behind(flights: Sequence[Flight]) -> list[int]:
    """The ranks for which others wait and which wait for no rank; if all wait in a circle, all of them."""
    waits = {flight.rank: waits_for(flight, flights) for flight in flights}
    awaited = sorted({rank for ranks in waits.values() for rank in ranks})
    return [rank for rank in awaited if not waits.get(rank)] or awaited  # one may not have begun a file


def blame(
    flights: Sequence[Flight], hosts: Sequence[str] = (), now: Mapping[int, float] | None = None
) -> str:
    """A line that names the rank that is behind, and what for.

    Args:
        hosts: by rank, named if there are several.
        now: as in `table`. With it, a rank that was stopped in the collective in which others wait counts
            too. If no rank is behind, the rank must be on a host without visible records.
    """
    found = behind(flights)
    waits = {flight.rank: waits_for(flight, flights) for flight in flights}
    if not found:
        waits = _wait_for_stopped(flights, now or {})
        found = sorted({rank for ranks in waits.values() for rank in ranks})
    if not found and (hidden := unseen(flights, hosts)):
        waits = {flight.rank: hidden for flight in flights if flight.open_call}
        found = hidden if waits else []
    if not found:
        return _together(flights, hosts) or "no rank waits for another"
    waiting = [flight for flight in flights if set(waits.get(flight.rank, ())) & set(found)]
    calls = sorted({str(flight.open_call) for flight in waiting})
    verb = "is" if len(found) == 1 else "are"
    waiters = ranks([flight.rank for flight in waiting])
    who = ranks(found, hosts)
    return f"{who} {verb} behind: {waiters} wait{'s' if len(waiting) == 1 else ''} in {', '.join(calls)}"


def unseen(flights: Sequence[Flight], hosts: Sequence[str]) -> list[int]:
    """The ranks of hosts without a record.

    Args:
        hosts: by rank.
    """
    seen = {hosts[flight.rank] for flight in flights} if hosts else set()
    return [rank for rank, host in enumerate(hosts) if host not in seen]


def out_of_reach(flights: Sequence[Flight], hosts: Sequence[str], silent: Sequence[str], here: str) -> str:
    """A line that names the hosts that do not answer `here`, and the ranks on them; "" where all answer."""
    if not silent:
        return ""
    gone = [rank for rank, host in enumerate(hosts) if host in silent]
    inside = {str(flight.open_call) for flight in flights if flight.rank not in gone and flight.open_call}
    are, do = "is" if len(gone) == 1 else "are", "does" if len(silent) == 1 else "do"
    waits = f"; the others wait in {', '.join(sorted(inside))}" if inside else ""
    return (
        f"{ranks(gone, hosts)} {are} behind: {' and '.join(silent)} {do} not answer {here}, the link or the "
        f"machine is gone{waits}"
    )


def blamed(report: str) -> tuple[str, list[int]]:
    """(the line of `blame` in a report, the ranks that it names); ("", []) if there is none."""
    found = re.search(r"^ranks? ([\d,]+)(?: on .+?)? (?:is|are) behind: .*$", report, re.M)
    return (found[0], [int(rank) for rank in found[1].split(",")]) if found else ("", [])


def standing(flight: Flight, flights: Sequence[Flight], now: float | None) -> str:
    """Where a rank stands.

    Args:
        now: monotonic time on its host while the run goes on; None if it is over.
    """
    last, inside = flight.last, flight.open_call
    reference = last.monotonic if now is None else now
    where = f"step {last.step}, {flight.place}"
    if inside is None:
        calls = flight.last_calls().values()
        done = max(calls, key=lambda record: record.number, default=None)
        what = f"{where}: last done {done}" if done else f"{where}: no collective yet"
        since = last.monotonic
    else:
        verb = "waits in" if waits_for(flight, flights) else "entered"
        what, since = f"{where}: {verb} {inside}", inside.monotonic
    if now is None:
        return what
    message = f"{what}, {max(0.0, reference - since):.1f} s ago"
    if flight.ended:
        return f"{message}; it has ended: {flight.ended}"
    silence = _silence(flight, now)
    return message + (f"; stopped or dead, no sign of life for {silence:.1f} s" if silence > SILENT else "")


def table(some: Sequence[Flight], flights: Sequence[Flight], now: Mapping[int, float]) -> list[str]:
    """A line per rank of `some`; ranks that stand alike share a line.

    Args:
        now: by rank, as in `standing`.
    """
    groups: dict[str, list[int]] = {}
    for flight in some:
        groups.setdefault(standing(flight, flights, now.get(flight.rank)), []).append(flight.rank)
    width = max((len(ranks(group)) for group in groups.values()), default=0)
    return [f"{ranks(group):{width}}  {what}" for what, group in groups.items()]


def ranks(group: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Name ranks: "rank 1", "ranks 0,2,3"; where there are several hosts, "ranks 2,3 on node1"."""
    there = list(dict.fromkeys(hosts[rank] for rank in group)) if len(set(hosts)) > 1 else []
    where = f" on {', '.join(there)}" if there else ""
    return f"rank{'s' if len(group) > 1 else ''} {','.join(map(str, group))}{where}"


def _silence(flight: Flight, now: float) -> float:
    """Seconds since its last sign of life. now: monotonic time on its host."""
    return 0.0 if flight.ended else now - flight.life_monotonic


def _wait_for_stopped(flights: Sequence[Flight], now: Mapping[int, float]) -> dict[int, list[int]]:
    """For each living rank in a collective, the ranks in the same collective that give no sign of life."""
    silent = [flight.rank for flight in flights if _silence(flight, now.get(flight.rank, 0.0)) > SILENT]
    inside = {flight.rank: (call.communicator, call.call) for flight in flights if (call := flight.open_call)}
    return {
        rank: [other for other in silent if inside.get(other) == call]
        for rank, call in inside.items()
        if rank not in silent
    }


def _together(flights: Sequence[Flight], hosts: Sequence[str]) -> str:
    """A line if ranks of several hosts are all in collectives and none is behind; else ""."""
    inside = sorted({str(flight.open_call) for flight in flights if flight.open_call})
    if len(set(hosts)) < 2 or not all(flight.open_call for flight in flights):
        return ""
    *before, last = dict.fromkeys(hosts)
    message = f"no rank is behind, all are in {', '.join(inside)}: "
    if len(before) == 1:
        return f"{message}what links {before[0]} and {last} is slow, or brings nothing"
    return (
        f"{message}a link of {', '.join(before)} or {last} is slow, or brings nothing; which one is not known"
    )


def _reached(flight: Flight, communicator: str) -> int:
    """The number of a rank's latest call on a communicator."""
    found = flight.last_calls().get(communicator)
    return found.call if found is not None else 0
