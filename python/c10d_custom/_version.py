__version__ = "0.1.0"

TESTED_TORCH = "2.11", "2.15"  # the oldest and the newest that the tests ran on
