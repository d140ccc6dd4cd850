"""What stands in for the transport of a group that this process cannot use: it has no ranks yet, or no more, or it is
the group of the process that this one was forked from. It refuses whatever is asked, and says why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

_ANSWERS = {"interrupted_here": False, "broken": True, "devices": (), "next_sequence": 1, "has_arena": False}
_ANSWERS |= dict.fromkeys(("abort", "leave", "close"))  # there is nothing under way


class NoTransport:
    """``why``: the end of a sentence that begins with the group."""

    strangers, ended = False, ""
    fast_collective = fast_submit = fast_message = None

    def __init__(self, name: str, rank: int, size: int, devices: list[str] | None, why: str) -> None:
        self.name, self.rank, self.size, self.device_types, self._why = name, rank, size, devices, why
        self.members = list(range(size))
        self.cpu = self

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise UsageError(f"group {self.name}, rank {self.rank}: it {self._why}")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._refuse if name not in _ANSWERS else lambda: _ANSWERS[name]
