"""How data is cut among ranks."""


def evenly(nbytes, parts, unit):
    """Offsets that cut ``nbytes`` into ``parts``, as equal as may be, at multiples of ``unit``: parts + 1 of them."""
    lines = -(-nbytes // unit)
    return [min(nbytes, lines * p // parts * unit) for p in range(parts + 1)]
