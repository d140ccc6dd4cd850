"""What the trace keeps of a group."""

import gc
import weakref

from c10d_custom.c10d import trace_dump
from c10d_custom.config import Config


class Source:
    """As much of a transport as is followed."""


def test_a_transport_that_nobody_else_keeps_is_collected():
    source = Source()
    gone = weakref.ref(source)
    trace_dump.follow(source, Config(trace_dir=""))
    del source
    gc.collect()
    assert gone() is None
