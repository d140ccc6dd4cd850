"""The errors a group raises. All derive from torch's own DistBackendError (a RuntimeError)."""

from torch.distributed import DistBackendError


class CustomBackendError(DistBackendError):
    """Base of everything this backend raises on purpose."""


class UsageError(CustomBackendError, ValueError):
    """The arguments of a call make no sense on their own: wrong dtype, shape, device, rank."""


class CollectiveMismatchError(CustomBackendError):
    """Ranks asked for different things; the message shows them side by side."""


class CollectiveTimeoutError(CustomBackendError, TimeoutError):
    """A call's time-out passed; the message names the ranks that are missing."""


class PeerLostError(CustomBackendError):
    """A rank this call depends on has died or left the group."""


class AbortedError(CustomBackendError):
    """The group was aborted or destroyed while the call was under way."""


class TransportError(CustomBackendError):
    """The machinery below failed: no shared memory, ranks that cannot reach each other."""
