"""``python -m c10d_custom trace FILE...``"""

from __future__ import annotations

import sys
from typing import Any

from ..plotting import pyplot
from .file import from_text
from .report import report
from .timeline import draw


def add_to(commands: Any) -> None:
    """Adds the command to an argparse parser's subparsers, with what it `run`s."""
    trace = commands.add_parser(
        "trace",
        help="says from the ranks' trace files who stands where and who waits for whom",
        description="Reads the files that ranks wrote to C10D_CUSTOM_TRACE_DIR, of one run; of several by one rank, "
        "the last.",
    )
    trace.add_argument("files", nargs="+", metavar="FILE")
    trace.add_argument(
        "--plot", metavar="PICTURE", help="also draw the last calls of all ranks: .svg, .png, .pdf; needs matplotlib"
    )
    trace.add_argument(
        "--calls", type=int, default=8, metavar="N", help="in the picture, of each rank (default: %(default)s; 0: all)"
    )
    trace.set_defaults(run=lambda args: main(args.files, args.plot, args.calls))


def main(files: list[str], plot: str | None = None, calls: int = 8) -> bool:
    """Prints the report on these files, and on stderr which of them are none; draws it if ``plot`` says where. True if
    none could be read, or the picture not be written."""
    if plot:
        pyplot()  # which ends here where there is none
    dumps = []
    for path in files:
        try:
            with open(path, encoding="utf-8") as file:
                dumps.append(from_text(file.read()))
        except (OSError, ValueError) as error:
            print(f"trace: {path}: {error}", file=sys.stderr)
    if dumps:
        print("\n".join(report(dumps)))
    if dumps and plot:
        try:
            draw(plot, dumps, calls)
        except (OSError, ValueError) as error:
            print(f"trace: {plot}: {error}", file=sys.stderr)
            return True
    return not dumps
