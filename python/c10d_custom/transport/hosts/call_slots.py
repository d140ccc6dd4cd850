"""The slots in a host's shared memory in which its ranks put up their calls over hosts (backend/hosts/call_slots.h)."""

from __future__ import annotations

from ctypes import c_uint64, sizeof, string_at

from ...native.over_hosts import CallHeader, lib

HEADER_BYTES = sizeof(CallHeader)
_LINE = 128  # bytes: of a slot, what comes before the payload


class CallSlots:
    """Of a native group. ``payload``: bytes that a slot has room for."""

    def __init__(self, handle: int, local: int, payload: int) -> None:
        self.address: int = lib.c10d_call_slots(handle)
        self.stride = slot_bytes(payload)
        self._local = local

    def put(self, header: bytes) -> None:
        """Puts up this rank's call, ``header``: the bytes of a CallHeader."""
        lib.c10d_put_call(self.address, self.stride, self._local, header)

    def has(self, local: int, number: int) -> bool:
        """Whether a rank of this host has put up that call, or a later one."""
        return c_uint64.from_address(self.address + local * self.stride).value >= number

    def header(self, local: int) -> bytes:
        """Returns the header that a rank of this host has put up last."""
        return string_at(self.address + local * self.stride + 8, HEADER_BYTES)


def slot_bytes(payload: int) -> int:
    return _LINE + (payload + _LINE - 1) // _LINE * _LINE
