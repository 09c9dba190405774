"""Kafka Streams with exactly_once_v2 counts every word once, whatever is killed: brokers, or the application."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
from tests.cluster.support_cluster import Nodes
from tests.cluster.support_streams import CommittedCounts, Lines, WordCount, missing
from tests.node.support_wire import unique

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

PARTITIONS = 2
PROGRESS = 500
"""Counts that must be committed after a fault: more than were on their way when it struck."""
PROGRESS_TIMEOUT_S = 90.0
SOAK_S = 300.0
LOG_CHARACTERS = 3_000
PAUSE_S_MAX = 12.0
"""Longer than the session timeout: a paused application comes back as a zombie."""

StartCounting: TypeAlias = Callable[[int, int], "Counting"]


class Counting:
    """A cluster with a growing topic of lines, applications that count their words, and a reader of the counts."""

    def __init__(self, nodes: Nodes, folder: Path, applications: int, seed: int) -> None:
        self.nodes = nodes
        source, target = nodes.new_topic(PARTITIONS), nodes.new_topic(PARTITIONS)
        self.target = target
        name = unique("word-count")
        self.applications = [
            WordCount(folder, f"application-{number}", nodes.bootstrap, name, source, target)
            for number in range(1, applications + 1)
        ]
        self.lines = Lines(nodes.bootstrap, source, seed)
        self.counts = CommittedCounts(nodes.bootstrap, target, PARTITIONS)

    def start(self) -> None:
        self.lines.start()
        for application in self.applications:
            application.start()
        self.make_progress("the application counts")

    def make_progress(self, what: str) -> None:
        self.counts.wait_for(self.counts.total + PROGRESS, PROGRESS_TIMEOUT_S, what)

    def finish(self) -> None:
        """Stop the input, wait until all of it is counted, and check the counts."""
        self.lines.stop()
        expected = self.lines.expected
        self.counts.wait_for(expected.total(), PROGRESS_TIMEOUT_S, "all lines are counted")
        self.counts.check(expected)
        self.nodes.no_surprises()

    def close(self) -> None:
        self.lines.close()
        for application in self.applications:
            application.close()
            print(application.log_text[-LOG_CHARACTERS:])
        self.counts.close()


@pytest.fixture
def start_counting(nodes: Nodes, tmp_path: Path) -> Iterator[StartCounting]:
    started: list[Counting] = []

    def start(applications: int, seed: int) -> Counting:
        started.append(Counting(nodes, tmp_path, applications, seed))
        started[-1].start()
        return started[-1]

    yield start
    for counting in started:
        counting.close()


def test_word_counts_are_exact_although_a_broker_and_the_application_are_killed(start_counting: StartCounting) -> None:
    counting = start_counting(1, 1)
    victim = counting.nodes.leader(counting.target)
    counting.nodes.kill(victim)
    counting.make_progress("the application counts without the killed node")
    counting.nodes.start(victim)
    (application,) = counting.applications
    application.kill()
    application.start()
    counting.make_progress("the application counts after its restart")
    counting.finish()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_word_counts_are_exact_after_minutes_of_kills_and_pauses(start_counting: StartCounting) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    counting = start_counting(2, seed)
    until_s = time.monotonic() + SOAK_S
    while time.monotonic() < until_s:
        number = chance.choice((0, 1))
        application, nodes, node_id = counting.applications[number], counting.nodes, chance.choice(counting.nodes.ids)
        faults: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            f"node {node_id} is killed": (lambda: nodes.kill(node_id), lambda: nodes.start(node_id)),  # noqa: B023
            f"node {node_id} is paused": (lambda: nodes.pause(node_id), lambda: nodes.resume(node_id)),  # noqa: B023
            f"application {number} is killed": (application.kill, application.start),
            f"application {number} is paused": (application.pause, application.resume),
        }
        fault = chance.choice(list(faults))
        print(f"{fault} for {(pause_s := chance.uniform(0, PAUSE_S_MAX)):.1f} s")
        begin, end = faults[fault]
        begin()
        time.sleep(pause_s)
        end()
        counting.make_progress(f"the application counts after {fault}")
    counting.finish()
