"""The plan of a comparison: which server runs, in which order; and the process figures that the kernel reports."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench import groups, kafka_server, workloads
from bench.chronik_server import ChronikServer
from bench.clients import NotMeasured
from bench.java_producer import steady_rate
from bench.processes import cpu_ticks, machine_time, parent_of, usage_of, with_children
from bench.restarts import no_files_for
from bench.servers import CHRONIK, Setup
from bench.side_by_side import NAMES, PARTS, bar, group_plans, growth_plans, security_plans, setup_plans

SETUPS = [Setup(1, "replicated"), Setup(1, "synced"), Setup(3, "replicated"), Setup(3, "synced")]
SMALL = kafka_server.with_heap(128)


def test_the_order_of_the_sides_turns_with_each_repetition() -> None:
    (plan,) = setup_plans(["latency"], [Setup(3, "replicated")], 3, None)
    assert [side.name == CHRONIK for side in plan.lives()] == [True, False, False, True, True, False]


def test_produce_is_compared_on_every_set_up_and_failover_on_three_nodes_only() -> None:
    assert [plan.setup for plan in setup_plans(["produce"], SETUPS, 1, None)] == SETUPS
    assert [plan.setup for plan in setup_plans(["failover"], SETUPS, 1, None)] == [Setup(3, "replicated")]


def test_keyed_loads_and_the_java_producer_meet_apache_kafka_as_it_is_shipped() -> None:
    setups = [*SETUPS, Setup(1, "default"), Setup(3, "default")]
    for name in ("keyed", "java"):
        kinds = [(plan.setup.nodes, plan.setup.durability) for plan in setup_plans([name], setups, 1, None)]
        assert kinds == [(1, "replicated"), (3, "replicated"), (1, "default"), (3, "default")]


def test_with_their_defaults_nodes_get_no_durability(tmp_path: Path) -> None:
    ChronikServer(tmp_path / "default", Setup(1, "default"))
    ChronikServer(tmp_path / "synced", Setup(1, "synced"))
    settings = {path.relative_to(tmp_path).parts[0]: path.read_text() for path in tmp_path.rglob("*.toml")}
    assert "durability" in settings["synced"]
    assert "durability" not in settings["default"]


def test_the_rate_of_the_java_producer_excludes_its_warm_up() -> None:
    output = """\
20000 records sent, 9136.5 records/sec (8.71 MB/sec), 1187.37 ms avg latency, 1680.00 ms max latency, 1232 ms 50th.
16000 steady state records sent, 12345.6 records/sec (11.77 MB/sec), 1100.10 ms avg latency, 1680.00 ms max latency.
"""
    assert steady_rate(output) == 12345.6
    with pytest.raises(NotMeasured, match="no brokers"):
        steady_rate("no brokers")


def test_the_smallest_heap_is_measured_in_separate_runs_on_one_node() -> None:
    plans = list(setup_plans(["memory"], SETUPS, 2, SMALL))
    assert [(plan.setup.nodes, [side.name for side in plan.sides]) for plan in plans] == [
        (1, [CHRONIK, kafka_server.NAME]),
        (1, [SMALL.name]),
        (3, [CHRONIK, kafka_server.NAME]),
    ]


def test_start_and_idle_memory_are_measured_before_any_load() -> None:
    (plan,) = setup_plans(["start", "memory", "produce"], [Setup(3, "replicated")], 1, None)
    assert plan.cold == (workloads.start, workloads.idle_memory)
    assert plan.warm == (workloads.produce, workloads.loaded_memory)


def test_failover_comes_last_since_it_leaves_a_node_short() -> None:
    assert PARTS[-1].name == "failover"


def test_every_name_leads_to_a_plan() -> None:
    for name in NAMES:
        plans = [
            *setup_plans([name], SETUPS, 1, None),
            *growth_plans([name], 1, 1_000_000, print),
            *security_plans([name], None, 1, 1_000_000, print),
            *group_plans([name], 1, 1_000_000, print),
        ]
        assert plans, name


def test_tls_is_compared_on_one_node_and_on_three() -> None:
    plans = list(security_plans(["tls"], None, 1, 1_000_000, print))
    assert [(plan.setup.nodes, plan.setup.protocol) for plan in plans] == [(1, "SASL_SSL"), (3, "SASL_SSL")]
    (three,) = security_plans(["tls"], 3, 1, 1_000_000, print)
    assert three.setup.nodes == 3


def test_idle_connections_without_enough_open_files_are_left_out_with_the_reason() -> None:
    said: list[str] = []
    (plan,) = security_plans(["tls-connections"], None, 1, 1_024, said.append)
    assert plan.cold == ()
    assert plan.warm
    assert "1,000 idle TLS connections" in said[0]


def test_rows_of_groups_share_a_run_and_leave_out_members_without_open_files() -> None:
    (plan,) = group_plans(["groups", "share-groups"], 1, 1_000_000, print)
    assert plan.warm == (groups.lost_member, groups.heartbeats, groups.classic_leave, groups.shared)
    said: list[str] = []
    (plan,) = group_plans(["groups"], 1, 1_024, said.append)
    assert groups.heartbeats not in plan.warm
    assert "1,000 members" in said[0]


def test_points_without_enough_open_files_are_left_out_with_the_reason() -> None:
    said: list[str] = []
    plans = growth_plans(["partitions"], 1, 5_000, said.append)
    assert [plan.title for plan in plans] == ["10 partitions", "100 partitions", "1,000 partitions"]
    assert "5,000 partitions" in said[0]
    assert no_files_for(5_000, 20_000) is None


def test_a_process_name_with_spaces_and_parentheses_shifts_no_field() -> None:
    stat = "42 (a) b (c) S 7 1 1 0 -1 4194560 1 2 3 4 50 25 6 7 20 0 1 0 100 1000 10"
    assert parent_of(stat) == 7
    assert cpu_ticks(stat) == 75


def test_time_that_the_host_took_is_a_share_of_all_time() -> None:
    before = machine_time("cpu 10 0 10 50 0 0 0 30 0 0\ncpu0 1 2 3")
    assert machine_time("cpu 20 0 20 60 0 0 0 60 5 5\n").stolen_share_since(before) == 0.5
    assert before.stolen_share_since(before) == 0.0


def test_usage_counts_this_process_and_its_children() -> None:
    assert os.getpid() in with_children([os.getppid()])
    own = usage_of([os.getpid()])
    assert own.cpu_s > 0
    assert own.resident_bytes > 1_000_000
    assert usage_of([]).resident_bytes == 0


def test_the_bar_fills_and_tells_what_is_left() -> None:
    assert bar(0, 4, 0.0) == "[....................] 0 of 4, 0.0 min:"
    assert bar(2, 4, 120.0) == "[##########..........] 2 of 4, 2.0 min, about 2 min left:"
