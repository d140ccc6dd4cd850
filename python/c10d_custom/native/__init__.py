"""ctypes binding of backend/shm/api.h. Names, layouts and order are those of that header."""

from __future__ import annotations

import ctypes as c
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

ABI_VERSION = 22
NEVER = 2**64 - 1  # kNever
OK, PENDING, TIMEOUT, PEER_LOST, MISMATCH, ABORTED, USAGE, BROKEN, INTERRUPTED, FORKED, EXHAUSTED, REENTERED = range(12)
ENDED_HERE = ABORTED, INTERRUPTED  # by what one rank did, of its own will or in a signal handler
JOINED, LEFT = 1, 2
LISTED_INPUTS, LISTED_OUTPUTS = 1 << 32, 1 << 33  # of fast_collective
SLOW_PATH, DONE_WAKE = 32, 33  # of fast_collective and leader_fast_path


class Geometry(c.Structure):
    _fields_ = [
        *((n, c.c_uint32) for n in ("ranks", "window", "block_bytes", "small_bytes", "cell_bytes", "cells")),
        ("call_slot_bytes", c.c_uint32),
        ("arena_bytes", c.c_uint64),
        *((n, c.c_uint32) for n in ("fan_in", "two_steps_bytes", "in_place_bytes", "forced")),
    ]


class CpuPlace(c.Structure):
    _fields_ = [*((n, c.c_uint32) for n in ("cpu", "cache", "node", "socket")), ("cache_bytes", c.c_uint64)]


class Span(c.Structure):
    _fields_ = [("data", c.c_void_p), ("bytes", c.c_uint64)]


Interrupted = c.CFUNCTYPE(c.c_int)


def fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    """Fields of one type that follow each other in a struct."""
    return [(name, kind) for name in names]


class CallArgs(c.Structure):
    _fields_ = [
        *fields(c.c_uint32, "op", "redop", "dtype"),
        ("root", c.c_int32),
        ("count", c.c_uint64),
        *fields(c.c_uint32, "item_bytes", "device"),
        ("factor", c.c_double),
        *fields(c.c_uint64, "number", "outer"),
        ("timeout_ns", c.c_int64),
        *fields(c.c_uint32, "nin", "nout"),
        *fields(c.POINTER(Span), "inputs", "outputs"),
        ("pipelined", c.c_void_p),
    ]


class MessageArgs(c.Structure):
    _fields_ = [
        *fields(c.c_uint32, "is_recv", "dtype"),
        ("peer", c.c_int32),
        ("reserved", c.c_uint32),
        ("tag", c.c_int64),
        ("data", Span),
        ("timeout_ns", c.c_int64),
    ]


class Failure(c.Structure):
    _fields_ = [
        *fields(c.c_int32, "status", "peer", "by", "cause"),
        *fields(c.c_uint64, "call", "seq"),
        ("elapsed_ns", c.c_int64),
        *fields(c.c_uint64, "expected", "actual"),
        *fields(c.c_uint32, "expected_dtype", "actual_dtype"),
    ]


class PublishedFingerprint(c.Structure):
    _fields_ = [
        ("seq", c.c_uint64),
        *fields(c.c_uint32, "op", "redop", "dtype"),
        ("root", c.c_int32),
        ("count", c.c_uint64),
        *fields(c.c_uint32, "device", "reserved"),
        ("factor", c.c_double),
        *fields(c.c_uint64, "outer", "place"),
    ]


class PeerState(c.Structure):
    _fields_ = [
        *fields(c.c_uint64, "arrived", "blocks_in", "blocks_reduced", "blocks_out"),
        *fields(c.c_uint32, "state", "pid"),
        ("alive", c.c_int32),
        ("mark", c.c_uint32),
        ("fingerprint", PublishedFingerprint),
    ]


TRACE_SEND, TRACE_RECV = 64, 65


class TraceRecord(c.Structure):
    _fields_ = [
        ("number", c.c_uint64),
        *fields(c.c_uint32, "op", "redop", "dtype"),
        ("peer", c.c_int32),
        *fields(c.c_uint64, "count", "in_bytes", "out_bytes"),
        *fields(c.c_int64, "tag", "issued", "began", "ended"),
        ("status", c.c_int32),
        ("reserved", c.c_uint32),
    ]


class WindowPart(c.Structure):
    _fields_ = [*fields(c.c_uint64, "data", "items", "signals"), *fields(c.c_uint32, "dtype", "item_bytes")]


_Handle, _Ticket, _Window = c.c_void_p, c.c_void_p, c.c_void_p
FAST_COLLECTIVE = _Handle, c.c_uint64, c.c_int32, c.c_void_p, c.c_void_p, c.c_uint64, c.c_int64
_MESSAGE = _Handle, c.c_uint64, c.c_int32, c.c_int64, c.c_void_p, c.c_uint64, c.c_int64, c.c_int64, c.POINTER(_Ticket)
_REDUCE = c.c_void_p, c.POINTER(c.c_void_p), c.c_uint32, c.c_uint64, c.POINTER(c.c_double)


class Core(c.CDLL):
    """The native core. A function is given its types when it is first asked for: a rank starts with few of them."""

    # Name, less its "c10d_" -> types of its result and arguments.
    signatures: ClassVar[dict[str, tuple[Any, ...]]] = {
        "abi_version": (c.c_int,),
        "memory_left": (c.c_uint64, c.c_uint64, c.c_char_p, c.c_uint32),
        "topology": (c.c_uint32, c.c_char_p, c.POINTER(c.c_uint32), c.c_uint32, c.POINTER(CpuPlace), c.c_uint32),
        "group_cache_bytes": (c.c_uint64, c.c_uint32),
        "stay_cool": (None, c.c_int),
        "segment_create": (c.c_int, c.POINTER(Geometry), c.POINTER(c.c_uint64)),
        "open": (c.c_int, c.c_int, c.c_uint32, c.c_int64, Interrupted, c.POINTER(_Handle)),
        "inside": (c.c_int, _Handle),
        "leave": (None, _Handle),
        "close": (None, _Handle),
        "free": (None, _Handle),
        "abort": (None, _Handle),
        "next_seq": (c.c_uint64, _Handle),
        "run": (c.c_int, _Handle, c.POINTER(CallArgs)),
        "submit": (None, _Handle, c.POINTER(CallArgs), c.POINTER(_Ticket)),
        "fast_collective": (c.c_int, *FAST_COLLECTIVE),
        "fast_submit": (c.c_int, *FAST_COLLECTIVE, c.POINTER(_Ticket)),
        "last_failure": (None, c.POINTER(Failure)),
        "post": (None, _Handle, c.POINTER(MessageArgs), c.POINTER(_Ticket)),
        "message": (c.c_int, *_MESSAGE),
        "ticket_source": (c.c_int, _Ticket),
        "ticket_number": (c.c_uint64, _Ticket),
        "test": (c.c_int, _Ticket),
        "watch": (c.c_int, _Handle, _Ticket, c.c_uint64),
        "wait": (c.c_int, _Handle, _Ticket, c.c_int64, c.c_int, c.POINTER(Failure)),
        "settle": (c.c_int, _Handle, _Ticket, c.c_int64, c.c_int),
        "withdraw": (c.c_int, _Handle, _Ticket),
        "release": (None, _Ticket),
        "next_completed": (c.c_int, _Handle, c.c_int64, c.POINTER(c.c_uint64)),
        "peer_state": (c.c_int, _Handle, c.c_uint32, c.c_uint64, c.POINTER(PeerState)),
        "peer_stopped": (c.c_int, _Handle, c.c_uint32),
        "peer_sizes": (c.c_int, _Handle, c.c_uint32, c.c_uint64, c.POINTER(c.c_uint64)),
        "set_mark": (None, _Handle, c.c_uint32),
        "enter_monitored_barrier": (None, _Handle, c.c_uint32),
        "monitored_barriers": (c.c_uint32, _Handle, c.c_uint32),
        "keep_trace": (None, _Handle, c.c_uint32),
        "set_threads": (None, _Handle, c.c_uint32),
        "trace": (c.c_uint64, _Handle, c.POINTER(TraceRecord), c.c_uint64),
        "poison": (None, _Handle, c.c_int32, c.c_int32, c.c_int32, c.c_uint64),
        "health": (c.c_int, _Handle, c.c_uint64, c.POINTER(Failure)),
        "set_elsewhere": (None, _Handle, c.c_void_p, c.c_void_p),
        "complete": (None, _Handle, c.c_uint64),
        "probe": (c.c_int, _Handle, c.c_int64),
        "reduce": (c.c_int, c.c_uint32, c.c_uint32, *_REDUCE),
        "call_slots": (c.c_void_p, _Handle),
        "take": (c.c_void_p, _Handle, c.c_uint64, c.c_int, c.POINTER(c.c_void_p), c.POINTER(c.c_int)),
        "give_back": (None, c.c_void_p, c.c_void_p),
        "place": (c.c_uint64, _Handle, c.c_void_p, c.c_uint64),
        "clear_signals": (c.c_uint64, c.c_void_p, c.c_uint32),
        "window_open": (_Window, _Handle, c.POINTER(WindowPart)),
        "window_free": (None, _Window),
        "window_put": (c.c_int, _Window, c.c_uint32, c.c_uint32, c.c_void_p, c.c_uint64, c.c_uint64),
        "window_signal": (c.c_int, _Window, c.c_uint32),
        "window_wait": (c.c_int, _Window, c.c_uint32, c.c_int64),
        "window_claim": (c.c_uint64, _Window, c.c_uint32),
        "window_await": (c.c_int, _Window, c.c_uint32, c.c_uint64, c.c_int64),
        "window_give_back": (None, _Window, c.c_uint32, c.c_uint64),
        "map": (c.c_void_p, _Handle, c.c_uint32, c.c_uint64, c.c_uint64, c.POINTER(c.c_int)),
        "unmap": (None, c.c_void_p, c.c_uint64),
        "sequencer_last": (c.c_uint64, c.c_void_p),
        "sequencer_take": (c.c_uint64, c.c_void_p),
        "sequencer_wait": (c.c_uint64, c.c_void_p),
        "sequencer_next": (c.c_uint64, c.c_void_p),
        "sequencer_under_way": (c.c_uint64, c.c_void_p),
        "sequencer_free": (c.c_int, c.c_void_p),
        "sequencer_close": (None, c.c_void_p),
        "reduce_variant": (c.c_char_p,),
    }

    def __getattr__(self, name: str) -> Any:
        signature = self.signatures.get(name.removeprefix("c10d_"))
        if signature is None:
            raise AttributeError(name)
        function = self[name]
        function.restype, function.argtypes = signature[0], signature[1:]
        setattr(self, name, function)
        return function


def _loaded(file: str, loader: Callable[[str], Any]) -> Any:
    """What ``loader`` makes of the path of a file beside this one. Where the package is in an archive (a zip file) the
    system gets a copy for as long as it takes."""
    path = Path(__file__).with_name(file)
    if path.exists():
        return loader(str(path))
    from importlib.resources import as_file, files

    try:
        with as_file(files(__package__).joinpath(file)) as copy:
            return loader(str(copy))
    except FileNotFoundError as error:
        raise ImportError(
            f"c10d-custom: {Path(__file__).parent} lacks {file}, of the native core. "
            "A tool that makes bundles has left it out: docs/install.md, Bundles, says what to tell it"
        ) from error


def _as_module(path: str) -> Any:
    from importlib.util import module_from_spec, spec_from_file_location

    name = f"{__name__}._fast"
    spec: Any = spec_from_file_location(name, path)
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def address_of(function: Any) -> int:
    """The address of a function of the core, for functions in C that call it."""
    return c.cast(function, c.c_void_p).value or 0


lib: Core = _loaded("_shm.so", Core)
if (_found := lib.c10d_abi_version()) != ABI_VERSION:
    raise ImportError(f"_shm.so has ABI version {_found}, this package needs {ABI_VERSION}: reinstall c10d-custom")
extension = _loaded("_fast.so", _as_module)
inside = partial(extension.ask, address_of(lib.c10d_inside))  # asked so often that what ctypes takes counts


def memory_left(enough: int = NEVER) -> tuple[int, str]:
    """How much memory this process can still get, less some that stays with the program: (bytes, whose limit that is),
    of what the machine has and what its cgroups allow (backend/shm/room.h). File caches count as free. To ask for them
    takes the kernel a while: not where there are ``enough`` bytes without, and then the answer is as many at least."""
    whose = c.create_string_buffer(4096)
    free = lib.c10d_memory_left(enough, whose, len(whose))
    return free, whose.value.decode(errors="replace")
