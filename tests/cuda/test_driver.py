"""The Driver and the calls of CUDA's driver that it makes, by the real binding, on a libcuda.so made here: of the real
cuda.h's signatures, with the host for a GPU."""

import contextlib
import ctypes
import importlib.util
import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch

from c10d_custom import dtypes
from c10d_custom.errors import TransportError
from c10d_custom.transport.cuda import compiler
from c10d_custom.transport.cuda import driver as cuda_driver
from c10d_custom.transport.cuda.driver import _BY_ROWS

cuda = pytest.importorskip("cuda.bindings.driver", reason="CUDA's binding comes with the extra 'test'")


def headers():
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations if spec else ():
        for found in Path(place).glob("*/include/cuda.h"):
            return found.parent
    pytest.skip("cuda.h comes with the extra 'test'")


def compiled(source, *flags):
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-isystem"]
    subprocess.run([*command, str(headers()), str(source), *flags], check=True, timeout=120)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    out = tmp_path_factory.mktemp("libcuda") / "libcuda.so.1"
    compiled(Path(__file__).with_name("fake_libcuda.cpp"), "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(out))
    return out


@pytest.fixture
def fake(path):
    library = ctypes.CDLL(str(path))  # by its name, the binding then finds it loaded
    library.fake_slow(0)
    library.fake_busy(0)
    library.fake_unsafe()
    return library


@pytest.fixture
def driver(fake, monkeypatch):
    cupy = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    current = [0]

    @contextlib.contextmanager
    def stream(on):
        before, current[0] = current[0], on.cuda_stream
        try:
            yield
        finally:
            current[0] = before

    for name, stand_in in {
        "current_device": lambda: 0,
        "get_device_properties": lambda device: types.SimpleNamespace(uuid="some-gpu"),
        "current_stream": lambda device: types.SimpleNamespace(cuda_stream=current[0]),
        "ExternalStream": lambda address, device: types.SimpleNamespace(cuda_stream=address),
        "stream": stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return cuda_driver.Driver(torch.device("cuda", 0))


def one_of_each(d):
    """Every call, in an order that makes sense."""
    memory, pinned, event, other = d.allocate(64), d.allocate_pinned(64), d.take_event(), d.take_event()
    stream, second = d.create_stream(), d.create_stream()
    opened = d.open_memory(d.export_memory(memory))
    assert opened == memory  # as this fake has it
    d.zero(stream, memory, 64)
    d.copy(stream, pinned, memory, 12)
    assert ctypes.string_at(pinned, 12) == bytes(12)
    ctypes.memmove(pinned, b"0123456789ab", 12)
    d.copy_in(stream, memory, pinned, 11)
    assert ctypes.string_at(memory, 12) == b"0123456789a\0"
    d.record(event, stream)
    d.wait(second, event)
    assert d.done(event) and not d.capturing()
    d.close_memory(opened)
    d.free(memory)
    d.free_pinned(pinned)
    first, last = d.take_event(timed=True), d.take_event(timed=True)
    assert d.milliseconds(first, last) == 1.5
    for e in (event, other, first, last):
        d.give_event(e, timed=e in (first, last))
    for s in (stream, second):
        d.destroy_stream(s)


def test_every_call_does_what_its_name_says(driver, fake):
    with driver.activate():
        one_of_each(driver)
        left = fake.fake_left()  # events, which serve again
        one_of_each(driver)
    assert fake.fake_left() == left


@pytest.mark.parametrize("nbytes", [0, 1, 2, 3, 4, 4095, _BY_ROWS - 1, _BY_ROWS, _BY_ROWS + 1])
def test_small_copies_to_the_gpu_go_by_rows_which_are_all_of_it(driver, fake, nbytes):
    source, target = ctypes.create_string_buffer(os.urandom(nbytes + 8)), ctypes.create_string_buffer(nbytes + 8)
    addresses = ctypes.addressof(target) + 4, ctypes.addressof(source) + 4
    fake.fake_by_rows()
    with driver.activate():
        driver.copy_in(driver.create_stream(), *addresses, nbytes)
    assert target.raw == bytes(4) + source.raw[4 : 4 + nbytes] + bytes(4)
    assert (fake.fake_by_rows() > 0) == (0 < nbytes < _BY_ROWS)


def test_an_allocation_is_known_by_what_cuda_says_of_an_address(driver):
    with driver.activate():
        first, other = driver.allocate(64), driver.allocate(13)  # the fake does not export the latter
        found = driver.allocation_of(first + 63)
        assert found[:2] == (first, 64) and found == driver.allocation_of(first)
        assert driver.allocation_of(other) is None
        driver.free(first)
        assert driver.allocation_of(first) is None
        again = driver.allocate(64)
        assert driver.allocation_of(again).number not in (0, found.number)
        driver.free(again)
        driver.free(other)


def test_no_thread_of_ours_spoils_a_capture_and_each_is_left_as_it_was(driver, fake):
    said = []

    def worker():
        before = fake.fake_mode(), fake.fake_contexts()
        for _ in range(2):
            with driver.activate(), driver.activate():
                one_of_each(driver)
        said.append((before, (fake.fake_mode(), fake.fake_contexts())))

    threads = [threading.Thread(target=worker) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert fake.fake_unsafe() == 0 and said == [((0, 0), (0, 0))] * 3


def test_out_of_memory_is_tried_again_without_what_torch_keeps(driver, fake, monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    with driver.activate():
        fake.fake_fails(2)
        driver.free(driver.allocate(64))
        assert emptied == [1]
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: fake.fake_fails(2))
        fake.fake_fails(2)
        with pytest.raises(TransportError, match="cuMemAlloc"):
            driver.allocate(64)


def test_without_a_context_calls_fail(driver):
    with pytest.raises(TransportError, match="cuMemAlloc"):
        driver.allocate(64)


BLOCKING = {
    "allocate": lambda d, m, e, s: d.allocate(8),
    "free": lambda d, m, e, s: d.free(m),
    "open_memory": lambda d, m, e, s: d.open_memory(bytes(64)),
    "close_memory": lambda d, m, e, s: d.close_memory(m),
    "done": lambda d, m, e, s: d.done(e),
    "record": lambda d, m, e, s: d.record(e, s),
    "destroy_stream": lambda d, m, e, s: d.destroy_stream(s),
}


@pytest.mark.parametrize("name", BLOCKING)
def test_a_call_that_blocks_holds_up_its_own_thread_alone(name, driver, fake):
    """Without the GIL, that is."""
    with driver.activate():
        at = driver.allocate(8), driver.take_event(), driver.create_stream()
        driver.zero(at[2], at[0], 8)
    began = threading.Event()
    over = []

    def block():
        with driver.activate():
            fake.fake_slow(400)
            began.set()
            BLOCKING[name](driver, *at)
            over.append(time.monotonic())

    thread = threading.Thread(target=block)
    thread.start()
    assert began.wait(10)
    while not over:
        seen = time.monotonic()
        time.sleep(1e-3)
        if not over and time.monotonic() - seen < 0.2:
            break  # this thread ran while that one was in the call
    ran_meanwhile = not over
    thread.join(10)
    fake.fake_slow(0)
    assert ran_meanwhile and over


def test_streams_are_our_own_and_come_before_ordinary_ones(driver, fake):
    with driver.activate():
        streams = [driver.create_stream() for _ in range(100)]
        assert len(set(streams)) == 100  # torch's pool has 32
        assert {fake.fake_priority(ctypes.c_void_p(s)) for s in streams} == {-4}
        streams.append(driver.create_stream(highest=True))
        assert fake.fake_priority(ctypes.c_void_p(streams[-1])) == -5
        for s in streams:
            driver.destroy_stream(s)


def test_a_future_comes_after_its_own_events_alone(driver, fake, monkeypatch):
    """On a stream on which nothing else is under way."""
    waits, created = [], []
    monkeypatch.setattr(driver, "wait", lambda stream, event: waits.append((stream, event)))
    real = driver.create_stream
    monkeypatch.setattr(driver, "create_stream", lambda: created.append(real()) or created[-1])
    seen = []

    class Future:
        def set_result(self, value):
            seen.append((value, driver.current_stream()))

    def resolve(value, events):
        with driver.after(events):
            Future().set_result(value)

    with driver.activate():
        resolve("a", [1, 2])
        resolve("b", [3])  # the first one's stream is idle
        fake.fake_busy(1)
        resolve("c", [4])
    assert len(created) == 2
    assert seen == [("a", created[0]), ("b", created[0]), ("c", created[1])]
    assert waits == [(created[0], 1), (created[0], 2), (created[0], 3), (created[1], 4)]


def test_copies_back_go_past_autograd(driver):
    leaf = torch.nn.Parameter(torch.zeros(6, 4).t())
    with driver.activate():
        driver.copy_tensors(driver.create_stream(), [(leaf, torch.ones(4, 6))])
    assert leaf.eq(1).all() and leaf.requires_grad and leaf.is_leaf


def test_an_error_is_named(driver, fake):
    with driver.activate():
        fake.fake_fails(2)
        with pytest.raises(TransportError, match="cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY: what it means"):
            driver.allocate_pinned(64)
        event = driver.take_event()
        fake.fake_busy(1)
        assert not driver.done(event)
        fake.fake_busy(0)
        fake.fake_fails(700)
        with pytest.raises(
            TransportError, match="CUDA_ERROR_ILLEGAL_ADDRESS: what it means, in work queued on this device before"
        ):
            driver.done(event)


def lacking(*_):
    raise RuntimeError("what the binding does not find")


def test_a_machine_without_the_driver_says_so(driver, monkeypatch):
    monkeypatch.setattr(cuda, "cuInit", lacking)
    with pytest.raises(TransportError, match="CUDA's driver: what the binding does not find"):
        cuda_driver.Driver(driver.device)


def test_a_kernel_s_code_is_there_before_it_is_launched(driver, fake, monkeypatch):
    """Its first launch may come in a capture, or while a kernel waits for it."""
    cupy = sys.modules["cupy"].cuda
    cupy.Device, cupy.driver = (
        lambda index: _Device(),
        types.SimpleNamespace(moduleLoadData=lambda code: 1, moduleGetFunction=lambda module, name: 4711),
    )
    monkeypatch.setattr(compiler, "compiled", lambda text, capability: b"")
    dtype = dtypes.BY_DTYPE[torch.float32]
    with driver.activate():
        assert driver.kernels.function("OneShot", dtype, int(dtypes.SUM)) == 4711
        assert fake.fake_loaded() == 4711
        assert driver.kernels.function("OneShot", dtype, int(dtypes.SUM)) == 4711 and not fake.fake_loaded()
        monkeypatch.setattr(cuda, "cuFuncLoad", lacking)
        assert driver.kernels.function("TwoShot", dtype, int(dtypes.SUM)) == 4711 and not fake.fake_loaded()


class _Device(contextlib.nullcontext):
    compute_capability = "90"
    attributes = {"MultiProcessorCount": 132}
