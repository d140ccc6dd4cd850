"""How ranks of this host that have met make a group, the one for which they met and later ones: by letters from process
to process, which the kernel carries and wakes their readers for. The store is asked nothing.

A letter is a datagram to an abstract Unix socket whose name nobody can guess; the ranks of the default group have told
each other the names when they met. The kernel says which process and which user a letter is from, and those of other
users are thrown away, unless the process is that of a rank, which has become another user (setuid) since they met: the
same PID, started at the same moment. It may carry a descriptor."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from ..errors import TransportError
from ..threads import select, socket, threading
from . import Gathering, Processes, started

if TYPE_CHECKING:
    from .exchange import Exchange

_KEY = 16  # bytes of a letter's first field: of which group it is
_LONGEST = 64 << 10
_MOST_TEXT = 8 << 10  # of an error that is told to others
_CREDENTIALS = struct.Struct("3i")
_ROOM = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(struct.calcsize("i"))
_SLICE, _SLICE_PER_RANK, _SLICE_MOST = 20e-3, 0.5e-3, 90e-3  # s: between two looks at who is alive
_ROOM_SECONDS = 20e-3  # how long to queue for room in a full mailbox
_AT_ONCE = 64  # letters
_GAVE_UP = "gave up"
_NO_MAILBOX = "no mailbox: "


class Letter:
    """``sender``: a rank, in the group that the letter is of; ``descriptor``: the reader's to close."""

    __slots__ = ("sender", "topic", "value", "descriptor")

    def __init__(self, sender: int, topic: str, value: Any, descriptor: int | None = None) -> None:
        self.sender, self.topic, self.value, self.descriptor = sender, topic, value, descriptor


class Mailbox:
    """This process's, for one group's ranks. Any thread may read: what is not for its group waits for another."""

    def __init__(self) -> None:
        self.name = f"c10d_custom-{os.urandom(16).hex()}"
        self._lock = threading.RLock()  # a signal handler may make a group, too
        self._letters: list[tuple[bytes, Letter]] = []  # of which group each is
        self._swept: list[tuple[bytes, Letter]] = []  # those that were there when `sweep` was last called
        self.known: dict[int, int | None] = {}  # PIDs of the ranks that may write -> when they started
        self.refused = ""  # which of them has written, and cannot be believed
        # To queue, rather than to ask again and again: who floods a mailbox then has no more than its share of it.
        queue, call = struct.pack("ll", 0, int(1e6 * _ROOM_SECONDS)), "socket"
        try:  # what a sandbox refuses shows here, not amid a group's making
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            call = "setsockopt"
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, queue)
            call = "bind"
            self._socket.bind("\0" + self.name)
            call = "sendmsg"
            self._socket.sendmsg([b"?"], [], 0, "\0" + self.name)
            call = "recvmsg"
            self._socket.recvmsg(1, 0, socket.MSG_DONTWAIT)
        except OSError as error:
            raise OSError(error.errno, f"{call}: {error.strerror}") from None

    def send(self, to: str, key: bytes, letter: Letter) -> bool:
        """False: its mailbox is full, and stays so for a while. Who has none any more gets none."""
        text = key + json.dumps([letter.sender, letter.topic, letter.value]).encode()
        descriptors = [] if letter.descriptor is None else [letter.descriptor]
        given = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", each)) for each in descriptors]
        try:
            self._socket.sendmsg([text], given, 0, "\0" + to)
        except ConnectionRefusedError:
            pass
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS):
                raise
            return False
        return True

    def fetch(self, seconds: float) -> bool:
        """Waits up to so long for letters; whether some have come."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except ValueError:
            raise TransportError("group creation: the default group has been destroyed meanwhile") from None
        if not poll.poll(1e3 * seconds):
            return False
        with self._lock:
            for _ in range(_AT_ONCE):
                if not self._receive():
                    break
        return True

    def read(self, key: bytes, topic: str | None = None) -> list[Letter]:
        """Takes out those of that group, on that topic, the oldest first."""
        with self._lock:  # a handler that fetches amid this loses nothing: the list is whole after each line
            found = [each for each in self._letters if each[0] == key and topic in (None, each[1].topic)]
            for each in found:
                self._letters.remove(each)
        return [letter for _, letter in found]

    def forget(self, key: bytes) -> None:
        """The letters of a group that nobody here makes any more."""
        for letter in self.read(key):
            _drop(letter)

    def sweep(self) -> None:
        """Called before each of several groups of the same process: drops what nobody will read, of an earlier one."""
        with self._lock:
            for each in [each for each in self._letters if each in self._swept]:
                self._letters.remove(each)
                _drop(each[1])
            self._swept = list(self._letters)

    def close(self) -> None:
        with self._lock:
            while self._letters:
                _drop(self._letters.pop()[1])
            self._socket.close()

    def _receive(self) -> bool:
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_LONGEST, _ROOM, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except OSError as error:
            raise TransportError(
                f"group creation: this process cannot read what ranks write to it (recvmsg: {error.strerror}): does a "
                "sandbox refuse that now, or did the program close descriptors that are not its own?"
            ) from error
        believed, descriptors = False, list[int]()
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors += struct.unpack(f"{len(content) // 4}i", content[: len(content) // 4 * 4])
            elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                believed = self._is_a_rank(*_CREDENTIALS.unpack(content[: _CREDENTIALS.size])[:2])
        letter = None
        if believed:
            with contextlib.suppress(ValueError, TypeError):
                sender, topic, value = json.loads(data[_KEY:])
                if type(sender) is int:
                    letter = Letter(sender, topic, value)
        if letter is not None and descriptors:
            letter.descriptor = descriptors.pop()
        for descriptor in descriptors:
            os.close(descriptor)
        if letter is not None:
            if letter.topic == _GAVE_UP:
                self.forget(data[:_KEY])
            self._letters.append((data[:_KEY], letter))
        return True

    def _is_a_rank(self, pid: int, user: int) -> bool:
        if user == os.geteuid():
            return True
        if (known := self.known.get(pid)) is None:
            return False
        if (found := started(pid)) is None:
            self.refused = (
                f"pid {pid}, a rank, has become user {user} (setuid), which is not this rank's, {os.geteuid()}; and "
                f"/proc does not say that it is the process that it was (mounted with hidepid?). Make groups before "
                "setuid, or change the user on all ranks"
            )
        return found == known


def mailbox() -> Mailbox | None:
    """None where there is no descriptor, or a sandbox refuses it: `letters_of` then says so."""
    try:
        return Mailbox()
    except OSError:
        return None


def _drop(letter: Letter) -> None:
    if letter.descriptor is not None:
        os.close(letter.descriptor)


def _cut(value: Any) -> Any:
    """With no text that is too long for a letter."""
    if isinstance(value, str):
        return value[:_MOST_TEXT]
    return {name: _cut(each) for name, each in value.items()} if isinstance(value, dict) else value


class Neighbours:
    """The ranks of a group on this host, by their numbers in it, as whom to write to; and how often this rank has been
    through the making of each group with them. ``mailbox``: this rank's; ``known``: their PIDs, and when each process
    started; ``era``: tells them from others who have written by the same mailbox, which is then not theirs to close."""

    def __init__(
        self, mailbox: Mailbox, names: Sequence[str], known: Mapping[int, int | None] | None = None, era: str = ""
    ) -> None:
        self.mailbox, self.names, self.era = mailbox, names, era
        mailbox.known.update(known or {})
        self._lives: dict[str, int] = {}

    def life(self, group: str) -> int:
        """How many groups of that name this rank has made or given up. Both count, because two ranks must come to the
        same number when they try again: at the last moment, one may have made a group that the other gave up."""
        return self._lives.get(group, 0)

    def ended(self, group: str) -> None:
        self._lives[group] = self.life(group) + 1

    def close(self) -> None:
        if not self.era:
            self.mailbox.close()


class Letters(Gathering):
    """Of a group of some ``neighbours``: ``members`` in the new group's order, of which this is ``rank``. ``group``:
    what names it among these; ``said``: gives the members that are known to be waiting, for an error's sake."""

    def __init__(
        self,
        neighbours: Neighbours,
        members: Sequence[int],
        rank: int,
        group: str,
        seconds: float,
        processes: Processes,
        look: Callable[[], None] | None,
        said: Callable[[], set[int]],
    ) -> None:
        super().__init__(rank, len(members), seconds, processes, look)
        self._neighbours, self._members, self._group, self._said = neighbours, members, group, said
        self._mailbox = neighbours.mailbox
        self.sleep = self._mailbox.fetch
        self._gone: dict[str, Any] | None = None  # why one gave up
        # Of this making of the group, and of the one before it under the same name: a rank that gave that one up may
        # have sent its letter late.
        self._key, self._former_key = (
            hashlib.sha256(f"{neighbours.era}{neighbours.life(group) - before} {group}".encode()).digest()[:_KEY]
            for before in (0, 1)
        )

    # --- the segment

    def hand_out(self, topic: str, value: Any, descriptor: int | None) -> None:
        """On rank 0: sends the same word, and a descriptor, to all others."""
        self._mailbox.fetch(0)
        self._require_nobody_gave_up()
        for rank in range(1, self.size):
            self._send(rank, topic, value, descriptor)

    def take(self, topic: str) -> Letter:
        """On the other ranks: what rank 0 hands out."""
        return self._await(lambda: self._first(topic, range(1)), "rank 0", self.deadline, topic)

    # --- the gathering

    def give_up(self, error: BaseException) -> None:
        self._neighbours.ended(self._group)
        why = {"rank": self.rank, "kind": type(error).__name__, "error": str(error)[:_MOST_TEXT]}
        with contextlib.suppress(OSError, TransportError):
            for rank in range(self.size):
                if rank != self.rank:
                    letter = Letter(self.rank, _GAVE_UP, why)
                    self._mailbox.send(self._neighbours.names[self._members[rank]], self._key, letter)
        self._forget()

    def complete(self) -> None:
        self._neighbours.ended(self._group)
        self._forget()

    def _forget(self) -> None:
        for key in (self._key, self._former_key):
            self._mailbox.forget(key)

    def _hear_verdict(self, topic: str, value: Any, meet: Callable[[int, Any], None] | None) -> Any:
        self._send(0, topic, value)
        return self.take(f"{topic}/verdict").value

    def _gather(self, topic: str, value: Any, meet: Callable[[int, Any], None] | None) -> list[Any]:
        values = {0: value}

        def all_said() -> list[Any] | None:
            values.update((letter.sender, letter.value) for letter in self._read(topic, range(1, self.size)))
            return [values[r] for r in range(self.size)] if len(values) == self.size else None

        who = "rank {}".format
        return self._await(
            all_said, lambda: who(min(r for r in range(self.size) if r not in values)), self._verdict_by, topic
        )

    def _announce(self, topic: str, verdict: Any) -> None:
        for rank in range(1, self.size):
            self._send(rank, f"{topic}/verdict", verdict)

    def _silent(self, topic: str) -> str:
        try:
            here = self._said() | {self._members[self.rank]}
        except RuntimeError:
            return ""
        return self._not_there([r for r in range(self.size) if self._members[r] not in here])

    # --- letters

    def _read(self, topic: str, senders: range) -> list[Letter]:
        """Those on it that have come from these ranks; of others, there are none."""
        found = self._mailbox.read(self._key, topic)
        for letter in found:
            if letter.sender not in senders:
                _drop(letter)
        return [letter for letter in found if letter.sender in senders]

    def _first(self, topic: str, senders: range) -> Letter | None:
        """Returns the only letter on this topic, or None."""
        found = self._read(topic, senders)
        for letter in found[1:]:
            _drop(letter)
        return found[0] if found else None

    def _require_no_trouble(self, slow: bool) -> None:
        self._require_nobody_gave_up()
        self.require_all_coming()

    def _require_nobody_gave_up(self) -> None:
        if (gone := self._first(_GAVE_UP, range(self.size))) is not None:
            self._gone = gone.value
        if self._gone is not None:
            raise self._given_up(self._gone)
        if self._mailbox.refused:
            raise TransportError(f"group creation, rank {self.rank}: {self._mailbox.refused}.")

    def _send(self, rank: int, topic: str, value: Any, descriptor: int | None = None) -> None:
        letter, to = Letter(self.rank, topic, _cut(value), descriptor), self._neighbours.names[self._members[rank]]
        try:
            while not self._mailbox.send(to, self._key, letter):
                self._make_room(rank)
        except OSError as error:
            raise TransportError(f"group creation: rank {self.rank} cannot write to rank {rank}: {error}") from error

    def _make_room(self, rank: int) -> None:
        """The mailbox of that rank is full; perhaps it waits for room in ours."""
        self._mailbox.fetch(0)
        self.require_all_coming()
        if time.monotonic() >= self.deadline:
            raise self._nothing_from(f"rank {rank}")

    def _await(self, found: Callable[[], Any], who: str | Callable[[], str], until: float, topic: str) -> Any:
        """What ``found`` finds among the letters, once it is not None. ``topic``: theirs."""
        pause = min(_SLICE + _SLICE_PER_RANK * self.size, _SLICE_MOST)
        if (what := self._until(found, until, (pause, pause))) is None:
            raise self._nothing_from(who if isinstance(who, str) else who(), self._silent(topic))
        return what


@contextlib.contextmanager
def letters_of(exchange: Exchange) -> Iterator[Letters]:
    """Inside, the ranks of ``exchange``, all of one host and one user, can write to each other. Collective over them;
    TransportError on all where the system refuses it to one."""
    box, said = None, ""
    try:
        box = Mailbox()
        said = box.name
    except OSError as error:
        said = f"{_NO_MAILBOX}{error}"

    def all_have_one(said: list[str]) -> list[str]:
        if lacks := [f"rank {rank}: {text}" for rank, text in enumerate(said) if text.startswith(_NO_MAILBOX)]:
            raise TransportError(f"group creation: ranks cannot write to each other: {'; '.join(lacks)}")
        return said

    everyone = range(exchange.size)
    try:
        names = exchange.gather_and_decide("mailboxes", said, all_have_one)
        neighbours, left, look = Neighbours(cast("Mailbox", box), names), exchange.left(), exchange.look
        yield Letters(neighbours, everyone, exchange.rank, "", left, exchange.processes, look, lambda: set(everyone))
    finally:
        if box is not None:
            box.close()
