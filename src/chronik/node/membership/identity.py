"""How this node identifies itself to other nodes."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from chronik.node.membership.internal_api import Hello


@dataclass(slots=True)
class Identity:
    """One process of one node. `incarnation` is new at each start; `internal` is its address for peers.

    `cluster_id` is empty until the node learns its first cluster's id, and never changes after that. Owned by the loop.
    """

    node_id: int
    incarnation: UUID
    internal: str
    cluster_id: str = ""

    def hello(self, target_node_id: int, purpose: str, nonce: bytes = b"") -> Hello:
        return Hello(self.cluster_id, self.node_id, self.incarnation, target_node_id, self.internal, purpose, nonce)
