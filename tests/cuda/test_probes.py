"""The probes (doctor/probes) on a simulated GPU that is as one would like it, and on ones that are not: every answer is
what the GPU is like, what hangs is cut off, and no process is left."""

import dataclasses
import functools
import multiprocessing
import os
import time

import pytest

from c10d_custom.doctor.probes import run
from c10d_custom.doctor.probes.every import PROBES
from c10d_custom.transport.cuda.answers import fits
from c10d_custom.transport.cuda.decisions import QUESTIONS
from gpu.probes.simulated import SimulatedGpu, World

BY_NAME = {probe.name: probe for probe in PROBES}


@pytest.fixture(autouse=True)
def quick_processes(monkeypatch):
    """Of a server that has torch already: what the probes are given is picklable all the same."""
    multiprocessing.set_forkserver_preload(["c10d_custom.doctor.probes.every"])  # the server's path lacks tests/
    monkeypatch.setattr(run, "METHOD", "forkserver")


def found(name, folder, seconds=60.0, **world):
    probe = dataclasses.replace(BY_NAME[name], seconds=seconds)
    world["wrong"] = frozenset(world.get("wrong", ()))
    return run.ask(probe, functools.partial(SimulatedGpu, World(str(folder), **world)), seconds)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_gpu_as_one_would_like_it(name, tmp_path):
    said = found(name, tmp_path, death="ends")
    assert set(said.answers) == set(BY_NAME[name].asks), said
    assert all(fits(key, answer) for key, answer in said.answers.items())
    no = {key for key, answer in said.answers.items() if answer is False}
    assert no == ({"torch_expandable_exported"} if name == "expandable segments" else set()), said


def test_every_question_is_asked_once():
    asked = [key for probe in PROBES for key in probe.asks]
    assert sorted(asked) == sorted(QUESTIONS)


@pytest.mark.parametrize(
    "name, world, wanted",
    [
        ("memory", {"wrong": ["memory is not shared"]}, {"memory_shared": False, "torch_memory_exported": False}),
        ("memory", {"wrong": ["numbers come again"]}, {"torch_memory_exported_again": False}),
        ("memory", {"wrong": ["what was open is opened"]}, {"torch_memory_exported_again": False}),
        ("events", {"wrong": ["events order nothing"]}, {"events_order": False, "events_recorded_again": False}),
        ("events", {"wrong": ["waits follow the event"]}, {"events_order": True, "events_recorded_again": False}),
        ("a death, and events", {"death": "never"}, {"death_ends_event_wait": False, "death_spares_context": True}),
        ("a death, and events", {"death": "poisons"}, {"death_ends_event_wait": True, "death_spares_context": False}),
        ("stream memory operations", {"wrong": ["waits hold up others"]}, {"values_spare_others": False}),
        ("many streams", {"queues": 8}, {"values_streams": 8}),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x.get("wrong", x.values()))),
)
def test_a_gpu_that_is_not(name, world, wanted, tmp_path):
    said = found(name, tmp_path, **world)
    assert {key: said.answers.get(key) for key in wanted} == wanted, said
    assert ("death_ends_event_wait_s" in said.answers) == (wanted.get("death_ends_event_wait") is True)
    assert (said.remarks.get("death_ends_event_wait_s") == "never") == (world.get("death") == "never")


def test_what_hangs_is_answered_with_no_and_cut_off(tmp_path):
    began = time.monotonic()
    said = found("stream memory operations", tmp_path, seconds=5.0, wrong=["waits end never"])
    assert time.monotonic() - began < 5 + 2 * run.GRACE
    assert said.answers == {"values_order": False}  # what comes after it was not asked
    assert said.remarks == {"values_order": "no answer within 5 s"}


def test_a_stream_that_does_not_come_to_rest_is_a_no_too(tmp_path):
    said = found("stream memory operations", tmp_path, wrong=["waits end never"])
    assert said.answers == {"values_order": False} and said.remarks["values_order"].startswith("TimeoutError")


def test_an_error_leaves_the_question_open(tmp_path):
    said = found("stream memory operations", tmp_path, wrong=["no stream memory operations"])
    assert said.answers == {} and "cudaErrorNotSupported" in said.remarks["values_order"]


def test_no_process_is_left(tmp_path):
    found("a death, and events", tmp_path, seconds=3.0, death="never")
    assert not multiprocessing.active_children()


def test_what_is_asked_after_the_time_is_over(tmp_path):
    make = functools.partial(SimulatedGpu, World(str(tmp_path)))
    (said,) = [found for _, found in run.ask_all(PROBES[:1], make, 0.5)]
    assert said.answers == {} and said.remarks == {"memory_shared": "not asked: no time was left"}


def test_who_it_is(tmp_path):
    make = functools.partial(SimulatedGpu, World(str(tmp_path)))
    assert run.identify(make, 20) == {"uuid": "simulated", "driver": "1.0", "device": "simulated GPU"}
    with pytest.raises(RuntimeError, match="AttributeError"):
        run.identify(functools.partial(SimulatedGpu, None), 20)


def test_a_probe_s_environment_is_that_of_its_processes_only(tmp_path):
    before = dict(os.environ)
    found("expandable segments", tmp_path)
    assert dict(os.environ) == before
