"""Whether a signal handler has interrupted a step of this package, in the thread that asks.

Such a step may hold a lock, or be about to start a thread: who ends a group there, and waits for its threads, waits for
itself."""

from __future__ import annotations

import sys
from types import FrameType

_PACKAGE = "c10d_custom."
_AMID = "c10d.completer", "c10d.issuing", "c10d.operations", "c10d.work", "transport"
_STEPS = tuple(_PACKAGE + name for name in _AMID)


def on_top_of_own_step() -> bool:
    """To be asked by the package. True if below the code that has called the package now there is a step of it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _name(frame).startswith(_PACKAGE):
        frame = frame.f_back
    while frame is not None and not _name(frame).startswith(_STEPS):
        frame = frame.f_back
    # A callback of a future runs where nothing is held.
    return frame is not None and frame.f_code.co_name != "_resolve"


def _name(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")
