"""What the tools' pictures share: matplotlib, asked for when one is drawn, and colours."""

from __future__ import annotations

from typing import Any

OURS, OTHER, INK = "#1f6fb4", "#e0872b", "#2b2f36"


def pyplot() -> Any:
    """matplotlib.pyplot, which needs no display; SystemExit that says what to install where there is none."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("--plot draws with matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot
