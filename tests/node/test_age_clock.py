"""When the wall clock jumps, deletion by age does not follow it immediately."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.node.cluster_harness import LocalNodes
from tests.support.eventually import until

from chronik.groups.commits import CommitRequest
from chronik.groups.records import TopicPartition
from chronik.node.age_clock import AGREES_S, JUMP_MS, AgeClock
from chronik.node.broker import Broker
from chronik.node.membership.topic_plans import NewTopic
from chronik.observe.logging import make_logger
from chronik.wire.batch import encode_batch
from chronik.wire.errors import ErrorCode

HOUR_MS = 60 * 60 * 1000
DAY_MS = 24 * HOUR_MS
EPOCH_MS = 1_700_000_000_000


class Machine:
    """A machine whose clocks the test controls."""

    def __init__(self) -> None:
        self.own_s = 100.0
        self.wall_ms = EPOCH_MS
        self.lines: list[str] = []
        self.ages = AgeClock(
            lambda: self.own_s, lambda: self.wall_ms, make_logger(self.lines.append, lambda: self.wall_ms)
        )

    def passes(self, ms: int) -> None:
        self.own_s += ms / 1000
        self.wall_ms += ms

    def events(self, name: str) -> int:
        return sum(name in line for line in self.lines)


def test_the_age_clock_equals_a_steady_wall_clock() -> None:
    machine = Machine()
    for ms in (0, 1, 999, HOUR_MS, 30 * DAY_MS):
        machine.passes(ms)
        assert machine.ages.now_ms() == machine.wall_ms
    assert machine.lines == []


@pytest.mark.parametrize("jump_ms", [JUMP_MS, -JUMP_MS, 1])
def test_the_age_clock_follows_small_corrections(jump_ms: int) -> None:
    machine = Machine()
    for _ in range(10):
        machine.wall_ms += jump_ms
        assert machine.ages.now_ms() == machine.wall_ms
        machine.passes(60_000)
    assert machine.lines == []


@pytest.mark.parametrize("jump_ms", [DAY_MS, -DAY_MS, JUMP_MS + 1])
def test_the_age_clock_ignores_a_wall_clock_jump_and_logs_it_once(jump_ms: int) -> None:
    machine = Machine()
    machine.wall_ms += jump_ms
    for _ in range(5):
        assert machine.ages.now_ms() == machine.wall_ms - jump_ms
        machine.passes(HOUR_MS)
    assert machine.events("wall_clock_jumped") == 1


def test_the_age_clock_accepts_a_jump_after_the_wall_clock_is_steady_long_enough() -> None:
    machine = Machine()
    machine.wall_ms += DAY_MS
    assert machine.ages.now_ms() == machine.wall_ms - DAY_MS
    machine.passes(int(AGREES_S * 1000) - 1)
    assert machine.ages.now_ms() == machine.wall_ms - DAY_MS
    machine.passes(1)
    assert machine.ages.now_ms() == machine.wall_ms
    assert machine.events("wall_clock_believed") == 1


def test_another_jump_restarts_the_wait() -> None:
    machine = Machine()
    machine.wall_ms += DAY_MS
    machine.ages.now_ms()
    machine.passes(int(AGREES_S * 1000) - 1)
    machine.wall_ms += DAY_MS
    assert machine.ages.now_ms() == machine.wall_ms - 2 * DAY_MS
    machine.passes(1)
    assert machine.ages.now_ms() == machine.wall_ms - 2 * DAY_MS
    assert machine.events("wall_clock_jumped") == 2


def test_the_age_clock_trusts_a_corrected_wall_clock_at_once() -> None:
    machine = Machine()
    machine.wall_ms += DAY_MS
    machine.ages.now_ms()
    machine.passes(HOUR_MS)
    machine.wall_ms -= DAY_MS
    assert machine.ages.now_ms() == machine.wall_ms
    machine.passes(HOUR_MS)
    assert machine.ages.now_ms() == machine.wall_ms
    assert machine.events("wall_clock_back") == 1


# On a node


class WallClock:
    def __init__(self) -> None:
        self.now_ms = EPOCH_MS

    def __call__(self) -> int:
        return self.now_ms


def produced(broker: Broker, topic: str, wall: WallClock, **more: Any) -> int:
    """Append a batch with the current timestamp and return the log end offset."""
    batch = encode_batch([(b"k", b"v" * 1000, (), wall.now_ms)], **more)
    return broker.host.require_leader(topic, 0).append(memoryview(bytearray(batch)), wall.now_ms).last_offset + 1


async def committed(broker: Broker, group: str) -> dict[TopicPartition, ErrorCode]:
    return await broker.groups.commit(CommitRequest(group, -1, "", None, ((("old", 0), 1, -1, ""),)))


async def test_a_forward_jump_of_the_wall_clock_by_a_day_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = WallClock()
    monkeypatch.setattr("tests.node.cluster_harness._wall_ms", wall)

    nodes = LocalNodes(
        tmp_path,
        1,
        default_replication_factor=1,
        retention_check_interval_ms=20,
        offsets_retention_minutes=60,
        offsets_topic_partitions=1,
    )
    async with nodes:
        broker = await nodes.start(1)
        await broker.topics.create(NewTopic("old", 1, configs={"retention.ms": str(HOUR_MS)}))
        # This topic's deletion by size proves that a retention round ran after the jump.
        by_size = {"retention.bytes": "1000", "segment.bytes": "1024", "retention.ms": "-1"}
        await broker.topics.create(NewTopic("large", 1, configs=by_size))
        end = produced(broker, "old", wall, producer_id=7, producer_epoch=0, base_sequence=0)
        assert await committed(broker, "group") == {("old", 0): ErrorCode.none}

        wall.now_ms += DAY_MS + HOUR_MS
        large = broker.host.require_leader("large", 0)
        for _ in range(5):
            produced(broker, "large", wall)
        await until(lambda: large.log_start_offset > 0, "retention by size goes on")
        broker.groups._expire()
        # If that expired offsets, their tombstones would be written before this commit.
        assert await committed(broker, "later") == {("old", 0): ErrorCode.none}
        old = broker.host.require_leader("old", 0)
        await until(lambda: old.high_watermark == end)
        assert (old.log_start_offset, old.log_end_offset) == (0, end)
        assert old.log.producers.get(7) is not None
        error, offsets = await broker.groups.committed("group", [("old", 0)])
        found = offsets[("old", 0)]
        assert error is ErrorCode.none
        assert found is not None and found.offset == 1
        assert len(nodes.events(1, "wall_clock_jumped")) == 1

        # Record timestamps always use the wall clock, and a restarted node trusts it.
        await nodes.stop(broker)
        broker = await nodes.start(1)
        await until(lambda: broker.host.require_leader("old", 0).log_start_offset == end, "the clock is believed")
