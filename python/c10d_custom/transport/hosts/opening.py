"""What the ranks of a group over hosts say to each other as it is opened, and what all of them then know."""

from __future__ import annotations

import secrets
from typing import Any

from ...errors import TransportError


def all_well(said: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [s["error"] for s in said if s["error"]]
    if errors:
        raise TransportError("; ".join(dict.fromkeys(errors)))
    if len({s["chunk"] for s in said}) > 1:  # what one sends would be shorter or longer than what another waits for
        each = ", ".join(f"rank {r}: {s['chunk']}" for r, s in enumerate(said))
        raise TransportError(f"C10D_CUSTOM_CHUNK_BYTES differs between the ranks ({each})")
    # The token: of what this group says in the store later, no other of its name shall take for its own.
    return {
        "ranks": [s["rank"] for s in said],
        "token": secrets.token_hex(8),
        "offers": [s["offer"] for s in said],
        "secret": secrets.token_hex(32),
    }
