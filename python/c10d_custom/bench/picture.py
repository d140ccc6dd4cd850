"""The pictures of the sweep and of ``bench --machine``: for each operation, time over size."""

from __future__ import annotations

from typing import Any

from ..plotting import INK, OTHER, OURS, pyplot

_COLORS = {"custom": OURS, "gloo": OTHER, "mpi": "#5a9e4b", "ucc": "#3f9aa0", "noop": "#9aa1ab", "floor": INK}


def readable(nbytes: float) -> str:
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes:g} B"


class _Picture:
    """Axes in rows and columns, all with sizes along them."""

    def __init__(self, title: str, rows: int, columns: int) -> None:
        self.plt = pyplot()
        size = 6 * columns, 4 * rows + (rows == 1)
        self._figure, self.axes = self.plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
        self._figure.suptitle(title)

    def finish(self, axis: Any, title: str, says: str, legend: str | None = None) -> None:
        from matplotlib.ticker import FuncFormatter, NullLocator

        axis.set_title(title)
        axis.set_ylabel(says)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: readable(x)))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, title=legend)

    def save(self, path: str) -> None:
        self._figure.savefig(path, dpi=110)
        self.plt.close(self._figure)


def draw(path: str, title: str, results: list[dict[str, Any]]) -> None:
    """The sweep's: times with their spread, and bus bandwidth, a line for each reference."""
    operations = list(dict.fromkeys(r["operation"] for r in results))
    picture = _Picture(title, len(operations), 2)
    for (times, bandwidth), operation in zip(picture.axes, operations, strict=True):
        for i, name in enumerate(dict.fromkeys(r["reference"] for r in results)):
            mine = [r for r in results if r["operation"] == operation and r["reference"] == name]
            sizes, color = [r["bytes"] for r in mine], _COLORS.get(name, f"C{i}")
            line: dict[str, Any] = {"color": color, "marker": "o", "markersize": 4, "label": name}
            times.plot(sizes, [r["median_us"] for r in mine], **line)
            times.fill_between(
                sizes, [r["min_us"] for r in mine], [r["p99_us"] for r in mine], color=color, alpha=0.12, linewidth=0
            )
            if all(r["busbw"] is not None for r in mine):
                bandwidth.plot(sizes, [r["busbw"] for r in mine], **line)
        times.set_yscale("log")
        picture.finish(times, operation, "microseconds: median, least to p99")
        picture.finish(bandwidth, operation, "busbw, GB/s")
    picture.save(path)


def draw_machine(path: str, title: str, results: list[dict[str, Any]], operations: list[str]) -> None:
    """A line for each number of ranks; gloo's are dashed."""
    picture = _Picture(title, 1, max(1, len(operations)))
    counts = sorted({r["ranks"] for r in results})
    for axis, operation in zip(picture.axes[0], operations):
        for i, ranks in enumerate(counts):
            color = picture.plt.get_cmap("viridis")(i / max(1, len(counts)))
            for name, style in (("custom", "-"), ("gloo", "--")):
                wanted = {"operation": operation, "ranks": ranks, "reference": name}
                mine = sorted((r["bytes"], r["median_us"]) for r in results if wanted.items() <= r.items())
                if mine:
                    axis.plot(*zip(*mine), style, color=color, marker="o", markersize=3, label=f"{ranks}, {name}")
        axis.set_yscale("log")
        picture.finish(axis, operation, "microseconds, median", "ranks")
    picture.save(path)
