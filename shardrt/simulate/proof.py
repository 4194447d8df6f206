"""What is proved of recorded programs, as a report: races, those that only a wait for a value hides, waits.

proof = prove([program])
print(proof)
assert not proof.races and not proof.hidden
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardrt.device.program import Program
from shardrt.simulate.races import Race, races_both_ways, without_values
from shardrt.simulate.waits import COVERED, NEEDED, NEVER, WaitSite, waits

__all__ = ["prove"]


@dataclass(frozen=True)
class Proof:
    """races: as recorded. hidden: those more that are there if the host asks for no value (loss, norm).

    waits: every site, with what it is good for in the one program or in the other, whichever is more.
    """

    races: list[Race]
    hidden: list[Race]
    waits: list[WaitSite]

    def __str__(self) -> str:
        parts = [str(race) for race in self.races]
        parts += [f"{race}\n  hidden  by the host's waits for values" for race in self.hidden]
        if not parts:
            parts.append("no race, at any speed of host, streams and links")
        for verdict in (NEEDED, COVERED, NEVER):
            lines = [str(site) for site in self.waits if site.verdict == verdict]
            if lines:
                parts.append("\n".join([f"waits {verdict}{' others' if verdict == COVERED else ''}", *lines]))
        return "\n\n".join(parts)


def prove(programs: Sequence[Program]) -> Proof:
    """Look for races, with and without the values that the host asks for, and say what each wait is good for.

    Raises:
        ValueError: as `order_of` does.
    """
    known, hidden = races_both_ways(programs)
    alone = {site.site: site for site in waits([without_values(program) for program in programs])}
    better = (NEEDED, COVERED, NEVER).index
    both = [
        min(site, alone.get(site.site, site), key=lambda either: better(either.verdict))
        for site in waits(programs)
    ]
    return Proof(known, hidden, both)
