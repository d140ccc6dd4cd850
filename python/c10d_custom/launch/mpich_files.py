"""Files in /dev/shm that MPICH and Intel MPI make as they start: the room that they take, where a process that has too
little dies of SIGBUS or SIGSEGV; and the end of MPICH's. That would remove them in Finalize only: removed before, so
that none is left where ranks are killed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..errors import TransportError
from ..threads import threading
from . import mapped_files

if TYPE_CHECKING:
    from types import FrameType


_FOLDER = "/dev/shm"
_OF_MPICH, _OF_INTEL = 1.1, 0.1  # MB for each rank of a host, of MPICH 5; of Intel MPI 2021, which takes half of it
# More MB, of UCX, for shared memory of its own: it does without where it finds fewer left than so many, but not well
# where some ranks of a host find them and others do not.
_OF_UCX, _LEFT_FOR_UCX = 4.4, 16
_WITHOUT = "UCX_TLS", "^posix"


def megabytes() -> tuple[float, float]:
    """(what is left in /dev/shm, its size). What MPICH's ranks that start beside this one have taken counts as left."""
    try:
        found = os.statvfs(_FOLDER)
    except OSError:
        return 0.0, 0.0
    taken = 0
    with contextlib.suppress(OSError), os.scandir(_FOLDER) as entries:
        for entry in entries:
            if entry.name.startswith("mpich_shm_"):
                with contextlib.suppress(OSError):
                    taken += 512 * entry.stat().st_blocks
    return (found.f_bavail * found.f_frsize + taken) / 1e6, found.f_blocks * found.f_frsize / 1e6


def taken_by(library: str) -> float:
    """MB for each rank of a host. ``library``: what it calls itself."""
    if library.startswith("Intel"):
        return _OF_INTEL
    return _OF_MPICH if library.startswith("MPICH") else 0.0


def too_little(left: float, ranks: int, library: str = "MPICH") -> str:
    """Why that library cannot start with so many MB for the ranks of a host, or ""."""
    each, name = taken_by(library), "MPICH" if library.startswith("MPICH") else "Intel MPI"
    if left >= ranks * each:
        return ""
    return (
        f"{_FOLDER} has {left:.1f} MB left, and {name} takes {each:.1f} MB of it for each rank of a host, "
        f"{ranks * each:.1f} MB here. Make it larger: docker run --shm-size, or mount -o remount,size=... {_FOLDER}"
    )


def spare(megabytes: float, ranks: int) -> bool:
    """Returns whether UCX is to do without /dev/shm on this host."""
    return megabytes < ranks * (_OF_MPICH + _OF_UCX) + _LEFT_FOR_UCX


def do_without() -> None:
    """UCX does, in this process, unless the user has said what it takes. On all ranks of a host, or none."""
    os.environ.setdefault(*_WITHOUT)


def prepare(ranks: int, library: str) -> None:
    """Before that one starts under its launcher, with so many ranks on this host. TransportError: there is no room."""
    left, size = megabytes()
    if why := too_little(left, ranks, library):
        raise TransportError(f"MPI cannot start: {why}")
    if not library.startswith("MPICH"):
        return
    # Not by what is left, which ranks that start one after the other find different. In user namespaces of their own
    # they may not open each other's.
    if spare(size, ranks) or _in_user_namespace():
        do_without()


def _in_user_namespace() -> bool:
    try:
        with open("/proc/self/uid_map") as f:
            return f.read().split() != ["0", "0", str((1 << 32) - 1)]
    except OSError:
        return False


def remove_files() -> None:
    """Once all ranks have started, or will not: all that want them have mapped them."""
    for file in mapped_files(r"/dev/shm/mpich_shm_\w+"):
        with contextlib.suppress(FileNotFoundError):  # another rank of this host was faster
            os.unlink(file)


@contextlib.contextmanager
def removed_at_the_end(settle: Callable[[], object]) -> Iterator[None]:
    """While MPI starts. torchrun ends a job's ranks by SIGTERM as soon as one is lost: who has not said what is to
    happen then ends as before, but removes the files first. ``settle``: returns once MPI, which starts in another
    thread, makes none any more for a while. (Of a host all of whose ranks are killed by SIGKILL in these milliseconds,
    the file stays.)"""

    def end(number: int, _frame: FrameType | None) -> None:
        settle()
        remove_files()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if ours and signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
