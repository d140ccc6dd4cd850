"""This process's file for torch's analyzer: what the user has put into TORCH_FR_DUMP_TEMP_FILE, and the global rank.

We write such files, and never read one: they are pickles."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..threads import threading
from ..transport.flight_recorder import dump_of

if TYPE_CHECKING:
    from ..transport.trace_file import GroupTrace


def write(beginning: str, rank: int, groups: Sequence[GroupTrace], kept: int) -> str:
    """Writes the rank's file, in the place of an older one, whole or not at all. Returns its path."""
    path = f"{beginning}{rank}"
    folder, name = os.path.split(os.path.abspath(path))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    # The analyzer takes what ends in a number, or has the beginning of the name in it: this has neither.
    draft = os.path.join(folder, f".{os.getpid()}-{threading.get_ident()}-{rank}.c10d-custom-draft")
    data = pickle.dumps(dump_of(groups, kept), protocol=2)  # as torch writes them
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.replace(draft, os.path.join(folder, name))
    except BaseException:
        os.unlink(draft)
        raise
    return path
