"""Groups that are asked for by another backend's name, and made by this one: gloo's.

Programs and frameworks that say "gloo" then run here unchanged. `torch.distributed.get_backend` goes on saying "gloo",
because they compare it; the group itself says who it is (`getBackendName`, the trace). A `ProcessGroupGloo` made by
hand stays gloo's. A bare `init_process_group()` asks for gloo by torch's own map of devices, hence for us, too.

torch 2.14 and newer keep gloo's maker in the table of plugins, where ours takes its place. Older ones look for the name
before they look there: the function that makes groups is wrapped."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

from ..config import REPLACEABLE  # nothing that imports torch: this is imported while torch is
from . import NAME, replaced

log = logging.getLogger("c10d_custom")

_undo: list[Callable[[], None]] = []
_told: list[bool] = []  # whether the log has been


def replace(name: str) -> None:
    """From now on groups asked for as ``name`` are made by this backend; again does nothing. UsageError for a name that
    is not among config.REPLACEABLE."""
    if name not in REPLACEABLE:
        from ..errors import UsageError

        raise UsageError(f"replace({name!r}): only {', '.join(REPLACEABLE)} can be replaced")
    import torch.distributed as dist

    if name in replaced or not dist.is_available():
        return
    in_table = hasattr(dist.Backend, "_ensure_backend_registered")
    _undo.append(_in_the_table(name) if in_table else _before_the_table())
    replaced.add(name)


def restore() -> None:
    """Gives all replaced names back to their own backends. Groups that exist stay what they are."""
    replaced.clear()
    while _undo:
        _undo.pop()()


def _tell(asked: str) -> None:
    """Writes into the log, once for a process, that such groups are ours."""
    if not _told:
        _told.append(True)
        log.info('groups of backend "%s" are made by "%s" (C10D_CUSTOM_REPLACES, or c10d_custom.replace)', asked, NAME)


def _in_the_table(name: str) -> Callable[[], None]:
    import torch.distributed as dist

    from .registration import create

    def create_in_place(options: Any, backend_options: Any) -> Any:
        _tell(name)
        return create(options, backend_options)

    plugins, key = dist.Backend._plugins, name.upper()
    before = plugins.get(key)  # None: torch registers it when it is first asked for
    plugins[key] = dist.Backend._BackendPlugin(create_in_place, True)

    def undo() -> None:
        if before is None:
            del plugins[key]
        else:
            plugins[key] = before

    return undo


def _before_the_table() -> Callable[[], None]:
    c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")
    original = c10d._new_process_group_helper
    signature = inspect.signature(original)

    @functools.wraps(original)
    def made_in_place(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        backend = given.arguments["backend"]
        asked = c10d.BackendConfig(c10d.Backend(backend)) if backend is not None else None
        makers = set(asked.get_device_backend_map().values()) if asked is not None else set()
        if not makers & replaced:
            return original(*args, **kwargs)
        if not makers <= replaced | {NAME}:
            log.warning(
                'backend "%s": this torch has one backend made in Python for all devices of a group or none; it takes '
                'torch 2.14 or newer to give the CPU\'s part to "%s". The group is made as if nothing were replaced.',
                asked,
                NAME,
            )
            return original(*args, **kwargs)
        given.arguments["backend"] = c10d.Backend(NAME)
        made = original(*given.args, **given.kwargs)
        group = made[0] if isinstance(made, tuple) else made
        if group in c10d._world.pg_map:
            c10d._world.pg_map[group] = (backend, c10d._world.pg_map[group][1])
            c10d._world.pg_backend_config[group] = str(asked)
        _tell(", ".join(sorted(makers & replaced)))
        return made

    c10d._new_process_group_helper = made_in_place

    def undo() -> None:
        if c10d._new_process_group_helper is made_in_place:
            c10d._new_process_group_helper = original
        # Else somebody has wrapped it again: with no names left, it only passes calls on.

    return undo
