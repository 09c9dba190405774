"""The oracle for clients: all responses that clients received, and checks that no later response contradicts them.

It runs with the clients and checks each response on arrival. Every record is unique and names its producer, so it has
exactly one correct offset in one partition.

- A record that was acknowledged or read at an offset stays there forever, and no other record is ever there.
- No record is in a partition twice, and every record was sent by a producer.
- The records of one stream (an idempotent producer, or one connection of another producer) keep their order.
- End offsets and watermarks never go backwards: a response is compared with all that arrived before its request.
- A reader gets every offset from its start on, in order.
- A group's committed offset never goes backwards, whichever node answers, and no member skips offsets that the group
  has not processed. A partition has one owner in each group (`GroupOwnership`).
- A producer id is assigned once.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from chronik.testing.sim.transaction_history import TransactionHistory
from chronik.testing.sim.world import World

SESSION_SHARE = 0.9
"""The share of a session left in the worst case: coordinator's clock as fast, member's as slow as allowed."""
AVAILABILITY_CHECK_S = 0.5
SILENCE_S_MAX = 12.0
"""Above the promised 10 s for partitions that the sick node led: simulated clients look for a leader less often."""


class TopicPartition(NamedTuple):
    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class RecordName(NamedTuple):
    """The content of a record's value: its stream, and its number in the stream."""

    stream: str
    number: int

    def value(self, size_bytes: int = 0) -> bytes:
        return f"{self.stream}/{self.number}/".encode().ljust(size_bytes, b".")

    @staticmethod
    def of(value: bytes | None) -> RecordName | None:
        parts = (value or b"").split(b"/")
        if len(parts) != 3 or not parts[1].isdigit():
            return None
        return RecordName(parts[0].decode(errors="replace"), int(parts[1]))


class PartitionHistory:
    """One partition, as seen by all clients together."""

    def __init__(self, world: World, name: TopicPartition) -> None:
        self.name = name
        self.records: dict[int, RecordName] = {}
        self.offsets: dict[RecordName, int] = {}
        self.end_seen = 0
        """The largest end offset that a client received."""
        self.acknowledged_count = 0
        self.acknowledged_s = 0.0
        """When a batch was last acknowledged."""
        self._sent: set[RecordName] = set()
        self._numbers: dict[str, list[int]] = {}
        self._world = world

    def sending(self, name: RecordName) -> None:
        """Note that the record may be in the log from now on."""
        self._sent.add(name)

    def acknowledged(self, names: list[RecordName], base_offset: int) -> None:
        for offset, name in enumerate(names, base_offset):
            self._place(offset, name, "acknowledged")
        self.acknowledged_count += len(names)
        self.acknowledged_s = self._world.now
        self._world.trace("acknowledged", base_offset, len(names))

    def read(self, offset: int, value: bytes | None, reader: str) -> None:
        name = RecordName.of(value)
        if name is None or name not in self._sent:
            self.violated(f"{reader} read a record at offset {offset} that no producer sent: {value!r:.60}")
            return
        self._place(offset, name, f"read by {reader}")

    def end_received(self, end_offset: int, known_at_request: int, reader: str) -> None:
        """Check the end offset for consumers (the high watermark) that a client received."""
        if end_offset < known_at_request:
            self.violated(f"{reader} received end offset {end_offset} after {known_at_request}")
        self.end_seen = max(self.end_seen, end_offset)

    def _place(self, offset: int, name: RecordName, how: str) -> None:
        known = self.records.get(offset)
        if known == name:
            return
        if known is not None:
            self.violated(f"offset {offset} held {known}, now {name} is {how} there")
            return
        elsewhere = self.offsets.get(name)
        if elsewhere is not None:
            self.violated(f"{name} is at offset {elsewhere}, now also {how} at {offset}")
            return
        self.records[offset] = name
        self.offsets[name] = offset
        self._check_order(offset, name, how)

    def _check_order(self, offset: int, name: RecordName, how: str) -> None:
        numbers = self._numbers.setdefault(name.stream, [])
        at = bisect_left(numbers, name.number)
        before = self.offsets[RecordName(name.stream, numbers[at - 1])] if at else -1
        after = self.offsets[RecordName(name.stream, numbers[at])] if at < len(numbers) else offset + 1
        if not before < offset < after:
            self.violated(f"{name} is {how} at {offset}, its neighbours in the stream at {before} and {after}")
        numbers.insert(at, name.number)

    def violated(self, what: str) -> None:
        self._world.violated(f"{self.name}: {what}")


class GroupHistory:
    """One group's position in one partition, as seen by all clients together. The committed offset only grows."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.committed = 0
        """The largest committed offset that a client knows of, from an OffsetCommit or OffsetFetch response."""
        self.processed_end = 0
        """Members have processed every offset below this."""
        self.tried = 0
        self._world = world

    def trying(self, offset: int) -> None:
        self.tried = max(self.tried, offset)

    def commit_acknowledged(self, offset: int) -> None:
        """Note a commit. Its response may reach a replaced member after the successor has committed more."""
        self.committed = max(self.committed, offset)

    def fetched(self, offset: int, known_at_request: int, client: str) -> None:
        """Check a committed offset that a client received from any node (-1: none yet)."""
        if max(offset, 0) < known_at_request:
            self._world.violated(
                f"{self.name}: {client} received committed offset {offset} after {known_at_request} was known"
            )
        elif offset > self.tried:
            self._world.violated(f"{self.name}: {client} received committed offset {offset}, which no client committed")
        else:
            self.committed = max(self.committed, offset)

    def processed(self, first: int, end: int, member: str) -> None:
        if first > self.processed_end:
            self._world.violated(
                f"{self.name}: {member} continues at {first}, but the group has processed up to {self.processed_end}"
            )
        self.processed_end = max(self.processed_end, end)


@dataclass(slots=True)
class Belief:
    """The partitions that a member considers its own, and until when."""

    generation: int
    partitions: tuple[int, ...]
    until_s: float


class GroupOwnership:
    """The owners of a group's partitions, by the coordinators' responses. Two owners at once are a violation.

    Members report their requests and the responses, in the order in which they happen.

    - Once a SyncGroup of generation g has succeeded, no heartbeat, commit or SyncGroup of an older generation that is
      sent later may succeed. Generations only grow, and a generation that a SyncGroup returned is in the log.
    - A member owns its assignment until a request fails or its session ends. The session starts when the member sends
      the last SyncGroup or heartbeat that succeeds. No other member may be assigned its partitions before that.
    """

    def __init__(self, world: World, group: str) -> None:
        self._world = world
        self._group = group
        self._formed_s: dict[int, float] = {}
        """By generation: when a member first received it."""
        self._beliefs: dict[str, Belief] = {}

    def synced(self, member: str, generation: int, partitions: list[int], sent_s: float, session_s: float) -> None:
        self.answered(member, generation, sent_s, "SyncGroup")
        self._formed_s.setdefault(generation, self._world.now)
        mine = Belief(generation, tuple(partitions), sent_s + session_s * SESSION_SHARE)
        for other, belief in self._beliefs.items():
            both = [partition for partition in belief.partitions if partition in mine.partitions]
            left_s = belief.until_s - self._world.now
            if other != member and both and belief.generation != generation and left_s > 0:
                self._world.violated(
                    f"group {self._group}: {member} was assigned partitions {both} in generation {generation}, but "
                    f"{other} owns them in generation {belief.generation} for another {left_s:.3f} s"
                )
        self._beliefs[member] = mine

    def heartbeat_succeeded(self, member: str, generation: int, sent_s: float, session_s: float) -> None:
        self.answered(member, generation, sent_s, "a heartbeat")
        belief = self._beliefs.get(member)
        if belief is not None and belief.generation == generation:
            belief.until_s = max(belief.until_s, sent_s + session_s * SESSION_SHARE)

    def answered(self, member: str, generation: int, sent_s: float, what: str) -> None:
        """Check that a successful request of this generation was not sent after a newer one began."""
        for newer, formed_s in self._formed_s.items():
            if newer > generation and formed_s < sent_s:
                self._world.violated(
                    f"group {self._group}: {what} of {member} in generation {generation} succeeded, sent "
                    f"{sent_s - formed_s:.3f} s after generation {newer} had begun"
                )

    def lost(self, member: str) -> None:
        """Note that the member owns nothing from now on: one of its requests failed, or it leaves."""
        self._beliefs.pop(member, None)


class History:
    """All that clients received in one run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.transactions = TransactionHistory(world)
        self._partitions: dict[TopicPartition, PartitionHistory] = {}
        self._groups: dict[tuple[str, TopicPartition], GroupHistory] = {}
        self._ownerships: dict[str, GroupOwnership] = {}
        self._producer_ids: dict[tuple[int, int], str] = {}

    @property
    def group_names(self) -> list[str]:
        return list(dict.fromkeys(group for group, _ in self._groups))

    def partition(self, topic: str, partition: int) -> PartitionHistory:
        name = TopicPartition(topic, partition)
        if name not in self._partitions:
            self._partitions[name] = PartitionHistory(self.world, name)
        return self._partitions[name]

    def partitions_of(self, topic: str) -> list[PartitionHistory]:
        return [known for name, known in self._partitions.items() if name.topic == topic]

    def group(self, group: str, topic: str, partition: int) -> GroupHistory:
        key = (group, TopicPartition(topic, partition))
        if key not in self._groups:
            self._groups[key] = GroupHistory(self.world, f"group {group}, {key[1]}")
        return self._groups[key]

    def ownership(self, group: str) -> GroupOwnership:
        if group not in self._ownerships:
            self._ownerships[group] = GroupOwnership(self.world, group)
        return self._ownerships[group]

    def producer_id_assigned(self, producer_id: int, epoch: int, producer: str) -> None:
        owner = self._producer_ids.setdefault((producer_id, epoch), producer)
        if owner != producer:
            self.world.violated(f"producer id {producer_id} was assigned to {owner} and to {producer}")

    @property
    def acknowledged_count(self) -> int:
        return sum(partition.acknowledged_count for partition in self._partitions.values())


class Availability:
    """From `begin` to `end`, checks that each partition of the topic keeps acknowledging acks=all batches.

    One node whose disk fails or hangs must not stop acknowledgements by other nodes.
    """

    def __init__(self, world: World, history: History, topic: str) -> None:
        self._world = world
        self._history = history
        self._topic = topic
        self._since_s: float | None = None
        self._why = ""

    def begin(self, why: str) -> None:
        self._since_s = self._world.now
        self._why = why
        self._check()

    def end(self) -> None:
        self._since_s = None

    def _check(self) -> None:
        if self._since_s is None:
            return
        for partition in self._history.partitions_of(self._topic):
            silent_s = self._world.now - max(self._since_s, partition.acknowledged_s)
            if silent_s > SILENCE_S_MAX:
                self._world.violated(f"{partition.name}: nothing was acknowledged for {silent_s:.1f} s: {self._why}")
        self._world.after(AVAILABILITY_CHECK_S, self._check)
