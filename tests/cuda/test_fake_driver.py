"""The simulated driver is called as the real one is."""

import ast
import inspect
from pathlib import Path

from c10d_custom.transport import cuda
from c10d_custom.transport.cuda.driver import Driver
from fake_driver import FakeDriver


def called():
    """What transport/cuda asks of a driver, found in its source."""
    names = set()
    for path in Path(cuda.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())) if path.name not in ("kernels.py", "driver.py") else ():
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in ("driver", "_driver"):
                names.add(node.attr)
    return names


def test_it_has_all_that_is_called_with_the_same_parameters():
    methods = {name for name in called() if callable(getattr(Driver, name, None))}
    assert len(methods) > 20
    for name in methods:
        real, fake = (list(inspect.signature(getattr(kind, name)).parameters) for kind in (Driver, FakeDriver))
        assert real == fake, name
