"""One process's file in the Flight Recorder's format: what is in it, and how it is written."""

import pickle
import re
from pathlib import Path

import pytest
import torch

from c10d_custom import config, dtypes
from c10d_custom.trace import flight_recorder
from c10d_custom.trace.file import GroupTrace
from c10d_custom.trace.flight_recorder import dump_of, scalar_type
from c10d_custom.transport.call_log import Peer, Record

# --- when, and where


@pytest.mark.parametrize(
    ("variable", "value", "written", "on_failure"),
    [
        ("TORCH_FR_DUMP_TEMP_FILE", "/new_", "/new_", True),
        ("TORCH_FR_DUMP_ON_TIMEOUT", "0", "/old_", False),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "false", "/old_", False),
        ("TORCH_FR_BUFFER_SIZE", "0", "", True),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000", "/old_", True),
    ],
)
def test_torch_s_variables_say_what_is_written(monkeypatch, variable, value, written, on_failure):
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/old_")
    monkeypatch.setenv(variable, value)
    assert config.flight_recorder_file() == written and config.flight_recorder_on_failure() is on_failure


@pytest.mark.parametrize("variable", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_a_size_that_is_no_number_is_named(variable):
    with pytest.raises(ValueError, match=f"^{variable}=x: "):
        config.Config.from_env({variable: "x"})


def test_the_signal_may_be_for_this_file_alone(monkeypatch):
    monkeypatch.delenv("C10D_CUSTOM_TRACE_DIR", raising=False)
    monkeypatch.setenv("C10D_CUSTOM_TRACE_SIGNAL", "10")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "/somewhere/rank_")
    assert config.Config.from_env().trace_signal == 10
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    with pytest.raises(ValueError, match="TORCH_FR_DUMP_TEMP_FILE"):
        config.Config.from_env()


def test_a_file_takes_the_place_of_the_rank_s_older_one(tmp_path):
    beginning = f"{tmp_path}/rank_"
    (tmp_path / "target").write_text("not ours")
    (tmp_path / "rank_1").symlink_to(tmp_path / "target")
    (tmp_path / "rank_11").write_text("another rank's")
    for _ in range(2):
        assert flight_recorder.write(beginning, 1, [], 256) == f"{beginning}1"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank_1", "rank_11", "target"]
    assert (tmp_path / "target").read_text() == "not ours" and (tmp_path / "rank_11").read_text() == "another rank's"
    assert pickle.loads((tmp_path / "rank_1").read_bytes())["entries"] == []


# --- what


def test_dtypes_have_the_names_that_torch_s_c_plus_plus_gives_them():
    headers = Path(torch.__file__).parent.glob("include/**/core/ScalarType.h")
    known = {name for h in headers for name in re.findall(r"_\([\w:<>]+, (\w+)\)", h.read_text())}
    ours = {d.name: scalar_type(d.name) for d in dtypes.BY_DTYPE.values()}
    assert set(ours.values()) <= known, "_SCALAR_TYPES of trace/flight_recorder.py"


def group_of(calls, entered, rank=0):
    peers = [Peer(r, 10 + r, "joined", n) for r, n in enumerate(entered)]
    return GroupTrace("g", rank, len(entered), [4, 6, 8][: len(entered)], peers, calls)


def call(number, state="done", operation="all_reduce", **changes):
    fields = {
        "operation": operation,
        "number": number,
        "reduce": "SUM",
        "dtype": "float32",
        "count": "4",
        "in_bytes": 16,
        "out_bytes": 16,
        "peer": -1,
        "tag": 0,
        "state": state,
        "issued": 1.7e9 + number,
        "began": 1.7e9 + number,
        "ended": None if state == "running" else 1.7e9 + number + 0.5,
    }
    return Record(**{**fields, **changes})


def test_an_entry_has_what_torch_s_has():
    found = dump_of([group_of([call(1), call(2, "running"), call(3, "queued", began=None, ended=None)], [2, 2])], 256)
    assert found["pg_config"] == {"g": {"name": "g", "desc": "undefined", "ranks": "[4, 6]"}}
    assert found["pg_status"]["0"] == {
        "last_enqueued_collective": 3,
        "last_started_collective": 2,
        "last_completed_collective": 1,
    }
    first = found["entries"][0]
    assert (first["input_sizes"], first["output_dtypes"], first["duration_ms"]) == ([[4]], ["Float"], 500.0)
    assert [(e["state"], e["retired"], e["record_id"]) for e in found["entries"]] == [
        ("completed", True, 0),
        ("started", False, 1),
        ("scheduled", False, 2),
    ]


def test_what_was_never_announced_is_left_out():
    calls = [call(1), call(2, "timed_out"), call(3, operation="rejected")]
    assert [e["collective_seq_id"] for e in dump_of([group_of(calls, [1, 2])], 256)["entries"]] == [1]
    assert [e["collective_seq_id"] for e in dump_of([group_of(calls, [2, 2])], 256)["entries"]] == [1, 2]
    assert [e["collective_seq_id"] for e in dump_of([group_of(calls, [None, None])], 256)["entries"]] == [1, 2]


def test_ranks_that_are_not_equally_far_forget_alike():
    starts = set()
    for last in (100, 101):
        calls = [call(n) for n in range(last - 39, last + 1)]
        starts.add(dump_of([group_of(calls, [last, 101])], 40)["entries"][0]["collective_seq_id"])
    assert starts == {65}


def test_messages_are_entries_of_their_sender_receiver_and_tag():
    calls = [
        call(n, state, operation, peer=peer, tag=7, count="-")
        for n, (state, operation, peer) in enumerate(
            [("done", "send", 0), ("running", "send", 0), ("waiting", "recv", 2), ("waiting", "recv", -1)]
        )
    ]
    found = dump_of([group_of(calls, [0, 0, 0], rank=1)], 256)
    assert [(e["process_group"][0], e["profiling_name"], e["collective_seq_id"]) for e in found["entries"]] == [
        ("g, rank 6 to rank 4, tag 7", "nccl:send 1->0", 1),
        ("g, rank 8 to rank 6, tag 7", "nccl:recv 0<-1", 1),
    ]
    assert found["pg_config"]["g, rank 6 to rank 4, tag 7"]["ranks"] == "[4, 6]"
