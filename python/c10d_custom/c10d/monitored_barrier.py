"""A barrier that names the ranks which do not come, and leaves the group usable when they don't.

Messages, not a collective: rank 0 hears from each rank, then lets all go. Numbered tags keep a
check-in that came too late out of the next barrier.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from ..errors import CollectiveTimeoutError, CustomBackendError

if TYPE_CHECKING:
    from .issuing import Issuing


def _tag(number: int) -> int:
    return -1 - number  # c10d's callers use tags from 0 up


def monitored_barrier(group: Issuing, number: int, seconds: float, wait_all_ranks: bool) -> None:
    """Collective over ``group``. Raises CollectiveTimeoutError naming the ranks that did not arrive
    within ``seconds``: on rank 0 the first of them, or all with ``wait_all_ranks``."""
    rank, size = group._group_rank, group._group_size
    token = torch.zeros(1, dtype=torch.uint8)
    deadline = time.monotonic() + seconds
    milliseconds = int(seconds * 1000)

    def exchange(method: str, peer: int) -> None:
        left = max(deadline - time.monotonic(), 0.001)
        group._message(method, [token], peer, _tag(number), left, method == "recv").wait(timedelta(seconds=left))

    if rank:
        try:
            exchange("send", 0)
            exchange("recv", 0)
        except CustomBackendError as error:
            raise CollectiveTimeoutError(
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting "
                f"for send/recv from rank 0 within {milliseconds} ms. Please check rank 0 logs for faulty "
                f"rank. ({error})"
            ) from error
        return
    missing: dict[int, CustomBackendError] = {}
    for peer in range(1, size):
        if time.monotonic() >= deadline and not missing:
            raise CollectiveTimeoutError(
                f"Rank {rank} timed out in monitoredBarrier after {milliseconds} ms, before it heard from rank {peer}"
            )
        try:
            exchange("recv", peer)
        except CustomBackendError as error:
            missing[peer] = error
            if not wait_all_ranks:
                raise CollectiveTimeoutError(
                    f"Rank {peer} failed to pass monitoredBarrier in {milliseconds} ms. ({error})"
                ) from error
    if missing:
        raise CollectiveTimeoutError(
            f"Ranks {', '.join(map(str, missing))} failed to pass monitoredBarrier in {milliseconds} ms. "
            f"({'; '.join(map(str, missing.values()))})"
        )
    for peer in range(1, size):
        exchange("send", peer)
