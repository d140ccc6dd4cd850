"""Who can get at a group's memory: its ranks. Not another user of the host; what strangers write to the socket over
which the segment is handed out is thrown away (tests/unit/test_local_datagrams.py)."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import c10d_custom
from c10d_custom.config import Config
from c10d_custom.errors import TransportError
from c10d_custom.transport.shm import segment

pytestmark = pytest.mark.lane2

SOURCES = Path(c10d_custom.__file__).parent
NOBODY = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_user_cannot_open_the_segment_of_a_process():
    fd = segment._create(Config(), 2)
    path = f"/proc/{os.getpid()}/fd/{fd}"
    code = f"""
import os, sys
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
for path in sys.argv[1:]:
    try:
        os.open(path, os.O_RDONLY)
        print("opened", path)
    except PermissionError:
        print("refused")
"""
    command = [sys.executable, "-S", "-c", code, path, f"/proc/{os.getpid()}/mem"]
    out = subprocess.run(command, text=True, capture_output=True, timeout=20, check=True).stdout
    assert out.split() == ["refused", "refused"]
    # One of the same user can, as it could read our memory: a user is not protected from himself.
    os.close(os.open(path, os.O_RDWR))
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    os.close(fd)


def test_a_segment_that_can_shrink_is_not_taken():
    """Whoever has it could shrink it under our feet, and a rank would die of SIGBUS."""
    fd = segment._create(Config(), 2)
    assert segment._unshrinkable(fd) == fd and not os.get_inheritable(fd)
    os.close(fd)
    with pytest.raises(TransportError, match="can shrink"):
        segment._unshrinkable(os.memfd_create("unsealed", os.MFD_ALLOW_SEALING))


# What makes objects of bytes by running what they say.
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
LOAD_MODULES = "threads.py", "read_ahead.py"  # their own way, by exec of what Python's loaders have found
WRITES_PICKLES = "flight_recorder.py"  # for torch's analyzer, which reads such
CALLS = {"eval", "exec", "loads_pickle", "load", "Unpickler", "_tensor_to_object"}


def test_nothing_received_is_unpickled():
    """By the package's sources: it imports no unpickler, and calls no function of torch or mpi4py that is one. The
    benchmark is a program on top, and its ranks use torch's object collectives among themselves. One module writes
    pickles, and has no other use of the module that does."""
    found = []
    for path in set(SOURCES.rglob("*.py")) - set((SOURCES / "bench").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [a.name.split(".")[0] for a in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0], *(a.name for a in node.names)]
            if path.name == WRITES_PICKLES and names == ["pickle"]:
                found += [f"{path.name} {use}" for use in _uses_of("pickle", tree) if use != "pickle.dumps"]
            elif bad := UNPICKLERS.intersection(names):
                found.append(f"{path.name}:{node.lineno} imports {bad}")
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                of = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
                if name == "exec" and path.name in LOAD_MODULES:
                    continue
                if (
                    (name in CALLS and of not in ("json",))
                    or name.endswith(("_object", "_object_list"))
                    or _pickles(of, name)
                ):
                    found.append(f"{path.name}:{node.lineno} calls {ast.unparse(node.func)}")
    assert not found, found


def _uses_of(module, tree):
    return [ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == module]


def _pickles(of, name):
    """mpi4py's methods in lower case send and receive pickled objects; those of buffers begin with a capital."""
    communicator = of.endswith(("world", "comm", "COMM_WORLD")) or "communicator" in of
    return communicator and name in {
        "send",
        "recv",
        "isend",
        "irecv",
        "bcast",
        "scatter",
        "gather",
        "allgather",
        "alltoall",
        "reduce",
        "allreduce",
        "sendrecv",
        "scan",
        "exscan",
        "ibcast",
    }
