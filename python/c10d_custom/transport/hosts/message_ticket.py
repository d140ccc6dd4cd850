"""A message between hosts: its ticket, its head, and the tags it goes by."""

import struct
import time

from ... import native
from ..failure import Trouble
from ..tickets import PyTicket
from .link import LARGE_TAGS, POINT_TO_POINT

HEAD = struct.Struct("<QIIq40x")  # bytes, dtype, whether they follow in the head, tag
SHARED_TAGS = LARGE_TAGS, LARGE_TAGS + 1


class MessageTicket(PyTicket):
    def __init__(self, engine, message):
        super().__init__(engine.complete)
        self.engine, self.message = engine, message
        self.began = time.monotonic()
        self.deadline = self.began + message.timeout
        self.number = next(engine.numbers)
        self.requests, self.keep = [], None
        self.posted = False  # a send: MPI has all of it
        self.kept_until = 0.0  # of one that was left: until then it may complete in a group that has ended
        self.matched = False
        self.inner = None  # the local ticket that a receive from any source has become

    def withdraw(self):
        self.engine.withdraw(self)

    def wait(self, seconds, may_run=False):
        begun = time.monotonic()
        while not self._done:
            self.engine.refuse_inside(self.message.name)
            self.engine.progress()
            waited = time.monotonic() - begun
            if self._done or waited >= seconds:
                break
            self.engine.link.pause(waited)
        return self._done


def tags_of(tag, limit):
    """MPI's tags, up to ``limit``, of the heads and the data of messages with that tag; negative ones are torch's
    own."""
    at = POINT_TO_POINT + (4 * tag if tag >= 0 else 4 * (-1 - tag) + 2)
    return (at, at + 1) if at + 1 <= limit else SHARED_TAGS


def unlike(ticket, nbytes, dtype):
    """The Trouble of a message whose head says that it is not what its receive is for; else None."""
    message = ticket.message
    if nbytes == message.tensor.nbytes and dtype == message.dtype.code:
        return None
    return Trouble(
        native.MISMATCH,
        ticket._source,
        expected=message.tensor.nbytes,
        actual=nbytes,
        expected_dtype=message.dtype.code,
        actual_dtype=dtype,
    )
