"""Whether hosts reach each other by TCP on any port, as MPI's connections and the failure detector's want it: tried
before MPI starts, whose own connections have no deadline."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import TransportError
from ..launch.addresses import addresses, listen
from ..threads import start
from .topology import by_host, one_machine

if TYPE_CHECKING:
    from .exchange import Exchange
    from .topology import Location

_SECONDS = 5.0  # for one host, over all its addresses
_TOKEN_BYTES = 16


def require_reachable(exchange: Exchange, places: Sequence[Location]) -> None:
    """Raises TransportError, on every rank alike, unless the first rank of each host reaches those of the next host and
    of the one before: a host that lets nobody in is noticed from one of them. Collective."""
    leaders = [ranks[0] for ranks in by_host(places).values()]
    with contextlib.ExitStack() as cleanup:
        offer = None
        if exchange.rank in leaders:
            offer = cleanup.enter_context(_open_door())
        offers = exchange.gather_and_decide("doors", offer, lambda offers: offers)
        problems = []
        if exchange.rank in leaders:
            at = leaders.index(exchange.rank)
            for other in sorted({leaders[at - 1], leaders[(at + 1) % len(leaders)]}):
                seconds = min(_SECONDS, 0.3 * exchange.left())
                if why := _why_not(offers[other], seconds):
                    problems.append(
                        f"{places[exchange.rank].hostname} (rank {exchange.rank}) cannot reach "
                        f"{places[other].hostname} (rank {other}) by TCP: {why}"
                    )

        def decide(said: list[list[str]]) -> None:
            if any(said):
                raise TransportError(
                    f"{'; '.join(text for texts in said for text in texts)}. MPI needs connections between hosts, on "
                    "ports that the kernel chooses: is there a firewall, or a network that only some hosts "
                    f"have?{one_machine(places)}"
                )

        exchange.gather_and_decide("reached", problems, decide)


@contextlib.contextmanager
def _open_door() -> Iterator[dict[str, Any]]:
    """What others need to connect to this rank, who may while this is open."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    with listen() as server:

        def let_in() -> None:
            with contextlib.suppress(OSError):  # shut down
                while True:
                    link, _ = server.accept()
                    with contextlib.suppress(OSError), link:
                        link.send(token)

        thread = start(let_in, "c10d_custom:door")
        try:
            yield {"addresses": addresses(), "port": server.getsockname()[1], "token": token.hex()}
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def _why_not(offer: dict[str, Any], seconds: float) -> str:
    """Why this host does not reach who made that offer; "": it does."""
    if not offer["addresses"]:
        return "it has no network address"
    tried, deadline = [], time.monotonic() + seconds
    for i, address in enumerate(offer["addresses"]):
        left = max(0.1, (deadline - time.monotonic()) / (len(offer["addresses"]) - i))
        try:
            with socket.create_connection((address, offer["port"]), left) as link:
                link.settimeout(left)
                if link.recv(_TOKEN_BYTES, socket.MSG_WAITALL).hex() == offer["token"]:
                    return ""
                tried.append(f"{address} is some other host's")
        except OSError as error:
            tried.append(f"{address}, port {offer['port']}: {error}")
    return "; ".join(tried)
