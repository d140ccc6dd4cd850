"""Ranks that die while a group over hosts is made, and MPI starts for it: told by the failure detector, which is there
before."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ... import native
from ...creation import Processes
from .error_text import fate
from .failure_detector import FailureDetector
from .layout import Hosts

if TYPE_CHECKING:
    from ...creation.exchange import Exchange
    from ...creation.topology import Location


class Watched(Processes):
    """What ``exchange`` knew of its ranks' processes, and what the `detector` hears, once there is one. A context: by
    an exception the detector ends, having said that this rank is alive."""

    detector: FailureDetector

    def __init__(self, exchange: Exchange, locations: Sequence[Location]) -> None:
        self._exchange, self._known, self.locations = exchange, exchange.processes, locations
        exchange.processes = self

    def open(self) -> None:
        """Makes the failure detector; collective over the group's ranks."""
        self.detector = FailureDetector(self._exchange, Hosts.of(self.locations, self._exchange.rank).ranks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._exchange.processes = self._known
        if kind is not None and hasattr(self, "detector"):
            self.detector.leave()
            self.detector.close()

    # --- Processes

    def add(self, rank: int, pid: int, start: int | None) -> bool:
        return self._known.add(rank, pid, start)

    def ended(self) -> set[int]:
        return self._known.ended() | self._lost()

    def obituary(self) -> str:
        # The first to die is named, also where others of its host that are seen here have been ended for it.
        if lost := self._lost():
            return "; ".join(f"rank {rank} {fate(self, rank)}" for rank in sorted(lost))
        return self._known.obituary()

    def left_for(self) -> str | None:
        return self._known.left_for()

    def close(self) -> None:
        self._known.close()

    def _lost(self) -> set[int]:
        fault = self.detector.fault if hasattr(self, "detector") else None
        return {fault.peer} if fault is not None and fault.status == native.PEER_LOST else set()
