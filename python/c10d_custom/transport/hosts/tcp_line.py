"""A TCP connection between two ranks of one group, on which they tell each other things as lines of JSON, once each has
proved that it knows the group's secret: by a digest of it and of what the other has just made up, so that who listens
at the port of a rank that is gone learns nothing.

Who is called (it may be a stranger who calls) begins, with its challenge. Nothing here waits."""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import secrets
import struct
from enum import Enum
from typing import Any

from ...threads import select, socket

_CHALLENGE, _DIGEST = 16, 32  # bytes
_CALLER = struct.Struct("<I16s32s")  # its rank, its challenge, its digest
_LONGEST = 1 << 20


class At(Enum):
    """What is known of a line's other end."""

    SILENT = "its host does not answer"
    CALLED = "it is alive"  # somebody at its port is, who has not said anything yet
    OPEN = "it has come"
    REFUSED = "its host refuses, which does not prove that it has ended"
    UNREACHED = "its host cannot be reached"
    ENDED = "it has hung up"


class TcpLine:
    """``link`` does not block; ``called``: the rank that was called from here, None if this rank was called; ``error``:
    what connecting there has given so far."""

    def __init__(
        self, link: socket.socket, secret: bytes, rank: int, called: int | None = None, error: int = 0
    ) -> None:
        self._link, self._secret, self._rank = link, secret, rank
        self.peer = called
        self._called = called is not None
        self._own = secrets.token_bytes(_CHALLENGE)
        self._unread = b""
        self.at = At.CALLED
        if self._called:
            self._connected(error)
        else:
            self._send(self._own)

    def fileno(self) -> int:
        return self._link.fileno()

    def events(self) -> int:
        """The events for which to poll."""
        return select.POLLOUT if self.at is At.SILENT else select.POLLIN

    def over(self) -> bool:
        return self.at in (At.REFUSED, At.UNREACHED, At.ENDED)

    def address(self) -> str:
        """The address of the other end."""
        return str(self._link.getpeername()[0])

    def close(self) -> None:
        self._link.close()
        if not self.over():
            self.at = At.ENDED

    def say(self, message: dict[str, Any]) -> None:
        self._send(f"{json.dumps(message)}\n".encode())

    def hear(self) -> list[dict[str, Any]]:
        """Returns the messages that have come."""
        if self.at is At.SILENT:
            self._connect()
        if self.at not in (At.CALLED, At.OPEN):
            return []
        try:
            data = self._link.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.at = At.ENDED
            return []
        self._unread += data
        if self.at is At.CALLED:
            self._answer() if self._called else self._admit()
        *lines, rest = self._unread.split(b"\n") if self.at is At.OPEN else [self._unread]
        self._unread = rest
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            messages = [None]
        if len(rest) > _LONGEST or not all(isinstance(message, dict) for message in messages):
            self.at = At.ENDED
            return []
        return messages

    def _connect(self) -> None:
        poll = select.poll()
        poll.register(self._link, select.POLLOUT)
        if not poll.poll(0):
            return
        self._connected(self._link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def _connected(self, error: int) -> None:
        known = {0: At.CALLED, errno.EINPROGRESS: At.SILENT, errno.ECONNREFUSED: At.REFUSED}
        self.at = known.get(error, At.UNREACHED)

    def _answer(self) -> None:
        """The caller's side of proving who is who."""
        assert self.peer is not None
        if len(self._unread) == _CHALLENGE:
            digest = self._digest(b"caller", self._unread, self._own, self._rank, self.peer)
            self._theirs = self._unread
            self._send(_CALLER.pack(self._rank, self._own, digest))
        elif len(self._unread) >= _CHALLENGE + _DIGEST:
            said, self._unread = self._unread[_CHALLENGE:][:_DIGEST], self._unread[_CHALLENGE + _DIGEST :]
            expected = self._digest(b"called", self._own, self._theirs, self._rank, self.peer)
            # Somebody else has got the port of a rank that is gone.
            self.at = At.OPEN if hmac.compare_digest(said, expected) else At.REFUSED

    def _admit(self) -> None:
        """The called side of proving who is who."""
        if len(self._unread) < _CALLER.size:
            return
        (peer, theirs, said), rest = _CALLER.unpack(self._unread[: _CALLER.size]), self._unread[_CALLER.size :]
        if not hmac.compare_digest(said, self._digest(b"caller", self._own, theirs, peer, self._rank)):
            self.at = At.ENDED
            return
        self.peer, self._unread, self.at = peer, rest, At.OPEN
        self._send(self._digest(b"called", theirs, self._own, peer, self._rank))

    def _digest(self, side: bytes, to: bytes, by: bytes, caller: int, called: int) -> bytes:
        return hmac.digest(self._secret, b"%s %b %b %d %d" % (side, to, by, caller, called), "sha256")

    def _send(self, data: bytes) -> None:
        """A few bytes now and then: they fit the socket's buffer, unless the peer is beyond help."""
        with contextlib.suppress(BrokenPipeError, ConnectionError):  # what it has said before can still be heard
            try:
                sent = self._link.send(data, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                sent = 0
            if sent < len(data):
                self.at = At.ENDED
