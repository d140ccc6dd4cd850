"""GPU memory that two processes share: whether they see each other's writes, how fast it is copied, and whether that of
torch's allocator can be shared, too."""

from __future__ import annotations

import time
from collections.abc import Callable

from .participant import Participant

_HERS, _MINE = 1717, 4242
_COPIES = 5
_TIMES = 4


def exporter(p: Participant) -> None:
    stream, address = p.gpu.stream(), p.gpu.allocate_zeros(p.gpu.large)
    p.say(p.driver.export_memory(address))
    p.hear()
    seen = p.gpu.read(stream, address)
    p.gpu.spin(stream, 0.0, address + 64, _MINE)
    p.gpu.settle(stream)
    p.say(seen == _HERS)
    p.hear()
    offer(p)
    offer_again(p)


def importer(p: Participant) -> None:
    stream = p.gpu.stream()
    address = p.driver.open_memory(p.hear())
    p.gpu.spin(stream, 0.0, address, _HERS)
    p.gpu.settle(stream)
    p.say()
    seen = p.hear()
    p.tell("memory_shared", seen and p.gpu.read(stream, address + 64) == _MINE)
    own = p.gpu.allocate_zeros(p.gpu.large)
    p.tell("copy_engine_gbps", _rate(p, stream, lambda: p.driver.copy(stream, own, address, p.gpu.large)))
    p.tell("copy_kernel_gbps", _rate(p, stream, lambda: p.gpu.copy_by_kernel(stream, own, address, p.gpu.large)))
    p.say()
    take(p, "torch_memory_exported")
    take_again(p)


def _rate(p: Participant, stream: int, copy: Callable[[], None]) -> float:
    """Thousand millions of bytes a second."""
    copy()
    p.gpu.settle(stream)
    began = time.monotonic()
    for _ in range(_COPIES):
        copy()
    p.gpu.settle(stream)
    return round(_COPIES * p.gpu.large / (time.monotonic() - began) / 1e9, 1)


def offer(p: Participant) -> None:
    """Shows memory of torch's allocator."""
    stream = p.gpu.stream()
    address, base = p.gpu.torch_memory(4096)
    p.gpu.spin(stream, 0.0, address, _MINE)
    p.gpu.settle(stream)
    try:
        p.say((p.driver.export_memory(base), address - base))
    except Exception as error:  # expected of some memory
        p.say((None, f"{type(error).__name__}: {error}"))
    p.hear()


def take(p: Participant, key: str) -> None:
    """Looks at it."""
    handle, offset = p.hear()
    if handle is None:
        p.remark(key, offset)
        p.tell(key, False)
    else:
        base = p.driver.open_memory(handle)
        p.tell(key, p.gpu.read(p.gpu.stream(), base + offset) == _MINE)
        p.driver.close_memory(base)
    p.say()


def offer_again(p: Participant) -> None:
    """Shows memory of torch's allocator and frees it while the other process has it open, several times."""
    stream, numbers, known = p.gpu.stream(), set(), True
    p.gpu.free_torch_memory()
    for value in range(1, 1 + _TIMES):
        address, base = p.gpu.torch_memory(4096)
        allocation = p.driver.allocation_of(address)
        known = known and allocation is not None and allocation.base == base and allocation.number not in numbers
        if allocation is not None:
            numbers.add(allocation.number)
        p.gpu.spin(stream, 0.0, address, value)
        p.gpu.settle(stream)
        p.say((p.driver.export_memory(base), address - base, known))
        p.hear()
        p.gpu.free_torch_memory()
        known = known and p.driver.allocation_of(address) != allocation


def take_again(p: Participant) -> None:
    """Looks at each, once it has closed the one before."""
    stream, before, well = p.gpu.stream(), None, True
    for value in range(1, 1 + _TIMES):
        handle, offset, known = p.hear()
        if before is not None:
            p.driver.close_memory(before)
        before = p.driver.open_memory(handle)
        well = well and known and p.gpu.read(stream, before + offset) == value
        p.say()
    p.tell("torch_memory_exported_again", well)


def take_expandable(p: Participant) -> None:
    take(p, "torch_expandable_exported")
