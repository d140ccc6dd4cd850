"""The errors a group raises. All derive from torch's own DistBackendError (a RuntimeError).

Messages name the operation, its number, the group and the rank, and say whether the group can be used any more. Where a
class says that the group is over, every further call on it raises at once, on every rank: destroy it, and make another.
docs/errors.md has an example of each."""

from torch.distributed import DistBackendError

DOCTOR = "python -m c10d_custom doctor shows what this machine allows"


class CustomBackendError(DistBackendError):
    """Base of everything this backend raises on purpose; itself, of a call on a group that is over."""


class UsageError(CustomBackendError, ValueError):
    """The arguments of a call make no sense on their own: wrong dtype, shape, device, rank. Nothing was moved. The
    group goes on if all ranks got it alike; else the others get a CollectiveMismatchError."""


class CollectiveMismatchError(CustomBackendError):
    """Ranks asked for different things; the message shows them side by side. Nothing was moved, and the group is over;
    of a message (send and receive differ in bytes or dtype), and of shapes of sparse tensors, it goes on."""


class CollectiveTimeoutError(CustomBackendError, TimeoutError):
    """A call's time-out passed; the message names the ranks that are missing. The group is over; of a message, or of
    the time given to Work.wait, it goes on."""


class PeerLostError(CustomBackendError):
    """A rank this call depends on has died or left the group, which is over."""


class AbortedError(CustomBackendError):
    """The group was aborted or destroyed while the call was under way. It is over."""


class TransportError(CustomBackendError):
    """The machinery below failed: no shared memory, ranks that cannot reach each other. The group is over, or was not
    made."""
