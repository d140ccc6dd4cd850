"""What is made of the little that a store in Python has; and which stores are taken as they are."""

from datetime import timedelta

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from c10d_custom.creation.bounded_store import whole
from c10d_custom.creation.exchange import peek
from c10d_custom.creation.least_store import LeastStore


class Least(Store):
    def __init__(self):
        super().__init__()
        self.set_timeout(timedelta(seconds=7))
        self.values = {}

    def set(self, key, value):
        self.values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key):
        return self.values[key]

    def add(self, key, amount):
        self.values[key] = b"%d" % (int(self.values.get(key, 0)) + amount)
        return int(self.values[key])

    def check(self, keys):
        return all(key in self.values for key in keys)


class Whole(Least):
    def compare_set(self, key, expected, desired):
        raise AssertionError

    def deleteKey(self, key):  # noqa: N802
        raise AssertionError


def test_stores_of_c_plus_plus_are_taken_as_they_are(tmp_path):
    class Own(HashStore):
        pass

    tcp = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    for inner in (tcp, FileStore(str(tmp_path / "file"), 1), HashStore(), Own(), Whole()):
        for store in (inner, PrefixStore("a", PrefixStore("b", inner))):
            assert whole(store) is store
    forgotten = PrefixStore("a", TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False))
    assert whole(forgotten) is forgotten


def test_a_store_in_python_is_completed():
    least = Least()
    for store in (PrefixStore("a", completed := whole(least)), whole(PrefixStore("a", least))):
        assert isinstance(completed, LeastStore)
        assert store.timeout == timedelta(seconds=7)
        for _ in range(2):
            assert peek(store, "k") is None
            assert not store.check(["k"])
            store.append("k", "1")
            store.append("k", "2")
            assert peek(store, "k") == store.get("k") == b"12"
            store.set("k", "0")
            assert store.check(["k"])
            assert peek(store, "k") == b"012"
            assert store.delete_key("k")
            assert not store.delete_key("k")
        assert store.add("n", 3) - store.add("n", 0) == 0
        store.set("empty", "")
        assert peek(store, "empty") == b""


def test_what_cannot_be_made_is_refused():
    least = Least()
    with pytest.raises(RuntimeError, match="has no compare_set"):
        whole(least).compare_set("k", "", "1")
