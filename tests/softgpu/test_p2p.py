"""The benchmark of messages on the GPU emulator: NCCL's own calls next to ours. Its times mean nothing."""

import json

import pytest

from bench.p2p.__main__ import main
from bench.p2p.ways import NCCL

pytest.importorskip("cupy")


@pytest.mark.parametrize("broken", [False, True])
def test_messages_arrive_by_nccl_and_through_the_host(broken, software, capsys, monkeypatch):
    if broken:
        receive, elsewhere = NCCL.receive, []

        def wrong(self, arrays, peer):
            elsewhere.extend(array.copy() for array in arrays)
            return receive(self, elsewhere[-len(arrays) :], peer)

        monkeypatch.setattr(NCCL, "receive", wrong)
        words = "latency -b 16 -e 16 -n 2 --json"
    else:
        words = "-b 16 -e 1K -f 64 -n 2 -W 3 --json"
    code = main([*"-t 2 -k nccl,staged".split(), *words.split()])
    found = {}
    for line in json.loads(capsys.readouterr().out)["lines"]:
        found[line["communicator"], line["test"], line["how"]] = line["wrong"]
    assert code == broken
    if broken:
        assert {way for way, wrong in found.items() if wrong} == {("nccl", "latency", "nccl")}
        return
    assert not any(found.values())
    for test in ("latency", "bandwidth", "bibw", "message_rate", "matrix_latency", "matrix_bandwidth"):
        ours = {"exchange"} if test == "bibw" else {"direct"}
        assert {how for kind, name, how in found if (kind, name) == ("nccl", test)} == ours | {"nccl"}
        assert {how for kind, name, how in found if (kind, name) == ("staged", test)} == ours | {"buffered"}
