"""What became of a run: from the flight files of its ranks and its metrics, whether it runs or has ended."""

import socket
import time
from collections.abc import Set
from pathlib import Path
from typing import Any

import psutil

from shardrt.faults import diagnosis
from shardrt.faults.flight import DONE, Flight, read_all
from shardrt.faults.watchdog import REPORT
from shardrt.train.metrics import METRICS
from shardrt.untrusted import Refused, read_regular, strict_json

DATA = 65  # nothing here can be read
_LARGEST = 1 << 30  # bytes of a text
_ALIVE = 5.0  # seconds since the last beat
_SAME = 300.0  # seconds between the starts of a rank and of a process that may be this rank
_EAR = 0.2  # seconds between two looks while listening
_ASKED = "exit code 75"  # the end of a rank that saved and stopped on request


def examine(run: Path, listening: float = 0.0) -> dict[str, Any]:
    """All known facts, in JSON types; `code` is the exit code of the command.

    listening: seconds to wait for signs of life of ranks of other hosts that have not said how they ended;
    0: a rank counts as alive for 5 seconds after its last sign, by this host's clock. Raises OSError if there
    is no such folder.
    """
    if not run.is_dir():
        raise FileNotFoundError(2, "no such folder", str(run))
    folder = run / "flight"
    flights, errors = read_all(folder)
    living = {flight.rank for flight in flights if _alive(flight)}
    if listening and (others := [flight for flight in flights if not (flight.ended or _is_here(flight))]):
        living.difference_update(flight.rank for flight in others)
        living |= _heard(folder, others, listening)
    if not flights and not errors:
        errors = [f"{folder}: no flight files"]
    hang = _text(folder / REPORT)
    # A launcher may resume a stopped rank for a moment before it ends the rank: the watchdog's record counts.
    blame, behind = diagnosis.blamed(hang)
    if not hang and not _all_done(flights) and not _all_asked(flights):
        blame, behind = diagnosis.blame(flights), diagnosis.behind(flights)
    found = {
        "run": str(run),
        "ranks": [_rank(flight, flights, living) for flight in flights],
        "behind": behind,
        "blame": blame if behind else "",
        "first": first_to_end(flights, living) if not hang else None,
        "metrics": _metrics(run / METRICS),
        "hang": hang,
        "errors": errors,
    }
    found["verdict"] = _verdict(flights, living, found)
    well = flights and not errors and all(rank["state"] in ("done", "alive") for rank in found["ranks"])
    well = well or (not errors and _all_asked(flights))
    return found | {"code": DATA if not flights else 0 if well else 1}


def lines(found: dict[str, Any]) -> list[str]:
    """The same facts as lines of text."""
    metrics = found["metrics"]
    rows = [f"{found['run']}: {found['verdict']}"]
    if metrics:
        loss = metrics.get("loss")
        shown = f"{loss:.4f}" if isinstance(loss, float) else "not finite" if loss is None else loss
        rows.append(f"metrics: last step {metrics.get('step')}, loss {shown}")
    for rank in found["ranks"]:
        how = f", {rank['how']}" if rank["how"] and rank["how"] != rank["state"] else ""
        rows += [
            f"rank {rank['rank']} on {rank['host']}, process {rank['pid']}: {rank['state']}{how}",
            f"    step {rank['step']}, {rank['phase']}; {rank['resident'] / 1e6:.0f} MB; "
            f"last sign of life {rank['last_sign']}",
            f"    last done: {rank['done'] or 'nothing'}",
        ]
        if rank["entered"] != rank["done"]:
            rows.append(f"    entered after it: {rank['entered'] or 'nothing'}")
    if found["hang"]:
        rows += ["what the watchdog said:", *(f"    {line}" for line in found["hang"].splitlines())]
    return rows + [f"warning: {line}" for line in found["errors"]]


def first_to_end(flights: list[Flight], living: Set[int]) -> int | None:
    """The first rank to end badly; None if all ended well, or none has ended.

    living: the ranks that still run.

    A rank that recorded a reason comes before ranks that were killed with it, which record none. If all were
    killed, it is the first silent rank, among the ranks for which others wait if there are any. The launcher
    kills the others within milliseconds, so the answer may be wrong if several ranks are behind.
    """
    over = [flight for flight in flights if flight.rank not in living]
    ended = [flight for flight in over if flight.ended not in ("done", _ASKED)]
    if not ended:
        return None
    spoke = [f for f in ended if f.ended and not f.ended.startswith("hang:") and "PeerFailed" not in f.ended]
    if spoke:
        return min(spoke, key=lambda flight: flight.ended_wall).rank
    awaited = [flight for flight in ended if flight.rank in diagnosis.behind(flights)]
    return min(awaited or ended, key=lambda flight: flight.life).rank


def _verdict(flights: list[Flight], living: Set[int], found: dict[str, Any]) -> str:
    if not flights:
        return "nothing is known"
    if not found["hang"] and len(living) == len(flights):
        return "still running"
    if _all_done(flights):
        return "done"
    if _all_asked(flights):
        return "asked to stop, and saved: resume with --resume auto"
    causes = ["ended by the watchdog"] if found["hang"] else []
    first = next((rank for rank in found["ranks"] if rank["rank"] == found["first"]), None)
    if first is not None:
        causes.append(f"rank {first['rank']} ended first ({first['how'] or first['state']})")
    if found["blame"]:
        causes.append(found["blame"])
    return "; ".join(causes) or "some ranks are done, others not yet"


def _rank(flight: Flight, flights: list[Flight], living: Set[int]) -> dict[str, Any]:
    calls = flight.last_calls().values()
    entered = max(calls, key=lambda record: record.number, default=None)
    finished = [record for record in flight.records if record.state == DONE]
    return {
        "rank": flight.rank,
        "host": flight.host,
        "pid": flight.pid,
        "state": _state(flight, living),
        "how": flight.ended or ("its process is stopped" if _is_here(flight) and _is_stopped(flight) else ""),
        "step": flight.last.step,
        "phase": flight.last.phase,
        "entered": str(entered) if entered else "",
        "done": str(finished[-1]) if finished else "",
        "inside": str(flight.open_call) if flight.open_call else "",
        "waits_for": diagnosis.waits_for(flight, flights),
        "resident": flight.resident,
        "last_sign": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(flight.life)),
        "last_sign_s": flight.life,
    }


def _state(flight: Flight, living: Set[int]) -> str:
    if flight.rank in living:
        return "alive"
    if flight.ended == "done":
        return "done"
    return "ended" if flight.ended else "killed, it said nothing"


def _all_asked(flights: list[Flight]) -> bool:
    return bool(flights) and all(flight.ended == _ASKED for flight in flights)


def _all_done(flights: list[Flight]) -> bool:
    return bool(flights) and all(flight.ended == "done" for flight in flights)


def _alive(flight: Flight) -> bool:
    if flight.ended:
        return False
    status, _ = _process(flight.pid)
    if _is_here(flight) and status in ("", psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return False  # or its parent has not yet read its exit status
    return _is_stopped(flight) or time.time() - flight.life < _ALIVE


def _is_stopped(flight: Flight) -> bool:
    """Whether this rank's process is here and stopped, by SIGSTOP or a debugger."""
    status, began = _process(flight.pid)
    return status == psutil.STATUS_STOPPED and abs(began - flight.began) < _SAME


def _is_here(flight: Flight) -> bool:
    return flight.host == socket.gethostname()[:64]


def _heard(folder: Path, flights: list[Flight], seconds: float) -> set[int]:
    """The ranks that give a sign of life while this process listens, independent of clocks."""
    before = {flight.rank: flight.life for flight in flights}
    living: set[int] = set()
    deadline = time.monotonic() + seconds
    while len(living) < len(flights) and time.monotonic() < deadline:
        time.sleep(_EAR)
        now = read_all(folder)[0]
        living |= {each.rank for each in now if each.life != before.get(each.rank, each.life)}
    return living


def _process(pid: int) -> tuple[str, float]:
    """The status of a process of this machine ("" if there is no process) and its start time."""
    try:
        process = psutil.Process(pid)
        return process.status(), process.create_time()
    except psutil.Error:
        return "", 0.0


def _metrics(path: Path) -> dict[str, Any]:
    """The last step in metrics.jsonl; {} if there is none. Skips lines that are not JSON."""
    last: dict[str, Any] = {}
    for line in _text(path).splitlines():
        try:
            record = strict_json(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("kind") == "step":
            last = record
    return last


def _text(path: Path) -> str:
    """A text file; "" if it can't be read."""
    try:
        return read_regular(path, _LARGEST).decode(errors="replace")
    except (OSError, Refused):
        return ""
