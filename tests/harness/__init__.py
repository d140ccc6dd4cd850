"""Rank processes that outlive one test: see pool.py."""
from .pool import RankFailure, RankPool, join_by_rank

__all__ = ["RankFailure", "RankPool", "join_by_rank"]
