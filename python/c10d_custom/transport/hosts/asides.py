"""Transfers between hosts that no call waits for: what nobody wants is received all the same, so that it is taken for
nothing else, and short news is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...native import over_hosts
from .link import Buffer

if TYPE_CHECKING:
    from mpi4py.MPI import Request

    from .link import MpiLink


class Asides:
    """Of one group. True while there are any."""

    def __init__(self, link: MpiLink) -> None:
        self._link = link
        self._under_way: list[tuple[list[Request], object]] = []

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def begin(self, memory: object) -> list[Request]:
        """A list for requests that use ``memory``, which is kept until they are complete."""
        requests: list[Request] = []
        self._under_way.append((requests, memory))
        return requests

    def adopt(self, requests: list[Request], memory: object) -> None:
        """Sees to the end of requests that are under way, and keeps ``memory`` meanwhile."""
        self._under_way.append((requests, memory))

    def send(self, memory: Buffer, peer: int, tag: int) -> None:
        requests, link = self.begin(memory), self._link
        over_hosts.lib.c10d_transfer_begins()
        requests.extend(map(link.comm.Isend, ([memory.memory, link.MPI.BYTE],), (peer,), (tag,)))

    def discard(self, nbytes: int, source: int, tag: int) -> None:
        """Receives what nobody wants."""
        scratch = Buffer(nbytes)
        self._link.receive(scratch.address, nbytes, source, tag, self.begin(scratch))

    def advance(self) -> None:
        for each in list(self._under_way):
            if self._link.MPI.Request.Testall(each[0]) and each in self._under_way:
                self._under_way.remove(each)

    def close(self) -> None:
        for requests, memory in self._under_way:
            if not self._link.MPI.Request.Testall(requests):
                self._link.give_up(requests, memory)
        self._under_way.clear()
