"""``python -m c10d_custom bench``: see bench/command.py."""
import sys

from .bench.command import main

if __name__ == "__main__":
    sys.exit(main())
