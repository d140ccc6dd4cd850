"""The Backend object that torch asks a group for, device by device."""


class DeviceBackend:
    """What torch expects `ProcessGroup._get_backend(device)` to answer."""
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_tensor_alloc = False
    supports_shrinking = False
    options = None

    def __init__(self, group):
        self._group = group

    def name(self):
        return self._group.getBackendName()

    def rank(self):
        return self._group.rank()

    def size(self):
        return self._group.size()

    def _set_default_timeout(self, timeout):
        self._group.set_timeout(timeout)

    set_timeout = _set_default_timeout

    def __eq__(self, other):
        return isinstance(other, DeviceBackend) and other._group is self._group

    def __hash__(self):
        return id(self._group)
