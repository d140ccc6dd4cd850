"""An operation under way in the core, as Python holds it. In C where that was built (backend/python/ticket.h), else
here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import PENDING, address_of, lib


class InPython:
    """``address``: of the core's ticket, which is released with this; ``status``: of native, PENDING until `done` or
    `settle` has seen the end."""

    address: Any = None
    status = PENDING
    _handle: Any = None

    def hold(self, handle: Any, at: Any, /) -> None:
        """Takes over the ticket whose address is ``at[0]``, and puts None there. ``handle``: its group's, which is to
        outlive it."""
        self._handle, self.address = handle, at[0]
        at[0] = None  # no signal handler runs between these two lines

    def done(self) -> bool:
        if self.status == PENDING:
            self.status = lib.c10d_test(self.address)
        return self.status != PENDING

    def settle(self, nanoseconds: int, may_run: bool, /) -> bool:
        """`done`, after a wait of up to so long, as c10d_settle."""
        if self.status == PENDING:
            self.status = lib.c10d_settle(self._handle, self.address, nanoseconds, may_run)
        return self.status != PENDING

    def __del__(self) -> None:
        if self.address:
            lib.c10d_release(self.address)


if TYPE_CHECKING:
    CoreTicket = InPython
else:
    try:
        from ._fast import CoreTicket, set_up_tickets  # not in every Python: see native

        set_up_tickets(address_of(lib.c10d_test), address_of(lib.c10d_settle), address_of(lib.c10d_release))
    except ImportError:
        CoreTicket = InPython
