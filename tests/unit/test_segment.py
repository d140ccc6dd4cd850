"""The sizes that a group's shared memory is made with."""

import pytest

from c10d_custom.config import Config
from c10d_custom.transport.shm.segment import geometry


@pytest.mark.parametrize("many", [2, 64, 65, 100, 4096])
def test_a_block_has_a_line_for_each_rank(many):
    made = geometry(Config(block_bytes=4096), many, 0)
    assert made.block_bytes % 4096 == 0 and made.block_bytes // many >= 64
    assert made.block_bytes < 4096 + 64 * many, "no more than it takes"
