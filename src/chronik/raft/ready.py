"""The output of the Raft core: results of calls, and the `Ready` that the node carries out.

Process a Ready in this order: send `messages`; write `persist`, report it with `RaftNode.persisted`, then send
`messages_after`; restore, apply `committed`, handle the other fields. Only the write takes time, and only
`messages_after` wait for it: everything else depends on earlier writes. During the write, `ready()` keeps returning
work that does not depend on it (heartbeats, replication, committed durable entries), with `persist` None. A second
write never starts before the first is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias
from uuid import UUID

from chronik.raft.membership import Membership
from chronik.raft.messages import Message
from chronik.raft.store import Entry, Persist, Snapshot


class RoleKind(Enum):
    FOLLOWER = "follower"
    PRE_CANDIDATE = "pre-candidate"
    CANDIDATE = "candidate"
    LEADER = "leader"


@dataclass(frozen=True, slots=True, order=True)
class ProposalId:
    """A proposal's place in the log. It is committed when a Ready returns an entry with this index *and* term."""

    index: int
    term: int


class Reason(Enum):
    """Why a call was refused. In all cases nothing was appended."""

    NOT_LEADER = "this node does not lead"
    TRANSFERRING = "leadership is being handed over"
    BUSY = "too many entries are uncommitted"
    TOO_LARGE = "the entry is too large"
    NOT_ESTABLISHED = "the leader has not committed an entry of its term yet"
    CHANGE_IN_FLIGHT = "another membership change is not committed yet"
    NOT_CAUGHT_UP = "the learner lags too far behind"
    STORE_IN_USE = "the node still responds from its known store"
    INVALID = "the change does not fit the membership"


@dataclass(frozen=True, slots=True)
class Refused:
    """The call had no effect. `leader` is the node to try instead, as far as this node knows."""

    reason: Reason
    leader: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """This node's role, the term, or the leader that it knows of has changed."""

    role: RoleKind
    term: int
    leader: int | None


@dataclass(frozen=True, slots=True)
class LeaderEstablished:
    """This node leads and, with this Ready, has applied all that earlier leaders committed: the controller may act."""

    term: int


@dataclass(frozen=True, slots=True)
class MembershipChanged:
    """The membership in effect: it is new or has just been committed."""

    membership: Membership
    is_committed: bool


@dataclass(frozen=True, slots=True)
class NodeIdTaken:
    """A node with an empty store asks to join under the id of a live member: two nodes have the same id."""

    node_id: int
    store: UUID


Event: TypeAlias = RoleChanged | LeaderEstablished | MembershipChanged | NodeIdTaken


@dataclass(frozen=True, slots=True)
class Ready:
    """The work to do now; the module docstring gives the order."""

    messages: tuple[Message, ...] = ()
    persist: Persist | None = None
    messages_after: tuple[Message, ...] = ()
    """Empty unless there is something to persist."""
    restore: Snapshot | None = None
    """Replaces the state machine; already durable. The committed entries follow it."""
    committed: tuple[Entry, ...] = ()
    """Durable here and committed, in order and without a gap since the last Ready or `restore`."""
    proposals_dropped: tuple[ProposalId, ...] = ()
    """These were overwritten: they never take effect."""
    events: tuple[Event, ...] = ()
