"""What the ranks of a host put up for each other to see, amid a collective over hosts: backend/mpi/board.h."""
from ctypes import c_uint64

from ...native import lib

_LINE = 128


class Board:
    """Of a native group. ``payload``: bytes that a slot has room for."""

    def __init__(self, handle, local, payload):
        self.address, self.stride = lib.c10d_board(handle), slot_bytes(payload)
        self._local = local

    def put(self, head):
        """This rank's call: the bytes of a Head."""
        lib.c10d_board_call(self.address, self.stride, self._local, head)

    def has(self, local, number):
        """Whether a rank of this host has put up that call, or a later one."""
        return c_uint64.from_address(self.address + local * self.stride).value >= number


def slot_bytes(payload):
    return _LINE + (payload + _LINE - 1) // _LINE * _LINE
