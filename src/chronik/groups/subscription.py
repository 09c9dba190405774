"""The topics that a member of a "consumer" group subscribes to, read from its JoinGroup metadata.

The coordinator does not otherwise parse what assignors exchange. It reads this much to know which topics a group still
needs: their offsets are neither deleted nor expired.

    ConsumerProtocolSubscription, any version:
        version     int16
        topics      int32 count, then each: int16 length, UTF-8
        ...         user data, owned partitions, generation, rack: not read
"""

import struct

_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")

CONSUMER_PROTOCOL_TYPE = "consumer"


def subscribed_topics(metadata: bytes) -> frozenset[str] | None:
    """Return the topics in a subscription, or None if the bytes are not a subscription."""
    try:
        (count,) = _INT32.unpack_from(metadata, 2)
        at = 6
        topics = []
        if count < 0:
            return None
        for _ in range(count):
            (length,) = _INT16.unpack_from(metadata, at)
            at += 2
            if length < 0 or at + length > len(metadata):
                return None
            topics.append(metadata[at : at + length].decode())
            at += length
    except (struct.error, UnicodeDecodeError):
        return None
    return frozenset(topics)
