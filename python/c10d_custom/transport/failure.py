"""How the sentence of an error is put together: what went wrong, operation, sequence number, group, rank, peer, time,
advice; the words for a rank that has died or is late are in shm/error_text.py and hosts/error_text.py.

Imported only with the first error, which may be made while the process exits. So neither it nor what it imports defines
a dataclass or a NamedTuple: they compile code, and Python then forgets that Ctrl-C ended the program (exit code 1)."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import dtypes, native
from ..errors import (
    AbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CustomBackendError,
    PeerLostError,
    TransportError,
    UsageError,
)

if TYPE_CHECKING:
    from ..call import Call, Message


# s: by how much stages inside a host outlast a call over hosts. A rank that waits there may wait for one that waits for
# another host, and that one knows who is missing.
LATER = 0.1


class ErrorText:
    """For a failure (a native Failure or a Trouble) of ``call`` (a Call or a Message). A transport
    says how it names its ranks and what it knows of them by overriding the methods at the end."""

    def __init__(self, transport: Any, failure: Any, call: Call | Message) -> None:
        self.t, self.f = transport, failure
        self.call: Any = call
        number = f" #{failure.call}" if failure.call else ""
        self.where = f"{call.name}{number} of group {transport.name or '(unnamed)'}, {self.who(transport.rank)}"
        self.after = f"after {failure.elapsed_ns / 1e9:.3f} s"

    def exception(self) -> CustomBackendError:
        # This rank has aborted the group itself, because a signal handler raised.
        interrupted = self.f.status == native.ABORTED and self.f.cause == native.INTERRUPTED
        error = self._broken() if self.f.status == native.BROKEN or interrupted else self._of(self.f.status, "")
        if self.f.status not in (
            native.ABORTED,
            native.INTERRUPTED,
            native.USAGE,
            native.FORKED,
        ):  # what this rank did itself
            self.t.failed(error)
        return error

    def _of(self, status: int, found_by: str) -> CustomBackendError:
        peer = self.f.peer
        if status == native.TIMEOUT:
            return self._timed_out(found_by)
        if status == native.PEER_LOST:
            return PeerLostError(
                f"{self.where}: {self._fate(peer)}, noticed {self.after}{found_by}. "
                "Destroy the group; the ranks that remain can create a new one."
            )
        if status == native.MISMATCH:
            return self._mismatch(found_by)
        if status == native.ABORTED:
            return AbortedError(f"{self.where}: {self.t.ended}{found_by}, {self.after}.")
        if status == native.INTERRUPTED and hasattr(self.call, "tag"):
            return AbortedError(
                f"{self.where}: a signal handler (Ctrl-C's, or the program's) raised amid it, {self.after}, and the "
                "message was taken back: call it again. The group goes on."
            )
        if status == native.INTERRUPTED:
            return AbortedError(
                f"{self.where}: a signal handler (Ctrl-C's, or the program's) raised amid it{found_by}, {self.after}, "
                "and the group was aborted for it."
            )
        if status == native.FORKED:
            return UsageError(f"{self.where}: a forked child cannot use its parent's group: create one in the child.")
        if status == native.EXHAUSTED:
            return self._exhausted(found_by)
        if status == native.USAGE:
            return UsageError(
                f"{self.where}: the native core refused these arguments (sizes of the parts do not fit, or there is no "
                "memory at an address)."
            )
        return TransportError(f"{self.where}: failed with status {status} {self.after}{found_by}.")

    def _exhausted(self, found_by: str) -> TransportError:
        if found_by:
            return TransportError(
                f"{self.where}: a rank got {self._lack()}{found_by}, {self.after}. The group is of no more use."
            )
        what, knobs, whose = (
            ("messages", "CELLS and C10D_CUSTOM_CELL_BYTES", "two ranks that exchange messages take")
            if hasattr(self.call, "tag")
            else ("data", "WINDOW and C10D_CUSTOM_BLOCK_BYTES", "a rank of a large all_to_all takes")
        )
        return TransportError(
            f"{self.where}: for its {what} this process got {self._lack()}. "
            f"(C10D_CUSTOM_{knobs} say how much memory {whose}.) The group is of no more use: destroy it."
        )

    def _lack(self) -> str:
        """What the machine did not give, and the call by which it was asked."""
        if not self.f.actual:  # of another host
            return "no memory"
        error = os.strerror(self.f.actual)
        if self.f.actual != errno.ENOMEM:
            return f"no memory (fallocate: {error})"
        free, whose = native.memory_left()
        return f"no memory ({error}; {whose} has {free >> 10} KiB left)"

    def _timed_out(self, found_by: str) -> CollectiveTimeoutError:
        if hasattr(self.call, "tag"):
            ended = f"{self.who(self.f.by)} gave up sending it" if self.f.by >= 0 else f"Timed out {self.after}"
            return CollectiveTimeoutError(f"{self.where}: {ended}. {self._awaited_message()}")
        if found_by and self.late():
            text = f"{self.where}: too late: {self.who(self.f.by)} had timed out, waiting for this rank."
        else:
            text = f"{self.where}: Timed out {self.after}{found_by}. {self.missing()}"
        return CollectiveTimeoutError(f"{text} The group is of no more use: destroy it and create a new one.")

    def standing(self) -> tuple[str, str]:
        """(the operation, whom it waits for), of one that has not failed."""
        return self.where, self._awaited_message() if hasattr(self.call, "tag") else self.missing()

    def _broken(self) -> CustomBackendError:
        f = self.f
        how = {native.ABORTED: "by", native.INTERRUPTED: "on"}.get(f.cause, "found by")
        by = f" ({how} {self.who(f.by)})" if f.by not in (-1, self.t.rank) else ""
        if f.call and f.call == f.seq:  # another rank found out first, but it is our failure too
            return self._of(f.cause, by)
        reason = {
            native.TIMEOUT: "timed out",
            native.PEER_LOST: "lost a rank",
            native.MISMATCH: "was not called alike on all ranks",
            native.ABORTED: "was aborted",
            native.INTERRUPTED: "was aborted, because a signal handler (Ctrl-C's, or the program's) raised",
            native.EXHAUSTED: f"got {self._lack()}",
        }.get(f.cause, "failed")
        kind = {
            native.PEER_LOST: PeerLostError,
            native.ABORTED: AbortedError,
            native.INTERRUPTED: AbortedError,
            native.EXHAUSTED: TransportError,
        }.get(f.cause, CustomBackendError)
        about = f"{self._fate(f.peer)}; " if f.cause == native.PEER_LOST and f.peer >= 0 else ""
        what = f"its collective #{f.seq} {reason}" if f.seq else f"it {reason}"
        return kind(f"{self.where}: the group is of no more use: {about}{what}{by}. Destroy it and create a new one.")

    def _fate(self, peer: int) -> str:
        return "a rank is gone" if peer < 0 else self.fate(peer)

    def _awaited_message(self) -> str:
        what = "send it" if self.call.is_recv else "receive it"
        peer = self.call.peer
        others = [peer] if peer >= 0 else [r for r in range(self.t.size) if r != self.t.rank]
        return (
            f"Did {self.who(peer) if peer >= 0 else 'any rank'} {what}, with tag {self.call.tag}? {self.doing(others)}"
        )

    def _mismatch(self, found_by: str) -> CollectiveMismatchError:
        f = self.f
        if hasattr(self.call, "tag"):
            names = [
                dtypes.BY_CODE[c].name if c in dtypes.BY_CODE else f"dtype {c}"
                for c in (f.expected_dtype, f.actual_dtype)
            ]
            here, there = ("receives", "sends") if self.call.is_recv else ("sends", "receives")
            return CollectiveMismatchError(
                f"{self.where}: this rank {here} {f.expected} bytes of {names[0]}, {self.who(f.peer)} {there} "
                f"{f.actual} bytes of {names[1]} (tag {self.call.tag})."
            )
        return CollectiveMismatchError(
            f"{self.where}: the ranks of the group called different things{found_by}; "
            f"{self.table()}\nNothing was moved. The group is of no more use: destroy it and create a new one."
        )

    # --- what the transport knows

    def who(self, rank: int) -> str:
        raise NotImplementedError

    def fate(self, rank: int) -> str:
        raise NotImplementedError

    def missing(self) -> str:
        """Who has not come to a collective that timed out, and what each rank does instead."""
        raise NotImplementedError

    def late(self) -> bool:
        """Whether the others timed out waiting for this rank."""
        return False

    def doing(self, ranks: Sequence[int]) -> str:
        """Returns what is known of what these ranks do."""
        return ""

    def table(self) -> str:
        """The ranks' fingerprints, side by side."""
        raise NotImplementedError
