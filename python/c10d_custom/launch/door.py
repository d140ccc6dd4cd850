"""Who may connect. A Door: where ranks connect that have been told of a token. Anybody can connect: all are heard at
once, in few bytes, and none is waited for; those that say nothing are closed when there are too many, the oldest first.
And of a socket inside a host, whose process is at its other end."""

from __future__ import annotations

import errno
import os
import secrets
import struct
from collections.abc import Collection
from typing import Any

from ..threads import selectors, socket

TOKEN_BYTES = 16
STRANGERS = 64  # connections that have not said who they are, besides one for each rank
HERE = b"."  # what who connects says last, once it has been answered the token
_HELLO = struct.Struct(f"<{TOKEN_BYTES}sI")
_AT_ONCE = 64  # connections taken between two looks at those that are there


def hello(token: bytes, rank: int) -> bytes:
    """What who connects says first."""
    return _HELLO.pack(token, rank)


def is_of_this_user(connection: socket.socket) -> bool:
    """Whether the other end of a Unix socket is, as the kernel says."""
    user = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
    return bool(user == os.geteuid())


class Door:
    """``ranks``: that are to come. One that has said the token and such a rank is answered the token; it is let in once
    it has then said that it is HERE. (A rank that had no answer for long may have connected again: by this it says
    which of its connections it means.)"""

    def __init__(self, server: socket.socket, token: bytes, ranks: Collection[int]) -> None:
        self._server, self._token = server, token
        self.waiting = set(ranks)
        self._most = len(self.waiting) + STRANGERS
        self._silent: dict[socket.socket, bytes] = {}  # connection -> what it has said so far; the oldest first
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def admit(self, seconds: float) -> list[tuple[socket.socket, int]]:
        """[(connection, rank)] of those that have come within that time; the caller closes them."""
        ready: list[Any] = [key.fileobj for key, _ in self._selector.select(seconds)]
        heard = [(link, self._hear(link)) for link in ready if link is not self._server]
        if self._server in ready:
            self._accept()  # last: it may close those that have said nothing
        return [(link, rank) for link, rank in heard if rank is not None]

    def close(self) -> None:
        for link in list(self._silent):
            self._drop(link)
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            if len(self._silent) >= self._most:
                self._drop(next(iter(self._silent)))
            try:
                link, _ = self._server.accept()
            except BlockingIOError:
                return
            except OSError as error:  # of a connection that is gone, or no descriptor is left
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    if not self._silent:
                        raise
                    self._drop(next(iter(self._silent)))
                continue
            link.setblocking(False)
            self._silent[link] = b""
            self._selector.register(link, selectors.EVENT_READ)

    def _hear(self, link: socket.socket) -> int | None:
        """The rank that it is; None: not known yet, or closed as a stranger's."""
        before = self._silent[link]
        wanted = _HELLO.size + len(HERE) * (len(before) >= _HELLO.size)
        try:
            said = link.recv(wanted - len(before))
            if said:
                self._silent[link] += said
                if len(self._silent[link]) < wanted:
                    return None
                token, rank = _HELLO.unpack(self._silent[link][: _HELLO.size])
                if secrets.compare_digest(token, self._token) and rank in self.waiting:
                    if len(before) < _HELLO.size:
                        link.send(self._token)
                        return None
                    self._forget(link)
                    self.waiting.discard(rank)
                    return int(rank)
        except BlockingIOError:
            return None
        except OSError:
            pass
        self._drop(link)
        return None

    def _forget(self, link: socket.socket) -> None:
        del self._silent[link]
        self._selector.unregister(link)

    def _drop(self, link: socket.socket) -> None:
        self._forget(link)
        link.close()
