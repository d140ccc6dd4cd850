"""Ranks that die while a group over hosts is made, and MPI starts for it: told by the failure detector, which is there
before."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ... import native
from .error_text import fate
from .failure_detector import FailureDetector
from .layout import Hosts

if TYPE_CHECKING:
    from ...creation.exchange import Exchange
    from ...creation.topology import Location


class Watched:
    """The ranks of ``exchange``, once there is a `detector`. A context: by an exception the detector ends, having said
    that this rank is alive."""

    detector: FailureDetector

    def __init__(self, exchange: Exchange, locations: Sequence[Location]) -> None:
        self._exchange, self.locations = exchange, locations
        self._known = exchange.processes.fates

    def open(self) -> None:
        """Makes the failure detector; collective over the group's ranks."""
        self.detector = FailureDetector(self._exchange, Hosts.of(self.locations, self._exchange.rank).ranks)
        # The first to die is named, also where others of its host that are seen here have been ended for it.
        self._exchange.processes.fates = lambda: self._lost() or self._known()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._exchange.processes.fates = self._known
        if kind is not None and hasattr(self, "detector"):
            self.detector.leave()
            self.detector.close()

    def _lost(self) -> dict[int, str]:
        fault = self.detector.fault
        if fault is None or fault.status != native.PEER_LOST:
            return {}
        return {fault.peer: fate(self, fault.peer)}
