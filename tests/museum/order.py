"""Bugs in which ranks call collectives that don't match, or wait for each other."""

from functools import partial

from shardrt.comm.links import _End
from shardrt.fsdp.forward import ForwardPass
from shardrt.fsdp.schedule import Schedule
from shardrt import device
from tests.museum.bug import Bug, Change
from tests.museum.programs import Net, train, piped

EACH = {"stands_for": {0: [0], 1: [1]}}


class Skipping(Net):
    """Rank 1 leaves the second block out, from the second step on."""

    def forward(self, tokens):
        self.calls = getattr(self, "calls", 0) + 1
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            if not (number == 1 and self.calls > 1 and device.current().program.rank == 1):
                x = block(x)
        return self.head(x)


ORDER = [
    Bug(
        "deepspeedai/DeepSpeed#7998",
        "[REQUEST]Will zero 3 support diffrent module usage?",
        "A module that only one rank called gathered its parameters there alone, and the ranks hung.",
        "order",
        (
            Change(ForwardPass._gather_skipped, "self._gathers.ensure(unit)", "pass"),
        ),
        partial(train, model=Skipping, prefetch=0),
        "zzz",
        how=EACH,
    ),
    Bug(
        "pytorch/pytorch#172668",
        "Pipeline communication blocks the execution of pipeline stages",
        "Two ranks each waited for their send to end before they received.",
        "order",
        (
            Change(_End.__init__, '_stream(mesh.device, communicator, f"{kind} {source} to {to}")', 'mesh.stream("links")'),
        ),
        piped,
        "zzz",
        how=EACH,
    ),
]
