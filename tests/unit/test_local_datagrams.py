"""Letters between processes of one host: what comes of them, of descriptors in them, of those that nobody reads."""

import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from c10d_custom.creation import Processes, started
from c10d_custom.creation import local_datagrams as module
from c10d_custom.creation.local_datagrams import Letter, Letters, Mailbox, Neighbours
from c10d_custom.errors import PeerLostError, TransportError

KEY = b"k" * module._KEY
OTHER = b"o" * module._KEY
NOBODY = 65534


@pytest.fixture
def boxes():
    made = [Mailbox() for _ in range(3)]
    yield made
    for box in made:
        box.close()


def make(boxes, members, rank, seconds=10.0, processes=None, look=lambda: None):
    neighbours = Neighbours(boxes[members[rank]], [box.name for box in boxes])
    return Letters(neighbours, members, rank, "group", seconds, processes or Processes(), look, set)


def on_each(boxes, members, act, letters=None):
    """What ``act`` makes of each rank's Letters, or the error."""
    made = [None] * len(members)

    def run(rank):
        try:
            made[rank] = act(letters(rank) if letters else make(boxes, members, rank))
        except Exception as error:
            made[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return made


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_descriptor_and_a_decision_reach_all(boxes):
    fd = os.memfd_create("x")

    def act(letters):
        if letters.rank == 0:
            letters.hand_out("segment", None, fd)
        else:
            given = letters.take("segment").descriptor
            assert os.path.sameopenfile(given, fd) and not os.get_inheritable(given)
            os.close(given)
        return letters.gather_and_decide("mapped", letters.rank, sum)

    before = descriptors()
    assert on_each(boxes, [2, 0, 1], act) == [3, 3, 3]
    assert descriptors() == before
    os.close(fd)


def test_an_error_anywhere_is_everyones(boxes):
    def refuse(values):
        raise TransportError(f"not with {values}")

    errors = on_each(boxes, [0, 1, 2], lambda letters: letters.gather_and_decide("mapped", letters.rank, refuse))
    assert [type(e) for e in errors] == [TransportError] * 3
    assert [str(e) for e in errors] == ["not with [0, 1, 2]"] * 3  # and that somebody is not there, it does not say


def test_a_long_text_is_cut(boxes):
    said = on_each(boxes, [0, 1], lambda letters: letters.gather_and_decide("mapped", "x" * 10**6, lambda v: len(v[1])))
    assert said == [module._MOST_TEXT] * 2


def test_full_mailboxes_hold_nobody_up(boxes):
    def act(letters):
        for i in range(300):  # more than a mailbox holds
            letters._send(1 - letters.rank, f"{i}", i)
        return sum(
            letters._await(lambda i=i: letters._first(f"{i}", range(2)), "", 1e9, f"{i}").value for i in range(300)
        )

    assert on_each(boxes, [0, 1], act) == [sum(range(300))] * 2


def test_a_flood_holds_nobody_up(boxes):
    over = threading.Event()

    def flood(at):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            while not over.is_set():
                stranger.sendto(b"x" * 100, "\0" + boxes[at].name)

    floods = [threading.Thread(target=flood, args=(at,), daemon=True) for at in (0, 1, 0, 1)]
    for thread in floods:
        thread.start()
    try:
        assert on_each(boxes, [0, 1], lambda letters: letters.gather_and_decide("mapped", 1, sum)) == [2, 2]
        with pytest.raises(TransportError, match="heard nothing from rank 0"):
            make(boxes, [0, 1], 1, seconds=0.3).take("segment")
    finally:
        over.set()
        while any(thread.is_alive() for thread in floods):
            for box in boxes:
                box.fetch(0.01)


def test_who_gives_up_is_heard_and_leaves_nothing(boxes):
    fd = os.memfd_create("x")
    letters = [make(boxes, [0, 1], rank) for rank in (0, 1)]
    before = descriptors()
    letters[0].hand_out("segment", None, fd)
    letters[0].give_up(TransportError("no more of this"))
    with pytest.raises(TransportError, match="rank 0 gave up: no more of this"):
        letters[1]._await(lambda: None, "rank 0", 1e9, "segment")
    assert descriptors() == before
    # Who made and gave up that one means another next time.
    assert make(boxes, [0, 1], 1)._key == letters[1]._key
    assert letters[0]._neighbours.life("group") == 1
    os.close(fd)


def test_after_a_group_that_one_rank_alone_gave_up_the_next_of_its_name_is_made(boxes):
    """It has told that it is there, and leaves before it hears that all are: the others have made the group."""
    every = [Neighbours(box, [other.name for other in boxes]) for box in boxes]

    def letters(rank, seconds):
        return Letters(every[rank], [0, 1, 2], rank, "group", seconds, Processes(), lambda: None, set)

    for quits in (1, 0):  # rank 0 amid its letters to the others
        first = [letters(rank, 20.0) for rank in range(3)]
        for rank in (1, 2):
            first[rank]._send(0, "mapped", rank)
        if quits:
            assert first[0].gather_and_decide("mapped", 0, sum) == 3
        else:
            first[0]._gather("mapped", 0, None)
            for rank in (1, 2):
                first[0]._send(rank, "mapped/verdict", {"ok": 3})
        for rank in {0, 1, 2} - {quits}:
            assert rank == 0 or first[rank].take("mapped/verdict").value == {"ok": 3}
            first[rank].complete()
        first[quits].give_up(KeyboardInterrupt())

        def act(of):
            decided = of.gather_and_decide("mapped", of.rank, sum)
            of.complete()
            return decided

        assert on_each(boxes, [0, 1, 2], act, lambda rank: letters(rank, 5.0)) == [3, 3, 3]
        for of in every:
            assert not of.mailbox._letters


def test_who_does_not_come_is_named(boxes):
    began = time.monotonic()
    with pytest.raises(TransportError, match=r"rank 1 heard nothing from rank 0 for .* Not there yet: rank 0\."):
        Letters(
            Neighbours(boxes[1], [box.name for box in boxes]), [0, 1], 1, "g", 0.3, Processes(), lambda: None, set
        ).take("segment")
    assert 0.3 <= time.monotonic() - began < 5


def test_a_dead_rank_ends_a_wait(boxes):
    class Dead(Processes):
        def obituary(self):
            return "rank 0 has died"

    with pytest.raises(PeerLostError, match="rank 0 has died"):
        make(boxes, [0, 1], 1, processes=Dead()).take("segment")


def test_a_closed_mailbox_is_an_error(boxes):
    letters = make(boxes, [0, 1], 1)
    boxes[1].close()
    with pytest.raises(TransportError, match="destroyed"):
        letters.take("segment")


def test_a_mailbox_whose_descriptor_the_program_has_closed_is_an_error(boxes):
    box = Mailbox()
    at, spare = box._socket.fileno(), os.open(os.devnull, os.O_RDONLY)
    os.dup2(spare, at)  # and has opened another file there
    try:
        with pytest.raises(TransportError, match="recvmsg: .*close descriptors that are not its own"):
            box.fetch(1.0)
    finally:
        os.close(spare)
        box.close()


def test_what_is_for_others_waits(boxes):
    assert boxes[0].send(boxes[1].name, KEY, Letter(0, "later", 1))
    assert boxes[0].send(boxes[1].name, OTHER, Letter(0, "now", 2))
    assert boxes[1].fetch(1)
    assert [letter.value for letter in boxes[1].read(OTHER)] == [2]
    assert [letter.value for letter in boxes[1].read(KEY, "later")] == [1]
    assert not boxes[1].read(KEY)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_letters_of_other_users_are_thrown_away(boxes):
    code = (
        "import os, socket, sys\n"
        f"os.setuid({NOBODY})\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "s.sendto(bytes.fromhex(sys.argv[2]) + b'[0, \"segment\", null]', '\\0' + sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-c", code, boxes[0].name, KEY.hex()], check=True)
    assert boxes[1].send(boxes[0].name, KEY, Letter(1, "after", 1))
    assert boxes[0].fetch(5)
    assert [letter.topic for letter in boxes[0].read(KEY)] == ["after"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_rank_that_has_become_another_user_is_believed_once_it_is_known_to_be_that_rank(boxes, monkeypatch):
    code = (
        "import os, socket, sys\n"
        f"os.setuid({NOBODY})\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "for line in sys.stdin:\n"
        "    s.sendto(bytes.fromhex(sys.argv[2]) + b'[1, \"segment\", null]', '\\0' + sys.argv[1])\n"
        "    print(flush=True)\n"
    )
    command = [sys.executable, "-c", code, boxes[0].name, KEY.hex()]
    rank = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def believed():
        rank.stdin.write("\n")
        rank.stdin.flush()
        rank.stdout.readline()
        return boxes[0].fetch(5) and bool(boxes[0].read(KEY))

    try:
        assert not believed()
        start = started(rank.pid)
        Neighbours(boxes[0], [], {rank.pid: start - 1})
        assert not believed()  # another process, to which that number has passed
        Neighbours(boxes[0], [], {rank.pid: start})
        assert believed() and not boxes[0].refused
        monkeypatch.setattr(module, "started", lambda pid: None)  # /proc does not say
        assert not believed()
    finally:
        rank.stdin.close()
        rank.wait(10)
    letters = make(boxes, [0, 1], 0)
    with pytest.raises(TransportError, match=f"pid {rank.pid}, a rank, has become user {NOBODY}"):
        letters._require_nobody_gave_up()


def test_what_makes_no_sense_is_thrown_away(boxes):
    for data in (b"", KEY, KEY + b"[1, 2", KEY + b"[1]", KEY + b"\xff"):
        boxes[1]._socket.sendto(data, "\0" + boxes[0].name)
    assert boxes[0].fetch(5)
    assert not boxes[0]._letters


@pytest.mark.parametrize("sender", [2, -1, 1.5, "1", None, [1], {}, True, 10**40])
def test_a_letter_of_no_rank_of_the_group_is_thrown_away(boxes, sender):
    """With what it carries."""
    letters = make(boxes, [0, 1], 0)
    before, fd = descriptors(), os.memfd_create("x")
    for topic in ("mapped", module._GAVE_UP, "mapped/verdict"):
        assert boxes[1].send(boxes[0].name, letters._key, Letter(sender, topic, {"ok": 1}, fd))
    os.close(fd)
    assert boxes[1].send(boxes[0].name, letters._key, Letter(1, "mapped", 1))
    assert letters.gather_and_decide("mapped", 1, sum) == 2
    letters.complete()
    assert descriptors() == before and not boxes[0]._letters


def test_only_rank_0_hands_out_and_decides(boxes):
    letters = make(boxes, [0, 1, 2], 1, seconds=0.3)
    for topic in ("segment", "mapped/verdict"):
        assert boxes[2].send(boxes[1].name, letters._key, Letter(2, topic, {"ok": 1}))
        with pytest.raises(TransportError, match="heard nothing from rank 0"):
            letters.take(topic)
