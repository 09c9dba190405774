"""The leader uses the largest ISR that the controller may have committed."""

from chronik.replication.isr import HEARD_MS_MAX, RETRY_MS_MIN, InSyncReplicas


def test_a_replica_stays_in_the_maximal_isr_until_its_removal_is_committed() -> None:
    isr = InSyncReplicas((1, 2, 3), 7)
    isr.propose((1, 2))
    assert isr.maximal == (1, 2, 3)
    isr.ended(7, True, 100)
    assert isr.maximal == (1, 2, 3)
    assert isr.committed_as((1, 2), 8)
    assert isr.maximal == isr.committed == (1, 2)


def test_a_replica_is_in_the_maximal_isr_once_its_addition_is_proposed() -> None:
    isr = InSyncReplicas((1,), 0)
    isr.propose((1, 2))
    assert isr.maximal == (1, 2)
    assert isr.committed == (1,)


def test_a_failed_addition_stays_in_the_maximal_isr_until_newer_metadata_arrives() -> None:
    isr = InSyncReplicas((1,), 4)
    isr.propose((1, 2))
    isr.ended(4, False, 100)
    assert isr.maximal == (1, 2)
    assert not isr.is_settled
    assert not isr.committed_as((1,), 4)
    assert isr.maximal == (1, 2)
    assert isr.committed_as((1,), 5)
    assert list(isr.maximal) == [1]
    assert isr.is_settled


def test_additions_of_several_proposals_accumulate_in_the_maximal_isr() -> None:
    isr = InSyncReplicas((1,), 0)
    isr.propose((1, 2))
    isr.ended(0, False, 0)
    isr.propose((1, 3))
    assert isr.maximal == (1, 2, 3)


def test_only_one_proposal_is_pending_and_a_failure_delays_the_next_proposal() -> None:
    isr = InSyncReplicas((1, 2), 0)
    assert isr.may_propose(0)
    isr.propose((1,))
    assert not isr.may_propose(10_000)
    isr.ended(0, False, 10_000)
    assert not isr.may_propose(10_000)
    assert isr.may_propose(10_000 + RETRY_MS_MIN)
    isr.propose((1,))
    isr.ended(0, True, 20_000)
    assert not isr.may_propose(20_000 + HEARD_MS_MAX - 1)
    assert isr.may_propose(20_000 + HEARD_MS_MAX)


def test_a_response_to_an_older_proposal_is_ignored() -> None:
    isr = InSyncReplicas((1, 2), 0)
    isr.propose((1,))
    isr.committed_as((1, 2, 3), 1)
    isr.propose((1, 2))
    isr.ended(0, False, 0)
    assert not isr.may_propose(0)
