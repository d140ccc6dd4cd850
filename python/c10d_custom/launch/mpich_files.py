"""Files in /dev/shm that MPICH makes as it starts, and would remove in Finalize only: removed before, so that none is
left where ranks are killed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..threads import threading
from .mapped import mapped_files

if TYPE_CHECKING:
    from types import FrameType


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
