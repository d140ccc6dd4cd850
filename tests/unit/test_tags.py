"""MPI's tags in a group over several hosts."""

from c10d_custom.transport.hosts import link
from c10d_custom.transport.hosts.message_ticket import SHARED_TAGS, tags_of


def test_each_kind_of_message_has_tags_of_its_own():
    kinds = [
        link.HEADER,
        link.DATA,
        link.ROUND,
        link.NOTHING,
        link.SUMS,
        link.REFUSAL,
        link.ROOM_WORD,
        link.ASKED,
        *SHARED_TAGS,
    ]
    kinds += [tag for user in (-2, -1, 0, 1, 2, 1000) for tag in tags_of(user, limit=1 << 20)]
    assert len(set(kinds)) == len(kinds), kinds
