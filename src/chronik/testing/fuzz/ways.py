"""The first byte of an input: the listener that it is for, and how it gets there.

bit 0    on the inter-node listener, after the handshake of nodes
bit 1    the end of input follows at once
bits 2-3 in pieces of 1, 7 or 4096 bytes rather than whole
bit 4    with bit 0 or 5, without a handshake or before authentication; with bit 7, instead of the TLS handshake
bit 5    on a listener with SASL, after authentication; with bit 4, before it
bit 6    on a listener with TLS, encrypted
bit 7    with bit 6, on the socket as it is, after the TLS handshake: frames without their sizes
"""

from __future__ import annotations

from dataclasses import dataclass

INTERNAL, ENDS_AT_ONCE, UNPROVEN, SASL, TLS, RAW = 1, 2, 16, 32, 64, 128
PIECES = (4, 8, 12)
PIECE_BYTES = (0, 1, 7, 4096)


@dataclass(frozen=True, slots=True)
class Way:
    """How an input reaches the node. `is_raw` implies `uses_tls`; the inter-node listener has neither TLS nor SASL."""

    is_internal: bool = False
    is_proven: bool = True
    uses_sasl: bool = False
    uses_tls: bool = False
    is_raw: bool = False
    piece_bytes: int = 0
    ends_at_once: bool = False

    @classmethod
    def of(cls, how: int) -> Way:
        is_internal = bool(how & INTERNAL)
        uses_tls = bool(how & TLS) and not is_internal
        return cls(
            is_internal,
            not how & UNPROVEN,
            bool(how & SASL) and not is_internal,
            uses_tls,
            uses_tls and bool(how & RAW),
            PIECE_BYTES[how >> 2 & 3],
            bool(how & ENDS_AT_ONCE),
        )
