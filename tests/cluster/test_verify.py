"""The original experiment, on a healthy cluster through one address: every record comes back."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest
from tests.cluster.support_cluster import Nodes
from tests.support.node import CHRONIK

RECORDS = 5_000
DEVIATION_PERCENT_MAX = 10.0


def verify(nodes: Nodes, client: str, acks: str, messages: int, timeout_s: float = 300.0) -> dict[str, Any]:
    """Run `chronik verify` with one bootstrap address, and return its JSON."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CHRONIK_")}
    ended = subprocess.run(
        [
            *(str(CHRONIK), "verify", "--json", "--bootstrap", nodes.node(1).bootstrap),
            *("--messages", str(messages), "--partitions", "3", "--acks", acks, "--client", client),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def is_complete(found: dict[str, Any], acks: str, messages: int) -> None:
    assert found["verdict"] == "PASS", found
    assert found["produced"] == messages
    assert found["consumed"] == messages
    assert found["success_rate"] == 100
    assert (found["missing"], found["duplicates"], found["out_of_order"]) == (0, 0, 0), found
    if acks != "0":
        assert found["acked"] == messages
    for partition in found["partitions"]:
        assert abs(partition["deviation_percent"]) < DEVIATION_PERCENT_MAX, found
        assert partition["gaps"] in (0, [], None), found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("acks", ["0", "1", "all"])
@pytest.mark.parametrize("client", ["kafka-python", "confluent"])
def test_verify_reads_back_all_five_thousand_records(shared_nodes: Nodes, client: str, acks: str) -> None:
    found = verify(shared_nodes, client, acks, RECORDS)
    is_complete(found, acks, RECORDS)
    assert sorted(partition["leader"] for partition in found["partitions"]) == shared_nodes.ids
