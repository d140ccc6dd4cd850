"""A barrier that names the ranks which do not come, and leaves the group usable when they don't.

Messages, not a collective: rank 0 hears from each rank, then lets all go, or tells them that it gives up. Numbered tags
keep a check-in that came too late out of the next barrier. A rank that waits in it looks now and then whether another
is in a collective instead. Then it joins that one, as a rank that calls something else: so everyone is told.
"""

from __future__ import annotations

import contextlib
import time
from ctypes import addressof, c_uint8
from typing import TYPE_CHECKING

import torch

from .. import dtypes
from ..call import Message, Region, tag_of_barrier
from ..errors import CollectiveMismatchError, CollectiveTimeoutError, CustomBackendError

if TYPE_CHECKING:
    from ..transport import Ticket
    from .issuing import Issuing


_LOOK = 0.05  # s between two looks at what the others do
_ON_ITS_WAY = 1.0  # s: that another host's news of a collective may be here before the word that lets this rank go
_GO, _GIVEN_UP = 0, 1


class MonitoredBarriers:
    """Those of one group, for one rank of it."""

    def __init__(self) -> None:
        self._entered = 0
        self._notices: list[tuple[Ticket, c_uint8]] = []  # which may still be read

    def run(self, group: Issuing, seconds: float, wait_all_ranks: bool) -> None:
        """Collective over ``group``. Raises CollectiveTimeoutError naming the ranks that did not arrive within
        ``seconds``: on rank 0 the first of them, or all with ``wait_all_ranks``. CollectiveMismatchError on every rank
        if some call a collective instead."""
        self._entered += 1
        group._transport.enter_monitored_barrier(self._entered)
        barrier = _MonitoredBarrier(group, self._entered, seconds)
        if group._group_rank:
            return barrier.check_in()
        self._notices = [(ticket, word) for ticket, word in self._notices if not ticket.done()]
        try:
            barrier.hear_from_all(wait_all_ranks)
        except CollectiveTimeoutError:
            self._notices += barrier.give_up()
            raise
        barrier.let_all_go()


class _MonitoredBarrier:
    def __init__(self, group: Issuing, number: int, seconds: float) -> None:
        self._group, self._number, self._seconds = group, number, seconds
        self._rank, self._size = group._group_rank, group._group_size
        self._deadline = time.monotonic() + seconds
        self._all_in = False  # rank 0 has heard from all: they may go on
        self._root_seen = 0.0  # when rank 0, of another host, was first seen in a collective

    # --- rank 0

    def hear_from_all(self, wait_all_ranks: bool) -> None:
        within = f"{self._milliseconds()} ms"
        missing: dict[int, CustomBackendError] = {}
        for peer in range(1, self._size):
            if time.monotonic() >= self._deadline and not missing:
                raise CollectiveTimeoutError(
                    f"Rank {self._rank} timed out in monitoredBarrier after {within}, before it heard from rank {peer}"
                )
            try:
                self._exchange("recv", peer)
            except CollectiveMismatchError:
                raise
            except CustomBackendError as error:
                missing[peer] = error
                if not wait_all_ranks:
                    raise CollectiveTimeoutError(
                        f"Rank {peer} failed to pass monitoredBarrier in {within}. ({error})"
                    ) from error
        if missing:
            raise CollectiveTimeoutError(
                f"Ranks {', '.join(map(str, missing))} failed to pass monitoredBarrier in {within}. "
                f"({'; '.join(map(str, missing.values()))})"
            )
        self._all_in = True

    def let_all_go(self) -> None:
        for peer in range(1, self._size):
            self._exchange("send", peer)

    def give_up(self) -> list[tuple[Ticket, c_uint8]]:
        """Tells all, also those that come later. Returns what is still to be kept."""
        notices = []
        for peer in range(1, self._size):
            with contextlib.suppress(CustomBackendError):
                word = c_uint8(_GIVEN_UP)
                notices.append((self._post("send", peer, word), word))
        return notices

    # --- the others

    def check_in(self) -> None:
        try:
            self._exchange("send", 0)
            word = self._exchange("recv", 0)
        except CollectiveMismatchError:
            raise
        except CustomBackendError as error:
            raise CollectiveTimeoutError(self._not_let_go(str(error))) from error
        if word == _GIVEN_UP:
            raise CollectiveTimeoutError(self._not_let_go("Rank 0 has given up, and says which rank it missed."))

    def _not_let_go(self, why: str) -> str:
        return (
            f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
            f"from rank 0 within {self._milliseconds()} ms. Please check rank 0 logs for faulty rank. ({why})"
        )

    def _milliseconds(self) -> int:
        return int(self._seconds * 1000)

    # --- messages, which are in no tensor: whatever modes of torch are on see nothing of them

    def _post(self, method: str, peer: int, word: c_uint8) -> Ticket:
        left = max(self._deadline - time.monotonic(), 0.001)
        data, dtype = Region(addressof(word), 1, 1), dtypes.BY_DTYPE[torch.uint8]
        return self._group._transport.post(
            Message(method, data, dtype, peer, tag_of_barrier(self._number), left, method == "recv")
        )

    def _exchange(self, method: str, peer: int) -> int:
        word = c_uint8(_GO)
        ticket: Ticket | None = None
        try:
            ticket = self._post(method, peer, word)
            while not ticket.wait(_LOOK, True):
                self._look()
        except BaseException as error:  # of a signal handler, too
            if ticket is not None and not ticket.done():
                ticket.withdraw()
            if ticket is None and isinstance(error, CustomBackendError):
                self._fail(error)
            raise
        failure = ticket.error()
        if isinstance(failure, CustomBackendError):
            self._fail(failure)
        if failure is not None:
            raise failure
        return word.value

    def _fail(self, error: CustomBackendError) -> None:
        """Raises ``error``, or the CollectiveMismatchError for which the group ended meanwhile."""
        if self._group._transport.broken():
            try:
                self._join_collective()
            except CollectiveMismatchError as mismatch:
                raise mismatch from error
            except CustomBackendError:
                pass
        raise error

    # --- ranks that are in a collective

    def _look(self) -> None:
        strays, of_other_hosts = self._group._transport.in_a_collective_instead(self._number)
        if self._rank == 0:
            strays = strays or (bool(of_other_hosts) and not self._all_in)
        elif 0 in of_other_hosts:
            self._root_seen = self._root_seen or time.monotonic()
            strays = strays or time.monotonic() > self._root_seen + _ON_ITS_WAY
        if strays:
            self._join_collective()

    def _join_collective(self) -> None:
        left = max(self._deadline - time.monotonic(), 1.0)
        self._group._transport.run(self._group._lower.monitored_barrier(left))
