"""`chronik pipeline run` with more topics than a small machine can start at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.spark.test_run import Service, own_node, services
from tests.support import topics
from tests.support.landing import landed
from tests.support.node import Node
from tests.support.topics import numbered

from chronik.pipeline.session import java_fault

__all__ = ["own_node", "services"]

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(java_fault() is not None, reason=str(java_fault())),
]

NAMES = [f"topic-{number}" for number in range(6)]


def test_six_topics_start_one_after_another(own_node: Node, tmp_path: Path, services: list[Service]) -> None:
    """Every other topic is empty: its start ends, too."""
    for number, name in enumerate(NAMES):
        topics.create(own_node.bootstrap, name)
        if number % 2:
            topics.append(own_node.bootstrap, name, 0, numbered(10))
    file = f'''
name = "many"
bootstrap = "{own_node.bootstrap}"
listen = "127.0.0.1:{{port}}"
[spark]
master = "local[2]"
[[landing]]
topics = {NAMES}
to = "tables"
'''
    service = Service(tmp_path, own_node.bootstrap, file)
    services.append(service)
    starting: set[int] = set()

    def all_run() -> bool:
        states = [service.job(name)["state"] for name in NAMES]
        starting.add(states.count("running"))
        return states == ["running"] * len(NAMES)

    service.wait(all_run, "all topics land")
    assert len(starting) > 2, "several topics ran before the last one did"
    assert [service.job(name)["restarts"] for name in NAMES] == [0] * len(NAMES)
    service.wait(lambda: all(service.job(name)["rows"] == 10 for name in NAMES[1::2]), "all records landed")
    assert all(len(landed(tmp_path / "tables" / name)) == 10 for name in NAMES[1::2])
