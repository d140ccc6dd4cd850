"""From where in the user's program calls are made: a stack without torch.distributed's frames and ours."""

from __future__ import annotations

import os
import sys
import time
from bisect import bisect_right
from collections import deque
from types import FrameType
from typing import TYPE_CHECKING

from torch import distributed

from ..threads import threading
from ..transport.call_log import Frame

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..transport.call_log import Record


_DEPTH = 32  # frames of a stack that are kept
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARIES = _OURS, os.path.dirname(distributed.__file__) + os.sep, threading.__file__


def stack(frame: FrameType | None) -> tuple[Frame, ...]:
    """From ``frame`` outwards, beginning where the libraries were called; nothing in a thread of theirs."""
    found: list[Frame] = []
    while frame is not None and len(found) < _DEPTH:
        code = frame.f_code
        if found or not code.co_filename.startswith(_LIBRARIES):
            found.append(Frame(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(found)


def inside_call(frame: FrameType | None) -> bool:
    """Whether code of ours is amid ``frame``, or has called it."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            return True
        frame = frame.f_back
    return False


class CallStacks:
    """The stacks of one group's last calls. Any thread and any signal handler may note, and read."""

    def __init__(self, calls: int) -> None:
        self._notes: deque[tuple[int, float, tuple[Frame, ...]]] = deque(maxlen=2 * calls)

    def note(self, number: int) -> None:
        """A call is about to be made; ``number``: its number, 0 for a message."""
        self._notes.append((number, time.time(), stack(sys._getframe(1))))

    def tell(self, records: Iterable[Record]) -> None:
        """Gives the records their frames: a collective those noted last before its number, a message those noted last
        before its time."""
        notes = list(self._notes)
        by_number = sorted((float(number), i) for i, (number, _, _) in enumerate(notes) if number)
        by_time = sorted((when, i) for i, (_, when, _) in enumerate(notes))
        for record in records:
            among, at = (by_time, record.issued) if record.is_message else (by_number, record.number)
            if place := bisect_right(among, (at, len(notes))):
                record.frames = notes[among[place - 1][1]][2]
