"""Which of the conformance cases are run on a GPU: those of tests/conformance/selection.py, fewer layouts crossed."""
from conformance.selection import cases_of

# Every dtype (x op) at one small and one larger size, every edge of size, and layouts that are views of other memory.
ALL = ("pairs", "sizes", "strided", "transposed", "offset", "scalar", "mixed")
FEW = ("small", "sizes", "mixed")


def chosen(collective, sections, reducing, full, world_size):
    """Each case once, in the order of the sections."""
    return list(dict.fromkeys(case for section in sections
                              for case in cases_of(collective, section, reducing, full, world_size)))


def time_for(cases):
    """Seconds, for kernels that are compiled already (gpu/check/compile_all.py)."""
    return 30 + 0.05 * len(cases)
