"""`chronik verify`: the experiment in which an earlier system lost 12-24 % of 5,000 records, on any Kafka cluster."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Annotated, Any

import typer

from chronik.cli.errors import CHECK_FAILED, CliError
from chronik.cli.options import DEFAULT_BOOTSTRAP, Acks, AsJson, Bootstrap, parse_acks
from chronik.cli.output import note, print_json
from chronik.cli.verify_account import PASS
from chronik.cli.verify_clients import CLIENTS
from chronik.cli.verify_report import matrix_figures, print_matrix, print_run
from chronik.cli.verify_run import Experiment, run
from chronik.client.properties import ClientSettings

BOOTSTRAP_FROM = ("one", "all")
MATRIX: dict[str, tuple[Any, ...]] = {
    "acks": ("0", "1", "all"),
    "bootstrap_from": BOOTSTRAP_FROM,
    "timeout_s": (60.0, 120.0),
    "max_poll_records": (500, 5000),
    "partitions": (1, 3),
}


def verify(
    messages: Annotated[int, typer.Option(min=1, help="Records to produce.")] = 5000,
    partitions: Annotated[int, typer.Option(min=1, help="Record i goes to partition i modulo this.")] = 3,
    acks: Acks = "1",
    bootstrap_from: Annotated[
        str, typer.Option(metavar="one|all", help="Give the clients one broker's address, or all.")
    ] = "one",
    client: Annotated[str, typer.Option(metavar="|".join(CLIENTS), help="The client to use.")] = "kafka-python",
    timeout: Annotated[float, typer.Option(min=0.1, help="Stop after this many seconds without a record.")] = 60.0,
    max_poll_records: Annotated[int, typer.Option(min=1, help="The most records that one poll returns.")] = 500,
    ledger: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write acknowledged records as JSON lines; keeps the topic.")
    ] = None,
    topic: Annotated[
        str | None, typer.Option(metavar="NAME", help="Use this topic and keep it (default: a temporary one).")
    ] = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Run all combinations and compare them.")] = False,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Produce, consume, and account for every record, partition by partition.

    PASS (exit 0) means that every record was acknowledged, and read once and in order; otherwise the exit code is 1.
    Works on any Kafka cluster.
    """
    experiment = Experiment(
        messages=messages,
        partitions=partitions,
        acks=parse_acks(acks),
        bootstrap_from=_one_of("--bootstrap-from", bootstrap_from, BOOTSTRAP_FROM),
        client=_one_of("--client", client, CLIENTS),
        timeout_s=timeout,
        max_poll_records=max_poll_records,
    )
    if matrix:
        if ledger is not None or topic is not None:
            raise CliError("--matrix creates a topic for each run: pass --ledger and --topic only for a single run")
        _verify_matrix(experiment, bootstrap, as_json)
        return
    if ledger is not None and experiment.acks == "0":
        raise CliError("--ledger needs acknowledgements, and acks=0 has none: pass --acks 1 or all")
    result = run(experiment, bootstrap, topic=topic, ledger=ledger)
    if as_json:
        print_json(result)
    else:
        print_run(result)
    if result["verdict"] != PASS:
        raise CliError(f"{result['verdict']}: {result['complaint']}", CHECK_FAILED)


def _verify_matrix(base: Experiment, bootstrap: ClientSettings, as_json: bool) -> None:
    """Run every combination even after a failure: the pattern of failures is more useful than the first one."""
    experiments = combinations(base)
    runs: list[dict[str, Any]] = []
    for index, experiment in enumerate(experiments):
        note(
            f"run {index + 1} of {len(experiments)}: acks={experiment.acks}, "
            f"bootstrap {experiment.bootstrap_from}, timeout {experiment.timeout_s:g} s, "
            f"{experiment.max_poll_records} per poll, {experiment.partitions} partitions"
        )
        runs.append(run(experiment, bootstrap))
    matrix = matrix_figures(runs)
    if as_json:
        print_json(matrix)
    else:
        print_matrix(matrix)
    failed = [one for one in runs if one["verdict"] != PASS]
    if failed:
        raise CliError(f"{len(failed)} of {len(runs)} runs failed; the first {failed[0]['complaint']}", CHECK_FAILED)


def combinations(base: Experiment) -> list[Experiment]:
    return [
        dataclasses.replace(base, **dict(zip(MATRIX, values, strict=True)))
        for values in itertools.product(*MATRIX.values())
    ]


def _one_of(flag: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise CliError(f"{flag} {value} is unknown: use {' or '.join(known)}")
    return value
