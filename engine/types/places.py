"""Numbers that tell a disk tier where a content lies: blocks have theirs, slots of states those below 0.

Used by the cache's bookkeeping (engine.kv) and by the runner, which moves the bytes.
"""


def place_of(slot: int) -> int:
    """The number of a state's slot among blocks."""
    return ~slot


def slot_of(place: int) -> int:
    """The slot of such a number."""
    return ~place
