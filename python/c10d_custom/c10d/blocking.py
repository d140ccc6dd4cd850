"""Whether a message is posted by dist.send or dist.recv, which wait for it right afterwards.

A signal handler that raises between their two steps, after the message was posted and before its Work is waited for,
would leave it under way with nobody to withdraw it. So for these the group waits before it returns the Work. torch
passes no word of it on; the caller's frame shows it."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch.distributed as dist

_ISEND, _IRECV, _SEND, _RECV = (inspect.unwrap(f).__code__ for f in (dist.isend, dist.irecv, dist.send, dist.recv))


def posted_to_be_awaited() -> bool:
    """To be asked one call below a group's ``send``, ``recv`` or ``recv_anysource``."""
    frame: Any = sys._getframe(3)
    if frame.f_code is _ISEND or frame.f_code is _IRECV:  # which they call
        frame = frame.f_back
    return frame.f_code is _SEND or frame.f_code is _RECV
