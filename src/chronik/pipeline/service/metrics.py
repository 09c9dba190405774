"""The service's Prometheus metrics, from the states of its jobs. Each exists from the start, for each job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, get_args

from chronik.client.pipelines import AuditState, JobState, PipelineJob

if TYPE_CHECKING:
    from prometheus_client.core import Metric

LABELS = ("job", "kind", "source", "target")
STATES: tuple[JobState, ...] = get_args(JobState)
COUNTERS = {
    "rows": "Rows landed in the table, or records written to the topic.",
    "bytes": "Bytes of files added to the table, or of records written to the topic.",
    "dead_letters": "Records that could not be decoded.",
    "restarts": "Attempts that failed.",
}
AUDIT_COUNTS = {
    "gaps": "Records of the log that are missing in the table, in the newest audit.",
    "duplicates": "Records that the table has twice, in the newest audit.",
    "mismatches": "Records that differ between log and table, in the newest audit.",
    "unexpected": "Rows that are not in the log or should be deleted, in the newest audit.",
    "deleted": "Records that are missing on purpose, in the newest audit.",
    "unverified": "Landed offsets that no complete audit has covered yet.",
}


def families(jobs: Sequence[PipelineJob]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for name, text in COUNTERS.items():
        counter = CounterMetricFamily(f"chronik_pipeline_{name}", text, labels=LABELS)
        for job in jobs:
            counter.add_metric(_labels(job), getattr(job, name))
        yield counter
    gauges: dict[str, tuple[str, Callable[[PipelineJob], float | None]]] = {
        "lag": ("Offsets that had not landed when the last micro-batch was planned.", lambda job: job.lag),
        "rows_per_second": ("Rate of the last micro-batch.", lambda job: job.rows_per_s),
        "batch_seconds": ("Duration of the last micro-batch.", lambda job: job.batch_s),
        "last_commit_timestamp_seconds": (
            "Time of the last commit with rows; 0 if there was none.",
            lambda job: (job.last_commit_ms or 0) / 1000,
        ),
    }
    for name, (text, value) in gauges.items():
        gauge = GaugeMetricFamily(f"chronik_pipeline_{name}", text, labels=LABELS)
        for job in jobs:
            gauge.add_metric(_labels(job), value(job) or 0)
        yield gauge
    state = GaugeMetricFamily("chronik_pipeline_state", "1 for the job's state.", labels=(*LABELS, "state"))
    for job in jobs:
        for name in STATES:
            state.add_metric((*_labels(job), name), float(job.state == name))
    yield state
    yield from _audits([(job, job.audit) for job in jobs if job.audit is not None])


def _audits(audited: Sequence[tuple[PipelineJob, AuditState]]) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    verdict = GaugeMetricFamily(
        "chronik_pipeline_audit_complete",
        "1 if the newest audit found every record; 0 if it found faults, failed or has not run.",
        labels=LABELS,
    )
    checked = GaugeMetricFamily(
        "chronik_pipeline_audit_timestamp_seconds", "Time of the newest audit; 0 if there was none.", labels=LABELS
    )
    for job, audit in audited:
        verdict.add_metric(_labels(job), float(audit.verdict == "complete"))
        checked.add_metric(_labels(job), (audit.checked_ms or 0) / 1000)
    yield verdict
    yield checked
    for name, text in AUDIT_COUNTS.items():
        gauge = GaugeMetricFamily(f"chronik_pipeline_audit_{name}", text, labels=LABELS)
        for job, audit in audited:
            gauge.add_metric(_labels(job), getattr(audit, name))
        yield gauge


def _labels(job: PipelineJob) -> tuple[str, str, str, str]:
    return job.name, job.kind, job.source, job.target
