"""The dashboard: static files, with a policy that lets the browser request nothing outside this port."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGE = "dashboard.html"
HEADERS = {
    # Nothing inline, nothing from elsewhere, and no framing.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """Routes of the page at `/` and `/dashboard`, and of its other files under `/static`. Reads all files once."""
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in _TYPES}
    paths = {"/": PAGE, "/dashboard": PAGE, **{f"/static/{name}": name for name in files if name != PAGE}}
    return [_route(path, files[name], _TYPES[Path(name).suffix]) for path, name in paths.items()]


def _route(path: str, content: bytes, media_type: str) -> Route:
    async def answer(request: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    return Route(path, answer)
