"""The short way of a small all_reduce over several hosts: one call of the native core (backend/mpi/quick.h)."""
from ctypes import addressof, c_uint64, c_void_p

from ... import dtypes
from ...call import Op
from ... import native
from ...native import lib


class ShortWay:
    """``trace``: calls to remember. Until `serve`, all calls go the long way."""

    def __init__(self, trace):
        self._calls = (c_void_p * ((1 + max(dtypes.BY_CODE)) * native.REDUCE_OPS * native.LENGTHS))()
        self._log = (native.TraceRecord * max(1, trace))()
        self._state = native.DirectQuick(stopped=1, calls=addressof(self._calls), log=addressof(self._log), room=trace)
        self._prepared = {}
        self.at = addressof(self._state)
        self.turn = self.at + native.DirectQuick.turn.offset

    def serve(self, small):
        """From now on, calls that ``small`` has prepared."""
        self._small = small
        self._state.limit, self._state.way = small.limit, addressof(small.way)
        self._state.lengths = (c_uint64 * native.LENGTHS)(*small.lengths)
        self._state.stopped = 0

    def add(self, prepared, index):
        head, address = prepared.reduce.head, addressof(prepared.reduce)
        if head.op == Op.all_reduce:    # not one of a device's tensors
            self._prepared[address] = prepared
            self._calls[(head.dtype * native.REDUCE_OPS + head.redop) * native.LENGTHS + index] = address

    def stop(self):
        self._state.stopped = 1

    @property
    def runner(self):
        """The thread that is amid a call; 0: none."""
        return self._state.runner

    @property
    def under_way(self):
        """(number, seconds when it began) of the call."""
        return self._prepared[self._state.now].reduce.head.number, self._state.began * 1e-9

    def go_on(self, status, seconds):
        """Ends the call under way, of which the core has said ``status``."""
        self._small.go_on(status, self._prepared[self._state.now], self._state.began * 1e-9 + seconds)

    def over(self, status):
        """The call under way has ended with a native status. True if somebody waits for the turn."""
        return lib.c10d_direct_over(self.at, status) == native.DONE_WAKE

    def records(self):
        """TraceRecords of the last calls."""
        records = (native.TraceRecord * len(self._log))()
        return records[:lib.c10d_direct_log(self.at, addressof(records))]
