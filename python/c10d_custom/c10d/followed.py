"""The transports that trace_dump.py writes of; none where nothing asks for files."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..transport.base import Transport
    from .callers import Callers


# By id; iterated over in copies that take no lock, as a signal may come at any time.
sources: dict[int, weakref.ref[Transport]] = {}
callers: dict[int, Callers] = {}  # of sources whose calls' stacks are remembered
said: set[int] = set()  # ids of sources whose failure has been written


def callers_of(source: Transport) -> Callers | None:
    """Who is to be told of each call of this source; None if nobody wants to know."""
    return callers.get(id(source))


def forget(source: Transport | None, key: int | None = None) -> None:
    key = id(source) if key is None else key
    sources.pop(key, None)
    callers.pop(key, None)
    said.discard(key)
