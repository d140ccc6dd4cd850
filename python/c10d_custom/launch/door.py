"""Where ranks connect that have been told of a token. Anybody can connect: all are heard at once, in few bytes, and
none is waited for; those that say nothing are closed when there are too many, the oldest first."""

from __future__ import annotations

import errno
import secrets
import struct
from collections.abc import Callable, Collection
from typing import Any

from ..threads import selectors, socket

TOKEN_BYTES = 16
STRANGERS = 64  # connections that have not said who they are, besides one for each rank
_HELLO = struct.Struct(f"<{TOKEN_BYTES}sI")
_AT_ONCE = 64  # connections taken between two looks at those that are there


def hello(token: bytes, rank: int) -> bytes:
    """What who connects says."""
    return _HELLO.pack(token, rank)


class Door:
    """``ranks``: that are to come. ``admits``: whether a connection is heard at all. ``greets``: answers one that has
    said the token and such a rank; it is let in once it has then said ``last_bytes`` more. (A rank that had no answer
    for long may have connected again: by these it says which of its connections it means.) ``refusal``: what others are
    told."""

    def __init__(
        self,
        server: socket.socket,
        token: bytes,
        ranks: Collection[int],
        greets: Callable[[socket.socket], object],
        last_bytes: int = 0,
        admits: Callable[[socket.socket], bool] = lambda link: True,
        refusal: bytes = b"",
    ) -> None:
        self._server, self._token, self._greets, self._admits = server, token, greets, admits
        self._whole, self._refusal = _HELLO.size + last_bytes, refusal
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
            if not self._admits(link):
                link.close()
                continue
            link.setblocking(False)
            self._silent[link] = b""
            self._selector.register(link, selectors.EVENT_READ)

    def _hear(self, link: socket.socket) -> int | None:
        """The rank that it is; None: not known yet, or closed as a stranger's."""
        before = self._silent[link]
        wanted = self._whole if len(before) >= _HELLO.size else _HELLO.size
        try:
            said = link.recv(wanted - len(before))
            if said:
                self._silent[link] += said
                if len(self._silent[link]) < wanted:
                    return None
                token, rank = _HELLO.unpack(self._silent[link][: _HELLO.size])
                if secrets.compare_digest(token, self._token) and rank in self.waiting:
                    if len(before) < _HELLO.size:
                        self._greets(link)
                    if len(self._silent[link]) < self._whole:
                        return None
                    self._forget(link)
                    self.waiting.discard(rank)
                    return int(rank)
                if self._refusal:
                    link.send(self._refusal)
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
