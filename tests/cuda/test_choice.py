"""Which order a group takes: what no probe has found safe is taken by nobody, whoever asks for it."""

import itertools

import pytest

from c10d_custom.transport.cuda.choice import NEEDS, TRIED, choose_order, unmet
from device_tensors import contents, device_tensor, options
from fake_world import World
from thread_ranks import run_ranks

SAFE = {key: True if least is True else 64 for needs in NEEDS.values() for key, least in needs}
TIMES = {"round_trip_us_host": 30.0, "round_trip_us_values": 8.0, "round_trip_us_events": 12.0}


def test_without_a_probe_the_host_waits():
    assert choose_order("auto", None)[0] == choose_order("auto", {})[0] == "host"


def test_events_without_a_probe_are_refused_and_it_is_said():
    name, reason = choose_order("events", None)
    assert name == "host" and "events may leave streams waiting for ever here (no probe has run" in reason


def test_values_have_a_trial_of_their_own():
    assert choose_order("values", None)[0] == "values"


@pytest.mark.parametrize("key", sorted(key for key, _ in NEEDS["events"]))
@pytest.mark.parametrize("answer", [False, None, 0])
def test_one_answer_that_is_not_yes_is_enough(key, answer):
    answers = {**SAFE, **TIMES}
    if answer is None:
        del answers[key]
    else:
        answers[key] = answer
    name, reason = choose_order("events", answers)
    assert name == "host" and key in reason


def test_the_fastest_of_what_is_safe():
    assert choose_order("auto", {**SAFE, **TIMES})[0] == "values"
    assert choose_order("auto", {**SAFE, **TIMES, "values_streams": 8})[0] == "events"
    assert choose_order("auto", {**SAFE, **TIMES, "values_streams": 8, "events_order": False})[0] == "host"
    assert choose_order("auto", {**SAFE, **TIMES, "round_trip_us_host": 5.0})[0] == "host"
    assert choose_order("auto", {**SAFE, "round_trip_us_values": 8.0})[0] == "host"  # nothing to compare with


def test_nothing_is_ever_taken_that_is_not_safe():
    keys = [key for need in NEEDS.values() for key, _ in need]
    for missing in itertools.chain.from_iterable(itertools.combinations(keys, n) for n in (1, 2)):
        answers = {key: answer for key, answer in {**SAFE, **TIMES}.items() if key not in missing}
        for wanted in ("auto", *NEEDS):
            name, _ = choose_order(wanted, answers)
            assert not unmet(name, answers) or wanted == name in TRIED


def order_of(config, world):
    def body(r):
        t = device_tensor(r, 5000, 1.0)
        r.pg.allreduce([t], options(False))
        cuda = next(iter(r.pg._transport._cuda.values()))
        return contents(r, t)[0].item(), cuda._collectives.peers.order.name, cuda.mode.reason

    results = run_ranks(2, body, config={"cuda_mode": "shared", **config}, world=world)
    assert [value for value, _, _ in results] == [2.0, 2.0] and len({order for _, order, _ in results}) == 1
    return results[0][1:]


def test_a_group_takes_what_the_probe_has_found():
    world = World(1)
    world.probed = {**SAFE, **TIMES}
    assert order_of({}, world)[0] == "values"
    assert order_of({"cuda_order": "events"}, World(1, dead_events_pass=True))[0] == "events"
    order, reason = order_of({"cuda_order": "events"}, World(1, dead_events_pass=False))
    assert order == "host" and "death_ends_event_wait" in reason


def test_ranks_that_have_found_different_things_wait_on_the_host(monkeypatch):
    from fake_driver import FakeDriver

    monkeypatch.setattr(FakeDriver, "probed", property(lambda self: {**SAFE, **TIMES} if self.rank else None))
    order, reason = order_of({}, World(1))
    assert order == "host" and "differs between the ranks" in reason
