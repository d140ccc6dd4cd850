"""A torch.distributed backend named "custom": ``init_process_group("custom")``.

Nothing needs to import this package: torch finds it by its entry points, `register` from torch 2.14 on when a group
first names "custom", `autoload` at `import torch`. Where TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns that off in an older
torch, import it.

A program that never names this backend is to run as if the package were not there. So what `autoload` needs is here,
and loads no other module of ours unless a variable of ours asks for it."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import timedelta

    import torch
    from torch.distributed import ProcessGroup

    from ._version import __version__


__all__ = ["__version__", "autoload", "empty", "register", "replace", "restore", "shrink_group"]


# What an MPI launcher leaves in the environment of the processes that it starts; launch/launcher.py knows the details.
_SIGNS_OF_A_LAUNCHER = "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID"


def autoload() -> None:
    """While torch is imported: makes "custom" known to a torch that asks nobody when a group names it (before 2.14),
    and ``mpi://``; under an MPI launcher, lets ``env://`` ask who wants to know; and does what the variables
    C10D_CUSTOM_LAUNCHER and C10D_CUSTOM_REPLACES ask for. Never raises: that would break ``import torch``."""
    try:
        import torch.distributed as dist

        if not dist.is_available():
            return
        if not hasattr(dist.Backend, "_ensure_backend_registered"):
            register()
        try:
            _let_ranks_be_found()
        except Exception:
            from .c10d import optional

            with optional("finding the ranks of an MPI job"):
                raise
        if "C10D_CUSTOM_REPLACES" in os.environ:
            from .config import replaced_wanted

            for name in replaced_wanted():
                replace(name)
    except Exception as error:
        import warnings

        warnings.warn(f"c10d-custom could not make itself known to torch: {error!r}", RuntimeWarning, stacklevel=2)


def _let_ranks_be_found() -> None:
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers  # the package has a function so called
    if "mpi" in handlers:
        return
    handlers["mpi"] = _mpi_rendezvous
    if any(sign in os.environ for sign in _SIGNS_OF_A_LAUNCHER):
        handlers["env"] = partial(_env_rendezvous, handlers["env"])
        if os.environ.get("C10D_CUSTOM_LAUNCHER") == "import":
            from .launch.launcher import fill_environment

            fill_environment()


def _mpi_rendezvous(url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
    from .launch.rendezvous import mpi_rendezvous

    return mpi_rendezvous(url, *args, **kwargs)


def _env_rendezvous(torchs: Callable[..., Iterator[Any]], url: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """``torchs``: its own handler of ``env://``, which others' groups get."""
    if os.environ.get("C10D_CUSTOM_LAUNCHER") != "import" and not _is_for_us():
        return torchs(url, *args, **kwargs)
    from .launch.rendezvous import env_rendezvous

    return env_rendezvous(torchs, url, *args, **kwargs)


def _is_for_us() -> bool:
    """Whether torch's init_process_group, which runs, makes a group of this backend. It does not say so to a
    rendezvous: its variables do."""
    import torch
    import torch.distributed as dist

    c10d, frame = sys.modules.get(f"{__name__}.c10d"), sys._getframe(1)  # not loaded: nothing is replaced
    while frame.f_code.co_name != "init_process_group" or "backend" not in frame.f_locals:
        if frame.f_back is None:
            return False
        frame = frame.f_back
    asked = str(frame.f_locals["backend"] or "undefined").lower()
    if asked == "undefined":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        asked = str(dist.Backend.default_device_backend_map.get(accelerator.type if accelerator else "cpu"))
    makers = {part.rpartition(":")[2] for part in asked.split(",")}
    return not makers.isdisjoint({"custom"} | (c10d.replaced if c10d else set()))


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
    shape: int | Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | str | int | None = None,
) -> torch.Tensor:
    """A CPU tensor of any contents, as torch.empty's, in memory that the ranks of ``group`` share (the default group if
    None). Where all ranks give such tensors, large all_reduces, all_gathers and reduce_scatters of that group read and
    write them where they lie; the results are the same. The tensor is this rank's own, and may outlive the group. In a
    group of one rank, or over several hosts, it is an ordinary tensor. See docs/zero-copy.md.

    With ``device``, a GPU: a tensor there, likewise, of a group in p2p mode (docs/cuda.md). Collective: all ranks ask
    for as many bytes, in one order with the group's other collectives.

    Raises UsageError for a group of another backend, TransportError where there is not so much memory."""
    from .c10d.allocation import empty

    return empty(shape, dtype, group, device)


def shrink_group(timeout: timedelta | None = None) -> ProcessGroup:
    """After a loss: makes the ranks of the default group that are alive the new default group, and returns it. Each of
    them calls it; ``timeout``: how long to wait for the others, the group's own if None. Ranks keep their order.

    Raises CollectiveTimeoutError if a rank neither comes nor ends in that time, UsageError if the default group is not
    of this backend; the old groups are then still there. See c10d/shrink.py."""
    from .c10d.shrink import shrink_group

    return shrink_group(timeout)


def __getattr__(name: str) -> Any:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import _version

    return _version.__version__


if not getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
    # A program has imported this, and not torch while it is imported itself, which calls `autoload`.
    autoload()
    register()
