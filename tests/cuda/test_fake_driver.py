"""The simulated driver can be called as the real one is."""

import inspect

from c10d_custom.transport.cuda.driver import CudaDriver, Driver
from fake_driver import FakeDriver


def test_the_simulated_driver_has_the_real_one_s_face():
    for name in Driver.__abstractmethods__:
        faces = {tuple(inspect.signature(getattr(c, name)).parameters) for c in (Driver, CudaDriver, FakeDriver)}
        assert len(faces) == 1, (name, faces)
