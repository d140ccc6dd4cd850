"""When the groups of a process end with its interpreter.

Exit handlers of the program, registered before or after a group was made, and its `weakref.finalize`s find it as it
was. It closes where the standard library's processes are joined, which `import torch` has registered earlier than most
programs register theirs: a child that is a rank, too, must not wait for this one. (A handler that was registered before
`import torch` comes later, and is told that the interpreter is ending.) A group over MPI ends before MPI does, and one
with CUDA tensors before what is loaded for them: before whatever has been registered until it was made."""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Callable
from multiprocessing import util

from ..threads import threading
from .issuing import Issuing, live

_ENDS = "the interpreter is ending, and the group has been closed"

_of = 0  # the process that has registered `_close_all`: a forked child's own groups are not its parent's


def close_groups_last() -> None:
    """At exit, all groups of this process."""
    global _of
    if _of != os.getpid():
        _of = os.getpid()
        util.Finalize(None, _close_all, exitpriority=0)


def close_groups_first() -> None:
    """Those that need it, before whatever has been registered until now: called again when more has been."""
    atexit.unregister(_close_some)
    atexit.register(_close_some)


def _close_some() -> None:
    _close(Issuing.ends_first)


def _close_all() -> None:
    _close(lambda group: True)


def _close(wanted: Callable[[Issuing], bool]) -> None:
    impatient = False
    try:
        if threading.current_thread() is threading.main_thread():
            impatient = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            # Another Ctrl-C ends the process here: raised in an exit handler, it would leave groups unclosed
            # and print a traceback of ours.
            if impatient:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    # A thread inside native code while the interpreter goes away would take the process with it.
    for group in live():
        if wanted(group):
            group.shutdown(_ENDS)
    if impatient:
        signal.signal(signal.SIGINT, signal.default_int_handler)
