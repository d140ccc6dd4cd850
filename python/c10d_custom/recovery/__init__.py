"""How processes go on together after a loss, or with others: who is left (on_one_host.py, over_hosts.py, of a group
that has lost ranks), or who has been named (handle.py, regroup.py, by a program that says which processes are to make a
group); then these meet at the store of the first of them (store.py), and make a group as always. Imported by c10d/,
which hands in what makes a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..creation import Processes

    class Build(Protocol):
        """Makes a group, collectively over its ``size`` ranks, within ``seconds``; an error on all of them where one
        cannot take part, and then nothing of it is left. ``store``: the group's alone."""

        def __call__(self, store: Any, rank: int, size: int, seconds: float, processes: Processes) -> Any: ...
