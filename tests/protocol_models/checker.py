"""Explicit-state search, exhaustive: every state that any interleaving can reach, breadth first, so that what it finds
is a shortest way there. Forty lines of our own: nothing on PyPI checks interleavings of programs (Spin and TLC do, and
are no Python packages), and these models are small.

A model has initial(), steps(state) -> [(name of the step, next state)], wrong(state) -> what is wrong, or None, and
over(state) -> whether it may end there. States are hashable. A step whose name ends in "dies" need never come: a
state with no other is stuck.
"""

from collections import deque

DIES = " dies"


class Found(AssertionError):
    """What is wrong, and the steps that lead there."""


def check(model, most=3_000_000):
    """Visits all states; returns how many there are. Raises Found at the first that is wrong, or stuck."""
    start = model.initial()
    came = {start: None}
    todo = deque([start])
    while todo:
        state = todo.popleft()
        wrong = model.wrong(state)
        steps = model.steps(state)
        if wrong is None and not model.over(state) and all(name.endswith(DIES) for name, _ in steps):
            wrong = "nobody can go on"
        if wrong is not None:
            raise Found(f"{wrong}: {' / '.join(_way(came, state))} / {state}")
        for name, following in steps:
            if following not in came:
                came[following] = state, name
                todo.append(following)
        assert len(came) <= most, f"more than {most} states"
    return len(came)


def _way(came, state):
    names = []
    while came[state] is not None:
        state, name = came[state]
        names.append(name)
    return names[::-1]
