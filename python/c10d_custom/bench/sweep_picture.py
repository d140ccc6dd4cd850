"""The sweep's picture: for each operation, time over size with its spread, and bus bandwidth."""

from __future__ import annotations

from typing import Any

from ..plotting import INK, OTHER, OURS, pyplot

_COLORS = {"custom": OURS, "gloo": OTHER, "mpi": "#5a9e4b", "ucc": "#3f9aa0", "noop": "#9aa1ab", "floor": INK}


def readable(nbytes: float) -> str:
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes:g} B"


def draw(path: str, title: str, results: list[dict[str, Any]]) -> None:
    plt = pyplot()
    from matplotlib.ticker import FuncFormatter, NullLocator

    operations = list(dict.fromkeys(r["operation"] for r in results))
    figure, axes = plt.subplots(
        len(operations), 2, figsize=(12, 4 * len(operations)), layout="constrained", squeeze=False
    )
    figure.suptitle(title)
    for (times, bandwidth), operation in zip(axes, operations, strict=True):
        for i, name in enumerate(dict.fromkeys(r["reference"] for r in results)):
            mine = [r for r in results if r["operation"] == operation and r["reference"] == name]
            sizes, color = [r["bytes"] for r in mine], _COLORS.get(name, f"C{i}")
            times.plot(sizes, [r["median_us"] for r in mine], color=color, marker="o", markersize=4, label=name)
            times.fill_between(
                sizes, [r["min_us"] for r in mine], [r["p99_us"] for r in mine], color=color, alpha=0.12, linewidth=0
            )
            if all(r["busbw"] is not None for r in mine):
                bandwidth.plot(sizes, [r["busbw"] for r in mine], color=color, marker="o", markersize=4, label=name)
        times.set_yscale("log")
        times.set_ylabel("microseconds: median, least to p99")
        bandwidth.set_ylabel("busbw, GB/s")
        for each in (times, bandwidth):
            each.set_title(operation)
            each.set_xscale("log", base=2)
            each.xaxis.set_major_formatter(FuncFormatter(lambda x, _: readable(x)))
            each.xaxis.set_minor_locator(NullLocator())
            each.grid(alpha=0.25)
            each.spines[["top", "right"]].set_visible(False)
            each.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
