"""The report of a hang by the rank that speaks for all: on its own host, and on hosts that it hears.

Clocks of other hosts are not compared with this host's clock. A rank of another host lives if its signs of
life go on while this rank listens.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from shardrt.faults import diagnosis, failure, reach
from shardrt.faults.flight import Flight, Recorder, read_all

__all__ = ["LISTENING"]

LISTENING = 1.6  # seconds for ranks of other hosts to give a sign of life, and for their hosts to answer
_TURNS = 4  # in which hosts are asked


class Heard(NamedTuple):
    """The known state of all ranks."""

    flights: list[Flight]  # as first read, with the latest signs of life
    now: dict[int, float]  # by rank: monotonic time of its host
    message: list[str]  # a line for each flight that can't be read
    silent: list[str]  # hosts that do not answer any more


def listen(
    folder: Path, rank: int, hosts: Sequence[str], addresses: Mapping[str, str], beat: Callable[[], None]
) -> Heard:
    """The flights in a folder, and signs of life from other hosts; returns at once if there are none.

    Args:
        hosts: by rank.
        addresses: of other hosts that did answer.
        beat: called regularly meanwhile.
    """
    flights, errors = read_all(folder)
    before, began = {flight.rank: flight for flight in flights}, time.monotonic()
    if len(set(hosts)) == 1:
        return Heard(flights, dict.fromkeys(before, began), errors, [])
    silent = dict(addresses)
    for turn in range(1, _TURNS + 1):
        for host in reach.answering(silent, LISTENING / _TURNS):
            del silent[host]
        beat()
        time.sleep(max(0.0, began + turn * LISTENING / _TURNS - time.monotonic()))
    now = {}
    for flight in read_all(folder)[0]:
        was = before.setdefault(flight.rank, flight)
        if hosts[flight.rank] == hosts[rank]:
            now[flight.rank] = began
            continue
        stands = was is not flight and was.life_monotonic == flight.life_monotonic
        now[flight.rank] = flight.life_monotonic + (LISTENING if stands else 0.0)
        before[flight.rank] = replace(was, beat_monotonic=flight.life_monotonic)
    return Heard([before[rank] for rank in sorted(before)], now, errors, list(silent))


def hang(recorder: Recorder, heard: Heard, hosts: Sequence[str], idle: float, limit: float) -> str:
    """Several lines for people: where each rank stands, and which one is behind."""
    several = len(set(hosts)) > 1
    own = diagnosis.ranks([recorder.rank], hosts)
    lines = [
        f"hang: no progress on {own} for {idle:.1f} s in {recorder.phase} "
        f"(limit {limit:.1f} s); the job ends with exit code {failure.HANG}"
    ]
    for host in dict.fromkeys(hosts):
        there = [flight for flight in heard.flights if hosts[flight.rank] == host]
        name = f"{host}: " if several else ""
        rows = diagnosis.table(there, heard.flights, heard.now) if host not in heard.silent else []
        lines += [f"  {name}{row}" for row in rows]
    lines += [f"  {line}" for line in heard.message]
    gone = diagnosis.out_of_reach(heard.flights, hosts, heard.silent, hosts[recorder.rank])
    return "\n".join([*lines, gone or diagnosis.blame(heard.flights, hosts, heard.now)]) + "\n"


def is_guess(report: str, heard: Heard, hosts: Sequence[str]) -> bool:
    """Whether a report blames no rank with a visible record, and another host may know better."""
    hidden = diagnosis.unseen(heard.flights, hosts)
    return bool(hidden) and not heard.silent and set(diagnosis.blamed(report)[1]) <= set(hidden)


def speaker(report: Path, hosts: Sequence[str]) -> str:
    """The host of the rank that has written a report; "" if the report does not name it yet."""
    try:
        found = re.match(r"hang: no progress on rank (\d+)", report.read_text(errors="replace"))
    except OSError:
        return ""
    return hosts[int(found[1])] if found and int(found[1]) < len(hosts) else ""
