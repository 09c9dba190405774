"""The Grafana dashboard only queries what real nodes expose: metric names, labels, and values under load."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from tests.clients.drivers.share import ConfluentShares
from tests.cluster.support_cluster import Nodes
from tests.node.support_wire import unique
from tests.node.test_telemetry import alter, get, push
from tests.observe.test_metrics import PROMISED
from tests.support.eventually import eventually

from chronik.cli.options import with_cluster
from chronik.client.groups import Groups
from chronik.wire.errors import ErrorCode

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana.json"
METRIC = re.compile(r"\b((?:chronik|process)_[a-z_]+)(?:{([^}]*)})?")
OF_THE_SCRAPE = {"instance"}
"""Labels that Prometheus adds."""


def scraped(nodes: Nodes) -> tuple[set[str], dict[str, set[str]]]:
    """Return what all nodes together expose: the family names, and the labels of each sample name."""
    families: set[str] = set()
    samples: dict[str, set[str]] = {}
    for node in nodes.responsive:
        for family in text_string_to_metric_families(node.get("/metrics")[1].decode()):
            families.add(family.name)
            for sample in family.samples:
                samples.setdefault(sample.name, set()).update(sample.labels)
    return families, samples


def test_running_nodes_export_every_metric_and_label_that_the_dashboard_queries(shared_nodes: Nodes) -> None:
    topic, group = shared_nodes.new_topic(1), unique("watched")
    leader = shared_nodes.leader(topic)
    with shared_nodes.connect(leader) as client:
        client.append(topic, b"one", b"two")
    with shared_nodes.connect(leader % 3 + 1) as stranger:
        assert stranger.fetch_one(topic).error_code == ErrorCode.not_leader_or_follower
    with_cluster(shared_nodes.bootstrap, lambda cluster: Groups(cluster).commit(group, {(topic, 0): 1}))

    with shared_nodes.connect(1) as client:
        assert alter(client, group, metrics="*", match="client_id=wire-test") == ErrorCode.none
        assert push(client, get(client)) == ErrorCode.none

    dashboard = json.loads(DASHBOARD.read_text())
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", ())]
    definitions = [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]

    def all_found() -> bool:
        families, samples = scraped(shared_nodes)
        assert set(PROMISED) <= families
        for query, legend in [*((t["expr"], t["legendFormat"]) for t in targets), *((d, "") for d in definitions)]:
            known = set(OF_THE_SCRAPE)
            for name, selector in METRIC.findall(query):
                assert name in samples, f"no node exports {name}, which {query} needs"
                assert set(re.findall(r"(\w+)[=!]", selector)) <= samples[name] | OF_THE_SCRAPE, query
                known |= samples[name]
            grouped = {label for labels in re.findall(r"(?:by|on) \(([^)]*)\)", query) for label in labels.split(", ")}
            assert grouped | set(re.findall(r"{{(\w+)}}", legend)) <= known, query
        return True

    assert len(targets) > 20
    # A share partition is known while a member reads it.
    member = ConfluentShares().join(shared_nodes.bootstrap, unique("sharing"), topic)
    try:
        eventually(lambda: (member.poll(), all_found())[1], 30, "every query finds its metrics")
    finally:
        member.close()
