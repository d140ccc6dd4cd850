"""How a group comes by its mode: what its GPUs and processes allow, and what becomes of it when a rank cannot do its
part."""

import logging

import pytest

from c10d_custom.errors import TransportError
from c10d_custom.transport.cuda import peers
from c10d_custom.transport.cuda.peers import choose
from device_tensors import contents, device_tensor, options
from fake_world import World
from thread_ranks import run_ranks

pytestmark = pytest.mark.lane2


def words(gpus, mode="auto", pids=None, **other):
    alike = {"mode": mode, "earlier": [], "visible": 1}
    alike |= dict.fromkeys(("staging_bytes", "one_shot_bytes", "in_place_bytes", "host_bytes"), 1)
    alike |= {"p2p_shared": 0, "side_by_side": False}
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
        (words("aa", "p2p", p2p_shared=1), "p2p"),
        (words("aa", p2p_shared=1), "shared"),
        (words("aa", "p2p", p2p_shared=1, pids=[7, 7]), "staged"),
    ],
)
def test_the_mode_follows_from_gpus_and_processes(table, mode):
    assert choose(table).name == mode


def test_modes_that_cannot_be_are_refused():
    with pytest.raises(TransportError, match="needs a GPU for each rank"):
        choose(words("aa", "p2p"))


@pytest.mark.parametrize(
    "what", ["mode", "p2p_shared", "staging_bytes", "one_shot_bytes", "in_place_bytes", "host_bytes"]
)
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
    assert {m.name for m in modes} == {"staged"} and all("is not read here" in m.reason for m in modes)


def modes_of(size, world, gpus, caplog, **config):
    """[(a result, the mode)] of ranks, and what was said at WARNING."""

    def body(r):
        t = device_tensor(r, 5000, 1.0)
        r.pg.allreduce([t], options(False))
        return contents(r, t)[0].item(), next(iter(r.pg._transport._cuda.values())).mode

    with caplog.at_level(logging.INFO, "c10d_custom"):
        results = run_ranks(size, body, world=world, gpus=gpus, config=config)
    assert [value for value, _ in results] == [float(size)] * size and len({mode for _, mode in results}) == 1
    return results[0][1], [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


@pytest.mark.parametrize("size", [2, 3])
def test_flags_that_never_arrive_lead_to_the_next_mode(size, caplog, monkeypatch):
    """The first all_reduce does not wait for them: the trial has, for a while."""
    monkeypatch.setattr(peers, "_TRIAL", 0.5)
    world = World(1)
    world.flags_lost = True
    mode, warnings = modes_of(size, world, [f"GPU-{r}" for r in range(size)], caplog)
    assert mode.name == "shared" and "p2p mode does not work: rank" in mode.reason and "on the GPU" in mode.reason
    assert len(warnings) == 1 and "in shared mode: p2p mode does not work" in warnings[0]


def test_a_slower_mode_is_a_warning_of_one_rank(caplog):
    world = World(1)
    world.separate = True
    mode, warnings = modes_of(2, world, ["GPU-0", "GPU-1"], caplog)
    assert mode.name == "staged" and len(warnings) == 1 and "in staged mode: shared mode does not work" in warnings[0]


@pytest.mark.parametrize("visible, warned", [(1, False), (8, True)])
def test_ranks_that_share_a_gpu_beside_idle_ones_are_told(visible, warned, caplog):
    world = World(1)
    world.visible = visible
    mode, warnings = modes_of(2, world, None, caplog)
    assert mode.name == "shared" and bool(warnings) == warned
    assert not warned or "2 ranks on 1 GPU of 8: call torch.cuda.set_device(local rank)" in warnings[0]


def test_a_mode_that_is_wanted_is_no_warning(caplog):
    assert not modes_of(2, World(1), ["GPU-0", "GPU-1"], caplog, cuda_mode="staged")[1]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("asked, link, mode", [("auto", 1e12, "p2p"), ("auto", 1e6, "staged"), ("p2p", 1e6, "p2p")])
def test_a_link_that_is_slower_than_host_memory_is_not_taken(size, asked, link, mode, caplog):
    """Unless somebody asks for it. It is no warning: nothing is faster there."""
    world = World(1)
    world.rates["link"] = link
    found, warnings = modes_of(size, world, [f"GPU-{r}" for r in range(size)], caplog, cuda_mode=asked)
    assert found.name == mode and not warnings
    assert "32 KiB take " in found.reason and " ms over the slowest link, " in found.reason
