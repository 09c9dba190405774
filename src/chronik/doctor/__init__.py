"""Diagnose stalled consumption: watch a topic for a few seconds, then return one verdict with evidence and a next step.

The doctor uses the Kafka protocol, so it works on any cluster. If the brokers are Chronik nodes, it also queries their
HTTP API. All data collection is bounded; the rules are pure functions.
"""

from chronik.doctor.diagnosis import Diagnosis, Evidence, Verdict
from chronik.doctor.examination import diagnose
from chronik.doctor.means import Means

__all__ = ["Diagnosis", "Evidence", "Means", "Verdict", "diagnose"]
