"""The benchmark runs every operation and prints a table; its figures are nobody's business here."""
import re
import subprocess
import sys

from c10d_custom.bench.operations import OPERATIONS


def bench(*options):
    return subprocess.run([sys.executable, "-m", "c10d_custom", "bench", *options], text=True, capture_output=True, timeout=200)


def test_every_operation_is_timed_at_every_size():
    out = bench("-o", "all", "-r", "3", "-b", "4", "-e", "64K", "-f", "16384", "--rounds", "1", "--seconds", "0.001")
    assert out.returncode == 0, out.stderr
    assert re.findall(r"^(\w+), 3 ranks", out.stdout, re.M) == list(OPERATIONS)
    sizes = re.findall(r"^ +(\d+)(?: +[\d.]+){6}$", out.stdout, re.M)
    assert sizes == ["4", "65536"] * len(OPERATIONS)


def test_an_unknown_operation_is_refused():
    out = bench("-o", "all_redcue")
    assert out.returncode == 2 and "all_redcue" in out.stderr
