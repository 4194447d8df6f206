"""Cables that are long, or lose what they carry: `cable.py DELAY LOSS PID NAME PID NAME, ...`.

The kernel's own (netem) is not everywhere. Each pair is a cable between two TAP devices, one in the network
of each process; frames go from one to the other after DELAY seconds, and a share LOSS of them never comes.
Where none is lost, frames are as large as TCP makes them (64 KiB), as on a card that cuts them up itself.

Prints "ready" when the devices are there, and runs until stdin ends.
"""

import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_TAP, _NO_PACKET_INFORMATION, _WITH_HEADER = 0x2, 0x1000, 0x4000
_CHECKSUM, _TCP4, _TCP6 = 1, 2, 4
_NETWORK = 0x40000000  # CLONE_NEWNET
_LARGEST = 70_000  # bytes of a frame with its header

_libc = ctypes.CDLL(None, use_errno=True)


def tap(pid: int, name: str, whole: bool) -> int:
    """A device called so in the network of a process: frames that are written to the file arrive from it."""
    network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if _libc.setns(network, _NETWORK):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(network)
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _TAP | _NO_PACKET_INFORMATION | (_WITH_HEADER if whole else 0)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    if whole:
        fcntl.ioctl(file, _TUNSETOFFLOAD, _CHECKSUM | _TCP4 | _TCP6)
    return file


def carry(pairs: dict[int, int], delay: float, loss: float) -> None:
    """Move frames from each file to its counterpart until stdin ends."""
    under_way: deque[tuple[float, int, bytes]] = deque()
    watched = [sys.stdin.fileno(), *pairs]
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        readable = select.select(watched, [], [], wait)[0]
        now = time.monotonic()
        for file in readable:
            if file not in pairs:
                return
            try:
                for _ in range(64):
                    frame = os.read(file, _LARGEST)
                    if not loss or random.random() >= loss:
                        under_way.append((now + delay, pairs[file], frame))
            except OSError:  # no more, or the device is down
                pass
        while under_way and under_way[0][0] <= now:
            try:
                os.write(under_way[0][1], under_way[0][2])
            except OSError:  # the device is down: as a cable that is cut, it loses the frame
                pass
            under_way.popleft()


def main(delay: str, loss: str, *ends: str) -> None:
    _libc.prctl(29, 1000, 0, 0, 0)  # PR_SET_TIMERSLACK: waits of microseconds
    files = [tap(int(pid), name, not float(loss)) for pid, name in zip(ends[::2], ends[1::2], strict=True)]
    pairs = dict(zip(files[::2], files[1::2], strict=True))
    print("ready", flush=True)
    carry(pairs | {there: here for here, there in pairs.items()}, float(delay), float(loss))


if __name__ == "__main__":
    main(*sys.argv[1:])
