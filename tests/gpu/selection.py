"""Which of the conformance cases are run on a GPU: those of tests/conformance/selection.py, fewer layouts crossed."""

from conformance.cases import run_cases
from conformance.selection import cases_of

from .device import device_of

# Every dtype (x op) at one small and one larger size, every edge of size, and layouts that are views of other memory.
ALL = ("pairs", "sizes", "strided", "transposed", "offset", "scalar", "mixed")
FEW = ("small", "sizes", "mixed")


def chosen(collective, sections, reducing, full, world_size):
    """Each case once, in the order of the sections."""
    return list(
        dict.fromkeys(
            case for section in sections for case in cases_of(collective, section, reducing, full, world_size)
        )
    )


def run_cases_on(kind, perform, cases):
    """run_cases, in a rank, on its device."""
    return run_cases(perform, cases, device_of(kind).name)


def time_for(cases):
    """Seconds, for kernels that are compiled already (gpu/check/compile_all.py)."""
    return 30 + 0.05 * len(cases)
