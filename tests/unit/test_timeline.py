"""The picture of a stuck job: which bars, of what state, from when till when, in which order; and that it is drawn."""

import subprocess
import sys
import xml.etree.ElementTree

import pytest

from c10d_custom.trace.file import Dump, GroupTrace, to_text
from c10d_custom.trace.timeline import Bar, draw, positions, rows, verdict
from c10d_custom.transport.call_log import Peer, Record

pytestmark = pytest.mark.lane2

DAY = 1.75e9  # all times below are seconds after it


def call(operation, number, issued, ended, state="done", peer=-1):
    return Record(operation, number, "-", "int8", "1", 1, 1, peer, 0, state, DAY + issued, None, ended and DAY + ended)


def dump(rank, written, *groups):
    return Dump(rank, 100 + rank, "hosta", DAY + written, "signal 10", list(groups))


def group(rank, calls, members=(0, 1, 2), peers=(), name="0"):
    return GroupTrace(name, members.index(rank), len(members), list(members), list(peers), calls)


def stuck():
    """Rank 0 is in a barrier; rank 1 waits for its message; rank 2 was killed."""
    first = call("all_reduce", 1, 1, 2)
    seen = [Peer(2, 102, "gone", 1)]
    return [
        dump(0, 30, group(0, [first, call("barrier", 2, 3, None, "running")], peers=seen)),
        dump(1, 31, group(1, [call("all_reduce", 1, 1.5, 2), call("recv", 1, 4, None, "waiting", peer=0)])),
    ]


def shown(row):
    return [[(b.label, b.state, b.begin - DAY, b.end - DAY, b.under_way) for b in lane] for lane in row.lanes]


def test_rows_bars_states():
    zero, one, two = rows(stuck())
    # Under way: open, until the last file was written.
    assert shown(zero) == [[("all_reduce #1", "done", 1, 2, False), ("barrier #2", "running", 3, 31, True)]]
    assert shown(one) == [
        [("all_reduce #1", "done", 1.5, 2, False), ("recv from rank 0", "waiting", 4, 31, True)],
        [("not in barrier #2", "missing", 3, 31, False)],  # at the same time: in another lane
    ]
    assert shown(two) == [[("not in barrier #2", "missing", 3, 31, False)]]
    assert [(r.rank, r.note) for r in (zero, one, two)] == [(0, ""), (1, ""), (2, "no file: its process is gone")]


def test_what_ended_badly_is_not_open_and_who_was_missing_is_so_until_then():
    dumps = [
        dump(0, 30, group(0, [call("barrier", 1, 3, 13, "timed_out")], (0, 1))),
        dump(1, 30, group(1, [call("recv", 1, 4, 13.5, "broken", peer=0)], (0, 1))),
    ]
    zero, one = rows(dumps)
    assert shown(zero) == [[("barrier #1", "timed_out", 3, 13, False)]]
    assert shown(one) == [
        [("recv from rank 0", "broken", 4, 13.5, False)],
        [("not in barrier #1", "missing", 3, 13, False)],
    ]


def test_several_who_wait_make_one_missing_bar_from_the_first_to_the_last():
    dumps = [
        dump(0, 30, group(0, [call("barrier", 1, 3, 13, "timed_out")])),
        dump(1, 30, group(1, [call("barrier", 1, 2, 12, "timed_out")])),
        dump(2, 30, group(2, [])),
    ]
    assert shown(rows(dumps)[2]) == [[("not in barrier #1", "missing", 2, 13, False)]]


def test_ranks_and_peers_are_global_and_groups_named_where_there_are_several():
    calls = [call("send", 1, 1, None, "waiting", peer=1)]
    dumps = [dump(4, 9, group(4, calls, (4, 6), name="dp"), group(4, [call("barrier", 1, 2, 3)], (4, 6)))]
    four, six = rows(dumps)
    assert [b.label for b in four.bars] == ["send to rank 6, group dp", "barrier #1, group 0"]
    assert (six.rank, six.bars, six.note) == (6, [], "no file")


def test_the_last_calls_are_shown_and_of_those_under_way_the_first():
    done = [call("barrier", n, n, n + 0.5) for n in range(1, 6)]
    queued = [call("all_reduce", n, n, None, "running" if n == 6 else "queued") for n in range(6, 9)]
    dumps = [dump(0, 20, group(0, [*done, *queued], (0,)))]
    assert [b.label for b in rows(dumps, 4)[0].bars] == [
        "barrier #5",
        "all_reduce #6",
        "all_reduce #7",
        "all_reduce #8",
    ]
    assert [(b.label, b.state) for b in rows(dumps, 1)[0].bars] == [("all_reduce #6", "running")]


def test_calls_that_overlap_are_in_lanes_of_their_own():
    dumps = [
        dump(0, 20, group(0, [call("barrier", 1, 1, 5), call("barrier", 2, 2, 6), call("barrier", 3, 5, 7)], (0,)))
    ]
    assert [[b.label for b in lane] for lane in rows(dumps)[0].lanes] == [["barrier #1", "barrier #3"], ["barrier #2"]]


def test_positions_keep_the_order_and_give_each_bar_room_for_its_label():
    bars = [
        Bar("all_reduce #1", "done", 0, 3e-6),
        Bar("all_reduce #1", "done", 1e-6, 2e-6),
        Bar("a long label that takes much room", "done", 3e-6, 5e-6),
        Bar("barrier #2", "running", 5e-6, 600),
        Bar("b", "running", 4e-6, 600),
    ]
    at = positions(bars)
    assert list(at) == sorted(at) and list(at.values()) == sorted(at.values())
    assert all(at[b.end] - at[b.begin] >= b.least_width for b in bars)
    assert at[600] - at[5e-6] > at[3e-6] - at[0]  # minutes are longer than microseconds
    assert positions([]) == {}


def test_the_verdict_says_who_holds_up_whom():
    assert verdict(stuck()) == ["rank 0 waits for rank 1 waits for rank 0", "rank 2 holds up ranks 0, 1"]


def command(folder, *options):
    for d in stuck():
        (folder / f"{d.rank}.trace").write_text(to_text(d))
    traces = sorted(folder.glob("*.trace"))
    return subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.path.insert(0, sys.argv.pop(1)); from c10d_custom.__main__ import main; sys.exit(main())",
            str(folder),
            "trace",
            *map(str, (*traces, *options)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command_draws_and_reports(tmp_path):
    pytest.importorskip("matplotlib", reason="the picture is matplotlib's")
    out = command(tmp_path, "--plot", tmp_path / "stuck.svg", "--calls", 1)
    assert out.returncode == 0 and "who waits for whom" in out.stdout, out.stderr
    drawn = (tmp_path / "stuck.svg").read_text()
    xml.etree.ElementTree.fromstring(drawn)
    # matplotlib writes each text as a comment beside its outlines.
    for text in ("rank 2", "barrier #2", "recv from rank 0", "not in barrier #2", "no file: its process is gone"):
        assert f"<!-- {text} -->" in drawn
    assert "<!-- all_reduce #1 -->" not in drawn  # --calls 1
    draw(str(tmp_path / "empty.png"), [dump(0, 1)])
    assert (tmp_path / "empty.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_said(tmp_path):
    pytest.importorskip("matplotlib", reason="the picture is matplotlib's")
    for name, reason in (("stuck.what", "not supported"), ("nowhere/stuck.svg", "No such file")):
        out = command(tmp_path, "--plot", tmp_path / name)
        assert out.returncode == 1 and "who waits for whom" in out.stdout, out.stderr
        assert f"trace: {tmp_path / name}: " in out.stderr and reason in out.stderr and "Traceback" not in out.stderr


def test_without_matplotlib_it_says_what_to_install(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')")
    out = command(tmp_path, "--plot", tmp_path / "stuck.svg")
    assert out.returncode == 1 and out.stderr == "--plot draws with matplotlib: pip install matplotlib\n"
