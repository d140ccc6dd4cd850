"""By which clock the core waits."""

import re
from pathlib import Path

import pytest

from c10d_custom import native

ROOT = Path(__file__).parents[2]


def names():
    """What scripts/wheels looks for in what it made, for both processors: waits of the C library that end at a time
    of day, in some build or other."""
    return re.search(r"^by_the_wall_clock='(.*)'$", (ROOT / "scripts" / "wheels").read_text(), re.M)[1]


@pytest.mark.skipif(not (ROOT / "scripts" / "wheels").exists(), reason="needs a checkout")
def test_no_wait_ends_at_a_time_of_day():
    """So that a clock which is set back makes none longer."""
    pattern = re.compile(names().encode())
    for name in ("pthread_cond_timedwait", "pthread_cond_clockwait", "sem_timedwait", "pthread_mutex_timedlock"):
        assert pattern.search(name.encode()), name
    for library in Path(native.__file__).parent.glob("*.so"):
        assert not pattern.findall(library.read_bytes()), library
