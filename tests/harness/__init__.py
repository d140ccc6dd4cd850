"""Rank processes that outlive one test (pool.py), here or as MPI jobs over hosts (layout.py)."""

from .layout import Layout
from .pool import RankFailure, RankPool, join_by_rank

__all__ = ["Layout", "RankFailure", "RankPool", "join_by_rank"]
