"""The p2p kernels' protocol between ranks under ThreadSanitizer, with threads that are late at random; and that
these tests notice where it lacks a part."""

import os
import subprocess

import pytest

from host_kernels import BY_NAME, FUSED, HERE, compile_host, compiler, instances, text_of_files

pytestmark = pytest.mark.lane2

INSTANCES = instances(FUSED, [BY_NAME["int32", "SUM"], BY_NAME["float32", "PREMUL_SUM"]])

WAIT = "if (!call.barrier(false)) return;\n    "
# What must not be missing: the text, and what is put in its place.
MUTATIONS = {
    "one set of signals": ("signal[barriers_ & 1]", "signal[0]"),
    "one half of the staging": ("(number_ & 1 ? a_.half : 0)", "0"),
    "no barrier between the shots": (WAIT + "move<false>(a, call, a.ranks - 1", "move<false>(a, call, a.ranks - 1"),
    "no barrier in an all_gather": (WAIT + "move<false>(a, call, a.ranks, ", "move<false>(a, call, a.ranks, "),
    "no barrier in a broadcast": (WAIT + "const u32 copies", "const u32 copies"),
    "no barrier where all is reduced": ("if (!call.barrier(R::Operation::kScalesInput)) return;\n  fold", "fold"),
    "no waiting for the block before its signal": ("    sync_block();\n", ""),
    "no waiting for the block after its signals": ("return !sync_block_or(!all);", "return all;"),
    "a signal that orders nothing": ("store_release_system(&mine.flag", "store_relaxed_system(&mine.flag"),
    "a wait that orders nothing": ("load_acquire_system(&signal_", "load_relaxed_system(&signal_"),
    "the signal before the factor": (
        "      if (with_factor) mine.factor = a_.factor;\n      store_release_system(&mine.flag, flag);",
        "      store_release_system(&mine.flag, flag);\n      if (with_factor) mine.factor = a_.factor;",
    ),
    "a flag for two words": (" && low[1] >> 32 == flag", ""),
    "the same flag for all calls": (
        "low[0] >> 32 == flag && low[1] >> 32 == flag && high[0] >> 32 == flag && high[1] >> 32 == flag",
        "(low[0] & low[1] & high[0] & high[1]) >> 63 == flag >> 31",
    ),
    "one half of the words": ("(u64)(number & 1) * a_.ranks", "(u64)(number & 0) * a_.ranks"),
    "words of long ago": ("number_ % kCleaned < 2", "false"),
    "words of now are cleaned": ("words(a_.rank, 0, number_ + 1)", "words(a_.rank, 0, number_)"),
    "data that takes the place of signals": ("    call.gather();\n", ""),
    "no barrier behind what lies": ("if (!stages()) barrier(false);", ""),
    "the first block ends the call": ("!= gridDim.x - 1", "!= 0"),
    "no wait for one of the ranks": ("all = all && wait(rank)", "all = all && (rank == 1 || wait(rank))"),
}


def build(path, mutation=None):
    text = compiler.text_of(INSTANCES, [HERE / "device.h"])
    if mutation:
        before, after = MUTATIONS[mutation]
        assert before in text
        text = text.replace(before, after)
    compile_host(path, text + text_of_files("host_threads.h", "protocol.cpp"), "-g1", "-fsanitize=thread")


def run(path, *numbers):
    return subprocess.run(
        [str(path), *map(str, numbers)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"},
    )


@pytest.fixture(scope="module")
def protocol(tmp_path_factory):
    path = tmp_path_factory.mktemp("protocol") / "protocol"
    build(path)
    return path


@pytest.mark.parametrize(
    "size,blocks,threads,calls", [(2, 2, 3, 2100), (3, 2, 2, 1400), (4, 1, 3, 1400), (1, 3, 2, 70)]
)
def test_many_calls(protocol, size, blocks, threads, calls):
    out = run(protocol, size, blocks, threads, calls, 1, 120)
    assert out.returncode == 0, out.stderr


@pytest.mark.full("compiles the protocol anew for each")
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_part_that_is_missing_is_noticed(tmp_path, mutation):
    build(tmp_path / "protocol", mutation)
    for seed in range(1, 9):
        # Without its second set the protocol hangs: it is the time-out that tells.
        if run(tmp_path / "protocol", 3, 2, 2, 140, seed, 3).returncode != 0:
            return
    pytest.fail("nothing was noticed")
