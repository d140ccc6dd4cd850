"""Several emulated hosts on one machine, out of Linux namespaces.

    with Hosts() as hosts:                                 # hosta and hostb
        hosts.run("hostb", ["hostname"])
        Popen(hosts.command(None, ["mpiexec", ...]))       # None: the login host, see below

Vocabulary. A *host* has its own network (eth0), hostname, process ids, System V IPC, /dev/shm, /etc/hosts
and boot id; the rest of the file system is the machine's, /tmp included. Every eth0 is a port of one *switch*,
a bridge. The *login host* is where jobs are launched from: the bridge is its network device, its name is
"login"; it has the machine's /dev/shm and runs no ranks. All of this is one *rig*.

Nothing outlives a rig. Its first process is process 1 of a PID namespace around all hosts and everything ever
run on them, so that the kernel kills them all when it ends; with the last process go the namespaces and with
those their devices and mounts. It waits for the end of its standard input, which the parent holds open: that
end comes also when the parent is killed. Then it removes the rig's folder, which holds the only files.
Devices and addresses exist inside the rig's namespaces alone, so that any number of rigs can coexist.

A process on a host sees only that host's processes; the machine sees all of them, each under a PID of its own.
"""

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

IPV4, IPV6 = ("10.99.0.", 24), ("fd99::", 64)  # what addresses begin with, and bits of the network's
SCRIPTS = Path(__file__).resolve().parent


class Hosts:
    def __init__(self, names=("hosta", "hostb"), own_name_is_loopback=False, ipv6=False):
        """own_name_is_loopback: as on Debian, each host resolves its own name to 127.0.1.1. ipv6: eth0 has no IPv4
        address."""
        self.names = tuple(names)
        self._network_prefix, self._network_bits = IPV6 if ipv6 else IPV4
        self.addresses = {name: f"{self._network_prefix}{i}" for i, name in enumerate(self.names, start=2)}
        self.login_address = f"{self._network_prefix}1"
        self._own_name_is_loopback = own_name_is_loopback
        self._rig = None

    @staticmethod
    @functools.cache
    def why_not():
        """None where a rig can be had, else the reason; it is found out by making one."""
        if sys.platform != "linux" or os.geteuid() != 0:
            return "emulated hosts need Linux and root"
        missing = [tool for tool in ("unshare", "nsenter", "mount", "ip", "tc") if shutil.which(tool) is None]
        if missing:
            return f"emulated hosts need {', '.join(missing)} (packages util-linux, iproute2)"
        try:
            with Hosts():
                return None
        except OSError as error:
            return f"emulated hosts are not possible here: {error}"

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="c10d-hosts-", dir="/tmp"))
        table = "127.0.0.1 localhost\n" + "".join(
            f"{address} {name}\n" for name, address in [("login", self.login_address), *self.addresses.items()]
        )
        (self.folder / "hosts").write_text(table)
        if self._own_name_is_loopback:
            for name, address in self.addresses.items():
                (self.folder / f"{name}.hosts").write_text(table.replace(f"{address} {name}", f"127.0.1.1 {name}"))
        self.ssh = self.folder / "ssh"
        shutil.copy(SCRIPTS / "ssh.sh", self.ssh)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self):
        # A session of its own: Ctrl-C is for the parent, whose end is the rig's end.
        self._rig = subprocess.Popen(
            [
                "unshare",
                "--net",
                "--uts",
                "--ipc",
                "--mount",
                "--pid",
                "--fork",
                "--kill-child=KILL",
                SCRIPTS / "login.sh",
                self.folder,
                self._network_prefix,
                str(self._network_bits),
                *self.names,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        said = ""
        while not (ready := re.search(r"^ready (\d+)$", said, re.M)):
            line = self._rig.stdout.readline().decode(errors="replace")
            if not line:
                raise OSError(said.strip() or "the rig's first process ended")
            said += line
        self._pids = {None: int(ready[1])}
        for name in self.names:
            self._pids[name] = int((self.folder / f"{name}.pid").read_text().split()[0])

    def __exit__(self, *_):
        if self._rig is not None:
            self._rig.stdin.close()
            try:
                self._rig.wait(10)
            except subprocess.TimeoutExpired:
                self._rig.kill()
                self._rig.wait()
            self._rig.stdout.close()
            self._rig = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def process(self, host):
        """The host's first process, by the machine's id."""
        return self._pids[host]

    def url_address(self, host):
        """A host's address as URLs have it."""
        address = self.addresses[host]
        return f"[{address}]" if ":" in address else address

    def command(self, host, argv, cwd=None):
        """The command line that runs argv on a host (None: the login host), with the caller's environment."""
        return [
            "nsenter",
            "-t",
            str(self._pids[host]),
            "-n",
            "-u",
            "-i",
            "-m",
            "-p",
            "sh",
            "-c",
            'cd "$0" && exec "$@"',
            str(cwd or os.getcwd()),
            *map(str, argv),
        ]

    def run(self, host, argv, **options):
        """subprocess.run on a host."""
        return subprocess.run(self.command(host, argv, options.pop("cwd", None)), **options)

    def rate(self, rate):
        """Limit what each host sends: "1gbit" and the like as tc has it; None: no limit."""
        for name in self.names:
            self._network(name, "tc", "qdisc", "del", "dev", "eth0", "root", check=False)
            if rate is not None:
                self._network(
                    name,
                    "tc",
                    "qdisc",
                    "add",
                    "dev",
                    "eth0",
                    "root",
                    "tbf",
                    "rate",
                    rate,
                    "burst",
                    "256kb",
                    "latency",
                    "50ms",
                )

    def sent_bytes(self, host):
        """What the host has sent so far, Ethernet headers included."""
        for line in Path(f"/proc/{self._pids[host]}/net/dev").read_text().splitlines():
            device, _, counters = line.partition(":")
            if device.strip() == "eth0":
                return int(counters.split()[8])
        raise LookupError(f"{host} has no eth0")

    def cut(self, host):
        """Pull the host's cable."""
        self._network(None, "ip", "link", "set", host, "down")

    def heal(self, host):
        self._network(None, "ip", "link", "set", host, "up")

    def _network(self, host, *command, check=True):
        done = subprocess.run(["nsenter", "-t", str(self._pids[host]), "-n", *command], capture_output=True, text=True)
        if check and done.returncode:
            raise OSError(f"{' '.join(command)} on {host or 'the login host'}: {done.stderr.strip()}")
