"""MPI's tags in a group over several hosts; and those of the group's own messages beside its user's."""

from c10d_custom.call import tag_of_barrier, tag_of_pieces, tag_of_window
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


def test_what_a_group_sends_by_itself_has_tags_of_its_own():
    numbers = 0, 1, 2, (1 << 39) - 1
    tags = [tag_of_barrier(number) for number in numbers]
    tags += [tag_of_window(window, number) for window in (1, 2, 3, (1 << 21) - 1) for number in numbers]
    tags += [tag for number in numbers for tag in (tag_of_pieces(number), tag_of_pieces(number) - 1)]
    assert len(set(tags)) == len(tags) and -(1 << 63) <= min(tags) and max(tags) < 0, sorted(tags)
