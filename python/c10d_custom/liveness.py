"""Which ranks of this host have ended, while their group is being made. Once it is, the native core watches."""
import contextlib
import os
import select


def started(pid):
    """When a process started, in the kernel's ticks: with its PID, what no other process ever has. None: there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return int(f.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


class Processes:
    """``who``: how error messages call a rank. Those that cannot be seen from here, on other hosts or in other PID
    namespaces, count as alive."""

    def __init__(self, who="rank {}".format):
        self._who = who
        self._poll = select.poll()
        self._ranks = {}    # pidfd -> rank
        self._pids = {}
        self._ended = set()

    def add(self, rank, pid, start):
        if rank in self._pids or pid == os.getpid():
            return
        self._pids[rank] = pid
        with contextlib.suppress(OSError):
            fd = os.pidfd_open(pid)
            # In this order: the PID cannot have passed to another process between the two looks.
            if started(pid) == start:
                self._ranks[fd] = rank
                self._poll.register(fd, select.POLLIN)
            else:
                os.close(fd)

    def ended(self):
        """The ranks that have."""
        if self._ranks:
            self._ended.update(self._ranks[fd] for fd, _ in self._poll.poll(0))
        return self._ended

    def obituary(self):
        return "; ".join(f"{self._who(rank)} (pid {self._pids[rank]}) has died" for rank in sorted(self.ended()))

    def close(self):
        for fd in self._ranks:
            os.close(fd)
        self._ranks = {}
