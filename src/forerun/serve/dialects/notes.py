"""What a request brought that changes nothing here: named in a response header, so that nobody is left guessing."""

from __future__ import annotations

from pydantic import BaseModel

HEADER = "X-Forerun-Warning"
LONGEST = 2000  # characters of the header; many servers in between refuse more than 8 KiB of headers


class Notes:
    """Collects the names, each once, in the order they came."""

    def __init__(self) -> None:
        self._unused: dict[str, None] = {}

    def unused(self, name: str) -> None:
        """`name` has no effect."""
        self._unused[name] = None

    def fields(self, sent: BaseModel, *names: str, under: str = "") -> None:
        """Those of the named fields that say something, and all that this server does not know by name."""
        unknown = [name for name, value in (sent.model_extra or {}).items() if value is not None]
        for name in (*(name for name in names if getattr(sent, name, None)), *unknown):
            self.unused(f"{under}{name}")

    def model(self, asked: str | None, served: str) -> None:
        """There is one model, whatever name a client is set up with."""
        if asked is not None and asked != served:
            self.unused(f"model '{asked}' (this is '{served}')")

    def headers(self) -> dict[str, str]:
        """The warning header, or nothing. Names may hold what a client wrote: only plain ASCII goes into a header, and
        no space stands at its end.
        """
        if not self._unused:
            return {}
        text = "not used: " + ", ".join(self._unused).rstrip()
        plain = "".join(letter if " " <= letter <= "~" else "?" for letter in text)
        return {HEADER: plain if len(plain) <= LONGEST else plain[: LONGEST - 4] + " ..."}
