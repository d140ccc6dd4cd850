"""The demo's picture: loss and accuracy per epoch, distributed beside single-process, and where a step's time goes."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter, StrMethodFormatter

OURS, OTHER, LOCAL, INK = "#1f6fb4", "#e0872b", "#c9ced6", "#2b2f36"


def draw_curves(axes, title: str, pick, distributed, single) -> None:
    epochs = range(1, len(pick(single)) + 1)
    # The two lie on each other: a wide line below, a thin one above, so that both can be seen.
    axes.plot(
        epochs,
        pick(distributed),
        color=OURS,
        linewidth=6,
        marker="o",
        markersize=9,
        markeredgewidth=0,
        alpha=0.45,
        label=f"distributed: {distributed.label}",
    )
    axes.plot(
        epochs, pick(single), color=INK, linewidth=1, marker="o", markersize=3, label="single process, same batches"
    )
    axes.set_title(title)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=(1, 2, 5, 10)))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def draw_steps(axes, times) -> None:
    for (name, t), color in zip(times.items(), (OURS, OTHER), strict=True):
        axes.bar(name, t.local, width=0.6, color=LOCAL)
        axes.bar(name, t.comm, width=0.6, bottom=t.local, color=color)
        axes.annotate(f"{t.local:.1f} ms local\n(no_sync)", (name, t.local / 2), ha="center", va="center", color=INK)
        axes.annotate(
            f"{t.comm:.1f} ms communication\n{t.share:.0%} of the step",
            (name, t.step),
            (0, 4),
            textcoords="offset points",
            ha="center",
            va="bottom",
            color=color,
            fontweight="bold",
        )
    axes.set_title("Time of one DDP step")
    axes.set_ylabel("milliseconds (median)")
    axes.set_xlim(-0.6, 1.6)
    axes.set_ylim(0, 1.2 * max(t.step for t in times.values()))


def draw(folder: Path, title: str, distributed, single, times) -> Path:
    figure, (loss, accuracy, steps) = plt.subplots(1, 3, figsize=(16, 5), layout="constrained")
    figure.suptitle(title)
    draw_curves(loss, "Training loss (cross-entropy)", lambda run: run.loss, distributed, single)
    if min(distributed.loss) * 5 < max(distributed.loss):  # on less of a range a log axis has no ticks to read
        loss.set_yscale("log")
        loss.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        loss.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        loss.yaxis.set_minor_formatter(NullFormatter())
    loss.set_ylabel("mean over the epoch's steps")
    draw_curves(accuracy, "Test accuracy", lambda run: run.accuracy, distributed, single)
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    accuracy.set_ylabel("images classified correctly")
    draw_steps(steps, times)
    for axes in (loss, accuracy, steps):
        axes.spines[["top", "right"]].set_visible(False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "demo.png"
    figure.savefig(path, dpi=110)
    return path
