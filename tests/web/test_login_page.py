"""The log-in form in a real browser, with a real cluster that requires a log-in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.browser import Expect, OpenPage
from tests.web.support_http import batch_of, put

from chronik.cli.options import with_cluster
from chronik.client.topics import Topics
from chronik.local.temporary_cluster import TemporaryCluster
from chronik.testing.tied_node import TIED_NODE, tied_environment

SHOTS = os.environ.get("CHRONIK_SCREENSHOTS", "")
"""A folder for pictures of the form, to look at."""


@pytest.fixture(scope="module")
def secure_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemporaryCluster]:
    users = tmp_path_factory.mktemp("users") / "users"
    users.touch(0o600)
    users.write_text("alice:wonderland\nbob:builder\n")
    environment = {
        **tied_environment(),
        "CHRONIK_SECURITY_HTTP_LOGIN": "true",
        "CHRONIK_SASL_USERS_FILE": str(users),
        "CHRONIK_SASL_FAILURE_DELAY_MS": "1000",
    }
    with TemporaryCluster(3, command=TIED_NODE, environment=environment) as cluster:
        yield cluster


def shoot(page: Any, name: str) -> None:
    if SHOTS:
        page.screenshot(path=str(Path(SHOTS, f"{name}.png")))


def enter(page: Any, user: str, password: str) -> None:
    page.get_by_label("User").fill(user)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Log in").click()


def test_a_log_in_leads_to_the_view_that_required_it_on_every_node(
    secure_cluster: TemporaryCluster, open_page: OpenPage, expect: Expect
) -> None:
    with_cluster(secure_cluster.bootstrap, lambda cluster: Topics(cluster).create("orders", 3, 3, {}), 30)
    for partition in range(3):
        put(secure_cluster.bootstrap, "orders", partition, batch_of([f"from {partition}".encode()]))
    first, second, _ = secure_cluster.nodes
    # A refused log-in is an error in the browser's console.
    page = open_page(first.http, "/#/topics/orders/messages", may_fail=True)
    expect(page).to_have_title("Log in · Chronik")
    shoot(page, "login-light")
    enter(page, "alice", "wrong")
    expect(page.get_by_role("alert")).to_have_text("Wrong user or password.")
    expect(page.get_by_label("Password")).to_have_value("")
    shoot(page, "login-wrong")
    page.wait_for_timeout(1_100)
    enter(page, "alice", "wonderland")
    # Each node leads one partition: two pages of messages come from other nodes, for alice.
    expect(page.locator("ol.messages li")).to_have_count(3)
    expect(page.locator("#connection")).to_contain_text("alice")
    expect(page.locator("#connection")).to_contain_text("live")
    shoot(page, "messages")
    page.goto(f"http://{second.http}/#/topics/orders")
    expect(page.locator("tbody tr[data-key^=partition-]")).to_have_count(3)
    expect(page.locator("tbody tr[data-key=partition-2]")).to_contain_text("ok")
    expect(page.locator("#connection")).to_contain_text("alice")
    page.get_by_role("button", name="Diagnose").click()
    expect(page.get_by_role("status", name="Diagnosis").get_by_role("heading")).to_have_text("healthy")
    shoot(page, "topic")
    page.get_by_role("button", name="Log out").click()
    expect(page).to_have_title("Log in · Chronik")
    assert page.evaluate("location.hash") == "#/topics/orders"
    assert page.evaluate("document.cookie") == ""  # HttpOnly


def test_the_page_returns_to_the_form_when_its_session_ends(
    secure_cluster: TemporaryCluster, open_page: OpenPage, expect: Expect
) -> None:
    node = secure_cluster.nodes[0]
    page = open_page(node.http, "/#/groups", width=390, color_scheme="dark", may_fail=True)
    expect(page.get_by_role("heading", level=1)).to_have_text("Chronik")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shoot(page, "login-dark-phone")
    enter(page, "bob", "builder")
    expect(page.locator("#connection")).to_contain_text("bob")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shoot(page, "groups-dark-phone")
    context = page.context
    (session,) = (cookie for cookie in context.cookies() if "session" in cookie["name"])
    assert session["httpOnly"] and session["sameSite"] == "Strict" and session["expires"] == -1
    context.clear_cookies()
    context.add_cookies([{**session, "value": session["value"][:-2] + "AA"}])
    page.evaluate("location.hash = '#/'")  # opens another stream, which is refused
    expect(page).to_have_title("Log in · Chronik")
    expect(page.get_by_role("alert")).to_have_text("Your session ended: log in again.")
    shoot(page, "login-ended")
    enter(page, "bob", "builder")
    expect(page).to_have_title("Cluster · Chronik")
    expect(page.locator("#health")).to_contain_text(re.compile("Healthy"))
