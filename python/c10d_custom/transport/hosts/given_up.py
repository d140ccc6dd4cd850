"""What MPI may still read or write of groups that are over: kept until it is through with it.

Receives are cancelled. Sends end when their receivers take them in, so each rank takes in, and drops, what still comes
for groups that have failed, and with Open MPI for those that have carried messages. All of this is looked after when
groups are made, now and then in waits and, but with Open MPI, when groups are closed. What remains: sends to ranks that
are gone, where MPI does not end them.

Requests that are here are touched by nobody else, but by `MpiLink.withdraw`, which takes the lock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...threads import threading

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm, Request

_EVERY = 0.5  # s between two looks in waits

lock = threading.RLock()  # taken twice where a signal handler closes a group amid `collect`
_kept: list[tuple[Sequence[Request], object]] = []
_drained: list[Intracomm] = []  # communicators of groups that are over, on which something may still come
_looked = 0.0


def keep(requests: Sequence[Request], memory: object) -> None:
    """Keeps ``memory`` until ``requests`` are complete."""
    _kept.append((requests, memory))


def drain(comm: Intracomm) -> None:
    """From now on `collect` takes in what still comes on the communicator of a group that is over."""
    _drained.append(comm)


def collect(MPI: Any, now_and_then: bool = False) -> None:
    """Lets go of what MPI is through with. ``now_and_then``: unless that was done a moment ago."""
    global _looked
    if not (_kept or _drained) or now_and_then and time.monotonic() - _looked < _EVERY:
        return
    if not lock.acquire(blocking=False):
        return
    try:
        _looked = time.monotonic()
        for comm in list(_drained):
            _take_in(MPI, comm)
        for each in list(_kept):
            if _complete(MPI, each[0]) and each in _kept:
                _kept.remove(each)
    finally:
        lock.release()


def _take_in(MPI: Any, comm: Intracomm) -> None:
    status = MPI.Status()
    try:
        while (found := comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
            scratch = bytearray(status.Get_count(MPI.BYTE))
            keep([found.Irecv([scratch, MPI.BYTE])], scratch)
    except MPI.Exception:
        if comm in _drained:
            _drained.remove(comm)  # one of its ranks is gone


def _complete(MPI: Any, requests: Sequence[Request]) -> bool:
    """Whether all are, well or not. Those that could be started again are freed: they hold the communicator."""
    try:
        if not MPI.Request.Testall(requests):
            return False
    except MPI.Exception:
        if not all(_ended(MPI, request) for request in requests):
            return False
    for request in requests:
        if request != MPI.REQUEST_NULL:
            request.Free()
    return True


def _ended(MPI: Any, request: Request) -> bool:
    try:
        return request.Test()
    except MPI.Exception:
        return True
