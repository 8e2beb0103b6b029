"""How this node reaches the others: its own address, and questions to a store on a node that may be cut off."""

import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from ipaddress import ip_address
from typing import Any

NOTICE_SECONDS = 60.0


def is_loopback(address: str) -> bool:
    """Whether an IP address means whatever machine uses it."""
    return ip_address(address.partition("%")[0]).is_loopback


def route_to(host: str) -> tuple[str, str]:
    """A host's address, and this machine's own on the way there. Sends nothing to it.

    Raises:
        OSError: the name does not resolve, or no interface leads there.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(address[0]), str(probe.getsockname()[0])


@cache
def own_address(host: str) -> str | None:
    """The address at which another machine finds this one, where its own name does not say so; None where it does.

    Debian's /etc/hosts gives a machine's name the address 127.0.1.1, and some names do not resolve at all.

    Raises:
        OSError: as `route_to`.
    """
    with suppress(OSError):
        if not is_loopback(str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])):
            return None
    return route_to(host)[1]


def ask(question: Callable[[], Any], seconds: float) -> list[Any]:
    """The answer of a store, alone in a list; [] if it fails, or takes longer.

    A thread asks: in the main thread no signal is heard until TCP gives up a lost node, after a quarter of an hour.
    """
    answers: list[Any] = []

    def ask_store() -> None:
        with suppress(RuntimeError):
            answers.append(question())

    thread = threading.Thread(target=ask_store, daemon=True)
    thread.start()
    thread.join(min(seconds, NOTICE_SECONDS))
    if thread.is_alive() and seconds > NOTICE_SECONDS:
        print(f"node 0 has not answered for {NOTICE_SECONDS:g} s; waiting up to {seconds:g} s for it", file=sys.stderr)
        thread.join(seconds - NOTICE_SECONDS)
    return answers
