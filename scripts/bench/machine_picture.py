"""The picture of ``scripts/bench machine``: for each operation, time over size, a line for each number of ranks; gloo's
are dashed."""

from __future__ import annotations

from typing import Any

from c10d_custom.bench.sweep_picture import readable
from c10d_custom.plotting import pyplot

from .machine_part import BARRIER


def draw(path: str, title: str, results: list[dict[str, Any]]) -> None:
    plt = pyplot()
    from matplotlib.ticker import FuncFormatter, NullLocator

    operations = [o for o in dict.fromkeys(r["operation"] for r in results) if o != BARRIER]
    counts = sorted({r["ranks"] for r in results})
    figure, axes = plt.subplots(
        1, max(1, len(operations)), figsize=(6 * max(1, len(operations)), 5), layout="constrained", squeeze=False
    )
    figure.suptitle(title)
    for axis, operation in zip(axes[0], operations, strict=False):
        for i, ranks in enumerate(counts):
            color = plt.get_cmap("viridis")(i / max(1, len(counts)))
            for name, style in (("custom", "-"), ("gloo", "--")):
                wanted = {"operation": operation, "ranks": ranks, "reference": name}
                mine = sorted((r["bytes"], r["median_us"]) for r in results if wanted.items() <= r.items())
                if mine:
                    sizes, microseconds = zip(*mine, strict=True)
                    axis.plot(
                        sizes, microseconds, style, color=color, marker="o", markersize=3, label=f"{ranks}, {name}"
                    )
        axis.set_title(operation)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_ylabel("microseconds, median")
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: readable(x)))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, title="ranks")
    figure.savefig(path, dpi=110)
    plt.close(figure)
