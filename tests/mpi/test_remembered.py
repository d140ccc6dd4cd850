"""The trace of a group over several hosts."""

from pathlib import Path

import pytest

from harness import Layout
from programs.launch import finish

REMEMBERED = Path(__file__).with_name("scripts") / "remembered.py"
KEPT = 256


def test_calls_are_remembered_whichever_way_they_went():
    layout = Layout.parse("2+2")
    if reason := layout.why_not():
        pytest.skip(reason)
    said = finish([REMEMBERED], layout=layout, address=False, deadline=120).json_by_rank()
    assert sorted(said) == [0, 1, 2, 3]
    small = ["all_reduce", "SUM", "float32", "4", 16]
    expected = [[n, *small] for n in range(1, 301)] + [
        [301, "all_reduce", "MAX", "float32", "4", 16],
        [302, "barrier", "-", None, None, 0],
        [303, "all_reduce", "SUM", "float32", str(1 << 16), 4 << 16],
        [304, *small],
        [305, *small],
    ]
    for rank, value in said.items():
        messages = [r[0] for r in value["before"] if r[0] in ("send", "recv")]
        assert messages == {0: ["recv"], 1: ["send"]}.get(rank, [])
        calls = [r for r in value["before"] if r[0] not in ("send", "recv")]
        assert all(state == "done" and in_order for *_, state, in_order in calls), calls
        told = [
            [number, op, reduce, *((None, None) if op == "barrier" else (dtype, count)), nbytes]
            for op, number, reduce, dtype, count, nbytes, _, _ in calls
        ]
        assert told == expected[-KEPT:]
        number, count, state = value["last"]
        assert (number, count) == (306, "5" if rank else "4") and state not in ("done", "running", "queued"), value[
            "last"
        ]
