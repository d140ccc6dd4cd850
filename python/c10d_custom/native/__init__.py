"""ctypes binding of backend/shm/api.h. Names, layouts and order are those of that header."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ABI_VERSION = 17
RECEIVED = 1 << 32  # of c10d_message
NEVER = 2**64 - 1  # kNever
OK, PENDING, TIMEOUT, PEER_LOST, MISMATCH, ABORTED, USAGE, BROKEN, INTERRUPTED, FORKED, EXHAUSTED, REENTERED = range(12)
JOINED, LEFT = 1, 2
LISTED_INPUTS, LISTED_OUTPUTS = 1 << 32, 1 << 33  # of fast_collective
SLOW_PATH, DONE_WAKE = 32, 33  # of fast_collective and leader_fast_path
LENGTHS, REDUCE_OPS = 5, 16  # of LeaderFastPath


class Geometry(c.Structure):
    _fields_ = [
        *((n, c.c_uint32) for n in ("ranks", "window", "block_bytes", "small_bytes", "cell_bytes", "cells")),
        ("board_bytes", c.c_uint32),
        ("arena_bytes", c.c_uint64),
    ]


class Span(c.Structure):
    _fields_ = [("data", c.c_void_p), ("bytes", c.c_uint64)]


Interrupted = c.CFUNCTYPE(c.c_int)


class CallArgs(c.Structure):
    _fields_ = [
        ("op", c.c_uint32),
        ("redop", c.c_uint32),
        ("dtype", c.c_uint32),
        ("root", c.c_int32),
        ("count", c.c_uint64),
        ("item_bytes", c.c_uint32),
        ("device", c.c_uint32),
        ("factor", c.c_double),
        ("number", c.c_uint64),
        ("outer", c.c_uint64),
        ("timeout_ns", c.c_int64),
        ("nin", c.c_uint32),
        ("nout", c.c_uint32),
        ("inputs", c.POINTER(Span)),
        ("outputs", c.POINTER(Span)),
        ("pipelined", c.c_void_p),
    ]


class Phase(c.Structure):
    _fields_ = [("requests", c.c_void_p), ("n", c.c_uint64)]


class PipelinedSlot(c.Structure):
    _fields_ = [("mine", c.c_void_p), ("theirs", c.POINTER(c.c_void_p)), ("phases", Phase * 4)]


class Alarm(c.Structure):
    """See backend/shm/alarm.h."""

    _fields_ = [("unread", c.c_int32), ("reads", c.c_uint32)]


Look = c.CFUNCTYPE(c.c_int)
LOOKED, LATE, TRANSFER = 1, 2, 3  # PipelinedEnd


class PipelinedReduce(c.Structure):
    """See backend/shm/pipelined_reduce.h."""

    _fields_ = [
        ("startall", c.c_void_p),
        ("testall", c.c_void_p),
        ("statuses", c.c_void_p),
        ("look", Look),
        ("later_ns", c.c_int64),
        ("chunk", c.c_uint64),
        ("factor", c.POINTER(c.c_double)),
        ("slots", c.POINTER(PipelinedSlot)),
        ("nslots", c.c_uint32),
        ("carriers", c.c_uint32),
        ("hosts", c.c_uint32),
        ("own", c.c_uint32),
        ("op", c.c_uint32),
        ("keeps", c.c_uint32),
        ("end", c.c_uint32),
        ("slot", c.c_uint32),
        ("alarm", c.POINTER(Alarm)),
    ]


class MessageArgs(c.Structure):
    _fields_ = [
        ("is_recv", c.c_uint32),
        ("dtype", c.c_uint32),
        ("peer", c.c_int32),
        ("reserved", c.c_uint32),
        ("tag", c.c_int64),
        ("data", Span),
        ("timeout_ns", c.c_int64),
    ]


class Failure(c.Structure):
    _fields_ = [
        ("status", c.c_int32),
        ("peer", c.c_int32),
        ("by", c.c_int32),
        ("cause", c.c_int32),
        ("call", c.c_uint64),
        ("seq", c.c_uint64),
        ("elapsed_ns", c.c_int64),
        ("expected", c.c_uint64),
        ("actual", c.c_uint64),
        ("expected_dtype", c.c_uint32),
        ("actual_dtype", c.c_uint32),
    ]


class Head(c.Structure):
    """What a rank says of its call over hosts: see backend/hosts/head.h."""

    _fields_ = [
        ("number", c.c_uint64),
        ("op", c.c_uint32),
        ("redop", c.c_uint32),
        ("dtype", c.c_uint32),
        ("root", c.c_int32),
        ("count", c.c_uint64),
        ("payload", c.c_uint64),
        ("factor", c.c_double),
        ("reserved", c.c_uint64 * 2),
    ]


class LeaderAllReduce(c.Structure):
    _fields_ = [
        ("startall", c.c_void_p),
        ("testall", c.c_void_p),
        ("statuses", c.c_void_p),
        ("idle", c.c_void_p),
        ("board", c.c_void_p),
        ("stride", c.c_uint64),
        ("ranks", c.c_uint32),
        ("local", c.c_uint32),
        ("between", c.POINTER(c.c_void_p)),
        ("nbetween", c.c_uint32),
        ("own_between", c.c_uint32),
        ("alarm", c.POINTER(Alarm)),
    ]


class LeaderCall(c.Structure):
    _fields_ = [
        ("head", Head),
        ("data", c.c_void_p),
        ("inside_factor", c.POINTER(c.c_double)),
        ("between_factor", c.POINTER(c.c_double)),
        ("requests", c.c_void_p),
        ("nrequests", c.c_uint32),
        ("inside_op", c.c_uint32),
        ("between_op", c.c_uint32),
        ("step", c.c_uint32),
        ("peer", c.c_int32),
    ]


class LeaderFastPath(c.Structure):
    """See backend/hosts/leader_all_reduce.h."""

    _fields_ = [
        ("sequencer", c.c_uint64),
        ("runner", c.c_uint64),
        ("stopped", c.c_uint32),
        ("limit", c.c_uint32),
        ("lengths", c.c_uint64 * LENGTHS),
        ("way", c.c_void_p),
        ("calls", c.c_void_p),
        ("now", c.c_void_p),
        ("began", c.c_int64),
        ("log", c.c_void_p),
        ("logged", c.c_uint64),
        ("room", c.c_uint64),
    ]


class Idle(c.Structure):
    _fields_ = [("testall", c.c_void_p), ("request", c.c_void_p), ("status", c.c_void_p)]


class PublishedFingerprint(c.Structure):
    _fields_ = [
        ("seq", c.c_uint64),
        ("op", c.c_uint32),
        ("redop", c.c_uint32),
        ("dtype", c.c_uint32),
        ("root", c.c_int32),
        ("count", c.c_uint64),
        ("device", c.c_uint32),
        ("reserved", c.c_uint32),
        ("factor", c.c_double),
        ("outer", c.c_uint64),
        ("place", c.c_uint64),
    ]


class PeerState(c.Structure):
    _fields_ = [
        ("arrived", c.c_uint64),
        ("blocks_in", c.c_uint64),
        ("blocks_reduced", c.c_uint64),
        ("blocks_out", c.c_uint64),
        ("state", c.c_uint32),
        ("pid", c.c_uint32),
        ("alive", c.c_int32),
        ("mark", c.c_uint32),
        ("fingerprint", PublishedFingerprint),
    ]


TRACE_SEND, TRACE_RECV = 64, 65


class TraceRecord(c.Structure):
    _fields_ = [
        ("number", c.c_uint64),
        ("op", c.c_uint32),
        ("redop", c.c_uint32),
        ("dtype", c.c_uint32),
        ("peer", c.c_int32),
        ("count", c.c_uint64),
        ("in_bytes", c.c_uint64),
        ("out_bytes", c.c_uint64),
        ("tag", c.c_int64),
        ("issued", c.c_int64),
        ("began", c.c_int64),
        ("ended", c.c_int64),
        ("status", c.c_int32),
        ("reserved", c.c_uint32),
    ]


def _load() -> c.CDLL:
    path = Path(__file__).with_name("_shm.so")
    library = c.CDLL(str(path))
    handle, ticket, failure = c.c_void_p, c.c_void_p, c.POINTER(Failure)
    signatures = {
        "abi_version": (c.c_int,),
        "segment_create": (c.c_int, c.POINTER(Geometry), c.POINTER(c.c_uint64)),
        "open": (handle, c.c_int, c.c_uint32, c.c_int64, Interrupted, c.POINTER(c.c_int)),
        "inside": (c.c_int, handle),
        "leave": (None, handle),
        "close": (None, handle),
        "free": (None, handle),
        "abort": (None, handle),
        "next_seq": (c.c_uint64, handle),
        "run": (c.c_int, handle, c.POINTER(CallArgs)),
        "submit_to": (None, handle, c.POINTER(CallArgs), c.POINTER(ticket)),
        "fast_collective": (c.c_int, handle, c.c_uint64, c.c_int32, c.c_void_p, c.c_void_p, c.c_uint64, c.c_int64),
        "fast_submit": (
            c.c_int,
            handle,
            c.c_uint64,
            c.c_int32,
            c.c_void_p,
            c.c_void_p,
            c.c_uint64,
            c.c_int64,
            c.POINTER(ticket),
        ),
        "last_failure": (None, failure),
        "post_to": (None, handle, c.POINTER(MessageArgs), c.POINTER(ticket)),
        "message": (
            c.c_int,
            handle,
            c.c_uint64,
            c.c_int32,
            c.c_int64,
            c.c_void_p,
            c.c_uint64,
            c.c_int64,
            c.c_int64,
            c.POINTER(ticket),
        ),
        "ticket_source": (c.c_int, ticket),
        "ticket_number": (c.c_uint64, ticket),
        "test": (c.c_int, ticket),
        "watch": (c.c_int, handle, ticket, c.c_uint64),
        "wait": (c.c_int, handle, ticket, c.c_int64, c.c_int, failure),
        "settle": (c.c_int, handle, ticket, c.c_int64, c.c_int),
        "withdraw": (c.c_int, handle, ticket),
        "release": (None, ticket),
        "next_completed": (c.c_int, handle, c.c_int64, c.POINTER(c.c_uint64)),
        "peer_state": (c.c_int, handle, c.c_uint32, c.c_uint64, c.POINTER(PeerState)),
        "peer_stopped": (c.c_int, handle, c.c_uint32),
        "peer_sizes": (c.c_int, handle, c.c_uint32, c.c_uint64, c.POINTER(c.c_uint64)),
        "set_mark": (None, handle, c.c_uint32),
        "enlist": (c.c_int, handle, c.c_uint32, c.c_uint32),
        "roll": (c.c_int, handle, c.c_uint32, c.c_uint32, c.POINTER(c.c_uint32)),
        "keep_trace": (None, handle, c.c_uint32),
        "set_threads": (None, handle, c.c_uint32),
        "trace": (c.c_uint64, handle, c.POINTER(TraceRecord), c.c_uint64),
        "poison": (None, handle, c.c_int32, c.c_int32, c.c_int32, c.c_uint64),
        "health": (c.c_int, handle, c.c_uint64, failure),
        "set_elsewhere": (None, handle, c.c_void_p, c.c_void_p),
        "complete": (None, handle, c.c_uint64),
        "probe": (c.c_int, handle, c.c_int64),
        "reduce": (
            c.c_int,
            c.c_uint32,
            c.c_uint32,
            c.c_void_p,
            c.POINTER(c.c_void_p),
            c.c_uint32,
            c.c_uint64,
            c.POINTER(c.c_double),
        ),
        "leader_all_reduce": (c.c_int, c.POINTER(LeaderAllReduce), c.POINTER(LeaderCall), c.c_int64),
        "board": (c.c_void_p, handle),
        "take": (c.c_void_p, handle, c.c_uint64, c.c_int, c.POINTER(c.c_void_p), c.POINTER(c.c_int)),
        "give_back": (None, c.c_void_p, c.c_void_p),
        "board_call": (None, c.c_void_p, c.c_uint64, c.c_uint32, c.c_char_p),
        "leader_fast_path": (c.c_int, c.c_void_p, c.c_uint64, c.c_int32, c.c_void_p, c.c_void_p, c.c_uint64, c.c_int64),
        "leader_fast_path_over": (c.c_int, c.c_void_p, c.c_int),
        "leader_fast_path_log": (c.c_uint64, c.c_void_p, c.c_void_p),
        "sequencer_last": (c.c_uint64, c.c_void_p),
        "sequencer_take": (c.c_uint64, c.c_void_p),
        "sequencer_wait": (c.c_uint64, c.c_void_p),
        "sequencer_next": (c.c_uint64, c.c_void_p),
        "sequencer_under_way": (c.c_uint64, c.c_void_p),
        "sequencer_free": (c.c_int, c.c_void_p),
        "sequencer_close": (None, c.c_void_p),
        "alarm_raised": (c.c_int, c.POINTER(Alarm)),
        "mpi_progress": (None, c.c_void_p),
        "end_mpi_at_exit": (None, c.c_void_p),
        "tell_hydra": (None, c.c_int32),
        "tell_pmix": (None, c.c_void_p, c.c_void_p),
        "can_reduce": (c.c_int, c.c_uint32, c.c_uint32),
        "reduce_variant": (c.c_char_p,),
    }
    for name, (result, *arguments) in signatures.items():
        function = getattr(library, f"c10d_{name}")
        function.restype, function.argtypes = result, arguments
    if (found := library.c10d_abi_version()) != ABI_VERSION:
        raise ImportError(f"{path} has ABI version {found}, this package needs {ABI_VERSION}: reinstall c10d-custom")
    return library


def address_of(function: Any) -> int:
    """For functions in C that call it."""
    return c.cast(function, c.c_void_p).value or 0


def _quick_inside(lib: c.CDLL) -> Callable[[Any], int]:
    """c10d_inside, which is asked so often that what ctypes takes counts."""
    try:
        from ._fast import ask  # not in a Python without a global interpreter lock, or not CPython
    except ImportError:
        return lib.c10d_inside
    return partial(ask, address_of(lib.c10d_inside))


lib = _load()
inside = _quick_inside(lib)
