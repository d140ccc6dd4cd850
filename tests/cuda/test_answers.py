"""Answers of the probes: what is kept is read again, what others may have written is not; and what they decide."""

import itertools
import json
import os
import stat

import pytest

from c10d_custom import config
from c10d_custom.transport.cuda import answers
from c10d_custom.transport.cuda.decisions import QUESTIONS, TABLE, TRIED, choose_order, decide

UUID, DRIVER = "a1b2-c3", "580.1.2"
SAID = {"values_order": True, "values_streams": 32, "round_trip_us_host": 40.5, "memory_shared": False}
# As one would like them.
GOOD = {key: 1.0 if question.unit else True for key, question in QUESTIONS.items()} | {
    "values_streams": 32,
    "round_trip_us_host": 50.0,
    "round_trip_us_events": 20.0,
    "round_trip_us_values": 10.0,
    "death_ends_event_wait_s": 0.2,
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(answers, "driver_version", lambda: DRIVER)
    return tmp_path / "c10d_custom"


@pytest.fixture
def file(folder):
    return answers.keep(SAID, UUID, DRIVER, "some GPU")


def test_what_is_kept_is_found_again(file, folder):
    assert answers.answers_of(UUID) == SAID
    assert answers.kept(UUID, DRIVER)["device"] == "some GPU"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert os.listdir(folder) == [file.name]


def test_another_gpu_or_driver_has_answers_of_its_own(file, monkeypatch):
    assert answers.answers_of("other") is None
    monkeypatch.setattr(answers, "driver_version", lambda: "581.0")
    assert answers.answers_of(UUID) is None


@pytest.mark.parametrize("uuid, driver", [("", DRIVER), (UUID, "")])
def test_a_gpu_that_cannot_be_told_from_others_has_none(uuid, driver):
    with pytest.raises(OSError):
        answers.keep(SAID, uuid, driver, "x")
    assert answers.kept(uuid, driver) is None


def test_names_lead_nowhere_else(folder):
    assert answers.file_of("../../etc/x", "1/2").parent == folder


def changed(path, **words):
    path.write_text(json.dumps(json.loads(path.read_text()) | words))


SPOILS = {
    "readable by others": lambda path: path.chmod(0o644),
    "writable by the group": lambda path: path.chmod(0o620),
    "a link": lambda path: (path.rename(path.with_name("real")), path.symlink_to(path.with_name("real"))),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path, 0o600)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "empty": lambda path: path.write_text(""),
    "cut off": lambda path: path.write_text(path.read_text()[:-9]),
    "no text": lambda path: path.write_bytes(b"\x80\x04\xff"),
    "too long": lambda path: path.write_text(path.read_text() + " " * (1 << 16)),
    "too deep": lambda path: path.write_text("[" * 60_000),
    "a list": lambda path: path.write_text("[]"),
    "of another format": lambda path: changed(path, format=2),
    "of another GPU": lambda path: changed(path, uuid="other"),
    "of another kernel": lambda path: changed(path, kernel="1.0"),
    "no date": lambda path: changed(path, date=None),
    "answers of no kind": lambda path: changed(path, answers=[]),
    "an unknown question": lambda path: changed(path, answers={"x": True}),
    "a number for yes or no": lambda path: changed(path, answers={"values_order": 1}),
    "yes for a number": lambda path: changed(path, answers={"values_streams": True}),
    "text for a number": lambda path: changed(path, answers={"values_streams": "32"}),
    "less than nothing": lambda path: changed(path, answers={"values_streams": -1}),
    "no number": lambda path: changed(path, answers={"values_streams": float("nan")}),
    "endless": lambda path: path.write_text(path.read_text().replace("32", "9" * 400)),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_a_file_that_is_not_sound_is_no_file(file, spoil):
    spoil(file)
    assert answers.answers_of(UUID) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="a file of another user's takes root")
def test_a_file_of_another_user_is_no_file(file):
    os.chown(file, 12345, -1)
    assert answers.answers_of(UUID) is None


def test_without_a_home(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", "/some/home")
    assert str(config.cache_folder()) == "/some/home/.cache/c10d_custom"
    monkeypatch.setenv("HOME", "relative")
    assert config.cache_folder() is None and answers.answers_of(UUID) is None


def test_the_version_of_the_driver(monkeypatch, tmp_path):
    monkeypatch.undo()
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue\nGCC 13.3.0\n")
    monkeypatch.setattr(answers, "_VERSIONS", (str(tmp_path / "missing"), str(tmp_path / "version")))
    assert answers.driver_version() == "580.159.04"


# --- the table


def test_the_table_is_sound():
    subjects = [row.subject for row in TABLE]
    for subject in dict.fromkeys(subjects):
        rows = [row for row in TABLE if row.subject == subject]
        last = rows[-1]
        assert not last.needs and not last.gain, f"{subject}: the last row must hold whatever was answered"
        assert len({row.choice for row in rows}) == len(rows)
    for row in TABLE:
        for key, relation, other in (*row.needs, *row.gain):
            assert key in QUESTIONS and (not isinstance(other, str) or other in QUESTIONS)
            assert (relation == "is") == (not QUESTIONS[key].unit) == isinstance(other, bool)


def choices(said):
    return {subject: row.choice for subject, row in decide(said).items()}


DEFAULT = {"mode": "trial", "order": "host", "memory": "staging"}


@pytest.mark.parametrize("said", [None, {}])
def test_without_answers_nothing_is_relied_upon(said):
    assert choices(said) == DEFAULT


def test_with_all_answers_as_one_would_like_them():
    assert choices(GOOD) == {"mode": "trial", "order": "values", "memory": "mapped"}


NEEDED = [(row, need) for row in TABLE for need in (*row.needs, *row.gain)]


@pytest.mark.parametrize("row, need", NEEDED, ids=[f"{row.choice}-{need[0]}" for row, need in NEEDED])
def test_each_need_is_needed(row, need):
    """With all that a row needs it is chosen (unless one before it is); without any one of them it is not."""
    key, relation, other = need
    met = dict(GOOD)
    if row.choice == "events":
        met["values_order"] = False
    if relation == "is":
        met[key] = other
    assert decide(met)[row.subject] is row
    worse = {"is": not other, ">=": 0, "<": 99.0}[relation]
    assert decide({**met, key: worse})[row.subject] is not row
    del met[key]
    assert decide(met)[row.subject] is not row


@pytest.mark.parametrize("said", [None, {}, {**GOOD, "death_ends_event_wait": False}, {"events_order": True}])
@pytest.mark.parametrize("wanted", ["auto", "events", "values", "host"])
def test_events_are_never_chosen_without_the_probes_saying_so(wanted, said):
    name, _ = choose_order(wanted, said)
    assert name != "events"
    assert wanted not in TRIED or name == wanted


def test_the_next_order_is_taken_where_one_is_not_safe_or_not_faster():
    assert choose_order("auto", {**GOOD, "values_streams": 8})[0] == "events"
    assert choose_order("auto", {**GOOD, "round_trip_us_values": 60.0})[0] == "events"
    assert choose_order("auto", {**GOOD, "values_streams": 8, "events_order": False})[0] == "host"
    assert choose_order("auto", {**GOOD, "round_trip_us_host": 5.0})[0] == "host"


ORDERS = {row.choice: row.needs for row in TABLE if row.subject == "order"}


def test_nothing_is_ever_taken_that_is_not_safe():
    keys = [key for needs in ORDERS.values() for key, _, _ in needs]
    for missing in itertools.chain(itertools.combinations(keys, 1), itertools.combinations(keys, 2)):
        for answer in (None, False, 0):
            said = {**GOOD, **dict.fromkeys(missing, answer)}
            for wanted in ("auto", *ORDERS):
                name, _ = choose_order(wanted, said)
                assert not {key for key, _, _ in ORDERS[name]} & set(missing) or wanted == name in TRIED


def test_what_is_wanted_by_name_need_not_be_faster():
    slow = {**GOOD, "round_trip_us_events": 999.0}
    assert choose_order("events", slow) == ("events", "C10D_CUSTOM_CUDA_ORDER says so")
    assert "death_spares_context" in choose_order("events", {**slow, "death_spares_context": False})[1]
    assert "no probe has run" in choose_order("events", None)[1]
