"""What `chronik verify` prints for people, and the comparison with the earlier runs of this experiment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from chronik.cli.output import print_table
from chronik.cli.verify_account import FAIL, PARTIAL, PASS

BASELINE = {"acks": "1", "bootstrap_from": "one", "timeout_s": 60.0, "max_poll_records": 500, "partition_count": 3}
"""The setup of the earlier measurements: kafka-python, 5,000 records, 3 partitions, one bootstrap address."""
EARLIER_RUNS = (
    ("v2.2.7: watermark synced every 5 s", 4391),
    ("v2.2.7.1: synced every 0.5 to 5 s by lag", 3941),
    ("v2.2.7.2: watermark sent as metadata events", 3814),
    ("v2.2.7 with idempotent watermark updates", 4410),
)
EARLIER_MESSAGES = 5000
SUMS = ("produced", "acked", "failed", "consumed", "missing", "duplicates", "out_of_order", "unexpected", "empty_polls")
PARTITION_COLUMNS = (
    "partition",
    "leader",
    "messages",
    "percent",
    "deviation",
    "first_offset",
    "last_offset",
    "gaps",
    "out_of_order",
)


def comparison(success_rate: float) -> list[dict[str, Any]]:
    """Return the earlier runs, with this run's lead over each in percentage points."""
    return [
        {
            "name": name,
            "consumed": consumed,
            "messages": EARLIER_MESSAGES,
            "success_rate": (rate := round(100 * consumed / EARLIER_MESSAGES, 1)),
            "difference": round(success_rate - rate, 1),
        }
        for name, consumed in EARLIER_RUNS
    ]


def matrix_figures(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return all runs, their totals, and a comparison of the earlier runs with the runs that use the same setup."""
    verdicts = {run["verdict"] for run in runs}
    counted = [{**run, "partition_count": len(run["partitions"])} for run in runs]
    like_earlier = [run for run in counted if all(run[name] == value for name, value in BASELINE.items())]
    lowest = min(run["success_rate"] for run in runs)
    return {
        "verdict": FAIL if FAIL in verdicts else PARTIAL if PARTIAL in verdicts else PASS,
        **{name: sum(run[name] for run in runs) for name in SUMS},
        "success_rate": lowest,
        "produce_s": round(sum(run["produce_s"] for run in runs), 3),
        "consume_s": round(sum(run["consume_s"] for run in runs), 3),
        "burst_rate": min(run["burst_rate"] for run in runs),
        "slowest_fetch_ms": max(run["slowest_fetch_ms"] for run in runs),
        "imbalance": max(run["imbalance"] for run in runs),
        "stalls": [stall for run in runs for stall in run["stalls"]],
        "partitions": [],
        "passed": sum(run["verdict"] == PASS for run in runs),
        "runs": list(runs),
        "comparison": comparison(min((run["success_rate"] for run in like_earlier), default=lowest)),
    }


def print_run(run: dict[str, Any]) -> None:
    rows = [[partition[column] for column in PARTITION_COLUMNS] for partition in run["partitions"]]
    title = f"{run['client']}, acks={run['acks']}, bootstrap {run['bootstrap']}, topic {run['topic']}"
    print_table(title, PARTITION_COLUMNS, rows, PARTITION_COLUMNS)
    print(f"produced {run['produced']:,} in {run['produce_s']:.2f} s, acked {run['acked']:,} ({run['acked_means']})")
    print(
        f"consumed {run['consumed']:,} in {run['consume_s']:.2f} s, first burst {run['burst_rate']:,.0f}/s, "
        f"{run['empty_polls']} empty polls, slowest fetch {run['slowest_fetch_ms']:,.0f} ms"
    )
    print(
        f"missing {run['missing']:,}, duplicates {run['duplicates']:,}, out of order {run['out_of_order']:,}, "
        f"imbalance {run['imbalance']:,}"
    )
    for stall in run["stalls"]:
        partitions = ", ".join(map(str, stall["partitions"]))
        print(f"stall at {stall['at_s']:.1f} s for {stall['seconds']:.1f} s in partitions {partitions}")
    earlier = ", ".join(f"{row['success_rate']}" for row in comparison(run["success_rate"]))
    print(f"{run['verdict']}: {run['success_rate']:g} % (the earlier system: {earlier} %)")


def print_matrix(matrix: dict[str, Any]) -> None:
    rows = [
        {
            "acks": run["acks"],
            "bootstrap": run["bootstrap_from"],
            "timeout": f"{run['timeout_s']:g}",
            "per poll": run["max_poll_records"],
            "partitions": len(run["partitions"]),
            "consumed": f"{run['consumed']}/{run['messages']}",
            "missing": run["missing"],
            "duplicates": run["duplicates"],
            "out of order": run["out_of_order"],
            "stalls": len(run["stalls"]),
            "success %": run["success_rate"],
            "verdict": run["verdict"],
        }
        for run in matrix["runs"]
    ]
    columns = tuple(rows[0])
    print_table("All combinations", columns, [tuple(row.values()) for row in rows], columns[2:11])
    compared = [
        (row["name"], f"{row['consumed']}/{row['messages']}", row["success_rate"], f"{row['difference']:+.1f}")
        for row in matrix["comparison"]
    ]
    first = matrix["comparison"][0]
    compared.append(("this cluster", "", round(first["success_rate"] + first["difference"], 1), ""))
    title = "acks=1, one bootstrap address, 60 s, 500 per poll, 3 partitions: the earlier system, and this cluster"
    names = ("system", "consumed", "success %", "this cluster is ahead by")
    print_table(title, names, compared, names[1:])
    print(f"{matrix['verdict']}: {matrix['passed']} of {len(rows)} runs complete, {matrix['missing']:,} missing")
