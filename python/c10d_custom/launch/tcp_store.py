"""A TCPStore of our own, served or connected to, whatever torch was built with."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore


def tcp_store(address: str, port: int, serves: bool, seconds: float, size: int | None = None) -> TCPStore:
    """Does not wait for others. ``port``: 0 if the kernel is to choose; ``seconds``: for its calls. By libuv, unless
    USE_LIBUV forbids it, as to torch's own rendezvous, or this torch was built without (Debian's)."""
    from torch.distributed import TCPStore  # launch/ is imported before torch is whole

    def made(by_libuv: bool) -> TCPStore:
        limit = timedelta(seconds=max(seconds, 0.001))
        return TCPStore(address, port, size, serves, limit, wait_for_workers=False, use_libuv=by_libuv)

    if os.environ.get("USE_LIBUV", "1") != "1":
        return made(False)
    try:
        return made(True)
    except RuntimeError as error:
        if "built without libuv" not in str(error):
            raise
        return made(False)
