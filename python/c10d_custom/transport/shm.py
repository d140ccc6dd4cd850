"""CPU tensors inside a host: calls of the native core, and its failures as exceptions."""
from ctypes import byref, c_uint64

from .. import dtypes
from ..call import Call, Fingerprint, Op, mismatch_table
from ..errors import (AbortedError, CollectiveMismatchError, CollectiveTimeoutError, CustomBackendError,
                      PeerLostError, TransportError, UsageError)
from . import native
from .base import Ticket, Transport
from .native import CallArgs, Failure, MessageArgs, PeerState, Span, lib
from .segment import open_segment

_FOREVER = 2**63 - 1


def _nanoseconds(seconds):
    return min(int(seconds * 1e9), _FOREVER)


class ShmTransport(Transport):
    """Opening it is collective over the ranks of ``exchange``. ``members``: the global rank of each
    group rank."""

    _handle = None

    def __init__(self, exchange, config, group_name, members):
        self.rank, self.size, self.name, self.members = exchange.rank, exchange.size, group_name, members
        self._raised = None  # by a signal handler, in the main thread
        signals = self._signals()
        next(signals)
        self._poll = native.Interrupted(signals.__next__)
        self._handle = open_segment(exchange, config, self._poll)

    # --- collectives

    def run(self, call):
        if lib.c10d_run(self._handle, byref(self._args(call))):
            raise self._last_error(call)

    def quick_all_reduce(self, address, count, dtype, redop, seconds):
        """The short way to the core: an all_reduce in place of ``count`` items at ``address``."""
        if lib.c10d_all_reduce(self._handle, address, count, dtype.code, redop, dtype.item_bytes,
                               int(seconds * 1e9)):
            raise self._last_error(Call(Op.all_reduce, "all_reduce", dtype, seconds))

    def _last_error(self, call):
        failure = Failure()
        lib.c10d_last_failure(byref(failure))
        return self.error(failure, call)

    def submit(self, call):
        return self._ticket(lib.c10d_submit(self._handle, byref(self._args(call))), call)

    def _args(self, call):
        def spans(tensors):
            return (Span * len(tensors))(*[(t.data_ptr(), t.nbytes) for t in tensors])

        return CallArgs(call.op, call.redop, call.dtype.code, call.root, call.count, call.dtype.item_bytes,
                        0, call.factor, _nanoseconds(call.timeout), len(call.inputs), len(call.outputs),
                        spans(call.inputs), spans(call.outputs))

    def _ticket(self, ticket, call):
        if not ticket:
            failure = Failure(status=native.ABORTED, peer=-1, by=-1)
            raise self.error(failure, call)
        return ShmTicket(self, ticket, call)

    # --- messages

    def post(self, message):
        t = message.tensor
        args = MessageArgs(message.is_recv, message.dtype.code, message.peer, 0, message.tag,
                           Span(t.data_ptr(), t.nbytes), _nanoseconds(message.timeout))
        return self._ticket(lib.c10d_post(self._handle, byref(args)), message)

    # --- life

    def next_completed(self, seconds):
        token = c_uint64()
        status = lib.c10d_next_completed(self._handle, _nanoseconds(seconds), byref(token))
        if status not in (native.OK, native.PENDING):
            raise AbortedError("the group is closed")
        return token.value if status == native.OK else None

    def next_sequence(self):
        return lib.c10d_next_seq(self._handle)

    def abort(self):
        lib.c10d_abort(self._handle)

    def leave(self):
        lib.c10d_leave(self._handle)

    def close(self):
        lib.c10d_close(self._handle)

    def __del__(self):
        if self._handle is not None:
            lib.c10d_free(self._handle)

    def _signals(self):
        # The core asks this generator's next value every so often while the main thread sleeps in it:
        # running Python code is what lets Python's signal handlers run, Ctrl-C's among them. A
        # generator, because they run wherever a frame is entered: here, that is inside the try.
        answer = 0
        while True:
            try:
                yield answer
                answer = 0
            except GeneratorExit:
                return
            except BaseException as error:
                self._raised, answer = error, 1

    def interrupted_here(self):
        """True in a signal handler that interrupted a call of this transport, in the same thread."""
        return bool(lib.c10d_inside(self._handle))

    # --- errors

    def states(self, sequence):
        """PeerState of every rank, with the fingerprint it published for that sequence number; None
        once the group is closed."""
        out = [PeerState() for _ in range(self.size)]
        for rank, state in enumerate(out):
            if lib.c10d_peer_state(self._handle, rank, sequence, byref(state)):
                return None
        return out

    def who(self, rank):
        return f"rank {rank}" if self.members[rank] == rank else f"rank {rank} (global rank {self.members[rank]})"

    def error(self, failure, call):
        """The exception for a native Failure of ``call`` (a Call or a Message)."""
        if failure.status == native.INTERRUPTED:
            raised, self._raised = self._raised, None
            return raised or KeyboardInterrupt()
        return _ErrorText(self, failure, call, self.states(failure.seq)).exception()


class _ErrorText:
    """Makes the sentence of an error: operation, sequence number, group, rank, peer, time, advice."""

    def __init__(self, transport, failure, call, states):
        self.t, self.f, self.call, self.states = transport, failure, call, states
        number = f" #{failure.call}" if failure.call else ""
        self.where = f"{call.name}{number} of group {transport.name or '(unnamed)'}, rank {transport.rank}"
        self.after = f"after {failure.elapsed_ns / 1e9:.3f} s"

    def exception(self):
        f = self.f
        if f.status == native.BROKEN:
            return self._broken()
        return self._of(f.status, "")

    def _of(self, status, found_by):
        peer = self.f.peer
        if status == native.TIMEOUT:
            return CollectiveTimeoutError(
                f"{self.where}: Timed out {self.after}{found_by}. {self._missing()}")
        if status == native.PEER_LOST:
            return PeerLostError(f"{self.where}: {self._fate(peer)}, noticed {self.after}{found_by}. "
                                 "Destroy the group; the ranks that remain can create a new one.")
        if status == native.MISMATCH:
            return self._mismatch(found_by)
        if status == native.ABORTED:
            return AbortedError(f"{self.where}: the group was aborted or destroyed{found_by}, {self.after}.")
        if status == native.FORKED:
            return UsageError(f"{self.where}: a forked child cannot use its parent's group: create one in the child.")
        if status == native.USAGE:
            return UsageError(f"{self.where}: the native core refused these arguments (sizes of the parts do not fit).")
        return TransportError(f"{self.where}: failed with status {status} {self.after}{found_by}.")

    def _broken(self):
        f = self.f
        by = f" (found by {self.t.who(f.by)})" if f.by >= 0 else ""
        if f.call and f.call == f.seq:  # another rank found out first, but it is our failure too
            return self._of(f.cause, by)
        reason = {native.TIMEOUT: "timed out", native.PEER_LOST: "lost a rank",
                  native.MISMATCH: "was not called alike on all ranks",
                  native.ABORTED: "was aborted"}.get(f.cause, "failed")
        kind = {native.PEER_LOST: PeerLostError, native.ABORTED: AbortedError}.get(f.cause, CustomBackendError)
        about = f"{self._fate(f.peer)}; " if f.cause == native.PEER_LOST and f.peer >= 0 else ""
        what = f"its collective #{f.seq} {reason}" if f.seq else reason
        return kind(f"{self.where}: the group is of no more use: {about}{what}{by}. "
                    "Destroy it and create a new one.")

    def _fate(self, peer):
        if peer < 0:
            return "a rank is gone"
        who = self.t.who(peer)
        if self.states is None:
            return f"{who} is gone"
        state = self.states[peer]
        if state.state == native.LEFT:
            return f"{who} has left the group (destroy_process_group, or its process ended)"
        return f"{who} (pid {state.pid}) has died"

    def _missing(self):
        if hasattr(self.call, "tag"):
            what = "send it" if self.call.is_recv else "receive it"
            peer = self.t.who(self.call.peer) if self.call.peer >= 0 else "any rank"
            return f"Did {peer} {what}, with tag {self.call.tag}?"
        if self.states is None:
            return ""
        late = [r for r, s in enumerate(self.states) if s.arrived < self.f.seq]
        if late:
            doing = "; ".join(f"{self.t.who(r)} has entered {self.states[r].arrived} collectives"
                              for r in late[:8])
            return f"Missing: {', '.join(self.t.who(r) for r in late)}. ({doing}; this is #{self.f.seq}.)"
        return f"All ranks have entered it; waiting for {self.t.who(self.f.peer)}, which has stalled."

    def _mismatch(self, found_by):
        f = self.f
        if hasattr(self.call, "tag"):
            names = [dtypes.BY_CODE[c].name if c in dtypes.BY_CODE else f"dtype {c}"
                     for c in (f.expected_dtype, f.actual_dtype)]
            here, there = ("receives", "sends") if self.call.is_recv else ("sends", "receives")
            return CollectiveMismatchError(
                f"{self.where}: this rank {here} {f.expected} bytes of {names[0]}, {self.t.who(f.peer)} "
                f"{there} {f.actual} bytes of {names[1]} (tag {self.call.tag}).")
        prints = {r: _fingerprint(s) for r, s in enumerate(self.states)} if self.states else {}
        return CollectiveMismatchError(
            f"{self.where}: the ranks of the group called different things{found_by}; "
            f"{mismatch_table(prints, self.t.members)}\nNothing was moved. The group is of no more use: "
            "destroy it and create a new one.")


def _fingerprint(state):
    p = state.fingerprint
    if not p.seq:
        return None
    return Fingerprint(p.seq, p.op, p.redop, p.dtype, p.root, p.count, p.device)


class ShmTicket(Ticket):
    def __init__(self, transport, ticket, call):
        self._transport, self._ticket, self._call = transport, ticket, call
        self._failure = None

    def done(self):
        return lib.c10d_test(self._ticket) != native.PENDING

    def wait(self, seconds, may_run=False):
        failure = Failure()
        status = lib.c10d_wait(self._transport._handle, self._ticket, _nanoseconds(seconds), may_run, byref(failure))
        if status > native.PENDING:
            self._failure = failure
        return status != native.PENDING

    def error(self):
        if self._failure is None:
            self.wait(0)
        return self._failure and self._transport.error(self._failure, self._call)

    def watch(self, token):
        return lib.c10d_watch(self._ticket, token) == native.PENDING

    @property
    def source(self):
        return lib.c10d_ticket_source(self._ticket)

    def __del__(self):
        lib.c10d_release(self._ticket)
