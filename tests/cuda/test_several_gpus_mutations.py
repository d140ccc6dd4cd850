"""The tests of ranks that have two GPUs each can fail: with any one of these lines of by_device.py broken, they do."""

from unittest import mock

import pytest

import test_several_gpus as tests
from c10d_custom.transport import by_device
from mutants import mutants
from test_in_place_mutations import mutant

pytestmark = pytest.mark.full("tests the tests: after a change of by_device.py")


def in_turn():
    for mode in tests.MODES:
        tests.test_collectives_of_both_gpus_in_turn(2, mode)


def order():
    tests.test_gpus_belong_together_by_the_order_of_first_use("shared")


def mixed():
    tests.test_gpus_in_mixed_order_are_an_error_that_says_so(2, "shared")


def barrier():
    for busy in (0, 1):
        tests.test_a_barrier_is_one_for_all_gpus(2, busy)


def messages():
    tests.test_messages_of_either_gpu_to_either("staged")


def end():
    tests.test_a_group_s_end_frees_what_it_has_on_each()


def ddp():
    tests.test_a_model_on_two_gpus(ddp_without, 2)


ONE = "self._cuda.get(device) or self._open(device)", "next(iter(self._cuda.values()), None) or self._open(device)"
BROKEN = {
    "one transport for all": (*ONE, in_turn),
    "of two GPUs the seeds' DDP takes one": (*ONE, ddp),
    "together by their numbers": ("self._ordinals.setdefault(device, len(self._ordinals))", "device.index", order),
    "not compared": ("= self._ordinals.setdefault(device,", "= 0 * self._ordinals.setdefault(device,", mixed),
    "all have one place": ("len(self._ordinals))\n", "0)\n", mixed),
    "carried out on the first": (
        "self._cuda[call.device].execute(call)",
        "[*self._cuda.values()][0].execute(call)",
        in_turn,
    ),
    "each in an order of its own": (
        "if self._queue is None:\n                self",
        "if True:\n                self",
        in_turn,
    ),
    "a message goes by the first": (
        'self._cuda[cast("torch.device", message.device)].post(',
        "[*self._cuda.values()][0].post(",
        messages,
    ),
    "a message is issued on the first": (
        "return cuda.issue(call)\n        if",
        "return [*self._cuda.values()][0].issue(call)\n        if",
        messages,
    ),
    "a barrier marks its own GPU alone": ("if other is not cuda:", "if False:", barrier),
    "a barrier awaits its own GPU alone": ("in (*last.beside, last):", "in (last,):", barrier),
    "a barrier awaits the other GPUs alone": ("in (*last.beside, last):", "in last.beside:", barrier),
    "what was used before is not told": (
        "[self._cuda[device].driver.uuid for device in list(self._ordinals)]",
        "[]",
        tests.test_a_gpu_that_another_rank_has_used_before_does_without_waiting_kernels,
    ),
    "one is closed": (
        "(self.cpu, list(self._cuda.values()), self",
        "(self.cpu, list(self._cuda.values())[:1], self",
        end,
    ),
}


def broken(name):
    before, after, _ = BROKEN[name]
    return mutant(by_device, before, after).ByDevice


def ddp_without(p):
    """In a process of its own, whose group is there already."""
    by_device.ByDevice.issue = broken("of two GPUs the seeds' DDP takes one").issue
    return tests.ddp_of_a_model_on_two_gpus(p)


def check(name):
    """What one of the tests says, or None: with ``name`` broken or, if that is None, nothing."""
    if name is None:
        tests.test_a_model_on_two_gpus(tests.ddp_of_a_model_on_two_gpus, 2)
        functions = {function for _, _, function in BROKEN.values() if function is not ddp}
    else:
        functions = {BROKEN[name][2]}
    with mock.patch("thread_ranks.ByDevice", by_device.ByDevice if name is None else broken(name)):
        for function in functions:
            try:
                function()
            except (Exception, pytest.fail.Exception) as error:
                return f"{function.__name__}: {error!r:.200} {error.__cause__!r:.200}"
    return None


SECONDS = 120


@pytest.fixture(scope="module")
def battery():
    with mutants("test_several_gpus_mutations") as made:
        yield made


@pytest.mark.timeout(150)
def test_what_is_left_as_it_is_passes(battery):
    assert battery.noticed(SECONDS, None) is None


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", BROKEN, ids=lambda name: name.replace(" ", "_"))
def test_a_broken_line_is_noticed(battery, record_property, name):
    how = battery.noticed(SECONDS, name)
    assert how is not None
    record_property("figures", how)
