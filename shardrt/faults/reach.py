"""Whether other hosts answer, for a rank that hangs: it connects by TCP to ssh's port and an unused one.

A running host accepts or refuses at once; a host without link or power does not answer. A firewall may drop
packets to a port, or answer that the host is unreachable: one answer from one port counts.
"""

import errno
import os
import selectors
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress

__all__ = ["PORTS", "addresses", "answering"]

PORTS = (9, 22)  # discard, ssh
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)


def addresses(hosts: Mapping[str, object]) -> dict[str, str]:
    """The addresses of each host whose name resolves here, IPv4 and IPv6, separated by commas."""
    found = {}
    for host in hosts:
        with suppress(OSError, UnicodeError):
            known = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found[host] = ",".join(dict.fromkeys(str(address[0]) for *_, address in known))
    return found


def answering(known: Mapping[str, str], seconds: float) -> set[str]:
    """The hosts of `known` (name to `addresses`) that answer within `seconds`."""
    answers: set[str] = set()
    deadline = time.monotonic() + seconds
    with ExitStack() as links, selectors.DefaultSelector() as asked:
        for host, listed in known.items():
            for address in listed.split(","):
                for port in PORTS:
                    with suppress(OSError):  # no more files, or no IPv6
                        link = links.enter_context(_asked(address, port))
                        asked.register(link, selectors.EVENT_WRITE, host)
        while answers != known.keys() and asked.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in asked.select(left):
                asked.unregister(key.fileobj)
                if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS:
                    answers.add(key.data)
    return answers


def _asked(address: str, port: int) -> socket.socket:
    """Begin a connection. Raises OSError if there is no route to the address."""
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    family, *_, whole = found[0]
    link = socket.socket(family, socket.SOCK_STREAM)
    link.setblocking(False)
    if (code := link.connect_ex(whole)) not in (errno.EINPROGRESS, *_ANSWERS):
        link.close()
        raise OSError(code, os.strerror(code))
    return link
