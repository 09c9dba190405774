"""The coverage-guided request fuzzer: a short run, its earlier findings, and that it finds planted bugs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chronik.node.runtime import Runtime
from chronik.node.serving import server
from chronik.node.serving.api import Handler
from chronik.node.serving.authentication import ClientAuthentication
from chronik.node.serving.connection import Request
from chronik.observe.logging import Logger
from chronik.storage.log import Log
from chronik.testing.fuzz.campaign import Result, campaign
from chronik.testing.fuzz.fuzzer import Finding, Fuzzer, replay
from chronik.testing.fuzz.ways import SASL, UNPROVEN
from chronik.wire.api import ApiKey

FINDINGS = sorted((Path(__file__).parent / "findings").glob("*.txt"))
SHORT_RUN = 3_000
FULL_RUN = 1_000_000
SEED = 1


def run(inputs: int, folder: Path) -> Result:
    finding = folder / "finding.txt"
    result = campaign(inputs, SEED, folder / "corpus", finding)
    assert result.broken is None, f"{result.broken}\n{finding.read_text() if finding.exists() else ''}"
    assert result.inputs >= inputs
    return result


def test_a_short_fuzzer_run_sends_every_request_type_and_finds_no_violation(tmp_path: Path) -> None:
    result = run(SHORT_RUN, tmp_path)
    fuzzer = Fuzzer(SEED)
    sampled = {(sample.key, sample.version) for sample in (*fuzzer.samples, *fuzzer.internal_samples)}
    # Few inputs that delete the topic of all samples are sent, so chance decides which versions these have.
    sampled -= {(key, version) for key, version in sampled if key == ApiKey.DELETE_TOPICS}
    assert {(key, version) for key, version, _ in result.kinds} >= sampled
    fuzzer.finish()
    for outcome in ("answered", "closed", "waits"):
        assert result.outcomes[outcome] > 0, result.outcomes
    # Before and after authentication, inside TLS and beside it.
    for state in ("SASL", "before SASL", "TLS", "raw TLS"):
        assert result.outcomes[f"way: {state}"] > 20, result.outcomes
    # Coverage guides the fuzzer: it keeps inputs beyond its corpus if they reach new code.
    assert result.edges > 3_000
    assert result.kept > 100


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_million_fuzzer_inputs_find_no_violation(tmp_path: Path) -> None:
    run(FULL_RUN, tmp_path)


@pytest.mark.parametrize("path", FINDINGS, ids=lambda path: path.stem)
def test_past_findings_stay_fixed(path: Path) -> None:
    found = Finding.read(path)
    assert found.inputs
    assert replay(found.seed, found.inputs) is None


def test_a_finding_is_read_back_unchanged_from_its_file(tmp_path: Path) -> None:
    found = Finding("a line\nand another", 7, (b"\x00abc", b""))
    found.write(tmp_path / "finding.txt")
    assert Finding.read(tmp_path / "finding.txt") == found


# -- the fuzzer finds planted bugs -------------------------------------------------------------------------------------


def found_with(*keys: ApiKey) -> str | None:
    """Run the valid requests of these APIs and the final crash; return the first failure, if any."""
    fuzzer = Fuzzer(SEED)

    for sample in [sample for sample in fuzzer.samples if sample.key in keys]:
        found = fuzzer.run(b"\x00" + sample.frame)
        if found is not None:
            return found.broken
    found = fuzzer.finish()
    return None if found is None else found.broken


def test_the_fuzzer_finds_an_exception_in_a_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Any:
        raise ZeroDivisionError

    answer_cold = server.answer_cold

    async def answer(runtime: Runtime, handler: Handler, request: Request, log: Logger) -> tuple[bytes, bool]:
        if handler.api.key is ApiKey.HEARTBEAT:
            handler = Handler(handler.api, fails)
        return await answer_cold(runtime, handler, request, log)

    assert found_with(ApiKey.HEARTBEAT) is None
    monkeypatch.setattr(server, "answer_cold", answer)
    assert "ZeroDivisionError" in (found_with(ApiKey.HEARTBEAT) or "")


def test_the_fuzzer_finds_a_response_that_does_not_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_cold = server.answer_cold

    async def cut(runtime: Runtime, handler: Handler, request: Request, log: Logger) -> tuple[bytes, bool]:
        answer, failed = await answer_cold(runtime, handler, request, log)
        return (answer[:-1] if handler.api.key is ApiKey.METADATA else answer), failed

    monkeypatch.setattr(server, "answer_cold", cut)
    assert "does not parse" in (found_with(ApiKey.METADATA) or "")


def test_the_fuzzer_finds_a_request_without_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    run_cold = server.Server._run_cold

    async def silent(self: server.Server, handler: Handler, request: Any, reply: Any, body: bytes) -> None:
        if handler.api.key is not ApiKey.HEARTBEAT:
            await run_cold(self, handler, request, reply, body)

    monkeypatch.setattr(server.Server, "_run_cold", silent)
    assert "no answer to API 12" in (found_with(ApiKey.HEARTBEAT) or "")


def test_the_fuzzer_finds_a_connection_that_is_closed_without_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    run_request = server.Server.run_request

    def abort(self: server.Server, connection: Any, frame: memoryview) -> None:
        if int.from_bytes(frame[:2], "big") == ApiKey.HEARTBEAT:
            connection.abort()
        else:
            run_request(self, connection, frame)

    monkeypatch.setattr(server.Server, "run_request", abort)
    assert "without a word" in (found_with(ApiKey.HEARTBEAT) or "")


def test_the_fuzzer_finds_a_request_that_is_served_before_authentication(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClientAuthentication, "admits", lambda self, frame: True)
    fuzzer = Fuzzer(SEED)
    frame = next(sample.frame for sample in fuzzer.samples if sample.key == ApiKey.METADATA)
    found = fuzzer.run(bytes((SASL | UNPROVEN,)) + frame)
    assert found is not None and "before authentication" in found.broken


def test_the_fuzzer_finds_an_acknowledged_record_that_a_crash_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    # Acknowledged without a sync: the crash at the end of a session loses these records.
    class NoSync:
        def __init__(self, job: Any) -> None:
            self._job = job

        def __getattr__(self, name: str) -> Any:
            return getattr(self._job, name)

        def run(self) -> None:
            return

    sync_job = Log.sync_job

    def pretended(self: Log) -> Any:
        job = sync_job(self)
        return job if job is None or not self.folder.endswith("kept-0") else NoSync(job)

    monkeypatch.setattr(Log, "sync_job", pretended)
    assert "acknowledged records" in (found_with(ApiKey.HEARTBEAT) or "")
