"""ctypes binding of what groups over several hosts alone use of the core: names and layouts of backend/shm/api.h and of
backend/hosts."""

from __future__ import annotations

import ctypes as c

from . import FAST_COLLECTIVE, Core, fields
from . import lib as _lib

LENGTHS, REDUCE_OPS = 5, 16  # of LeaderFastPath


class Phase(c.Structure):
    _fields_ = [("requests", c.c_void_p), ("n", c.c_uint64)]


class PipelinedSlot(c.Structure):
    _fields_ = [("mine", c.c_void_p), ("theirs", c.POINTER(c.c_void_p)), ("phases", Phase * 4)]


class FailureNews(c.Structure):
    """See backend/hosts/failure_news.h."""

    _fields_ = [("unread", c.c_int32), ("kept", c.c_uint32)]


Look = c.CFUNCTYPE(c.c_int)
LOOKED, LATE, TRANSFER = 1, 2, 3  # PipelinedEnd


class PipelinedReduce(c.Structure):
    """See backend/hosts/pipelined_reduce.h."""

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
        ("failure_news", c.POINTER(FailureNews)),
    ]


class CallHeader(c.Structure):
    """What a rank says of its call over hosts: see backend/hosts/call_slots.h."""

    _fields_ = [
        ("number", c.c_uint64),
        *fields(c.c_uint32, "op", "redop", "dtype"),
        ("root", c.c_int32),
        *fields(c.c_uint64, "count", "payload"),
        ("factor", c.c_double),
        ("balance", c.c_uint64 * 2),
    ]


class LeaderAllReduce(c.Structure):
    _fields_ = [
        ("startall", c.c_void_p),
        ("testall", c.c_void_p),
        ("statuses", c.c_void_p),
        ("idle", c.c_void_p),
        ("call_slots", c.c_void_p),
        ("stride", c.c_uint64),
        ("ranks", c.c_uint32),
        ("local", c.c_uint32),
        ("between", c.POINTER(c.c_void_p)),
        ("nbetween", c.c_uint32),
        ("own_between", c.c_uint32),
        ("failure_news", c.POINTER(FailureNews)),
        ("awake_ns", c.c_int64),
    ]


class LeaderCall(c.Structure):
    _fields_ = [
        ("header", CallHeader),
        ("data", c.c_void_p),
        *fields(c.POINTER(c.c_double), "inside_factor", "between_factor"),
        ("requests", c.c_void_p),
        *fields(c.c_uint32, "nrequests", "inside_op", "between_op", "step"),
        ("peer", c.c_int32),
        ("since", c.c_int64),
    ]


class LeaderFastPath(c.Structure):
    """See backend/hosts/leader_all_reduce.h."""

    _fields_ = [
        ("sequencer", c.c_uint64 * 2),
        ("runner", c.c_uint64),
        *fields(c.c_uint32, "stopped", "limit"),
        ("lengths", c.c_uint64 * LENGTHS),
        *fields(c.c_void_p, "way", "calls", "now"),
        ("began", c.c_int64),
        ("log", c.c_void_p),
        *fields(c.c_uint64, "logged", "room"),
    ]


class Idle(c.Structure):
    _fields_ = [("testall", c.c_void_p), ("request", c.c_void_p), ("status", c.c_void_p)]


Core.signatures.update(
    {
        "leader_all_reduce": (c.c_int, c.POINTER(LeaderAllReduce), c.POINTER(LeaderCall), c.c_int64),
        "put_call": (None, c.c_void_p, c.c_uint64, c.c_uint32, c.c_char_p),
        "leader_fast_path": (c.c_int, *FAST_COLLECTIVE),
        "leader_fast_path_over": (c.c_int, c.c_void_p, c.c_int),
        "leader_fast_path_log": (c.c_uint64, c.c_void_p, c.c_void_p),
        "failure_news_came": (c.c_int, c.POINTER(FailureNews)),
        "mpi_progress": (None, c.c_void_p),
        "end_mpi_at_exit": (None, c.c_void_p),
        "drive_mpi": (c.c_int, c.c_void_p),
        "end_mpi_driver": (None,),
        "transfer_begins": (None,),
        "mpi_is_called": (None,),
        "survive_refused_sends": (None, c.c_void_p),
        "tell_hydra": (None, c.c_int32),
        "tell_pmix": (None, c.c_void_p, c.c_void_p),
    }
)

lib = _lib  # which has these functions now
