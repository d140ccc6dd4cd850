"""How a group comes by its mode: what its GPUs and processes allow, and what becomes of it when a rank cannot do its
part."""

import logging

import pytest

from c10d_custom.errors import TransportError
from c10d_custom.transport.cuda.peers import choose
from device_tensors import contents, device_tensor, options
from fake_driver import FakeDriver
from fake_world import World
from test_answers import GOOD
from thread_ranks import run_ranks


def words(gpus, mode="auto", pids=None, **other):
    alike = {"mode": mode, "found_mode": "trial", "order": "auto", "earlier": []}
    alike |= dict.fromkeys(("staging_bytes", "one_shot_bytes", "in_place_bytes", "host_bytes"), 1)
    return [{"gpu": g, "pid": (pids or range(len(gpus)))[i], **alike, **other} for i, g in enumerate(gpus)]


@pytest.mark.parametrize(
    "table, mode",
    [
        (words("ab"), "p2p"),
        (words("aa"), "shared"),
        (words("aba"), "shared"),
        (words("a"), "shared"),
        (words("ab", "shared"), "shared"),
        (words("ab", "staged"), "staged"),
        (words("aa", pids=[7, 7]), "staged"),
        (words("ab", "p2p"), "p2p"),
        (words("ab", found_mode="staged"), "staged"),
        (words("ab", "shared", found_mode="staged"), "shared"),
    ],
)
def test_the_mode_follows_from_gpus_and_processes(table, mode):
    assert choose(table).name == mode


def test_modes_that_cannot_be_are_refused():
    with pytest.raises(TransportError, match="needs a GPU for each rank"):
        choose(words("aa", "p2p"))


@pytest.mark.parametrize("what", ["mode", "staging_bytes", "order", "one_shot_bytes", "in_place_bytes", "host_bytes"])
def test_variables_that_differ_are_refused(what):
    mixed = words("aa")
    mixed[1][what] = "other"
    variable = f"C10D_CUSTOM_CUDA_{what.upper()}"
    with pytest.raises(TransportError, match=f"{variable} differs between the ranks.*rank 1: other"):
        choose(mixed)


def first_all_reduce(step, config):
    """[(a result, the mode)] of three ranks, one of which fails at ``step``."""

    def body(r):
        t = device_tensor(r, 5000, 1.0)
        if r.rank == 1:
            real = r.driver.create_event

            def create_event(shared=False):
                if shared and step == "create_event":
                    raise RuntimeError("out of luck")
                return real(shared)

            r.driver.create_event = create_event
            if step != "create_event":
                r.driver.fails[step] = RuntimeError("out of luck")
        r.pg.allreduce([t], options(False))
        return contents(r, t)[0].item(), next(iter(r.pg._transport._cuda.values())).mode

    return run_ranks(3, body, config={"cuda_mode": "shared", **config})


@pytest.mark.parametrize("step", ["allocate", "export_memory", "open_memory"])
def test_what_one_rank_cannot_do_makes_all_fall_back(step, caplog):
    with caplog.at_level(logging.INFO, "c10d_custom"):
        results = first_all_reduce(step, {})
    assert [v for v, _ in results] == [3.0] * 3
    assert {m.name for _, m in results} == {"staged"}
    assert all("rank 1" in m.reason and "out of luck" in m.reason for _, m in results)
    assert sum("in staged mode" in line for line in caplog.messages) == 3  # once for each rank


@pytest.mark.parametrize("step", ["create_event", "export_event", "open_event"])
def test_events_that_one_rank_cannot_share_give_way_to_the_host(step):
    for value, mode in first_all_reduce(step, {"cuda_order": "events"}):
        assert value == 3.0 and mode.name == "shared"
        assert all(text in mode.reason for text in ("ordered by host", "events do not work", "rank 1", "out of luck"))


def test_memory_that_only_seems_shared_is_found_out():
    def body(r):
        t = device_tensor(r, 5000, 1.0)
        if r.rank == 0:
            real = r.driver.open_memory

            def open_memory(handle):  # somewhere else, as a driver that lies gives it
                address = real(handle)
                r.driver.close_memory(address)
                r.lost = r.driver.allocate(65536)
                return r.lost

            r.driver.open_memory = open_memory
            r.driver.close_memory = lambda address, real=r.driver.close_memory: (
                r.driver.free(address) if address == getattr(r, "lost", None) else real(address)
            )
        r.pg.allreduce([t], options(False))
        return next(iter(r.pg._transport._cuda.values())).mode

    modes = run_ranks(2, body, config={"cuda_mode": "shared"})
    assert {m.name for m in modes} == {"staged"} and all("does not read what rank 1" in m.reason for m in modes)


def test_values_that_do_not_work_give_way_to_the_host():
    def body(r):
        if r.rank == 0:
            r.driver.wait_value = lambda stream, address, value: (_ for _ in ()).throw(
                RuntimeError("no such operation")
            )
        t = device_tensor(r, 5000, 1.0)
        r.pg.allreduce([t], options(False))
        return contents(r, t)[0].item(), next(iter(r.pg._transport._cuda.values())).mode.reason

    for value, reason in run_ranks(2, body, config={"cuda_mode": "shared", "cuda_order": "values"}):
        assert value == 2.0 and "ordered by host" in reason and "no such operation" in reason


def test_what_the_probes_found_for_one_rank_counts_for_all(monkeypatch):
    def probed(driver):
        return {"memory_shared": False} if driver.rank else None

    monkeypatch.setattr(FakeDriver, "probed", property(probed))

    def body(r):
        t = device_tensor(r, 5000, 1.0)
        r.pg.allreduce([t], options(False))
        return contents(r, t)[0].item(), next(iter(r.pg._transport._cuda.values())).mode

    for value, mode in run_ranks(2, body):
        assert value == 2.0 and mode.name == "staged" and "the probes found" in mode.reason


def order_of(config, world):
    def body(r):
        t = device_tensor(r, 5000, 1.0)
        r.pg.allreduce([t], options(False))
        cuda = next(iter(r.pg._transport._cuda.values()))
        return contents(r, t)[0].item(), cuda._collectives.peers.order.name, cuda.mode.reason

    results = run_ranks(2, body, config={"cuda_mode": "shared", **config}, world=world)
    assert [value for value, _, _ in results] == [2.0, 2.0] and len({order for _, order, _ in results}) == 1
    return results[0][1:]


def test_a_group_takes_the_order_that_the_probes_allow():
    world = World(1)
    world.probed = GOOD
    assert order_of({}, world)[0] == "values"
    assert order_of({"cuda_order": "events"}, World(1, dead_events_pass=True))[0] == "events"
    order, reason = order_of({"cuda_order": "events"}, World(1, dead_events_pass=False))
    assert order == "host" and "death_ends_event_wait" in reason


def test_ranks_that_have_found_different_things_wait_on_the_host(monkeypatch):
    monkeypatch.setattr(FakeDriver, "probed", property(lambda self: GOOD if self.rank else None))
    order, reason = order_of({}, World(1))
    assert order == "host" and "differs between the ranks" in reason
