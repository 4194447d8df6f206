"""One host of DiLoCo that meets others at a hub: `python -m tests.hosts.apart ADDRESS HOST WIDTH ROUNDS`.

Prints the elements of the model, and the bytes of a message. It trains nothing: its parameters move by noise.
Host 0 runs the hub.
"""

import sys
import threading
import time

import numpy as np

from shardrt import nn, optim
from shardrt.comm import DeviceMesh, init_device_mesh
from shardrt.fsdp import fully_shard
from shardrt.parallel import DiLoCo, HubExchange, HubLost
from shardrt.parallel.hub import Hub


def main(address: str, host: str, width: str, rounds: str) -> None:
    hub, port = Hub(2, 60.0), int(address.rpartition(":")[2])
    if host == "0":
        hub.listen("0.0.0.0", port)
        threading.Thread(target=hub.serve, daemon=True).start()
    mesh = init_device_mesh("cpu")
    model = fully_shard(nn.Linear(int(width), int(width)), mesh=mesh)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    link = connected(address, int(host), mesh)
    outer = DiLoCo(optimizer, link, sync_every=50, should_quantize=True)
    outer.join(0)
    for number in range(int(rounds)):
        for piece in optimizer.slices:
            shard = piece.storage.shard
            shard += np.random.default_rng([number, int(host)]).standard_normal(shard.size, np.float32)
        for step in range(50):
            outer.step(50 * number + step + 1)
    print(sum(piece.storage.shard.size for piece in optimizer.slices), outer.fragments[0].message_bytes)
    while host == "0" and len(hub._groups[0].connections) > 1:
        time.sleep(0.05)


def connected(address: str, host: int, mesh: DeviceMesh) -> HubExchange:
    """The exchange, once there is a hub."""
    for _ in range(200):
        try:
            return HubExchange(address, host, 2, mesh)
        except HubLost:
            time.sleep(0.1)
    raise SystemExit("no hub")


if __name__ == "__main__":
    main(*sys.argv[1:])
