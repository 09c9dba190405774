"""Rules on access: the doctor cannot connect, may not look, or is throttled. Without access, nothing else is known."""

from __future__ import annotations

from chronik.doctor.diagnosis import Evidence, Finding, listed, nodes_of
from chronik.doctor.observations import DOCTOR_CLIENT_ID, Observations
from chronik.observe.traces import FetchServed, ProduceRejected

THROTTLED_MS_MIN = 1
THROTTLES_MIN = 2
"""One delay may be a burst at the start; a quota that holds delays request after request."""
AUTHORIZATION_ERROR = "TOPIC_AUTHORIZATION_FAILED"


def expired_certificate(seen: Observations) -> Finding:
    evidence = [
        Evidence(fault.text, node=fault.node) for fault in seen.connection_faults if fault.kind == "expired-certificate"
    ]
    return Finding(
        "expired-certificate",
        f"the certificate of {_brokers(evidence)} is expired or not valid yet: clients that verify it cannot connect",
        "Issue new certificates (chronik certs create, or your authority) and replace the files of tls.certificate and "
        "tls.key: nodes load changed files without a restart. If only some clients fail, check their clocks.",
        evidence,
    )


def wrong_listener(seen: Observations) -> Finding:
    evidence = [
        Evidence(fault.text, node=fault.node) for fault in seen.connection_faults if fault.kind == "wrong-listener"
    ]
    evidence += [
        Evidence(f"the metadata advertises {address} for node {node}, where nothing answers: {reason}", node=node)
        for node, (address, reason) in sorted(seen.unreachable_advertised.items())
    ]
    advertised = bool(seen.unreachable_advertised)
    return Finding(
        "wrong-listener",
        "clients reach the bootstrap address, but not the addresses that the brokers advertise"
        if advertised
        else f"{_brokers(evidence)} has a listener with another security protocol at this address",
        "Set advertise.kafka, or advertise of the listener, to an address that clients can reach."
        if advertised
        else "Use the address of the listener that matches security.protocol, or change security.protocol "
        "(PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL).",
        evidence,
    )


def not_authorized(seen: Observations) -> Finding:
    evidence = [
        Evidence(
            f"{seen.who} may not {refusal.operation} {refusal.resource}: {refusal.error}",
            node=refusal.node,
            group=refusal.group,
        )
        for refusal in seen.refusals
    ]
    denied: dict[tuple[str, str], int] = {}
    for event in seen.traces:
        if isinstance(event, FetchServed | ProduceRejected) and event.error == AUTHORIZATION_ERROR:
            operation = "READ" if isinstance(event, FetchServed) else "WRITE"
            if event.client_id != DOCTOR_CLIENT_ID:
                key = event.client_id or "a client without an id", operation
                denied[key] = denied.get(key, 0) + 1
    evidence += [
        Evidence(
            f"{client} was refused {operation} on topic {seen.topic} {count} times",
            client=client,
            numbers={"refusals": count},
        )
        for (client, operation), count in sorted(denied.items())
    ]
    operations = listed(dict.fromkeys(refusal.operation for refusal in seen.refusals)) if seen.refusals else "READ"
    who = seen.who if seen.refusals else "User:NAME"
    return Finding(
        "not-authorized",
        f"{seen.who} lacks rights on {seen.topic}, so its state is unknown"
        if seen.refusals
        else f"clients of {seen.topic} lack rights on it",
        f"An administrator grants rights with chronik acl add --principal {who} --operation {operations} "
        f"--topic {seen.topic}; chronik acl list shows what denies them. Or pass --properties of another user.",
        evidence,
    )


def throttled(seen: Observations) -> Finding:
    by_node: dict[int, list[float]] = {}
    for throttle in seen.throttles:
        if throttle.delay_ms >= THROTTLED_MS_MIN:
            by_node.setdefault(throttle.node, []).append(throttle.delay_ms)
    evidence = [
        Evidence(
            f"node {node} throttled {len(delays)} requests of {seen.who}, by up to {max(delays):.0f} ms",
            node=node,
            numbers={"requests": len(delays), "throttle_ms": max(delays)},
        )
        for node, delays in sorted(by_node.items())
        if len(delays) >= THROTTLES_MIN
    ]
    return Finding(
        "throttled",
        f"a quota of {seen.who} slows requests to node {listed(nodes_of(evidence))}: clients of this user wait",
        "See the quotas with kafka-configs --describe --entity-type users (and clients), then raise them, or reduce "
        "the load of this user and client id.",
        evidence,
    )


def _brokers(evidence: list[Evidence]) -> str:
    nodes = nodes_of(evidence)
    return f"node {listed(nodes)}" if nodes else "the broker"
