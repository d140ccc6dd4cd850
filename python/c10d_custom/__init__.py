"""A torch.distributed backend named "custom": ``init_process_group("custom")``.

Nothing needs to import this package: torch finds it by its entry points, `register` from torch 2.14 on when a group
first names "custom", `autoload` at `import torch`. Where TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns that off in an older
torch, import it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ._version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    import torch
    from torch.distributed import ProcessGroup


__all__ = ["__version__", "autoload", "empty", "register", "replace", "restore", "shrink_group"]


def autoload() -> None:
    """While torch is imported, or this package: registers the backend, and, under an MPI launcher, fills the
    environment in. Never raises: that would break ``import torch``."""
    try:
        register()
        from .c10d.registration import look_for_launcher

        look_for_launcher()
        if "C10D_CUSTOM_REPLACES" in os.environ:
            from .config import replaced_wanted

            for name in replaced_wanted():
                replace(name)
    except Exception as error:
        import warnings

        warnings.warn(f"c10d-custom could not register its backend: {error!r}", RuntimeWarning, stacklevel=2)


def register() -> None:
    """Registers "custom" for CPU and CUDA tensors with torch.distributed; again, or where torch was built without
    torch.distributed, does nothing. What a group needs is imported when one is made."""
    from .c10d.registration import register

    register()


def replace(name: str = "gloo") -> None:
    """From now on, groups that are asked for as "gloo" are made by this backend: by ``init_process_group("gloo")``, in
    a device string ("cpu:gloo,cuda:nccl" keeps NCCL; torch 2.14 or newer), by ``new_group(backend="gloo")`` and
    wherever torch takes gloo by itself. ``torch.distributed.get_backend`` says "gloo" there. The environment variable
    C10D_CUSTOM_REPLACES=gloo does the same at `import torch`, in child processes, too. Call it on all ranks.

    Raises UsageError for another name."""
    from .c10d.replacing import replace

    replace(name)


def restore() -> None:
    """Undoes `replace`: from now on, groups are made by who is named. Groups that exist stay what they are."""
    from .c10d.replacing import restore

    restore()


def empty(
    shape: int | Sequence[int], *, dtype: torch.dtype | None = None, group: ProcessGroup | None = None
) -> torch.Tensor:
    """A CPU tensor of any contents, as torch.empty's, in memory that the ranks of ``group`` share (the default group if
    None). Where all ranks give such tensors, large all_reduces, all_gathers and reduce_scatters of that group read and
    write them where they lie; the results are the same. The tensor is this rank's own, and may outlive the group. In a
    group of one rank, or over several hosts, it is an ordinary tensor. See docs/zero-copy.md.

    Raises UsageError for a group of another backend, TransportError where there is not so much memory."""
    from .c10d.allocation import empty

    return empty(shape, dtype, group)


def shrink_group(timeout: timedelta | None = None) -> ProcessGroup:
    """After a loss: makes the ranks of the default group that are alive the new default group, and returns it. Each of
    them calls it; ``timeout``: how long to wait for the others, the group's own if None. Ranks keep their order.

    Raises CollectiveTimeoutError if a rank neither comes nor ends in that time, UsageError if the default group is not
    of this backend; the old groups are then still there. See c10d/shrink.py."""
    from .c10d.shrink import shrink_group

    return shrink_group(timeout)


autoload()
