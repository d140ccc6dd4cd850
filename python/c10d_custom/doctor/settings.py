"""What the environment says: our variables, and whose place this backend takes."""

from __future__ import annotations

import os
import re
import textwrap
from typing import Any

from ..config import Config, replaced_wanted, table
from .finding import Finding, State

_PREFIX = "C10D_CUSTOM_"


def settings() -> Finding:
    """Those that are set; all that have no value they can have, and those that nobody reads."""
    given = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIX)}
    unknown = sorted(given.keys() - {name for name, *_ in table()})
    invalid = refused(given)
    facts: dict[str, Any] = {"set": given, "unknown": unknown, "invalid": invalid}
    if not given:
        return Finding("settings", f"no {_PREFIX}... is set", facts=facts)
    fine = [
        f"{name}={textwrap.shorten(value, 40, placeholder='...')}"
        for name, value in given.items()
        if name not in invalid and name not in unknown
    ]
    text = "; ".join([*invalid.values(), *(f"{name} is no variable of this package" for name in unknown), *fine])
    if invalid:
        return Finding("settings", f"no group can be made: {text}", State.FAILS, facts)
    return Finding("settings", text, State.REMARK if unknown else State.FINE, facts)


def refused(given: dict[str, str]) -> dict[str, str]:
    """{variable: what is wrong with its value}"""
    wrong: dict[str, str] = {}
    left = dict(given)
    while left:
        try:
            Config.from_env(left)
        except ValueError as error:
            name = re.match(f"{_PREFIX}[A-Z0-9_]+", str(error))
            if name is None or left.pop(name[0], None) is None:
                wrong[""] = str(error)
                break
            wrong[name[0]] = str(error)
        else:
            break
    return wrong


def replaces() -> Finding:
    """Which names of other backends make groups of this one."""
    from ..c10d import replaced

    done, wanted = sorted(replaced), replaced_wanted()
    facts: dict[str, Any] = {"replaced": done, "wanted": wanted}
    if missing := sorted(set(wanted) - set(done)):
        text = f"{_PREFIX}REPLACES asks for {', '.join(missing)}, and it was not done"
        return Finding("replaces", text, State.REMARK, facts)
    if done:
        return Finding("replaces", f'groups asked for as "{", ".join(done)}" are made by this backend', facts=facts)
    return Finding("replaces", f'nothing: groups asked for as "gloo" are gloo\'s ({_PREFIX}REPLACES)', facts=facts)
