"""Whether other hosts answer, for a rank that hangs: asked over TCP, of a port where nobody listens.

A host that is there refuses at once; one whose link or power is gone says nothing.
"""

import errno
import select
import socket
import time
from collections.abc import Mapping

_PORT = 9  # discard
_GONE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT, errno.EHOSTDOWN)


def addresses(hosts: Mapping[str, object]) -> dict[str, str]:
    """The IPv4 address of each host that is known by its name here."""
    found = {}
    for host in hosts:
        try:
            found[host] = socket.gethostbyname(host)
        except OSError:
            continue
    return found


def answering(known: Mapping[str, str], seconds: float) -> set[str]:
    """Which of these hosts, by name and address, answer within so many seconds."""
    asked: dict[socket.socket, str] = {}
    answers: set[str] = set()
    try:
        for host, address in known.items():
            asked[link := socket.socket(socket.AF_INET, socket.SOCK_STREAM)] = host
            link.setblocking(False)
            link.connect_ex((address, _PORT))
        deadline = time.monotonic() + seconds
        while waiting := [link for link, host in asked.items() if host not in answers]:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for link in select.select([], waiting, [], left)[1]:
                if link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _GONE:
                    del asked[link]
                    link.close()
                else:
                    answers.add(asked[link])
    except OSError:  # no more files, or no network at all
        return answers
    finally:
        for link in asked:
            link.close()
    return answers
