"""Settings that cannot work are refused before a model loads, in one line that says what to do."""

from __future__ import annotations

import importlib.util
import ipaddress
import math
import re
import socket
from dataclasses import asdict
from pathlib import Path

from forerun.errors import ForerunError
from forerun.serve.effort import BUDGETS
from forerun.serve.parsing.formats import REASONING_PARSERS, TOOL_PARSERS
from forerun.serve.settings import DEFAULT, METRICS_NAMES, ServeSettings
from forerun.text.stops import MAX_STOPS
from forerun.text.template import read_template

CHOICES = {
    "tool_parser": TOOL_PARSERS,
    "reasoning_parser": REASONING_PARSERS,
    "reasoning": ("auto", "off", *BUDGETS),
}
PUBLISHED = re.compile(r"tcp://(\*|\[[0-9a-f:.]+\]|[0-9.]+):([0-9]{1,5})", re.IGNORECASE)
# A whole origin, or a host's name alone.
ORIGIN = re.compile(r"\*|(?:[a-z][a-z0-9+.-]*://)?(?:\[[0-9a-f:.]+\]|[^/:@\s\[\]*]+)(?::[0-9]{1,5})?/?", re.IGNORECASE)


def check_settings(settings: ServeSettings) -> None:
    """`ForerunError` for the first thing that is wrong."""
    if not 0 <= settings.port <= 65535:
        raise ForerunError(f"--port {settings.port}: give a number from 0 (any free one) to 65535")
    for name, value in asdict(settings).items():
        flag = f"--{name.replace('_', '-')} {value}"
        if name.startswith(DEFAULT):
            _check_sampling(name.removeprefix(DEFAULT), value, flag)
            continue
        if type(value) is int and name != "port" and value < 1:  # bool is an int, too
            raise ForerunError(f"{flag}: give a whole number from 1 up")
        if isinstance(value, float) and not 0 < value < math.inf:
            raise ForerunError(f"{flag}: give seconds above 0")
        if name in CHOICES and value not in CHOICES[name]:
            raise ForerunError(f"{flag}: use one of {', '.join(CHOICES[name])}")
    for name in settings.metrics_names:
        if name not in METRICS_NAMES:
            raise ForerunError(f"--metrics-names {name}: use {' or '.join(METRICS_NAMES)}, or both")
    if settings.max_stops > MAX_STOPS:
        raise ForerunError(f"--max-stops {settings.max_stops}: an answer can look for {MAX_STOPS} stop strings at most")
    if settings.chat_template is not None:
        read_template(Path(settings.chat_template))
    for origin in settings.allowed_origins:
        if ORIGIN.fullmatch(origin) is None:
            raise ForerunError(
                f"--allowed-origins {origin}: write what a browser sends, as https://app.example or "
                "http://localhost:3000, a host's name for all its ports, or *"
            )
    _check_kv_events(settings)
    key = settings.api_key
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        raise ForerunError("--api-key must be printable ASCII without spaces: headers carry nothing else")
    if key is None and not is_loopback(settings.host):
        raise ForerunError(
            f"--host {settings.host} can be reached by others: set a key with --api-key or FORERUN_API_KEY, "
            "or listen on 127.0.0.1"
        )


def _check_kv_events(settings: ServeSettings) -> None:
    address = settings.kv_events
    if address is None:
        if settings.kv_events_topic is not None:
            raise ForerunError(f"--kv-events-topic {settings.kv_events_topic}: say where with --kv-events")
        return
    found = PUBLISHED.fullmatch(address)
    host, port = ("", 0) if found is None else (found[1].strip("[]"), int(found[2]))
    if not 0 < port <= 65535 or not (host == "*" or _is_ip_address(host)):
        raise ForerunError(f"--kv-events {address}: write an IP address and a port, as tcp://127.0.0.1:5557")
    if settings.api_key is None and not is_loopback(host):
        raise ForerunError(
            f"--kv-events {address} gives the tokens of all prompts and answers to other machines: set a key with "
            "--api-key or FORERUN_API_KEY and keep the port inside, or publish at 127.0.0.1"
        )
    for package in ("zmq", "msgspec"):
        if importlib.util.find_spec(package) is None:
            raise ForerunError(f"--kv-events needs the package {package}: pip install 'forerun[events]'")


def _is_ip_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _check_sampling(name: str, value: float | None, flag: str) -> None:
    """As the sampler does, under the flag's name."""
    if value is None:
        return
    from forerun.sample.parameters import SamplingParams

    try:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    except ForerunError as error:
        raise ForerunError(f"{flag}: {error}") from error


def free_port(host: str, port: int) -> int:
    """The port, or for 0 one that is free now; one that is taken is found out before a model loads."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: old connections do not count
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ForerunError(f"cannot listen on {host}:{port}: {error.strerror or error}; try --port 0") from error
        return int(listener.getsockname()[1])


def is_loopback(host: str) -> bool:
    """Can only this machine reach it? Of names, `localhost` alone is sure to mean that."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
