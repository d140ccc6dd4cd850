"""``doctor --probe`` and ``--decisions``, and doctor's line on them, with simulated answers."""

import json
import subprocess
import sys

import pytest
import torch

from c10d_custom.doctor import probing
from c10d_custom.doctor.finding import State
from c10d_custom.doctor.probes import run
from c10d_custom.doctor.probes.every import PROBES
from c10d_custom.transport.cuda import answers
from c10d_custom.transport.cuda.decisions import TABLE

ABOUT = {"uuid": "u1", "driver": "1.2", "device": "Some GPU"}
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for module in (answers, probing):
        monkeypatch.setattr(module, "driver_version", lambda: ABOUT["driver"])
    return tmp_path / "c10d_custom"


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: type("Properties", (), {"uuid": "u1"}))


@pytest.fixture
def simulated(monkeypatch):
    """What each probe finds; {} unless set."""
    found = {}
    monkeypatch.setattr(run, "identify", lambda make, seconds: ABOUT)
    monkeypatch.setattr(run, "ask_all", lambda probes, make, s: ((p, found.get(p.name, run.Found())) for p in probes))
    return found


def ask():
    said, words = [], []
    status = probing.ask_and_keep(None, 1.0, said.append, words.append)
    return status, "\n".join(said), words


def test_answers_are_kept_after_each_probe(simulated):
    simulated["events"] = run.Found({"events_order": True, "host_us_record": 1.5})
    simulated["many streams"] = run.Found({"values_streams": 32}, {"values_streams": "a remark"})
    status, text, words = ask()
    wanted = {"events_order": True, "host_us_record": 1.5, "values_streams": 32}
    assert status == State.FINE and answers.answers_of("u1") == wanted
    assert len(words) == len(PROBES) and words[0]["answers"] == {} and words[-1]["answers"] == wanted
    assert "Some GPU, driver 1.2" in text and "Kept in" in text and "a remark" in text
    assert [line.split()[1] for line in text.splitlines() if line.startswith("  values_order ")] == ["open"]


def test_answers_that_no_question_has_are_not_kept(simulated):
    simulated["events"] = run.Found({"events_order": 7, "host_us_record": True, "events_recorded_again": True})
    ask()
    assert answers.answers_of("u1") == {"events_recorded_again": True}


def test_answers_that_cannot_be_kept(simulated, folder):
    folder.write_text("no folder")
    status, text, _ = ask()
    assert status == State.REMARK and "could not be kept" in text


def test_without_a_gpu_to_ask(monkeypatch, folder):
    monkeypatch.setattr(run, "identify", lambda make, seconds: (_ for _ in ()).throw(RuntimeError("no such thing")))
    status, text, words = ask()
    assert status == State.FAILS and text == "No GPU that can be asked: no such thing" and not words
    assert not folder.exists()


def test_all_of_the_table_is_printed_and_what_holds_is_marked():
    text = probing.decisions({"memory_shared": False, "values_streams": 8})
    lines = text.splitlines()
    for row in TABLE:
        assert any(line[2:].startswith(f"{row.choice}: ") for line in lines)
        assert all(any(need[0] in line for line in lines) for need in (*row.needs, *row.gain))
    assert [line.split(":")[0] for line in lines if line[0] == ">"] == ["> staged", "> host", "> staging"]
    assert "      met  memory_shared is no  (no)" in lines and "      not  values_streams >= 16  (8 streams)" in lines
    assert "      not  round_trip_us_events < round_trip_us_host  (open)" in lines


def test_the_line_of_the_doctor(one_gpu):
    said = probing.probes()
    assert said.state is State.FINE and "was not asked" in said.text and "order host" in said.text
    answers.keep({"memory_shared": False}, **ABOUT)
    said = probing.probes()
    assert "mode staged, order host" in said.text and said.facts["answers"] == {"memory_shared": False}


def test_the_table_by_this_machine_s_answers(one_gpu, capsys):
    answers.keep({"memory_shared": False}, **ABOUT)
    assert probing.print_decisions() == 0
    assert "> staged" in capsys.readouterr().out


def doctor(*options):
    return subprocess.run(
        [sys.executable, "-m", "c10d_custom", "doctor", *options], capture_output=True, text=True, timeout=120
    )


@no_gpu
def test_the_command_without_a_gpu(folder):
    out = doctor("--probe")
    assert out.returncode == State.FAILS and out.stdout.startswith("No GPU that can be asked: "), out.stderr
    assert "Traceback" not in out.stderr and not folder.exists()
    out = doctor("--decisions")
    assert out.returncode == 0 and "This machine was not asked." in out.stdout and "> host: " in out.stdout
    said = {f["name"]: f for f in json.loads(doctor("--json", "--no-self-test").stdout)["findings"]}
    assert said["probes"]["text"] == "no GPU to ask"
