"""The web page: files of the package, under a policy that lets them reach nothing but this server."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter
from fastapi.responses import Response

from forerun.serve.errors import ApiError

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "manifest-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}


def page_files() -> dict[str, bytes]:
    """Every file of the page by its address, read once: a request names one of these or gets nothing."""
    folder = resources.files("forerun.serve").joinpath("page")
    found = {f"/page/{entry.name}": entry.read_bytes() for entry in folder.iterdir() if _suffix(entry.name) in TYPES}
    return found | {"/": found["/page/index.html"]}


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]


def router(files: dict[str, bytes]) -> APIRouter:
    """Serves them and nothing else."""
    routes = APIRouter(include_in_schema=False)

    def found(address: str) -> Response:
        if address not in files:
            raise ApiError(404, "There is nothing at this address.")
        kind = TYPES[_suffix("index.html" if address == "/" else address)]
        return Response(files[address], headers=HEADERS | {"Content-Type": kind})

    @routes.get("/", response_model=None)
    @routes.head("/", response_model=None)
    async def index() -> Response:
        return found("/")

    @routes.get("/page/{name:path}", response_model=None)
    async def file(name: str) -> Response:
        return found(f"/page/{name}")

    return routes
