"""The rig: its hosts are apart, a network joins them, real launchers run over them, nothing is left of it."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .hosts import Hosts
from .mpi import Mpi

pytestmark = pytest.mark.skipif(Hosts.why_not() is not None, reason=str(Hosts.why_not()))

# Sends argv[3] bytes to argv[1]:argv[2]; run with a deadline, says what became of it.
SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20)
connection.sendall(bytes(int(sys.argv[3])))
connection.shutdown(socket.SHUT_WR)
assert connection.recv(1) == b"!"
"""
RECEIVE = """
import socket, sys
with socket.create_server(("", int(sys.argv[1]))) as server:
    print("listening", flush=True)
    connection, (peer, _) = server.accept()
    received = 0
    while data := connection.recv(1 << 20):
        received += len(data)
    connection.sendall(b"!")
    print(peer, received)
"""


@pytest.fixture(scope="module")
def hosts():
    with Hosts() as hosts:
        yield hosts


def output(hosts, host, *argv):
    return hosts.run(host, argv, check=True, capture_output=True, text=True, timeout=30).stdout


def transfer(hosts, count, port, sender="hosta", receiver="hostb"):
    """Send so many bytes between hosts; (the receiver's words, seconds, bytes that left the sender)."""
    receiving = subprocess.Popen(
        hosts.command(receiver, [sys.executable, "-c", RECEIVE, port]), stdout=subprocess.PIPE, text=True
    )
    with receiving:
        assert receiving.stdout.readline() == "listening\n"
        before, started = hosts.sent_bytes(sender), time.monotonic()
        output(hosts, sender, sys.executable, "-c", SEND, receiver, str(port), str(count))
        return receiving.communicate(timeout=30)[0], time.monotonic() - started, hosts.sent_bytes(sender) - before


def test_each_host_has_its_own(hosts, tmp_path):
    (tmp_path / "shared").write_text("by all")
    seen = [Path("/proc/sys/kernel/random/boot_id").read_text()]
    for name in hosts.names:
        assert output(hosts, name, "hostname") == f"{name}\n"
        assert socket.gethostname() not in hosts.names
        seen.append(output(hosts, name, "cat", "/proc/sys/kernel/random/boot_id"))
        output(hosts, name, "sh", "-c", 'echo "$0" >/dev/shm/here', name)
        assert output(hosts, name, "cat", tmp_path / "shared") == "by all"
        assert output(hosts, name, "pwd") == f"{os.getcwd()}\n"
    assert len(set(seen)) == 3
    for name in hosts.names:
        assert output(hosts, name, "sh", "-c", "ls /dev/shm; cat /dev/shm/here") == f"here\n{name}\n"
        links = {
            kind: output(hosts, name, "readlink", f"/proc/self/ns/{kind}") for kind in ("net", "uts", "ipc", "pid")
        }
        for kind, link in links.items():
            assert link != os.readlink(f"/proc/self/ns/{kind}") + "\n", kind
    assert not os.path.exists("/dev/shm/here")


def test_a_network_joins_them_and_counts(hosts):
    count = 10_000_000
    for port, (sender, receiver) in enumerate([("hosta", "hostb"), ("hostb", "hosta")], 4000):
        said, _, sent = transfer(hosts, count, port, sender, receiver)
        assert said == f"{hosts.addresses[sender]} {count}\n"
        assert count < sent < 1.1 * count


def test_rate(hosts):
    hosts.rate("100mbit")
    _, seconds, _ = transfer(hosts, 10_000_000, 4010)
    hosts.rate(None)
    assert seconds > 0.5  # of 0.8, less what the bucket lets through
    assert "tbf" not in output(hosts, "hosta", "tc", "qdisc", "show", "dev", "eth0")


def test_cut_and_heal(hosts):
    hosts.cut("hostb")
    connect = 'import socket; socket.create_connection(("hostb", 9), timeout=0.5)'
    cut = hosts.run("hosta", [sys.executable, "-c", connect], capture_output=True, text=True)
    assert "timed out" in cut.stderr or "No route" in cut.stderr, cut.stderr
    hosts.heal("hostb")
    assert transfer(hosts, 1000, 4020)[0].endswith(" 1000\n")


def test_own_name_as_on_debian():
    with Hosts(("one", "two", "three"), own_name_is_loopback=True) as hosts:
        resolve = "import socket; print(*map(socket.gethostbyname, ['one', 'two', 'three']))"
        assert output(hosts, "two", sys.executable, "-c", resolve) == "10.99.0.2 127.0.1.1 10.99.0.4\n"


def belongings(folder):
    """What of a rig could be left: its folder, and processes and mounts that name it."""
    found = [str(folder)] if folder.exists() else []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        for kind in ("cmdline", "mountinfo"):
            try:
                if os.fsencode(folder) in Path("/proc", entry, kind).read_bytes():
                    found.append(f"{kind} of process {entry}")
            except OSError:
                pass
    return found


def devices():
    return sorted(os.listdir("/sys/class/net"))


def test_nothing_is_left():
    before = devices()
    with Hosts() as first, Hosts() as second:
        sleeps = [subprocess.Popen(hosts.command("hostb", ["sleep", "1000"])) for hosts in (first, second)]
        assert devices() == before
        assert belongings(first.folder) and belongings(second.folder)
    for hosts, sleep in zip((first, second), sleeps):
        assert sleep.wait(10) != 0
        assert not belongings(hosts.folder)


def test_nothing_is_left_when_the_parent_is_killed():
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from rig import Hosts; import subprocess\n"
        "with Hosts() as hosts:\n"
        "    subprocess.Popen(hosts.command('hosta', ['sh', '-c', 'sleep 1000 & setsid sleep 1001 & wait']))\n"
        "    print(hosts.folder, flush=True); time.sleep(1000)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, Path(__file__).parents[1]], stdout=subprocess.PIPE, text=True
    )
    with parent:
        folder = Path(parent.stdout.readline().strip())
        assert belongings(folder)
        parent.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 10
        while belongings(folder) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not belongings(folder)


@pytest.mark.parametrize("name", ["mpich", "openmpi"])
@pytest.mark.parametrize("ranks_per_host", [[2, 2], [3, 1]], ids=["2+2", "3+1"])
def test_launchers(hosts, name, ranks_per_host):
    mpi = Mpi.named(name)
    if reason := mpi.why_not():
        pytest.skip(reason)
    program = (
        "from mpi4py import MPI; import socket, sys, os; w = MPI.COMM_WORLD; "
        "sys.stdout.write(f'{w.rank} {socket.gethostname()} {w.allreduce(1)} {os.environ[\"SAID\"]}\\n')"
    )
    command = mpi.command(ranks_per_host, [mpi.python, "-c", program], hosts, forward=["SAID"])
    done = subprocess.run(
        command,
        env=mpi.environment({**os.environ, "SAID": "so"}),
        timeout=60,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    where = ["hosta"] * ranks_per_host[0] + ["hostb"] * ranks_per_host[1]
    assert sorted(done.stdout.splitlines()) == [f"{rank} {host} 4 so" for rank, host in enumerate(where)], done
    assert done.returncode == 0
