"""A connection between two ranks of one group, on which they tell each other things as lines of JSON, once each has
proved that it knows the group's secret: by a digest of it and of who calls whom, so that who listens at the port of a
rank that is gone learns nothing with which a living one could be called.

Who calls begins. Nothing here waits."""

from __future__ import annotations

import errno
import hmac
import json
import struct
from enum import Enum
from typing import Any

from ...threads import socket

_PROOF = 32  # bytes
_CALLER = struct.Struct("<I")  # the caller's rank, before its proof
_LONGEST = 1 << 20


class At(Enum):
    """What is known of a line's other end."""

    SILENT = "its host does not answer"
    CALLED = "it is alive"  # somebody at its port is, who has not said anything yet
    OPEN = "it has come"
    NOT_YET = "it is alive, and was not there to be called"
    REFUSED = "its host refuses, which does not prove that it has ended"
    UNREACHED = "its host cannot be reached"
    ENDED = "it has hung up"


_FAILURES = {errno.EAGAIN: At.NOT_YET, errno.ECONNREFUSED: At.REFUSED}  # of connecting; others: UNREACHED


class TcpLine:
    """``link`` does not block; ``called``: the rank that was called from here, None if this rank was called; ``error``:
    what connecting there has given so far. ``said``: what the peer has said, under each name the newest."""

    def __init__(
        self, link: socket.socket, secret: bytes, rank: int, called: int | None = None, error: int = 0
    ) -> None:
        self._link, self._secret, self._rank, self._called = link, secret, rank, called
        self.peer, self.said, self._unread = called, dict[str, Any](), b""
        self.at = At.CALLED if called is None else At.SILENT
        if error not in (0, errno.EINPROGRESS):
            self.at = _FAILURES.get(error, At.UNREACHED)

    def fileno(self) -> int:
        return self._link.fileno()

    def over(self) -> bool:
        return self.at not in (At.SILENT, At.CALLED, At.OPEN)

    def address(self) -> str:
        """The address of the other end."""
        name = self._link.getpeername()
        return str(name[0]) if isinstance(name, tuple) else "127.0.0.1"

    def close(self) -> None:
        self._link.close()
        if not self.over():
            self.at = At.ENDED

    def say(self, message: dict[str, Any]) -> None:
        self._send(f"{json.dumps(message)}\n".encode())

    def hear(self) -> list[dict[str, Any]]:
        """Returns the messages that have come."""
        if self.over():
            return []
        try:
            if self.at is At.SILENT:
                self._link.send(self._hello(self._rank), socket.MSG_NOSIGNAL)  # fails until they are connected
                self.at = At.CALLED
            data = self._link.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError as error:
            self.at = At.ENDED if self.at is not At.SILENT else _FAILURES.get(error.errno or 0, At.UNREACHED)
            return []
        self._unread += data
        if not data:
            self.at = At.ENDED
        elif self.at is At.CALLED:
            self._hear_proof()
        if self.at is not At.OPEN:
            return []
        *lines, self._unread = self._unread.split(b"\n")
        try:
            messages = [dict[str, Any](json.loads(line)) for line in lines]
            if len(self._unread) > _LONGEST:
                raise ValueError
        except (ValueError, TypeError):
            messages, self.at = [], At.ENDED
        for message in messages:
            self.said |= message
        return messages

    def _hear_proof(self) -> None:
        """Of the other end's being that rank of the group."""
        length = _PROOF if self._called is not None else _CALLER.size + _PROOF
        proof, rest = self._unread[:length], self._unread[length:]
        if len(proof) < length:
            return
        if self._called is not None:
            # Somebody else may have got the port of a rank that is gone.
            self.at = At.OPEN if hmac.compare_digest(proof, self._proof("answers", self._rank)) else At.REFUSED
        else:
            (self.peer,) = _CALLER.unpack(proof[: _CALLER.size])
            self.at = At.OPEN if hmac.compare_digest(proof, self._hello(self.peer)) else At.ENDED
            if self.at is At.OPEN:
                self._send(self._proof("answers", self.peer))
        self._unread = rest

    def _hello(self, caller: int) -> bytes:
        return _CALLER.pack(caller) + self._proof("calls", caller)

    def _proof(self, what: str, caller: int) -> bytes:
        called = self._rank if self._called is None else self._called
        return hmac.digest(self._secret, f"{what} {caller} {called}".encode(), "sha256")

    def _send(self, data: bytes) -> None:
        """A few bytes now and then: they fit the socket's buffer, unless the peer is beyond help."""
        try:
            self._link.sendall(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            self.at = At.ENDED
        except ConnectionError:  # what it has said before can still be heard
            pass
