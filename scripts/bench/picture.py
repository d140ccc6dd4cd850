"""The model's picture: all_reduce over the number of hosts, with what was measured, and how DDP scales."""

from __future__ import annotations

from collections.abc import Sequence

from c10d_custom.bench.picture import readable
from c10d_custom.plotting import INK, OTHER, OURS, pyplot


def draw(
    path: str,
    title: str,
    hosts: Sequence[int],
    sizes: Sequence[int],
    curves: dict[str, dict[int, list[float]]],
    points: dict[str, list[tuple[int, int, float, float]]],
    scaling: dict[str, list[float]],
) -> None:
    """``curves``: {"hierarchical": {size: [seconds for each of hosts]}, "flat": ...}; ``points``: {"hierarchical":
    [(hosts, size, measured seconds, seconds predicted for the very job and machine measured)], ...}; ``scaling``:
    {"hierarchical": [efficiency for each of hosts], ...}"""
    plt = pyplot()
    from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

    figure, (times, ddp) = plt.subplots(1, 2, figsize=(14, 6), layout="constrained")
    figure.suptitle(title)
    colors = {"hierarchical": OURS, "flat": OTHER}
    for name, by_size in curves.items():
        for size in sizes:
            times.plot(
                hosts,
                [s * 1e3 for s in by_size[size]],
                color=colors[name],
                linestyle="-" if name == "hierarchical" else "--",
                linewidth=2,
                alpha=0.9,
            )
        for count, size, seconds, predicted in points.get(name, ()):
            if size in sizes:
                times.plot(count, predicted * 1e3, color=INK, marker="_", markersize=14, linestyle="none")
                times.plot(
                    count,
                    seconds * 1e3,
                    color=colors[name],
                    marker="o" if name == "hierarchical" else "D",
                    markersize=7,
                    markeredgecolor="white",
                    linestyle="none",
                )
        times.plot(
            [], [], color=colors[name], linestyle="-" if name == "hierarchical" else "--", label=f"{name}, predicted"
        )
        if points.get(name):
            times.plot(
                [],
                [],
                color=colors[name],
                marker="o" if name == "hierarchical" else "D",
                linestyle="none",
                label=f"{name}, measured",
            )
    if any(points.values()):
        times.plot(
            [], [], color=INK, marker="_", markersize=14, linestyle="none", label="predicted for what was measured"
        )
    for size in sizes:
        last = curves["hierarchical"][size][-1]
        times.annotate(
            readable(size), (hosts[-1], last * 1e3), (6, 0), textcoords="offset points", va="center", color=OURS
        )
    times.set_yscale("log")
    times.set_ylabel("milliseconds")
    times.set_title("all_reduce")
    for name, values in scaling.items():
        ddp.plot(
            hosts,
            values,
            color=colors[name],
            linestyle="-" if name == "hierarchical" else "--",
            linewidth=2,
            label=name,
        )
    ddp.set_ylim(0, 1.05)
    ddp.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ddp.set_title("DDP: share of the step that computes")
    for axes in (times, ddp):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("hosts")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
