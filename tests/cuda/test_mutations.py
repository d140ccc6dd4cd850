"""The tests of this folder can fail: with any one step of the protocol left out or misplaced, they do."""

import time
from unittest import mock

import pytest
import torch

from c10d_custom.call import changed
from c10d_custom.transport.cuda import host_exchange, p2p, peers, registered, shared, staged, staged_messages, transport
from c10d_custom.transport.cuda.stream_op import StreamOp
from c10d_custom.transport.shm import ShmTransport
from fake_driver import FakeDriver
from fake_kernels import FakeKernels
from test_device_messages import both_ways, in_turns
from test_registered import different_tensors, every_op
from test_shared import Program, program
from thread_ranks import run_ranks

pytestmark = pytest.mark.lane2

P2P = {"cuda_mode": "p2p"}
SHARED, STAGED = {"cuda_mode": "shared"}, {"cuda_mode": "staged"}


def nothing(*_, **__):
    pass


def off(target, name, new=nothing, *more):
    return mock.patch.multiple(target, **{name: new}, **dict(zip(more[::2], more[1::2])))


def not_awaited(what):
    def came(self, call, event, seconds, this):
        return this == what or _CAME(self, call, event, seconds, this)

    return off(host_exchange.Place, "came", came)


_CAME, _PUT = host_exchange.Place.came, shared.SharedCollectives._put


def awaited_before_it_is_put(self, put):
    bases = _PUT(self, nothing)
    put(bases[self.me])
    return bases


def one_half(self, k):
    return [self.peers.staging[r] for r in range(self.n)]


def backwards(driver, stream, dtype, redop, factors, jobs):
    _REDUCE(driver, stream, dtype, redop, factors, [j._replace(sources=j.sources[::-1]) for j in jobs])


_REDUCE = FakeDriver.reduce


def slot_of_its_own(self, call, slot, lo, hi, in_place):
    return _FETCH(self, call, 0, lo, hi, in_place)


_FETCH = staged.StagedCollectives._fetch


def finished_at_once(self, stream):
    _BEGIN(self, stream)
    _FINISH(self, stream)


def not_finished_again(self, stream):
    if self.end is None:
        _FINISH(self, stream)


_BEGIN, _FINISH = StreamOp.begin, StreamOp.finish


def hasty(seed, size, steps, config, seconds):
    """A group that is destroyed as soon as its last collective is enqueued."""

    def body(r):
        t = torch.ones(5000)
        r.fill(t, torch.ones(5000))
        r.pg.allreduce([t]).wait()

    run_ranks(size, body, seed=seed, laziness=1.0, config=config, seconds=seconds)


def over_at_once(self):
    while self.copying:
        yield self.copying.popleft()


def on_gpus_of_their_own(seed, size, steps, config, seconds):
    """In the mode that is asked for: what does not work there must not be made up for in another."""
    p = Program.of(seed, size, steps)

    def body(r):
        p.run(r)
        assert next(iter(r.pg._transport._cuda.values())).mode.name == config["cuda_mode"]

    run_ranks(size, body, seed=seed, config=config, seconds=seconds, gpus=[f"GPU-{r}" for r in range(size)])


def hasty_on_gpus_of_their_own(seed, size, steps, config, seconds):
    """Destroyed while rank 0's stream is still on its way to the collectives."""

    def body(r):
        t = torch.ones(5000)
        r.fill(t, torch.ones(5000))
        r.pg.allreduce([t]).wait()
        until = time.monotonic() + 0.3
        if r.rank == 0:
            with r.driver.activate():
                r.driver.user(r.driver.current_stream(), lambda: None, ready=lambda: time.monotonic() > until)
        r.pg.allreduce([t]).wait()
        return t

    results = run_ranks(
        size, body, seed=seed, laziness=1.0, config=config, seconds=seconds, gpus=[f"GPU-{r}" for r in range(size)]
    )
    assert [t.unique().tolist() for t in results] == [[float(size**2)]] * size


def staging_of_the_rounds(self, setup, table):
    """The fused kernels in the memory of the rounds."""
    _OPEN(self, setup, table)
    self.fused.p2p._stagings = [self.staging[r] for r in range(self.size)]


_OPEN = peers.Peers.open


def on_a_stream_of_its_own(self, stream, call, number=0, **other):
    _P2P(self, self._kernels.driver.create_stream() if number else stream, call, number, **other)


def without_time(self, stream, call, *more, **other):
    _P2P(self, stream, changed(call, timeout=1e-9), *more, **other)


_P2P = p2p.P2p.run


def parts_in_one_place(self, stream, call, *more, **other):
    """Of an all_gather, or a reduce_scatter."""
    outputs, inputs = [*call.outputs][:1] * len(call.outputs), [*call.inputs][:1] * len(call.inputs)
    _P2P(self, stream, changed(call, outputs=outputs, inputs=inputs), *more, **other)


def numbered_by_its_rank(self, stream, call, number=0, **other):
    _P2P(self, stream, call, number and 1 + self._rank, **other)


_FINGERPRINT = p2p.P2p._fingerprint


def another_root(self, stream, call, *more, **other):
    _P2P(self, stream, changed(call, root=0), *more, **other)


MUTATIONS = {
    "no wait for what was put": (SHARED, lambda: not_awaited("what was queued for it, or before")),
    "awaited before it is put": (SHARED, lambda: off(shared.SharedCollectives, "_put", awaited_before_it_is_put)),
    "no meeting but the first": (SHARED, lambda: off(ShmTransport, "meet")),
    "one half for all rounds": (SHARED, lambda: off(shared.SharedCollectives, "_bases", one_half)),
    "an event for each wait": (SHARED, lambda: off(FakeDriver, "give_event"), hasty),
    "the sources backwards": (SHARED, lambda: off(FakeDriver, "reduce", backwards)),
    "the caller's stream is not waited for": (SHARED, lambda: off(StreamOp, "begin")),
    "the caller's stream does not wait": (SHARED, lambda: off(StreamOp, "join")),
    "the end is recorded at the beginning": (
        SHARED,
        lambda: off(StreamOp, "begin", finished_at_once, "finish", not_finished_again),
    ),
    "freed without waiting for those who have it open": (
        SHARED,
        lambda: off(ShmTransport, "unmarked", lambda self, mark: []),
    ),
    "closed while the stream is at work": (
        SHARED,
        lambda: off(transport.CudaTransport, "idle", lambda self, seconds: True),
        hasty,
    ),
    "several GPUs: no wait for what was put": (
        SHARED,
        lambda: not_awaited("what was queued for it, or before"),
        on_gpus_of_their_own,
    ),
    "several GPUs: awaited before it is put": (
        SHARED,
        lambda: off(shared.SharedCollectives, "_put", awaited_before_it_is_put),
        on_gpus_of_their_own,
    ),
    "several GPUs: no meeting but the first": (SHARED, lambda: off(ShmTransport, "meet"), on_gpus_of_their_own),
    "several GPUs: one half for all rounds": (
        SHARED,
        lambda: off(shared.SharedCollectives, "_bases", one_half),
        on_gpus_of_their_own,
    ),
    "fused: memory that is not zeroed": (P2P, lambda: off(FakeDriver, "zero"), on_gpus_of_their_own),
    "fused: staging of the rounds": (
        P2P,
        lambda: off(peers.Peers, "open", staging_of_the_rounds),
        on_gpus_of_their_own,
    ),
    "fused: one half for all calls": (
        P2P,
        lambda: off(FakeKernels, "half_of", lambda self, number, half: 0),
        on_gpus_of_their_own,
    ),
    "fused: on another stream": (P2P, lambda: off(p2p.P2p, "run", on_a_stream_of_its_own), on_gpus_of_their_own),
    "fused: freed before the others have closed": (
        P2P,
        lambda: off(peers.Peers, "close_imports", peers.Peers.free),
        hasty_on_gpus_of_their_own,
    ),
    "fused: the others' memory stays open": (
        P2P,
        lambda: off(peers.Peers, "close_imports"),
        hasty_on_gpus_of_their_own,
    ),
    "fused: closed while the stream is at work": (
        P2P,
        lambda: off(transport, "come_to", lambda *_: True),
        hasty_on_gpus_of_their_own,
    ),
    "fused: a rank leaves before others have come": (
        P2P,
        lambda: off(p2p.P2p, "busy", lambda self: False),
        hasty_on_gpus_of_their_own,
    ),
    "fused: the guard takes leaving for failing": (
        P2P,
        lambda: off(transport.CudaTransport, "prepare_to_leave", lambda self: self.cpu.leave() or time.sleep(0.1)),
        hasty_on_gpus_of_their_own,
    ),
    "fused: no time": (P2P, lambda: off(p2p.P2p, "run", without_time), on_gpus_of_their_own),
    "fused: parts in one place": (P2P, lambda: off(p2p.P2p, "run", parts_in_one_place), on_gpus_of_their_own),
    "fused: another root": (P2P, lambda: off(p2p.P2p, "run", another_root), on_gpus_of_their_own),
    "fused: a number of its own": (P2P, lambda: off(p2p.P2p, "run", numbered_by_its_rank), on_gpus_of_their_own),
    "registered: freed before the others have closed": (
        P2P,
        lambda: off(registered.Registered, "close_imports", registered.Registered.free),
        every_op,
    ),
    "registered: the others' memory stays open": (P2P, lambda: off(registered.Registered, "close_imports"), every_op),
    "registered: no comparison of places": (
        P2P,
        lambda: off(p2p.P2p, "_fingerprint", staticmethod(lambda *what: _FINGERPRINT(*what[:-2]))),
        different_tensors,
    ),
    "staged: the host does not wait for the GPU": (STAGED, lambda: not_awaited(staged._BEFORE)),
    "staged: one slot for all pieces": (STAGED, lambda: off(staged.StagedCollectives, "_fetch", slot_of_its_own)),
    "staged: the caller's stream is not waited for": (STAGED, lambda: off(StreamOp, "begin")),
    "staged: the caller's stream does not wait": (STAGED, lambda: off(StreamOp, "join")),
    "messages: sent before the bytes have come": (
        STAGED,
        lambda: off(staged_messages.Sending, "_copies_over", over_at_once),
        in_turns,
    ),
    "messages: memory given back under a copy": (
        STAGED,
        lambda: off(staged_messages.StagedTicket, "over", staged_messages.StagedTicket.done),
        in_turns,
    ),
    "messages: the caller's stream is not waited for": (STAGED, lambda: off(StreamOp, "begin"), in_turns),
    "messages: the caller's stream does not wait": (STAGED, lambda: off(StreamOp, "join"), in_turns),
    **{
        f"pieces, {config['cuda_mode']}: {name}": (config, mutation, both_ways)
        for config in (SHARED, STAGED)
        for name, mutation in {
            "moved on before they are copied": lambda: off(staged_messages.StagedTicket, "_copies_over", over_at_once),
            "the caller's stream is not waited for": lambda: off(StreamOp, "begin"),
            "the caller's stream does not wait": lambda: off(StreamOp, "join"),
        }.items()
    },
}


def test_what_is_left_as_it_is_passes():
    for seed in range(6):
        program(seed, 3, 12, SHARED)
        hasty(seed, 3, 1, SHARED, 10.0)
        on_gpus_of_their_own(seed, 3, 12, SHARED, 10.0)
        on_gpus_of_their_own(seed, 3, 12, P2P, 10.0)
        hasty_on_gpus_of_their_own(seed, 3, 1, P2P, 10.0)


@pytest.mark.full("tests the tests; as the other mutations, after a change of either")
@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_left_out_is_noticed(name, monkeypatch):
    config, mutation, *other = MUTATIONS[name]
    run = other[0] if other else program
    monkeypatch.setattr(transport, "_DRAIN", 0.3)
    caught = []
    with mutation():
        for seed in range(60):  # the first, but where another thread's look at the GPU hides it
            try:
                run(seed, 3, 12, config, seconds=3.0)
            except AssertionError as error:
                caught.append(error)
                break
    assert caught, "no test failed"
    print(f"{name}: caught at seed {seed}: {str(caught[0])[:200]} {str(caught[0].__cause__)[:160]}")
