"""Whether hosts reach each other by TCP on any port, as MPI's connections and the failure detector's want it: tried
before MPI starts, whose own connections have no deadline."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import TransportError
from ..launch.addresses import addresses, interfaces, listen
from ..threads import socket, start
from .topology import by_host, one_machine

if TYPE_CHECKING:
    from .exchange import Exchange
    from .topology import Location

_SECONDS = 5.0  # for one host, over all its addresses
_TOKEN_BYTES = 16


def require_reachable(exchange: Exchange, places: Sequence[Location]) -> str | None:
    """Raises TransportError, on every rank alike, unless the first rank of each host reaches those of the next host and
    of the one before: a host that lets nobody in is noticed from one of them. Collective. The interface by which this
    host reaches both, where it is one, and can be told."""
    leaders = [ranks[0] for ranks in by_host(places).values()]
    with contextlib.ExitStack() as cleanup:
        problems: list[str] = []
        by: set[str | None] = set()
        if exchange.rank in leaders:
            exchange.say(_door(exchange.rank), cleanup.enter_context(_open_door()))
            at = leaders.index(exchange.rank)
            for other in sorted({leaders[at - 1], leaders[(at + 1) % len(leaders)]}):
                offer = exchange.hear(_door(other), f"rank {other}")
                seconds = min(_SECONDS, 0.3 * exchange.left())
                try:
                    by.add(interfaces().get(_reached_from(offer, seconds)))
                except OSError as error:
                    problems.append(
                        f"{places[exchange.rank].hostname} (rank {exchange.rank}) cannot reach "
                        f"{places[other].hostname} (rank {other}) by TCP: {error}"
                    )

        def decide(said: list[dict[str, Any]]) -> dict[str, str | None]:
            if failures := "; ".join(text for one in said for text in one["problems"]):
                raise TransportError(
                    f"{failures}. MPI needs connections between hosts, on ports that the kernel chooses: is there a "
                    f"firewall, or a network that only some hosts have?{one_machine(places)}"
                )
            return {str(leader): said[leader]["by"] for leader in leaders}

        mine = {"problems": problems, "by": by.pop() if len(by) == 1 else None}
        chosen: dict[str, str | None] = exchange.gather_and_decide("reached", mine, decide)
        leader = next(ranks[0] for ranks in by_host(places).values() if exchange.rank in ranks)
        return chosen[str(leader)]


def _door(rank: int) -> str:
    return f"door/{rank}"


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


def _reached_from(offer: dict[str, Any], seconds: float) -> str:
    """This host's address when it reaches who made that offer. OSError: it does not, and why."""
    if not offer["addresses"]:
        raise OSError("it has no network address")
    tried, deadline = [], time.monotonic() + seconds
    for i, address in enumerate(offer["addresses"]):
        left = max(0.1, (deadline - time.monotonic()) / (len(offer["addresses"]) - i))
        try:
            with socket.create_connection((address, offer["port"]), left) as link:
                link.settimeout(left)
                if link.recv(_TOKEN_BYTES, socket.MSG_WAITALL).hex() == offer["token"]:
                    return str(link.getsockname()[0])
                tried.append(f"{address} is some other host's")
        except OSError as error:
            tried.append(f"{address}, port {offer['port']}: {error}")
    raise OSError("; ".join(tried))
