"""The tests of collectives in place can fail: with any one of these lines broken, they do."""

import contextlib
import sys
import types
from unittest import mock

import pytest

import in_place_ranks as ranks
import test_in_place
from c10d_custom.transport.cuda import in_place, mappings
from mutants import mutants

pytestmark = pytest.mark.full("minutes: programs of ranks, for each line")


def bytes_moved():
    test_in_place.test_bytes_moved("broadcast", lambda n: n, lambda n: 2 * n, 3)


NEVER = ranks.programs, ranks.in_order
# The line, what is put in its place, and which functions are to notice.
IN_PLACE = {
    "the stream is not awaited": ('self._await(call, left, "what', '(lambda *_: 0)(self, "what', NEVER),
    "the kernel is not awaited": ('self._await(call, left, "the', '(lambda *_: 0)(self, "the', NEVER),
    "an end that nobody waits for": ("said = tell(", "said = [bytes([True])] * self._n or tell(", NEVER),
    "who cannot is not heard": ("all(told.can for told in table)", "True", [ranks.cannot_be_exported]),
    "some can": ("if not all(told.can", "if not any(told.can", [ranks.cannot_be_exported]),
    "memory beyond an allocation": (" or address + tensor.nbytes > ", " or 0 > ", [ranks.beyond_its_segment]),
    "a handle for each call": ("self._told.pop(number, None) or _Told(", "_Told(", [ranks.exported_once]),
    "all is remembered": (" and len(self._told) < _KEPT", "", [ranks.told_again]),
    "what is freed stays told": ("[self._told.pop(number) for number in gone]", "[]", [ranks.freed]),
    "what is freed is not told": ("told.freed[i] = number", "pass", [ranks.freed]),
    "what is freed is not heard": ("[n for n in told.freed if n])", "[])", [ranks.freed]),
    "another in the place of what is freed": ("!= t.allocation]", "is None]", [ranks.freed]),
    "what was resized to nothing stays told": ("t.lost() or ", "", [ranks.resized]),
    "what is mapped is not kept": (
        "told.storage = storage  #",
        "told.storage = torch.UntypedStorage(0)  #",
        [ranks.dropped],
    ),
    "kept for good": ("held > self._limit or", "", [ranks.dropped]),
    "others' count as well": ("and t.alone()}", "}", [ranks.in_use]),
    "given up before the leader has heard": ("self._going += [", "_ = [", [ranks.dropped]),
    "outputs of all_gather are kept": (
        "once = call.op is Op.all_gather and",
        "once = False and",
        [ranks.for_a_call_alone],
    ),
    "kept however large": ("storage.nbytes() <= self._limit and", "", [ranks.for_a_call_alone]),
    "open after a call alone": ("[p.number for p in told.place if p.once]", "[]", [ranks.for_a_call_alone]),
    "in use for good": ("  self._leave(entered)\n        return True", "  return True", [ranks.freed]),
    "in use after what failed": (
        "self._leave(entered)\n            return False",
        "return False",
        [ranks.cannot_be_opened],
    ),
    "tried again": ("self._facts.in_place = False", "pass", [ranks.cannot_be_opened]),
    "nothing said of what failed": ("if said[LEADER] != bytes([True])", "if False", [ranks.cannot_be_opened]),
    "another's word for the leader's": ("said[LEADER]", "said[-1]", [ranks.cannot_be_opened]),
    "not closed with the group": ("self._driver.mappings.release(self)", "pass", [ranks.closed_with_the_group]),
    "its own memory opened": ("            if p.nbytes:", "            if True:", [ranks.exported_once]),
    "tensors at the beginning": ("found.append(base + p.address - p.base)", "found.append(base)", [ranks.views]),
    "all ranks have one owner": ("told.owner, allocation, bytes", "7, allocation, bytes", [ranks.in_order]),
    "the group is not the one": (".enter(self,", ".enter(None,", [ranks.in_order]),
    "outputs for inputs": ("[*call.inputs, *call.outputs]):", "[*call.outputs, *call.inputs]):", [ranks.programs]),
    "reduced as bytes": ("call.op in (Op.all_reduce, Op.reduce_scatter)", "False", [ranks.programs]),
    "moved as what it is": ("(BYTES, COPY, [])", "(call.dtype, call.redop, factors())", [ranks.programs]),
    "no factor": ("call.redop, factors())", "call.redop, [])", [ranks.programs]),
    "the root is the first": ("at[call.root][0]]", "at[0][0]]", [ranks.programs]),
    "the root is written": ("for r in ranks if r != call.root]", "for r in ranks]", [bytes_moved]),
    "another part": ("[Job([a[r] for a in at]", "[Job([a[0] for a in at]", [ranks.programs]),
    "another output": ("[at[r][len(at)]]", "[at[0][len(at)]]", [ranks.programs]),
    "one part's length for all": ("call.inputs[r].nbytes // item", "call.inputs[0].nbytes // item", [ranks.programs]),
    "one output's length for all": ("call.outputs[r].nbytes) for", "call.outputs[0].nbytes) for", [ranks.programs]),
    "inputs where outputs are": ("[a[1 + r] for a in at if", "[a[r] for a in at if", [ranks.programs]),
    "elements for bytes": ("call.inputs[0].nbytes // item)]", "call.inputs[0].nbytes)]", [ranks.in_order]),
}

UNITS = [
    test_in_place.test_groups_of_a_process_share_what_is_open,
    test_in_place.test_nothing_is_closed_that_a_call_may_use,
    test_in_place.test_a_call_that_failed_holds_what_it_used_until_its_group_is_over,
]
NO_SEEDS = [*UNITS, bytes_moved]
MAPPINGS = {
    "known by the owner alone": ("key = owner, allocation.number", "key = owner, 0", [ranks.more_than_are_kept]),
    "opened for each call": ("found = self._open.pop(key, None)", "found = None", [ranks.exported_once]),
    "what is stale stays": ("self._make_room(owner, allocation)", "pass", [ranks.overlapping]),
    "another's memory is stale": ("key[0] == owner and ", "", UNITS),
    "stale only where it begins alike": (
        "other.base < end and allocation.base < other.base + other.nbytes",
        "other.base == allocation.base",
        [ranks.overlapping],
    ),
    "what a call uses is stale": (
        "if other.used():\n                    raise",
        "if False:\n                    raise",
        UNITS,
    ),
    "what a call uses makes room": ("if not other.used()]", "]", UNITS),
    "no room is made": (
        "for key in idle[: max(0, len(self._open) - self._most + 1)]:",
        "for key in ():",
        [ranks.more_than_are_kept, *UNITS],
    ),
    "too much room is made": ("- self._most + 1)]:", "- self._most + 2)]:", UNITS),
    "what was used last makes room": ("for key in idle[: ", "for key in idle[::-1][: ", UNITS),
    "more than may be": ("if len(self._open) >= self._most:", "if False:", UNITS),
    "calls are not counted": ("found.users[group] += 1", "pass", UNITS),
    "forgotten amid a call": ("if found is not None and not found.used():", "if found is not None:", UNITS),
    "not forgotten": ("self._close((owner, number))", "pass", [ranks.freed]),
    "closed though others use it": ("if not found.users:", "if True:", UNITS),
    "a failed call's hold stays": ("found.users.pop(group, None)", "pass", UNITS),
    "closed and not forgotten": ("self._open.pop(key).address", "self._open[key].address", [ranks.freed]),
}


def mutant(module, before, after):
    """The module with that piece of its text replaced."""
    with open(module.__file__) as file:
        text = file.read()
    assert text.count(before) == 1, (text.count(before), before)
    made = types.ModuleType(module.__name__ + "_broken")
    made.__package__ = module.__package__
    sys.modules[made.__name__] = made
    exec(compile(text.replace(before, after), module.__file__, "exec"), made.__dict__)
    return made


def broken_collective(name):
    """(what breaks it, the functions that are to notice)"""
    before, after, functions = IN_PLACE[name]
    made = mutant(in_place, before, after)
    return [
        mock.patch.object(ranks, "in_place", made),
        mock.patch("c10d_custom.transport.cuda.peers.InPlace", made.InPlace),
    ], functions


def broken_cache(name):
    before, after, functions = MAPPINGS[name]
    made = mutant(mappings, before, after)
    return [
        mock.patch("fake_driver.Mappings", made.Mappings),
        mock.patch.object(test_in_place, "Mappings", made.Mappings),
    ], functions


SEEDS = 12
KINDS = {"collective": (broken_collective, IN_PLACE), "cache": (broken_cache, MAPPINGS)}
MUTATIONS = [(kind, name) for kind, (_, names) in KINDS.items() for name in names]


def check(kind, name):
    """What one of the functions says, or None: with ``name`` broken or, if that is None, nothing."""
    make, names = KINDS[kind]
    patches, functions = make(name) if name is not None else ([], {f: 0 for _, _, fs in names.values() for f in fs})
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        for function in functions:
            for seed in range(1 if function in NO_SEEDS else SEEDS if name is not None else 2):
                try:
                    function(*([] if function in NO_SEEDS else [seed]))
                except (Exception, pytest.fail.Exception) as error:
                    return f"{function.__name__}: seed {seed}: {error!r:.200} {error.__cause__!r:.200}"
    return None


SECONDS = 240


@pytest.fixture(scope="module")
def battery():
    with mutants("test_in_place_mutations") as made:
        yield made


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_as_it_is_passes(battery, kind):
    assert battery.noticed(SECONDS, kind, None) is None


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind, name", MUTATIONS, ids=lambda v: v.replace(" ", "_"))
def test_a_broken_line_is_noticed(battery, record_property, kind, name):
    how = battery.noticed(SECONDS, kind, name)
    assert how is not None
    record_property("figures", how)
