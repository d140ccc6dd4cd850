"""``python -m c10d_custom bench``, ``doctor``, ``trace``: see bench/command.py, doctor/command.py, trace/command.py."""

from __future__ import annotations

import argparse
import sys

from .doctor import command as doctor_command


def main() -> int | None:
    """The exit status of the command that the command line names; argparse exits with 2 where it names none."""
    parser = argparse.ArgumentParser(prog="python -m c10d_custom", description="Tools of c10d-custom.")
    commands = parser.add_subparsers(required=True, metavar="command")
    doctor_command.add_to(commands)
    if sys.argv[1:2] != ["doctor"]:  # which tells why, where the others cannot even be imported
        from .bench import command
        from .trace import command as trace_command

        command.add_to(commands)
        trace_command.add_to(commands)
    args = parser.parse_args()
    return vars(args).pop("run")(args)


if __name__ == "__main__":
    sys.exit(main())
