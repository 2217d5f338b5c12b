"""How the server's log is written: text for people or JSON for programs, with the id of the request a line is about."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from forerun.serve.request_log import current_id


class OfRequest(logging.Filter):
    """Gives every line the id that it was logged with, else that of the request being served, else none."""

    def filter(self, record: logging.LogRecord) -> bool:
        request = getattr(record, "request", "") or current_id()
        record.request, record.named = request, f" [{request}]" if request else ""
        return True


class JsonLines(logging.Formatter):
    """An object in each line."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": time, "level": record.levelname.lower(), "logger": record.name}
        if request := getattr(record, "request", ""):
            line["request"] = request
        line |= getattr(record, "facts", None) or {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_log(level: str, form: str) -> None:
    """For the whole process, on stderr; `form`: text or json."""
    handler = logging.StreamHandler()
    handler.addFilter(OfRequest())
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s%(named)s: %(message)s")
    handler.setFormatter(JsonLines() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
