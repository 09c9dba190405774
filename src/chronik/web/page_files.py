"""The web page's files, from the package: small, read once, and identified by a hash of their content."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chronik.web.answers import Refusal

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


class PageFile:
    """One file. Browsers cache it but revalidate it on every request, because the node may have been upgraded."""

    def __init__(self, path: Path) -> None:
        self.content = path.read_bytes()
        self._headers = {
            "content-type": CONTENT_TYPES[path.suffix],
            "etag": f'"{hashlib.sha256(self.content).hexdigest()[:32]}"',
            "cache-control": "no-cache",
        }

    def answer(self, request: Request) -> Response:
        etags = request.headers.get("if-none-match", "")
        if self._headers["etag"] in [etag.strip().removeprefix("W/") for etag in etags.split(",")]:
            return Response(status_code=304, headers=self._headers)
        return Response(self.content, headers=self._headers)


def page_routes() -> list[Route]:
    """Return the routes of `/` and of the files that it uses."""
    files = {path.name: PageFile(path) for path in sorted(FOLDER.iterdir()) if path.suffix in CONTENT_TYPES}

    async def index(request: Request) -> Response:
        return files[INDEX].answer(request)

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in files:
            raise Refusal(404, f"the page has no file {name[:100]}: see /")
        return files[name].answer(request)

    return [Route("/", index), Route("/page/{name}", file)]
