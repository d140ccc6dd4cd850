"""Who can get at a group's memory: its ranks. Not another user of the host, nor whoever talks to the socket over which
the segment is handed out; and what talks there holds nobody up."""

import ast
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore

import c10d_custom
from c10d_custom.config import Config
from c10d_custom.creation.exchange import Exchange
from c10d_custom.errors import TransportError
from c10d_custom.launch.door import hello
from c10d_custom.transport.shm import segment

pytestmark = pytest.mark.lane2

SOURCES = Path(c10d_custom.__file__).parent
NOBODY = 65534
RANKS = 3

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


class HandOver:
    """Rank 0's side, in a thread; `fetch` is the other ranks'."""

    def __init__(self):
        store = HashStore()
        self.exchanges = [Exchange(store, rank, RANKS, 20.0) for rank in range(RANKS)]
        self.fd = segment._create(Config(), RANKS)
        self.token = secrets.token_bytes(16)
        self.server = socket.socket(socket.AF_UNIX)
        self.name = f"c10d_custom-test-{secrets.token_hex(8)}"
        self.server.bind("\0" + self.name)
        self.server.listen(segment._QUEUE)
        self.offer = {"socket": self.name, "token": self.token.hex()}
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self):
        with self.server:
            segment._serve(self.server, self.fd, self.token, RANKS, self.exchanges[0])

    def fetch(self):
        """Both other ranks get it, soon."""
        began = time.monotonic()
        for rank in range(1, RANKS):
            fd = segment._fetch(self.offer, rank, self.exchanges[rank])
            assert os.path.sameopenfile(fd, self.fd)
            assert not os.get_inheritable(fd)
            os.close(fd)
        self.thread.join(5)
        assert not self.thread.is_alive()
        return time.monotonic() - began


@pytest.fixture
def hand_over():
    made = HandOver()
    yield made
    os.close(made.fd)


def connect(name):
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(5)
    peer.connect("\0" + name)
    return peer


HOSTILE = {
    "silence": lambda h: b"",
    "garbage": lambda h: os.urandom(1000),
    "half a hello": lambda h: hello(h.token, 1)[:7],
    "a wrong token": lambda h: hello(bytes(16), 1),
    "a rank there is not": lambda h: hello(h.token, RANKS),
    "rank 0": lambda h: hello(h.token, 0),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_strangers_get_nothing_and_hold_nobody_up(hand_over, kind):
    """Of the same user: those of others are not even heard."""
    said = HOSTILE[kind](hand_over)
    with contextlib.ExitStack() as held:
        strangers = []
        for _ in range(300):
            strangers.append(held.enter_context(connect(hand_over.name)))
            with contextlib.suppress(OSError):
                strangers[-1].sendall(said)
        assert hand_over.fetch() < 5
        for stranger in strangers:
            with contextlib.suppress(ConnectionError):
                data, fds, *_ = socket.recv_fds(stranger, 100, 10)
                assert not fds and data in (b"", segment._REFUSED)


def other_user(code, *arguments):
    """Starts Python as nobody."""
    start = f"import os, socket, sys\nos.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
    return subprocess.Popen(
        [sys.executable, "-S", "-c", start + code, *map(str, arguments)],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


@as_root
def test_another_user_gets_nothing_even_with_the_token(hand_over):
    """It connects thousands of times, from before the first rank to after the last."""
    code = """
print("ready", flush=True)
got = tries = 0
held = []
try:
    while True:
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(5)
        try:
            peer.connect("\\0" + sys.argv[1])
            tries += 1
            if tries % 2:
                held = held[-200:] + [peer]     # some wait, and hold their connection
                continue
            peer.sendall(bytes.fromhex(sys.argv[2]))
            got += len(socket.recv_fds(peer, 1, 1)[1])
        except ConnectionRefusedError:
            break
        except OSError:
            pass
finally:
    print(got, tries, flush=True)
"""
    stranger = other_user(code, hand_over.name, hello(hand_over.token, 1).hex())
    assert stranger.stdout.readline() == "ready\n"
    time.sleep(0.3)
    assert hand_over.fetch() < 5
    got, tries = map(int, stranger.communicate(timeout=20)[0].split())
    assert got == 0 and tries > 100


@as_root
def test_another_user_cannot_open_the_segment_of_a_process(hand_over):
    path = f"/proc/{os.getpid()}/fd/{hand_over.fd}"
    code = """
for path in sys.argv[1:]:
    try:
        os.open(path, os.O_RDONLY)
        print("opened", path)
    except PermissionError:
        print("refused")
"""
    out, _ = other_user(code, path, f"/proc/{os.getpid()}/mem").communicate(timeout=20)
    assert out.split() == ["refused", "refused"]
    # One of the same user can, as it could read our memory: a user is not protected from himself.
    os.close(os.open(path, os.O_RDWR))
    assert os.fstat(hand_over.fd).st_mode & 0o777 == 0o600
    hand_over.fetch()


@as_root
def test_a_segment_that_another_user_offers_is_not_taken():
    """He may have written to the store, which anybody can who reaches its port."""
    code = """
fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
server = socket.socket(socket.AF_UNIX)
server.bind("\\0" + sys.argv[1])
server.listen()
print("ready", flush=True)
peer, _ = server.accept()
try:
    peer.recv(1000)
    socket.send_fds(peer, [b"s"], [fd])
except OSError:
    pass
"""
    name = f"c10d_custom-test-{secrets.token_hex(8)}"
    impostor = other_user(code, name)
    assert impostor.stdout.readline() == "ready\n"
    with pytest.raises(TransportError, match=f"another user .uid {NOBODY}"):
        segment._fetch({"socket": name, "token": "00" * 16}, 1, Exchange(HashStore(), 1, 2, 5.0))
    impostor.communicate(timeout=20)


def test_a_segment_that_can_shrink_is_not_taken():
    """Whoever has it could shrink it under our feet, and a rank would die of SIGBUS."""
    with socket.socket(socket.AF_UNIX) as server:
        name = f"c10d_custom-test-{secrets.token_hex(8)}"
        server.bind("\0" + name)
        server.listen()
        fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)

        def serve():
            peer, _ = server.accept()
            with peer:
                peer.recv(1000)
                socket.send_fds(peer, [segment._HANDED], [fd])

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(TransportError, match="can shrink"):
            segment._fetch({"socket": name, "token": "00" * 16}, 1, Exchange(HashStore(), 1, 2, 5.0))
        thread.join()
        os.close(fd)


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
