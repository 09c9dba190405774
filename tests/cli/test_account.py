"""The account of produced, acknowledged and consumed records."""

from chronik.cli.account import Account
from chronik.cli.demo_report import report_html


def full_account(records: int = 6, partitions: int = 2) -> Account:
    account = Account(partitions)
    for number in range(records):
        account.produced(number % partitions)
        account.acknowledged(number % partitions, number)
        account.consumed(number % partitions, number // partitions, number)
    return account


def test_nothing_to_complain_of_when_all_arrived_once_in_order() -> None:
    account = full_account()
    assert account.complaint() is None
    total = account.rows()[-1]
    assert (total["produced"], total["acked"], total["consumed"], total["missing"]) == (6, 6, 6, 0)
    assert account.rows()[0]["last_offset"] == 2


def test_a_record_that_was_acknowledged_and_not_read_is_missing() -> None:
    account = full_account()
    account.produced(0)
    account.acknowledged(0, 6)
    assert account.complaint() == "of 7 records: 1 missing"


def test_a_record_read_twice_is_a_duplicate_and_out_of_order() -> None:
    account = full_account()
    account.consumed(0, 0, 0)
    total = account.rows()[-1]
    assert (total["duplicates"], total["out_of_order"], total["missing"]) == (1, 1, 0)


def test_a_record_without_an_acknowledgement_is_complained_of_but_not_missing() -> None:
    account = full_account()
    account.produced(1)
    assert account.complaint() == "of 7 records: 1 not acknowledged"


def test_the_report_holds_the_verdict_and_escapes_what_it_shows() -> None:
    account = full_account()
    page = report_html(account.rows(), None, {"<b>": "a & b"})
    assert "once, in order" in page
    assert "&lt;b&gt;: a &amp; b" in page
    assert "http" not in page
    assert "3 missing" in report_html(account.rows(), "3 missing", {})
