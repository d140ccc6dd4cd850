"""The printed table, in the columns of nccl-tests."""

from __future__ import annotations

from typing import Any

HOW = {
    "rank0": "times are rank 0's",
    "mean": "a call's time is the mean over the ranks",
    "min": "a call's time is its fastest rank's",
    "max": "a call's time is its slowest rank's",
}


def place(hosts: list[dict[str, Any]], busy: int = 0) -> str:
    """In words, what the ranks run on. ``hosts``: as ranks.hosts has them."""
    cores = sorted({h["cores"] for h in hosts})
    text = f"{'/'.join(map(str, cores))} cores, load {'/'.join(format(h['load'], '.1f') for h in hosts)} before"
    if busy:
        text += f", {busy} more process{'es' if busy > 1 else ''} burning a core each"
    if len(hosts) > 1:
        text += "; " + ", ".join(f"{h['name']}: {h['ranks']} ranks" for h in hosts)
    return text


def head(ratio_to: str) -> str:
    """Times in microseconds, bandwidths in GB/s (10^9 bytes). The ratio: how many times as fast as ``ratio_to``."""
    return (
        f"{'size':>10} {'count':>10} {'type':>8} {'redop':>7} {'root':>4} {'backend':>8} {'min us':>10} "
        f"{'time us':>10} {'p99 us':>10} {'algbw':>7} {'busbw':>7} {'#wrong':>6} {'x ' + ratio_to:>8}"
    )


def ratio(results: list[dict[str, Any]], result: dict[str, Any], to: str) -> float | None:
    """Time of the reference ``to`` over ``result``'s; None where it was not timed."""
    base = next((r["median_us"] for r in results if r["reference"] == to), None)
    return None if base is None else base / result["median_us"]


def rows(results: list[dict[str, Any]], ratio_to: str) -> str:
    """One size's results, a row for each."""

    def cell(value: Any, form: str = "") -> str:
        return "-" if value is None else format(value, form)

    def row(r: dict[str, Any]) -> str:
        return (
            f"{r['bytes']:>10} {r['count']:>10} {r['type']:>8} {(r['redop'] or 'none').lower():>7} {r['root']:>4} "
            f"{r['reference']:>8} {r['min_us']:>10.1f} {r['median_us']:>10.1f} {r['p99_us']:>10.1f} "
            f"{cell(r['algbw'], '.2f'):>7} {cell(r['busbw'], '.2f'):>7} {cell(r['wrong']):>6} "
            f"{cell(ratio(results, r, ratio_to), '.2f'):>8}"
        )

    return "\n".join(row(r) for r in results)
