"""Random schedules over a model of three replicas: no record exposed as committed is lost or changed.

Each planted bug is found within a stated number of seeds, which proves that the oracle can fail.
"""

import pytest
from tests.replication.model import Bugs, Cluster, Violation

STEPS = 1_500
SEEDS = 40
SEEDS_FOR_A_BUG_MAX = 60


def play(seed: int, *, synced: bool, bugs: Bugs | None = None) -> Cluster:
    cluster = Cluster(seed, synced=synced, min_insync=1 + seed % 2, bugs=bugs)
    cluster.run(STEPS)
    cluster.calm_down()
    return cluster


@pytest.mark.parametrize("synced", [True, False], ids=["synced", "replicated"])
def test_no_committed_record_is_lost_and_all_replicas_converge(synced: bool) -> None:
    counts: dict[str, int] = {}
    for seed in range(SEEDS):
        try:
            played = play(seed, synced=synced)
        except Violation as violation:
            raise AssertionError(f"seed {seed}: {violation}") from violation
        for what, count in played.counts.items():
            counts[what] = counts.get(what, 0) + count
    # A schedule without events would prove nothing.
    assert min(counts.values()) >= SEEDS, counts


@pytest.mark.parametrize(
    "bug",
    [
        "removal_counts_before_commit",
        "watermark_is_log_end",
        "truncates_by_watermark",
        "counts_what_is_not_synced",
        "counts_what_is_received",
        "diverging_fetch_counts",
    ],
)
def test_random_schedules_find_a_planted_bug(bug: str) -> None:
    bugs = Bugs(**{bug: True})
    for seed in range(SEEDS_FOR_A_BUG_MAX):
        try:
            play(seed, synced=True, bugs=bugs)
        except Violation:
            return
    pytest.fail(f"{SEEDS_FOR_A_BUG_MAX} seeds did not find it")


def test_a_follower_that_keeps_an_epoch_without_records_causes_a_violation() -> None:
    """Found by the model: node 3 led epoch 1 without writing, then received records of epoch 0."""
    with pytest.raises(Violation):
        for seed in range(300):
            play(seed, synced=seed % 2 == 0, bugs=Bugs(keeps_unused_epochs=True))


def test_counting_additions_only_after_their_commit_loses_records() -> None:
    with pytest.raises(Violation):
        for seed in range(400):
            play(seed, synced=True, bugs=Bugs(addition_counts_after_commit=True))
