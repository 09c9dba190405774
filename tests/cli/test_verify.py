"""`chronik verify`, on a real node and with clients that lose, duplicate and reorder records."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.cli.run_chronik import chronik
from tests.support.node import Node

from chronik.cli import app, verify, verify_run
from chronik.cli.verify import combinations
from chronik.cli.verify_clients import Read, Report
from chronik.cli.verify_report import comparison, matrix_figures
from chronik.cli.verify_run import Experiment, Prepared
from chronik.wire.checksum import record_checksum

FIELDS = {
    *("verdict", "produced", "acked", "consumed", "missing", "duplicates", "out_of_order", "success_rate", "produce_s"),
    *("consume_s", "burst_rate", "empty_polls", "imbalance", "stalls", "slowest_fetch_ms", "partitions"),
}
PARTITION_FIELDS = {"partition", "leader", "messages", "percent", "deviation", "first_offset", "last_offset", "gaps"}


@pytest.mark.parametrize("acks", ["0", "1", "all"])
@pytest.mark.parametrize("client", ["kafka-python", "confluent"])
def test_verify_accounts_for_every_record(shared_node: Node, client: str, acks: str) -> None:
    at = ("-b", shared_node.bootstrap)
    found = chronik("verify", "--client", client, "--acks", acks, "--messages", "2000", "--json", *at).json()
    assert found.keys() >= FIELDS
    assert found["partitions"][0].keys() >= PARTITION_FIELDS
    assert found["verdict"] == "PASS"
    assert (found["produced"], found["acked"], found["consumed"], found["missing"]) == (2000, 2000, 2000, 0)
    assert [partition["messages"] for partition in found["partitions"]] == [667, 667, 666]
    assert all(partition["gaps"] == 0 and partition["deviation"] == 0 for partition in found["partitions"])
    assert found["topic"] not in chronik("topic", "list", *at).out


def test_ledger_option_records_each_acknowledged_record_and_keeps_the_topic(shared_node: Node, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    at = ("-b", shared_node.bootstrap)
    found = chronik("verify", "--messages", "300", "--ledger", str(ledger), "--json", *at).json()
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert {(line["partition"], line["offset"]) for line in lines} == {(i % 3, i // 3) for i in range(300)}
    assert {line["checksum"] for line in lines} == {
        record_checksum(str(i).encode(), f"Message {i}".encode()) for i in range(300)
    }
    assert found["topic"] in chronik("topic", "list", *at).out


def test_verify_reads_an_existing_topic_from_its_previous_end_offset(shared_node: Node) -> None:
    at = ("-b", shared_node.bootstrap, "--topic", "verify-twice", "--messages", "90", "--json")
    assert chronik("verify", *at).json()["partitions"][0]["first_offset"] == 0
    again = chronik("verify", "--client", "confluent", *at).json()
    assert (again["verdict"], again["partitions"][0]["first_offset"]) == ("PASS", 30)


def test_verify_prints_a_verdict_without_json(shared_node: Node) -> None:
    shown = chronik("verify", "--messages", "30", "-b", shared_node.bootstrap)
    assert shown.code == 0
    assert "PASS: 100 % (the earlier system: 87.8, 78.8, 76.3, 88.2 %)" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--client", "java"), "use kafka-python or confluent"),
        (("--bootstrap-from", "some"), "use one or all"),
        (("--acks", "2"), "use all, 1 or 0"),
        (("--messages", "0"), "--messages"),
        (("--acks", "0", "--ledger", "x"), "pass --acks 1 or all"),
        (("--matrix", "--ledger", "x"), "single run"),
        (("-b", "127.0.0.1:1"), "-b HOST:PORT"),
    ],
)
def test_wrong_usage_is_a_one_line_error_with_advice(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    refused = chronik("verify", *arguments, cwd=tmp_path)
    assert refused.code == 2
    assert says in refused.error_line
    assert list(tmp_path.iterdir()) == []


# -- a log between sender and reader that the test damages --

Damage = Callable[[list[int]], list[int]]


class DamagedLog:
    """Sender and reader in one: the records sent to each partition are read back after `damage`."""

    def __init__(self, damage: Damage, report: Callable[[Report], None]) -> None:
        self._damage = damage
        self._report = report
        self._partitions: dict[int, list[int]] = {0: [], 1: [], 2: []}
        self._unread: list[Read] | None = None

    def send(self, number: int, partition: int, key: bytes, value: bytes) -> None:
        self._partitions[partition].append(number)
        self._report(Report(number, None, 0, 0))

    def serve_reports(self) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def poll(self, timeout_s: float) -> Sequence[Read]:
        if self._unread is None:
            self._unread = [
                Read(partition, offset, str(number).encode())
                for partition, numbers in self._partitions.items()
                for offset, number in enumerate(self._damage(numbers) if partition == 1 else numbers)
            ]
        batch, self._unread = self._unread[:100], self._unread[100:]
        return batch

    def end_offsets(self) -> dict[int, int]:
        return {
            partition: len(self._damage(numbers) if partition == 1 else numbers)
            for partition, numbers in self._partitions.items()
        }


def run_with(damage: Damage, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    logs: list[DamagedLog] = []

    def open_sender(client: str, bootstrap: str, topic: str, acks: str, report: Callable[[Report], None]) -> DamagedLog:
        logs.append(DamagedLog(damage, report))
        return logs[0]

    prepared = Prepared("t", "127.0.0.1:9092", "127.0.0.1:9092", {0: 1, 1: 2, 2: 3}, {0: 0, 1: 0, 2: 0})
    monkeypatch.setattr(verify_run, "with_cluster", lambda *_: prepared)
    monkeypatch.setattr(verify_run, "_delete", lambda *_: None)
    monkeypatch.setattr(verify_run, "end_offsets", lambda *_: logs[0].end_offsets())
    monkeypatch.setattr(verify_run, "open_sender", open_sender)
    monkeypatch.setattr(verify_run, "open_reader", lambda *_: logs[0])
    return verify_run.run(Experiment(messages=900, timeout_s=0.2), "127.0.0.1:9092")


def test_a_complete_log_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_with(lambda numbers: numbers, monkeypatch)["verdict"] == "PASS"


def test_verify_finds_a_lost_record(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_with(lambda numbers: [*numbers[:100], *numbers[101:]], monkeypatch)
    assert (found["missing"], found["duplicates"], found["out_of_order"], found["verdict"]) == (1, 0, 0, "PARTIAL")


def test_verify_finds_a_duplicate_after_the_last_expected_record(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_with(lambda numbers: [*numbers, numbers[-1]], monkeypatch)
    assert (found["missing"], found["duplicates"], found["out_of_order"]) == (0, 1, 0)
    assert found["verdict"] != "PASS"


def test_verify_finds_two_swapped_records(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_with(lambda numbers: [numbers[1], numbers[0], *numbers[2:]], monkeypatch)
    assert (found["missing"], found["duplicates"], found["out_of_order"]) == (0, 0, 1)
    assert found["verdict"] != "PASS"


def test_verify_fails_if_a_fifth_of_the_records_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_with(lambda numbers: numbers[:120], monkeypatch)
    assert (found["verdict"], found["success_rate"], found["missing"]) == ("FAIL", 80.0, 180)
    assert found["imbalance"] == 180


def test_an_incomplete_run_exits_with_1_and_prints_the_account_to_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_with(lambda numbers: numbers[1:], monkeypatch)
    monkeypatch.setattr(verify, "run", lambda *_, **__: found)
    assert app.main(["verify", "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["missing"] == 1
    assert printed.err == "chronik: PARTIAL: of 900 records: 1 missing\n"


# -- the matrix --


def test_the_matrix_has_each_combination_once() -> None:
    experiments = combinations(Experiment())
    assert len(experiments) == len(set(experiments)) == 3 * 2 * 2 * 2 * 2
    assert Experiment() in experiments


def test_the_matrix_is_compared_with_the_figures_of_the_earlier_system(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_with(lambda numbers: numbers, monkeypatch) | {"timeout_s": 60.0}
    lossy = run_with(lambda numbers: numbers[1:], monkeypatch) | {"acks": "0"}
    found = matrix_figures([whole, lossy])
    assert [row["success_rate"] for row in found["comparison"]] == [87.8, 78.8, 76.3, 88.2]
    assert [row["difference"] for row in found["comparison"]] == [12.2, 21.2, 23.7, 11.8]
    assert (found["verdict"], found["passed"], found["missing"], found["produced"]) == ("PARTIAL", 1, 1, 1800)
    assert found.keys() >= FIELDS


def test_a_lower_success_rate_has_a_negative_difference() -> None:
    assert [row["difference"] for row in comparison(80.0)] == [-7.8, 1.2, 3.7, -8.2]


def test_a_failed_run_fails_the_matrix_after_all_runs_are_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lossy = run_with(lambda numbers: numbers[1:], monkeypatch)
    whole = run_with(lambda numbers: numbers, monkeypatch)
    monkeypatch.setattr(verify, "run", lambda experiment, _: lossy if experiment.acks == "all" else whole)
    assert app.main(["verify", "--matrix", "--json"]) == 1
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)["runs"]) == 48
    assert printed.err.startswith("chronik: 16 of 48 runs failed")


def test_verify_prints_the_matrix_and_the_comparison_without_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run_with(lambda numbers: numbers, monkeypatch)
    monkeypatch.setattr(verify, "run", lambda *_: whole)
    assert app.main(["verify", "--matrix"]) == 0
    shown = capsys.readouterr().out
    assert "4391/5000" in shown and "+12.2" in shown
    assert "PASS: 48 of 48 runs complete, 0 missing" in shown
