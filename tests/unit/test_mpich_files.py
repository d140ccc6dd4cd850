"""What becomes of MPICH's file in /dev/shm where a rank is ended while MPI starts; and where it has no room."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from c10d_custom.errors import TransportError
from c10d_custom.launch import mpich_files

# Maps the file as MPICH does, begins, and waits for the end. "plain": as a program that starts nothing of ours.
PROGRAM = """
import contextlib, mmap, os, signal, sys, threading, time
from c10d_custom.launch import mpich_files

made, ended = threading.Event(), threading.Event()

def make():
    global there
    if sys.argv[2] == "later":
        ended.wait()
        time.sleep(0.3)
    file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.truncate(file, 4096)
    there = mmap.mmap(file, 4096)
    os.close(file)
    print("made", flush=True)
    made.set()

def settle():
    ended.set()
    made.wait(10)

def pause():
    for _ in range(600):
        time.sleep(0.1)  # a signal that comes just before a sleep begins does not end it

threading.Thread(target=make, daemon=True).start()
if sys.argv[2] != "later":
    made.wait()
if sys.argv[2] == "handled":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
with contextlib.nullcontext() if sys.argv[2] == "plain" else mpich_files.removed_at_the_end(settle):
    if sys.argv[2] == "over":
        mpich_files.remove_files()
    else:
        print("begun", flush=True)
        pause()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
print("begun", flush=True)
pause()
"""


@pytest.mark.parametrize(
    "kind, code, left",
    [
        ("starting", -signal.SIGTERM, False),
        ("later", -signal.SIGTERM, False),  # libmpi makes it after the signal has come
        ("over", -signal.SIGTERM, False),
        ("plain", -signal.SIGTERM, True),
        ("handled", 7, True),  # the program's own handler is its own
    ],
)
def test_who_is_ended_by_sigterm_removes_it(kind, code, left):
    file = Path(f"/dev/shm/mpich_shm_{os.getpid():x}f_0")
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, file, kind], stdout=subprocess.PIPE, text=True)
    try:
        said = [process.stdout.readline() for _ in range(1 if kind == "later" else 2)]
        assert said[-1] == "begun\n"
        process.terminate()
        assert process.wait(20) == code
        assert process.stdout.read() == ("made\n" if kind == "later" else "")
        assert file.exists() == left
    finally:
        process.kill()
        process.stdout.close()
        file.unlink(missing_ok=True)


@pytest.mark.parametrize("library", ["MPICH Version: 5.0.2", "Intel(R) MPI Library 2021.18.1 for Linux* OS"])
def test_mpi_does_not_start_where_there_is_too_little_room(monkeypatch, library):
    """Both were seen to end by SIGBUS in 64 KB."""
    monkeypatch.setattr(mpich_files, "megabytes", lambda: (0.065, 0.065))
    with pytest.raises(TransportError, match="/dev/shm has 0.1 MB left, and .* takes"):
        mpich_files.prepare(2, library)


def test_open_mpi_does_without(monkeypatch):
    monkeypatch.setattr(mpich_files, "megabytes", lambda: (0.065, 0.065))
    mpich_files.prepare(2, "Open MPI v5.0.10")
