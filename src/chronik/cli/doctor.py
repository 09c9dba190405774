"""`chronik doctor`: why consumption of a topic stalls, as one verdict with its evidence."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from chronik.cli.errors import CHECK_FAILED
from chronik.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, Topic
from chronik.cli.output import note, print_json, print_table
from chronik.doctor import Diagnosis, Means, diagnose
from chronik.doctor.examination import SECONDS, SECONDS_MAX


def doctor(
    topic: Topic,
    group: Annotated[str | None, typer.Option("--group", metavar="G", help="Examine only this group.")] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, max=SECONDS_MAX, help="How long to watch the topic, at least.")
    ] = SECONDS,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Explain why consumption of a topic stalls: a verdict, its evidence, the next step. Exit 1 unless healthy."""
    note(f"watching {topic} for {seconds:g} s, or a little longer if a consumer is stuck")
    diagnosis = asyncio.run(
        diagnose(
            bootstrap.endpoints,
            topic,
            group,
            seconds,
            wall_ms=lambda: time.time_ns() // 1_000_000,
            means=Means.of(bootstrap.security),
        )
    )
    if as_json:
        print_json(diagnosis.to_json())
    else:
        show(diagnosis)
    if diagnosis.verdict != "healthy":
        raise typer.Exit(CHECK_FAILED)


def show(diagnosis: Diagnosis) -> None:
    """Print the verdict for people, then its evidence."""
    print(f"{diagnosis.verdict}: {diagnosis.summary}.")
    for item in diagnosis.evidence:
        since = f" (for {item.since_s:g} s)" if item.since_s else ""
        print(f"  - {item.text}{since}")
    if diagnosis.also:
        print(f"  also: {', '.join(diagnosis.also)}")
    for text in diagnosis.notes:
        print(f"  note: {text}")
    print(f"next: {diagnosis.next_step}")
    offsets = ("start", "stable", "watermark", "end")
    columns = ("partition", "leader", "isr", "replicas", *offsets, "slowest fetch ms", "groups")
    rows = [
        (
            view.partition,
            view.leader,
            ",".join(map(str, view.isr)),
            ",".join(map(str, view.replicas)),
            view.log_start_offset,
            view.last_stable_offset,
            view.high_watermark,
            view.log_end_offset,
            view.fetch_ms,
            ", ".join(f"{group} at {at['committed']} lag {at['lag']}" for group, at in view.groups.items()) or "-",
        )
        for view in diagnosis.partitions
    ]
    print_table("", columns, rows, columns[:2] + columns[4:9])
