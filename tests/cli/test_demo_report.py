"""The demo's page."""

from chronik.cli.demo_report import Chapter, report_html
from chronik.cli.verify_account import Account


def chapter(complaint: str | None) -> Chapter:
    account = Account(3, 1)
    for number in range(3):
        account.sent()
        account.acknowledged(number)
        account.delivered(0, number, number)
    return Chapter("A & B", account.partition_figures({0: 1}), complaint, {"<b>": "a & b"})


def test_the_report_holds_the_verdict_and_escapes_what_it_shows() -> None:
    page = report_html([chapter(None)])
    assert "once, in order" in page
    assert "&lt;b&gt;: a &amp; b" in page
    assert "<h2>A &amp; B</h2>" in page
    assert "http" not in page


def test_a_complaint_stands_in_its_own_chapter() -> None:
    page = report_html([chapter(None), chapter("3 missing")])
    assert page.count("once, in order") == 1
    assert page.count("3 missing") == 1
