"""Messages between ranks of one host in a group over several: the local transport carries them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from ...call import changed
from ...native.direct import NOT_BEGUN

if TYPE_CHECKING:
    import torch

    from ...call import Message
    from .. import LocalTransport, Ticket


class LocalMessages:
    """``local``: the transport inside this host; ``here``: the group ranks of it, in its order."""

    def __init__(self, local: LocalTransport, here: Sequence[int]) -> None:
        self._local, self._here = local, here
        self._places = {rank: place for place, rank in enumerate(here)}

    def fast(self, tensors: Sequence[torch.Tensor], is_recv: bool, peer: int, *rest: Any) -> int:
        """As FastMessage; nothing is done for a peer that is not of this host."""
        place, fast = self._places.get(peer), self._local.fast_message
        if place is None or fast is None:
            return NOT_BEGUN
        return fast(tensors, is_recv, place, *rest)

    def posted(self, posted: list[Any], call: tuple[Any, ...]) -> Ticket:
        """Returns the ticket of a posted message, as `posted_message` of a transport does."""
        return self._renamed(self._local.posted_message(posted, (self._by_place, *call)))

    def _by_place(self, make: Callable[..., Message], *arguments: Any) -> Message:
        message = make(*arguments)
        return changed(message, peer=self._places[message.peer])

    def post(self, message: Message) -> Ticket:
        """Issues a message to or from a rank of this host; returns its Ticket."""
        local = changed(message, peer=self._places[message.peer])
        return self._renamed(self._local.post(local))

    def _renamed(self, ticket: Ticket) -> Ticket:
        return cast("Ticket", _LocalTicket(ticket, self._here))

    def post_from(self, message: Message, source: int) -> Ticket:
        """A receive from any source, once it is known that ``source`` has sent what it waits for."""
        return self.post(changed(message, peer=source))

    def probe(self, tag: int) -> int:
        """The group rank whose message of that tag waits for a receive from any source; -1: none."""
        source = self._local.probe(tag)
        return self._here[source] if source >= 0 else -1


class _LocalTicket:
    """A ticket of this host's transport, but that it names ranks as the whole group does."""

    def __init__(self, ticket: Ticket, here: Sequence[int]) -> None:
        self._inner, self._here = ticket, here

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def source(self) -> int:
        source = self._inner.source
        return self._here[source] if source >= 0 else -1
