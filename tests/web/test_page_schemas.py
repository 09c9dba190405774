"""The schemas in a real browser, with a real cluster."""

from __future__ import annotations

import json
import os

from tests.support.browser import Expect, OpenPage

from chronik.client.schema_registry import RegistryClient
from chronik.testing.cluster import TestCluster

SCRIPT = "<img src=x onerror='window.ran = true'>"


def order(*names: str) -> str:
    fields = [{"name": name, "type": ["null", "string"], "default": None} for name in names]
    return json.dumps({"type": "record", "name": "Order", "doc": SCRIPT, "fields": fields})


def test_the_page_shows_versions_and_what_changed(
    chronik_cluster: TestCluster, open_page: OpenPage, expect: Expect
) -> None:
    client = RegistryClient([f"http://{node.http}" for node in chronik_cluster.nodes])
    subject = "page/orders-value"
    path = "/subjects/page%2Forders-value/versions"
    for names in (("id",), ("id", "who"), ("who", "total")):
        client.request("POST", path, {"schema": order(*names)})
    proto = 'syntax = "proto3"; message Item { string name = 1; }'
    client.request("POST", "/subjects/page-items-value/versions", {"schema": proto, "schemaType": "PROTOBUF"})
    client.request("PUT", "/config/page%2Forders-value", {"compatibility": "FULL"})
    page = open_page(chronik_cluster.nodes[1].http)
    page.get_by_role("link", name="Schemas", exact=True).click()
    row = page.locator(f"tbody tr[data-key='{subject}']")
    expect(row.locator("td[data-label='Latest version']")).to_have_text("3")
    expect(page.locator("tbody tr[data-key=page-items-value]")).to_contain_text("Protobuf")
    if folder := os.environ.get("CHRONIK_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/schemas.png")
    page.get_by_label("Search subjects").fill("ORDERS")
    expect(page.locator("tbody tr[data-key=page-items-value]")).to_have_count(0)
    row.get_by_role("link", name=subject).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(subject)
    expect(page.locator("dl.figures")).to_contain_text("FULL")
    text = page.locator("pre.schema")
    expect(text).to_contain_text('"name": "total"')
    expect(text).to_contain_text(SCRIPT)
    page.get_by_label("Compare with").get_by_role("link", name="1").click()
    expect(page.locator("pre.diff .removed")).to_contain_text(['"name": "id"'])
    expect(page.locator("pre.diff .added").filter(has_text='"total"')).to_have_count(1)
    assert page.url.endswith("#/schemas/page%2Forders-value/3/1")
    if folder:
        page.screenshot(path=f"{folder}/diff.png")
    page.get_by_label("Version", exact=True).get_by_role("link", name="2").click()
    expect(page.locator("pre.schema")).to_contain_text('"name": "who"')
    expect(page.locator("pre.diff")).to_have_count(0)
    assert page.evaluate("window.ran") is None
    missing = open_page(chronik_cluster.nodes[1].http, "/#/schemas/unknown", may_fail=True)
    expect(missing.get_by_role("alert")).to_contain_text("Subject 'unknown' not found.")
