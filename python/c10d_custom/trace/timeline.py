"""The picture of a stuck job: a row for each rank, its last calls as bars from issue to end, and what others are
in and it is not.

Calls take from microseconds to minutes. So the picture keeps order, not proportion: over all rows, what happened later
is further right, a bar has at least the width of its label, and a gap grows with the logarithm of its time. Ranks on
several hosts are put in order by the clocks of their hosts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..plotting import INK, OTHER, pyplot
from ..transport.call_log import UNDER_WAY
from .report import SEEN, circles, holders, in_words, inside, latest, ranks_in_words, standings

if TYPE_CHECKING:
    from ..transport.call_log import Record
    from .file import Dump, GroupTrace
    from .report import GroupStanding

MISSING = "missing"  # a bar's state: others are in a collective that this rank has not entered
_TICK = 1e-6  # seconds: what the files resolve

# state -> (name in the legend, colour, colour of the label)
_LOOKS = {
    "done": ("done", "#d5dae1", INK),
    "running": ("under way", OTHER, "white"),
    "waiting": ("under way", OTHER, "white"),
    "queued": ("behind another, not begun", "#f6dcc0", INK),
    "timed_out": ("timed out", "#bf3030", "white"),
    "peer_lost": ("a rank was lost", "#7c3f98", "white"),
    "mismatch": ("not called alike", "#7c3f98", "white"),
    MISSING: ("others are in it, this rank is not", "white", "#bf3030"),
}
_BROKEN = ("broken off", "#5b6470", "white")  # aborted, refused and so on

# In points, which are the picture's unit.
_FONT, _LANE, _BAR, _ROW_GAP, _TICKS_APART, _ARROW = 8.0, 20.0, 15.0, 10.0, 66.0, 7.0


@dataclass(frozen=True)
class Bar:
    """A call, or a collective that a rank has not entered. ``end``: of one under way, of the last file's writing."""

    label: str
    state: str
    begin: float
    end: float

    @property
    def under_way(self) -> bool:
        return self.state in UNDER_WAY

    @property
    def least_width(self) -> float:
        return 0.6 * _FONT * len(self.label) + 10


@dataclass
class Row:
    """A rank. Bars that overlap are in different lanes. ``note``: what to say where it has no file."""

    rank: int
    note: str = ""
    lanes: list[list[Bar]] = field(default_factory=list)

    def add(self, bar: Bar) -> None:
        for lane in self.lanes:
            if all(bar.end <= b.begin or b.end <= bar.begin for b in lane):
                lane.append(bar)
                return
        self.lanes.append([bar])

    @property
    def height(self) -> int:
        """The row's height in lanes; a note has a lane of its own."""
        return max(1, len(self.lanes) + bool(self.note))

    @property
    def bars(self) -> list[Bar]:
        return [bar for lane in self.lanes for bar in lane]


def rows(dumps: Iterable[Dump], calls: int = 8) -> list[Row]:
    """Of each rank its last ``calls`` calls (0: all), those under way before others; and the calls of others that it
    has not come to."""
    newest = latest(dumps)
    groups = standings(newest)
    found = {rank: Row(rank) for rank in sorted({m for g in groups for m in g.members} | newest.keys())}
    now = max((d.written for d in newest.values()), default=0.0)
    several = len({g.name for g in groups if any(v.calls for v in g.views.values())}) > 1
    for rank, dump in newest.items():
        own = [(c, g) for g in dump.groups for c in g.calls]
        # Those under way come last, the oldest of them at the very end: the others wait for it.
        own.sort(key=lambda pair: (pair[0].ended or math.inf, -pair[0].issued))
        for call, trace in sorted(own[-max(0, calls) :], key=lambda pair: pair[0].issued):
            found[rank].add(Bar(_label(call, trace, several), call.state, call.issued, _end(call, now)))
    for group in groups:
        for (member, label), (begin, end) in _missing(group, now, several).items():
            found[member].add(Bar(label, MISSING, begin, end))
        for rank, member in enumerate(group.members):
            if member not in newest:
                state = group.seen[rank].state if rank in group.seen else ""
                found[member].note = "no file" + (f": {SEEN[state]}" if state in SEEN else "")
    return list(found.values())


def _end(call: Record, now: float) -> float:
    return max(call.ended or now, call.issued + _TICK)


def _label(call: Record, group: GroupTrace | GroupStanding, several: bool) -> str:
    if call.is_message:
        peer = group.members[call.peer] if 0 <= call.peer < len(group.members) else None
        text = f"{call.operation} {'to' if call.operation == 'send' else 'from'} "
        text += "any rank" if peer is None else f"rank {peer}"
    else:
        text = f"{call.operation} #{call.number}"
    return f"{text}, group {group.name or '(unnamed)'}" if several else text


def _missing(group: GroupStanding, now: float, several: bool) -> dict[tuple[int, str], tuple[float, float]]:
    """{(global rank, label): from when till when others have been in a collective that it has not entered}"""
    found: dict[tuple[int, str], tuple[float, float]] = {}
    for rank in group.views:
        call = group.last(rank)
        if call is None or not inside(call):
            continue
        end = _end(call, now)
        for other in group.late(rank, call):
            key = group.members[other], f"not in {_label(call, group, several)}"
            begin, last = found.get(key, (call.issued, end))
            found[key] = min(begin, call.issued), max(last, end)
    return found


def positions(bars: Sequence[Bar]) -> dict[float, float]:
    """{time at which a bar begins or ends: where that is, in points from the left}"""
    ending = defaultdict(list)
    for bar in bars:
        ending[bar.end].append(bar)
    times = sorted({t for bar in bars for t in (bar.begin, bar.end)})
    at = dict.fromkeys(times[:1], 0.0)
    for before, t in pairwise(times):
        gap = 18 * math.log1p((t - before) / 1e-3)
        at[t] = max(at[before] + gap, *(at[bar.begin] + bar.least_width for bar in ending[t]), 0.0)
    return at


def verdict(dumps: Iterable[Dump]) -> list[str]:
    """Says who holds up whom, in a line each."""
    waits = [w for g in standings(latest(dumps)) for w in g.waits()]
    return [in_words(circle) for circle in circles(waits)] + [
        f"rank {rank} holds up {ranks_in_words(behind)}" for rank, behind in holders(waits).items()
    ]


def _since(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.4g} {name}"
    return f"{seconds * 1e6:.0f} µs"


def draw(path: str, dumps: Sequence[Dump], calls: int = 8) -> None:
    """Writes the picture; its name's ending says what kind: .svg, .png, .pdf. Raises ValueError where matplotlib does
    not know that, OSError where the file cannot be written."""
    plt = pyplot()
    ranks = rows(dumps, calls)
    bars = [bar for row in ranks for bar in row.bars]
    at = positions(bars)
    said = verdict(dumps)[:3]
    lanes = sum(row.height for row in ranks)
    left, right, top, bottom = 54.0, 16.0, 34.0 + 13 * len(said), 62.0
    wide, high = max([360.0, *at.values()]) + _ARROW, lanes * _LANE + len(ranks) * _ROW_GAP
    width, height = left + wide + right, top + high + bottom
    figure = plt.figure(figsize=(width / 72, height / 72))
    axes = figure.add_axes((left / width, bottom / height, wide / width, high / height))
    axes.set(xlim=(0, wide), ylim=(high, 0), yticks=[])
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.text(
        left / width, 1 - 20 / height, f"Last calls of {len(ranks)} ranks", fontsize=11, weight="bold", color=INK
    )
    for i, line in enumerate(said):
        figure.text(left / width, 1 - (36 + 13 * i) / height, line, fontsize=9, color=INK)
    y = 0.0
    for i, row in enumerate(ranks):
        tall = row.height * _LANE + _ROW_GAP
        if i % 2 == 0:
            axes.axhspan(y, y + tall, color="#f5f6f8", linewidth=0, zorder=0)
        axes.text(-8, y + tall / 2, f"rank {row.rank}", ha="right", va="center", fontsize=9, color=INK)
        for n, lane in enumerate(row.lanes):
            for bar in lane:
                _draw_bar(plt, axes, bar, at, y + _ROW_GAP / 2 + (n + 0.5) * _LANE)
        if row.note:
            axes.text(6, y + tall - (_ROW_GAP + _LANE) / 2, row.note, va="center", fontsize=_FONT, color=INK)
        y += tall
    _draw_time(axes, at)
    _draw_legend(plt, axes, bars)
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.endswith(".svg") else None)
    plt.close(figure)


def _draw_bar(plt: Any, axes: Any, bar: Bar, at: dict[float, float], y: float) -> None:
    _, color, ink = _LOOKS.get(bar.state, _BROKEN)
    a, b, half = at[bar.begin], at[bar.end], _BAR / 2
    corners = [(a, y - half), (b, y - half), (b, y + half), (a, y + half)]
    if bar.under_way:  # open: its end is not known
        corners.insert(2, (b + _ARROW, y))
    missing = bar.state == MISSING
    edge = {"edgecolor": ink, "linestyle": (0, (4, 2)), "linewidth": 1} if missing else {"edgecolor": "white"}
    axes.add_patch(plt.Polygon(corners, facecolor=color, clip_on=False, zorder=2, **edge))
    axes.text((a + b) / 2, y, bar.label, ha="center", va="center_baseline", fontsize=_FONT, color=ink, zorder=3)


def _draw_time(axes: Any, at: dict[float, float]) -> None:
    ticks: list[float] = []
    for t, x in at.items():
        if not ticks or x - at[ticks[-1]] >= _TICKS_APART:
            ticks.append(t)
    axes.set_xticks([at[t] for t in ticks], ["0" if t == ticks[0] else _since(t - ticks[0]) for t in ticks])
    axes.tick_params(axis="x", labelsize=_FONT, colors=INK)
    axes.set_xlabel("since the first call that is shown; in order, lengths not to scale", fontsize=_FONT, color=INK)


def _draw_legend(plt: Any, axes: Any, bars: Sequence[Bar]) -> None:
    states = {bar.state for bar in bars}
    looks = dict.fromkeys(look for state, look in _LOOKS.items() if state in states)
    if states - _LOOKS.keys():
        looks[_BROKEN] = None
    handles = [
        plt.Rectangle(
            (0, 0),
            1,
            1,
            label=name,
            facecolor=color,
            edgecolor=ink if color == "white" else color,
            linestyle="--" if color == "white" else "-",
        )
        for name, color, ink in looks
    ]
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(axes.get_position().x0, 8 / (72 * axes.figure.get_figheight())),
        bbox_transform=axes.figure.transFigure,
        borderaxespad=0,
        borderpad=0,
        frameon=False,
        ncols=len(handles),
        fontsize=_FONT,
        handlelength=1.4,
        columnspacing=1.4,
    )
