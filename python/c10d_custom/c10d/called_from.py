"""Which part of torch makes a call, where that decides what is done: torch passes no word of it on, and the caller's
frame shows it."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch.distributed as dist
from torch.autograd import graph

_ISEND, _IRECV, _SEND, _RECV = (inspect.unwrap(f).__code__ for f in (dist.isend, dist.irecv, dist.send, dist.recv))
_BACKWARD = getattr(getattr(graph, "_engine_run_backward", None), "__code__", None)


def posted_to_be_awaited() -> bool:
    """Whether a message is posted by dist.send or dist.recv, which wait for it right afterwards. To be asked one call
    below a group's ``send``, ``recv`` or ``recv_anysource``.

    A signal handler that raises between their two steps, after the message was posted and before its Work is waited
    for, would leave it under way with nobody to withdraw it. So for these the group waits before it returns the Work.
    """
    frame: Any = sys._getframe(3)
    if frame.f_code is _ISEND or frame.f_code is _IRECV:  # which they call
        frame = frame.f_back
    return frame.f_code is _SEND or frame.f_code is _RECV


def amid_backward_pass() -> bool:
    """Whether a collective is begun by C++ amid a backward pass, as DDP's Reducer does it. To be asked two calls below
    a group's method."""
    caller = sys._getframe(3).f_back
    return caller is not None and caller.f_code is _BACKWARD
