"""At exit, groups end first of all that is this package's."""

from __future__ import annotations

import atexit
import signal
import threading

from .issuing import live


def close_groups_first() -> None:
    """Before whatever has been registered until now: called again when more has been."""
    atexit.unregister(_close_all)
    atexit.register(_close_all)


def _close_all() -> None:
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
        group.shutdown()
    if impatient:
        signal.signal(signal.SIGINT, signal.default_int_handler)
