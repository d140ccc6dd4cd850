"""One rank's side of a test of torch's suite, in a process that runs many of them one after another.

Upstream, each test has processes of its own (MultiProcessTestCase); what its `_run` does there is done here. Tests
leave by sys.exit with a known code when they are to be skipped.
"""

import os
import types
import unittest
import uuid
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch.distributed as dist

from .impersonation import as_gloo

RANKS = 4  # of expected.txt
GROUP_SECONDS = 20.0  # for each operation: below a test's deadline, so that the backend's own message comes first
BARRIER_SECONDS = 30.0  # upstream's 10 do not always do for ranks that outnumber the cores
# Compares dist.get_backend() with the name that the group has for DDP's C++ logger, which stays its own.
OWN_NAME = {"test_ddp_logging_data_cpu"}


_configured = {"BACKEND": "gloo", "WORLD_SIZE": str(RANKS)}


def configure(rank, world_size, backend):
    """For the life of this process: the number of ranks, and the name under which the tests ask for a backend."""
    _configured.update(BACKEND=backend, WORLD_SIZE=str(world_size))


@cache
def suite():
    """torch's module of tests, which reads its configuration when it is imported."""
    os.environ.update(_configured, INIT_METHOD="file://, each test's own", PYTORCH_DISABLE_RUNNING_SCRIPT_CHK="1")
    from torch.testing._internal.distributed import distributed_test

    # The tests know ranks by their PID, which two hosts may both have.
    mine = uuid.uuid4().int
    distributed_test.os = types.SimpleNamespace(**{**vars(os), "getpid": lambda: mine})
    distributed_test.get_profiling_event = _profiling_events(distributed_test.get_profiling_event)
    return distributed_test


def _profiling_events(find):
    """Upstream wants every event to end in another thread than it began in. A call of ours that need not leave the
    caller's thread does not; but number, names and shapes of the events are to be as upstream wants them."""

    def found(*args, **options):
        events = find(*args, **options)
        for event in events:
            event.is_async = True
        return events

    return found


@cache
def test_class():
    class Test(suite().TestDistBackend, suite().DistributedTest._DistTestBase):
        folder = None
        barriers = 0

        def _barrier(self, wait_for=None, timeout=BARRIER_SECONDS):
            """Past the backend, as upstream's, which looks every 0.1 s."""
            self.barriers += 1
            store = dist.FileStore(str(self.folder / "barriers"))
            store.set(f"{self.barriers} {self.rank}", "")
            ranks = range(wait_for or int(_configured["WORLD_SIZE"]))
            store.wait([f"{self.barriers} {rank}" for rank in ranks], timedelta(seconds=timeout))

    return Test


impersonate = cache(as_gloo)


def names(rank, world_size):
    return unittest.defaultTestLoader.getTestCaseNames(test_class())


def run(rank, world_size, name, folder, under_launcher, backend, ungated):
    """None if the test has passed, else the reason for which it was skipped. Raises what it raises.

    ungated: run it also where upstream lets only MPI do so.
    """
    asked = _configured["BACKEND"]
    if backend != asked:
        impersonate(backend)
    test = _test(rank, name, folder)
    from torch.testing._internal.common_utils import set_rng_seed

    where = {} if under_launcher else {"init_method": test.init_method, "rank": rank, "world_size": world_size}
    dist.init_process_group(backend if name in OWN_NAME else asked, timeout=timedelta(seconds=GROUP_SECONDS), **where)
    assert dist.group.WORLD.name() == backend, dist.group.WORLD.name()
    test._barrier()
    set_rng_seed()
    reason = _call(test, name, ungated)
    test._barrier()  # a rank that destroys its groups has left those of the others
    return reason


def reasons(rank, world_size, names, folder):
    """{name: the reason for which it is skipped} of tests that find one before they need a group."""
    return {name: _call(_test(rank, name, folder), name) for name in names}


def _test(rank, name, folder):
    module = suite()
    os.environ["TEMP_DIR"] = folder
    Path(folder, "test_dir").mkdir(exist_ok=True)
    module.INIT_METHOD = f"file://{folder}/another"
    test = test_class()(name)
    test.rank, test.folder, test.file_name = rank, Path(folder), f"{folder}/init"
    return test


def _call(test, name, ungated=False):
    module = suite()
    method = getattr(test_class(), name)
    if getattr(method, "__unittest_skip__", False) and not ungated:
        return method.__unittest_skip_why__  # it is left to unittest's runner, not used here, to heed this
    os.environ["BACKEND"] = "mpi" if ungated else _configured["BACKEND"]  # as the tests' own wrappers have it
    try:
        getattr(test, name)()
    except unittest.SkipTest as skip:
        return str(skip)
    except SystemExit as end:
        for skip in module.TEST_SKIPS.values():
            if skip.exit_code == end.code:
                return skip.message
        raise
    return None
