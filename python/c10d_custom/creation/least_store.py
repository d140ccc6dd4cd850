"""A Store by a class in Python, which has only what torch asks of any: set, get, add, check and wait.

torch's own of etcd is one. A group's creation asks for more: that what is said can be taken back, and that many ranks
say something under one key. Here both are made of these five. It takes more operations, and the store keeps the keys.

What `append` adds to a key lies under numbered keys of its own. A number is had before its line is there, and who reads
stops at the first line that is not: so what has been read once stays the beginning of what is read later."""

from __future__ import annotations

from typing import Any

from torch.distributed import Store

_GONE = b"(deleted)"  # the value of a key that was deleted: none of ours is, which are JSON or names


class LeastStore(Store):
    """Over ``least``. Who makes it keeps it as long as a PrefixStore over it is used: of an object of Python, C++ keeps
    its own half alive only."""

    def __init__(self, least: Any) -> None:
        super().__init__()
        self._least = least
        self.set_timeout(least.timeout)

    def set(self, key: str, value: Any) -> None:
        self._least.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._found(key)
        return self._least.get(key) if value is None else value

    def add(self, key: str, amount: int) -> int:
        return self._least.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return all(self._found(key) is not None for key in keys)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._least.wait(keys, *timeout)

    def append(self, key: str, value: bytes) -> None:
        self._least.set(f"{key}/line {self._least.add(f'{key}/lines', 1)}", value)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:  # str: called from Python, not by C++
        if expected != desired:
            raise RuntimeError("this store has no compare_set")
        value = self._found(key)
        return value if value is not None else expected.encode() if isinstance(expected, str) else expected

    def deleteKey(self, key: str) -> bool:  # noqa: N802  C++'s name
        there = self._found(key) is not None
        if self._least.check([key]):
            self._least.set(key, _GONE)
        if lines := self._least.add(f"{key}/lines", 0):
            self._least.set(f"{key}/gone", f"{lines}")
        return there

    def _found(self, key: str) -> bytes | None:
        """What was set, and all that was added to it since it was last deleted."""
        value = self._said(key)
        number = int(self._said(f"{key}/gone") or 0)
        while (line := self._said(f"{key}/line {number + 1}")) is not None:
            value = (value or b"") + line
            number += 1
        return value

    def _said(self, key: str) -> bytes | None:
        if not self._least.check([key]) or (value := bytes(self._least.get(key))) == _GONE:
            return None
        return value
