"""What a group is to `pickle`: its name, by which this process has a group when it is loaded."""

from __future__ import annotations

from typing import Any

from ..errors import UsageError
from .issuing import live


def group_named(name: str) -> Any:
    """The process group of that name in this process. UsageError if there is none."""
    from torch._C._distributed_c10d import _resolve_process_group

    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]  # torch's own type is a str
    except RuntimeError:
        pass  # made without torch, as by split_group or torchft
    for group in live():
        if group._name == name and not group._closed:
            return group
    raise UsageError(
        f'a pickled process group named "{name}" cannot be loaded: this process has no group of that name. A group is '
        "pickled as its name alone: make the same groups, in the same order, before what holds them is loaded"
    )
