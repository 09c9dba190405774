"""`make soak`: inject faults into real processes, test limits under load, and run the simulator; then print a table.

    python -m tests.faults.soak [--seconds 1800] [--seed N] [--only FAULT,...]

At most a sixth of the given time goes to the limits at full size; runs shorter than 15 minutes skip them. A third of
the remaining time goes to the simulator, the rest to the campaign. The exit code is 1 if anything was found. In that
case the campaign's histories and the nodes' folders are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from tests.clients.drivers.java import SOURCE as JAVA_DRIVER
from tests.clients.drivers.java import Jvm
from tests.cluster.support_soak import SoakResults
from tests.faults.support_campaign import Campaign, fresh_seed
from tests.faults.support_faults import CAMPAIGN
from tests.faults.support_injector import FaultInjector, campaign_cluster
from tests.sim.support_soak import simulate

from chronik.testing.sim.runner import SCENARIOS

LIMITS = Path(__file__).with_name("test_limits.py")
LIMITS_FROM_S = 900.0
LIMITS_SHARE = 1 / 6
SIMULATOR_SHARE = 1 / 3


def say(line: str) -> None:
    print(line, flush=True)


def main() -> int:
    options = argparse.ArgumentParser(prog="make soak")
    options.add_argument("--seconds", type=float, default=1800.0)
    options.add_argument("--seed", type=int, default=None)
    options.add_argument("--only", type=lambda text: text.split(","), default=[], help=f"of {', '.join(CAMPAIGN)}")
    chosen = options.parse_args()
    unknown = set(chosen.only) - set(CAMPAIGN)
    if unknown:
        options.error(f"no such fault: {', '.join(sorted(unknown))}")
    seed = fresh_seed() if chosen.seed is None else chosen.seed
    began_s = time.monotonic()
    ends_s = began_s + chosen.seconds
    say(f"soak for {chosen.seconds:.0f} s, seed {seed} (again: make soak SEED={seed})")
    found: list[str] = []
    if not chosen.only and chosen.seconds >= LIMITS_FROM_S:
        found += limits(chosen.seconds * LIMITS_SHARE)
    else:
        say("limits under load: left out of a short run; they are in make test (small) and make soak-counts (full)")
    left_s = ends_s - time.monotonic()
    simulator_s = 0.0 if chosen.only else left_s * SIMULATOR_SHARE
    campaign = SoakResults("campaign")
    found += play(campaign, seed, ends_s - simulator_s, chosen.only)
    campaign.write(passed=not found)
    simulated = SoakResults("simulator")
    if simulator_s:
        found += simulations(simulated, max(10.0, ends_s - time.monotonic()))
        simulated.write(passed=not simulated.anomalies.total())
    say(table([campaign, simulated], time.monotonic() - began_s))
    for complaint in found:
        say(f"FOUND: {complaint}")
    return 1 if found else 0


def play(results: SoakResults, seed: int, until_s: float, only: list[str]) -> list[str]:
    """Run the campaign and return what it found."""
    folder = Path(tempfile.mkdtemp(prefix="chronik-soak-"))
    say(f"campaign on real processes for {until_s - time.monotonic():.0f} s, in {folder}")
    try:
        with (
            java_clients(folder) as jvm,
            campaign_cluster(folder / "cluster", seed, say) as injector,
            kept_logs(injector, folder),
        ):
            Campaign(injector, seed, results, folder, say, only, jvm).run(until_s)
    except Exception:
        found = f"{traceback.format_exc()}\nseed {seed}; histories and logs are in {folder}"
        say(found)
        return [found]
    shutil.rmtree(folder, ignore_errors=True)
    return []


@contextlib.contextmanager
def java_clients(folder: Path) -> Iterator[Jvm | None]:
    """Start a JVM with the newest Java client; without one, yield None and say why."""
    try:
        jvm = Jvm("kafka-clients-4.3", JAVA_DRIVER, folder)
    except FileNotFoundError as error:
        say(f"no transactions by a Java client: {error}")
        yield None
        return
    try:
        yield jvm
    finally:
        jvm.close()


@contextlib.contextmanager
def kept_logs(injector: FaultInjector, folder: Path) -> Iterator[None]:
    """If the campaign fails, copy the nodes' logs from the disks that are removed with the cluster."""
    try:
        yield
    except Exception:
        for node_id in injector.nodes.ids:
            (folder / f"node-{node_id}.log").write_text(injector.nodes.log_text(node_id))
        raise


def simulations(results: SoakResults, seconds: float) -> list[str]:
    found: list[str] = []
    for scenario in sorted(SCENARIOS):
        say(f"simulator, {scenario}: fresh seeds on all cores for {seconds / len(SCENARIOS):.0f} s")
        result = simulate(scenario, seconds / len(SCENARIOS))
        say(f"       {result.summary()}")
        results.simulated(result.acknowledged, result.faults, len(result.failures))
        found += result.failures
    return found


def limits(seconds: float) -> list[str]:
    say(f"limits under load, at full size, for at most {seconds:.0f} s")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "soak", str(LIMITS)]
    try:
        status = subprocess.run(command, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        return [f"the limits under load took longer than {seconds:.0f} s: {' '.join(command)}"]
    return [] if status == 0 else [f"a limit does not hold: {' '.join(command)}"]


def table(sections: list[SoakResults], seconds: float) -> str:
    """Return the injected faults and their outcome as plain text."""
    lines = ["", f"{'fault':<34} {'injected':>9} {'longest unavailability':>24}", "-" * 69]
    for section in sections:
        for kind, count in sorted(section.faults.items()):
            ms = section.unavailable_ms.get(kind)
            lines.append(f"{kind:<34} {count:>9} {'' if ms is None else f'{ms:,.0f} ms':>24}")
    operations = sum(section.operations for section in sections)
    anomalies = {kind: count for section in sections for kind, count in section.anomalies.items() if count}
    lines += ["-" * 69, f"{operations:,} operations in {seconds:,.0f} s"]
    lines.append(f"anomalies: {sum(anomalies.values())} {anomalies or ''}".rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
