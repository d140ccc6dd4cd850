"""How data is cut among ranks."""

from __future__ import annotations


def evenly(nbytes: int, parts: int, unit: int) -> list[int]:
    """Offsets that cut ``nbytes`` into ``parts``, as equal as may be, at multiples of ``unit``: parts + 1 of them."""
    lines = -(-nbytes // unit)
    return [min(nbytes, lines * p // parts * unit) for p in range(parts + 1)]


def chunks(nbytes: int, most: int) -> list[tuple[int, int]]:
    """[(begin, end)] of equal chunks of at most about ``most`` bytes."""
    many = max(1, -(-nbytes // most))
    each = -(-nbytes // many // 64) * 64 or 64
    return [(at, min(nbytes, at + each)) for at in range(0, nbytes, each)]
