"""Why consumption stalls: watches a topic for some seconds and gives one verdict, with its evidence and the next step.

What is asked over the Kafka protocol works on any cluster; what only Chronik's nodes tell is asked of their HTTP API,
where there is one. Gathering has bounds on everything; the rules are pure.
"""

from chronik.doctor.diagnosis import Diagnosis, Evidence, Verdict
from chronik.doctor.examination import diagnose

__all__ = ["Diagnosis", "Evidence", "Verdict", "diagnose"]
