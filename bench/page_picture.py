"""Take the screenshots of the page for the README: `.venv/bin/python bench/page_picture.py [FOLDER]`.

Starts three real nodes with some load, then pauses a follower: the page shows the stall, and the doctor names its
cause. Needs Chromium (`make test` installs it) and two minutes.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer
from playwright.sync_api import Page, expect, sync_playwright

from chronik.cli.options import with_cluster
from chronik.client.topics import Topics
from chronik.testing.cluster import TestCluster

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
TOPICS = {"orders": (3, 14), "payments": (6, 8), "clicks": (12, 40), "audit-log": (1, 2)}
"""The number of partitions, and the approximate number of records in a tenth of a second."""
QUIET = {"log_level": 0}
"""Clients log a lot when a node is gone, and here one is paused on purpose."""
LOAD_S = 75
STALLED_S = 4


class Load(threading.Thread):
    """A small shop: orders, payments and clicks, and the groups that read them."""

    def __init__(self, bootstrap: str) -> None:
        super().__init__(daemon=True)
        self.stopped = threading.Event()
        self._servers = bootstrap
        self._random = random.Random(1)

    def run(self) -> None:
        for group, topics in (("billing", ["orders", "payments"]), ("dashboards", ["clicks"])):
            threading.Thread(target=self._consume, args=(group, topics), daemon=True).start()
        producer = Producer({"bootstrap.servers": self._servers, "client.id": "shop", "acks": "1", **QUIET})
        number = 0
        while not self.stopped.wait(0.1):
            for topic, (_, load) in TOPICS.items():
                swing = 1.2 + math.sin(time.monotonic() / 9 + len(topic))
                for _ in range(int(load * swing * self._random.uniform(0.6, 1.4) / 4)):
                    number += 1
                    producer.produce(topic, json.dumps(self._order(number)), f"customer-{self._random.randint(1, 900)}")
            producer.poll(0)

    def _order(self, number: int) -> dict[str, Any]:
        choice = self._random.choice
        return {"id": number, "item": choice(["lamp", "chair", "desk"]), "country": choice(["DE", "FR", "NL", "PL"])}

    def _consume(self, group: str, topics: list[str]) -> None:
        settings = {"bootstrap.servers": self._servers, "group.id": group, "client.id": f"{group}-1"}
        consumer = Consumer({**settings, "auto.offset.reset": "earliest", **QUIET})
        consumer.subscribe(topics)
        while not self.stopped.is_set():
            consumer.poll(0.5)
        consumer.close()


def main(folder: Path) -> int:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print("page_picture: no Chromium here: install it (apt-get install chromium)", file=sys.stderr)
        return 1
    with TestCluster() as cluster:
        for topic, (partitions, _) in TOPICS.items():
            configs = {"chronik.trace": "true", "min.insync.replicas": "3"} if topic == "orders" else {}
            with_cluster(
                cluster.bootstrap,
                lambda found, topic=topic, partitions=partitions, configs=configs: Topics(found).create(
                    topic, partitions, 3, configs
                ),
                30,
            )
        load = Load(cluster.bootstrap)
        load.start()
        leader = cluster.leader("audit-log")
        follower = next(node.id for node in cluster.nodes if node.id not in (leader, cluster.controller))
        watcher = next(node for node in cluster.nodes if node.id != follower)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
            sides = {"light": "page.png", "dark": "page-dark.png"}
            pages: dict[str, Page] = {}
            for scheme in sides:
                context = browser.new_context(color_scheme=scheme, viewport={"width": 1200, "height": 790})
                pages[scheme] = context.new_page()
                pages[scheme].goto(f"http://{watcher.http}/#/topics/orders")
            pages["light"].wait_for_timeout(LOAD_S * 1000)
            cluster.pause(follower)
            pages["light"].wait_for_timeout(STALLED_S * 1000)
            for scheme, name in sides.items():
                page = pages[scheme]
                page.get_by_role("button", name="Diagnose").click()
                expect(page.locator(".verdict")).to_be_visible(timeout=60_000)
                page.mouse.move(0, 0)
                page.screenshot(path=str(folder / name))
                print(f"{folder / name}: {(folder / name).stat().st_size:,} bytes")
            browser.close()
        load.stopped.set()
        cluster.resume(follower)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs")))
