"""``python -m c10d_custom trace FILE...``"""

from __future__ import annotations

import sys
from typing import Any

from ..transport.trace_file import read
from .merge import report


def add_to(commands: Any) -> None:
    """Adds the command to an argparse parser's subparsers, with what it `run`s."""
    trace = commands.add_parser(
        "trace",
        help="says from the ranks' trace files who stands where and who waits for whom",
        description="Reads the files that ranks wrote to C10D_CUSTOM_TRACE_DIR, of one run; of several by one rank, "
        "the last.",
    )
    trace.add_argument("files", nargs="+", metavar="FILE")
    trace.set_defaults(run=lambda args: main(args.files))


def main(files: list[str]) -> bool:
    """Prints the report on these files, and on stderr which of them are none. True if none could be read."""
    dumps = []
    for path in files:
        try:
            with open(path, encoding="utf-8") as file:
                dumps.append(read(file.read()))
        except (OSError, ValueError) as error:
            print(f"trace: {path}: {error}", file=sys.stderr)
    if dumps:
        print("\n".join(report(dumps)))
    return not dumps
