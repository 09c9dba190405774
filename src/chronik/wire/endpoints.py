"""Current leader and endpoints (KIP-951), which Produce and Fetch return with NOT_LEADER_OR_FOLLOWER.

current_leader   tagged field of a partition: leader_id int32, leader_epoch int32, tagged fields
node_endpoints   tagged field 0 of the response: compact array of
                 node_id int32, host compact string, port int32, rack compact nullable string, tagged fields
"""

from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple

from chronik.wire.errors import MalformedRequest
from chronik.wire.primitives import read_array_count, read_string, skip_tags, uvarint, write_string

_INT32: Final = Struct(">i")
LEADER: Final = Struct(">ii")

NODE_ENDPOINT_BYTES_MIN: Final = 11


class LeaderIdAndEpoch(NamedTuple):
    leader_id: int
    leader_epoch: int


class NodeEndpoint(NamedTuple):
    node_id: int
    host: str
    port: int
    rack: str | None = None


def node_endpoints_tags(endpoints: Sequence[tuple[int, str, int, str | None]]) -> bytes:
    """Write the tagged fields that end a response: node_endpoints, or none."""
    if not endpoints:
        return b"\x00"
    parts = [uvarint(len(endpoints) + 1)]
    for node_id, host, port, rack in endpoints:
        parts += (_INT32.pack(node_id), write_string(host, True), _INT32.pack(port), write_string(rack, True), b"\x00")
    content = b"".join(parts)
    return b"\x01\x00" + uvarint(len(content)) + content


def read_node_endpoints(buffer: memoryview) -> list[NodeEndpoint]:
    count, at = read_array_count(buffer, 0, True, NODE_ENDPOINT_BYTES_MIN)
    endpoints: list[NodeEndpoint] = []
    for _ in range(count):
        (node_id,) = _INT32.unpack_from(buffer, at)
        host, at = read_string(buffer, at + 4, True)
        if host is None:
            raise MalformedRequest("node endpoint without a host")
        (port,) = _INT32.unpack_from(buffer, at)
        rack, at = read_string(buffer, at + 4, True)
        at = skip_tags(buffer, at)
        endpoints.append(NodeEndpoint(node_id, host, port, rack))
    return endpoints


def read_leader(buffer: memoryview) -> LeaderIdAndEpoch | None:
    """Return None for the schema's default, which means that the leader is unknown."""
    leader = LeaderIdAndEpoch(*LEADER.unpack_from(buffer))
    return None if leader == (-1, -1) else leader
