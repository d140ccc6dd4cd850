"""Sockets that a forked child must not keep: as long as it had them, this process's peers would take it for alive."""

from __future__ import annotations

import os
import weakref

from ...threads import socket

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def own(link: socket.socket) -> socket.socket:
    """The same, closed in each child that is forked."""
    _sockets.add(link)
    return link


def _close() -> None:
    for link in list(_sockets):
        link.close()


os.register_at_fork(after_in_child=_close)
