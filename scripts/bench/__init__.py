"""Measurements and models of our own work, beside the benchmark that the package has: `python scripts/bench --help`."""
