"""A process that answers every request with the same bytes: what lookups cost a machine without a registry.

python bench/fixed_answers.py        prints its port, and runs until it is killed
"""

from __future__ import annotations

import asyncio

BODY = b'{"schema":"' + b"x" * 90 + b'"}'
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nx-padding: %s\r\n\r\n" % (len(BODY), b"x" * 500) + BODY
"""About as long as the answer of a node."""


class Answers(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(ANSWER)


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Answers, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
