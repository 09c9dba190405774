"""What the brokers of a cluster report about its controller, and how it is explained."""

from __future__ import annotations

from chronik.client.controller_watch import Survey
from chronik.client.layout import BrokerLayout, ClusterLayout

BROKERS = {node_id: BrokerLayout(node_id, f"host-{node_id}", 9092) for node_id in (1, 2, 3)}


def reports(controller_id: int) -> ClusterLayout:
    return ClusterLayout("c", controller_id, BROKERS, {})


def test_a_disconnected_node_does_not_prove_that_there_is_no_controller() -> None:
    assert Survey(BROKERS, {1: reports(-1), 2: reports(3), 3: None}, frozenset()).has_controller
    assert not Survey(BROKERS, {1: reports(-1), 2: None, 3: None}, frozenset()).has_controller


def test_the_explanation_names_the_nodes_that_do_not_answer() -> None:
    line = Survey(BROKERS, {1: reports(-1), 2: None, 3: None}, frozenset({4})).explain()
    assert "node 1 answers; nodes 2 (host-2:9092), 3 (host-3:9092) do not answer; node 4 had failed before" in line
    assert "start the nodes that are down" in line


def test_if_all_nodes_answer_the_explanation_advises_to_check_connections_and_disks() -> None:
    line = Survey(BROKERS, dict.fromkeys(BROKERS, reports(-1)), frozenset()).explain()
    assert "nodes 1, 2, 3 answer" in line and "reach each other" in line and "start" not in line
