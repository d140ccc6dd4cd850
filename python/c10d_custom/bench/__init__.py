"""Collectives timed side by side on several backends, in one run."""
