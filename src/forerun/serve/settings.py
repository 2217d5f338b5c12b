"""Every setting of the server, declared once: flags, FORERUN_* variables, the config file and /props come of these."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal


def _about(topic: str, help: str, **more: Any) -> dict[str, Any]:
    return {"topic": topic, "help": help, **more}


NETWORK, LIMITS, ENGINE, SAMPLING = "Network", "Limits", "Engine", "Sampling of requests that do not say"
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
DEFAULT = "default_"  # in front of the names of sampling options
# What names of metrics may begin with; the first where nothing is said. Gateways and autoscalers look for vLLM's.
METRICS_NAMES = ("forerun", "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """What `forerun serve` can be told, beside the model's own options."""

    host: str = field(default="127.0.0.1", metadata=_about(NETWORK, "Address to listen on."))
    port: int = field(default=8000, metadata=_about(NETWORK, "Port to listen on; 0: any free one."))
    api_key: str | None = field(
        default=None, metadata=_about(NETWORK, "Key that clients must send; needed for other addresses.", secret=True)
    )
    allowed_hosts: tuple[str, ...] = field(
        default=(), metadata=_about(NETWORK, "Host names that browsers may use, beside the address itself.")
    )
    allowed_origins: tuple[str, ...] = field(
        default=(), metadata=_about(NETWORK, "Origins or hosts of web pages that may call it (CORS).")
    )
    served_model_name: tuple[str, ...] = field(
        default=(), metadata=_about(NETWORK, "Names of the model for clients; answers carry the first.")
    )
    any_model_name: bool = field(default=False, metadata=_about(NETWORK, "Take whatever name a client calls it by."))
    strict_fields: bool = field(
        default=False, metadata=_about(NETWORK, "Refuse fields that are not known even where they change nothing.")
    )
    page: bool = field(default=True, metadata=_about(NETWORK, "Serve the web page."))
    max_running: int = field(default=64, metadata=_about(ENGINE, "Answers in the making at once."))
    tool_parser: str = field(
        default="auto",
        metadata=_about(
            ENGINE, "How it writes tool calls: auto, none, hermes, qwen3_coder, gemma4, llama3_json or mistral."
        ),
    )
    reasoning_parser: str = field(
        default="auto", metadata=_about(ENGINE, "How it marks its thinking: auto, none, think, gemma4 or mistral.")
    )
    chat_template: str | None = field(
        default=None, metadata=_about(ENGINE, "A Jinja file in place of the model's own.", metavar="FILE")
    )
    reasoning: str = field(
        default="auto",
        metadata=_about(
            ENGINE, "Thinking where a request says nothing: auto, off, minimal, low, medium, high, xhigh or max."
        ),
    )
    default_temperature: float | None = field(
        default=None, metadata=_about(SAMPLING, "Default: the model's, else OpenAI's 1.")
    )
    default_top_p: float | None = field(default=None, metadata=_about(SAMPLING, "Default: the model's, else 1."))
    default_top_k: int | None = field(default=None, metadata=_about(SAMPLING, "Default: the model's, else 0: all."))
    default_min_p: float | None = field(default=None, metadata=_about(SAMPLING, "Default: the model's, else 0."))
    default_repetition_penalty: float | None = field(
        default=None, metadata=_about(SAMPLING, "Default: the model's, else 1.")
    )
    default_presence_penalty: float | None = field(
        default=None, metadata=_about(SAMPLING, "Default: the model's, else 0.")
    )
    default_frequency_penalty: float | None = field(
        default=None, metadata=_about(SAMPLING, "Default: the model's, else 0.")
    )
    max_queue: int = field(default=256, metadata=_about(LIMITS, "Answers that may wait; more get 429."))
    queue_timeout: float = field(default=120.0, metadata=_about(LIMITS, "Seconds a request may wait for its turn."))
    request_timeout: float = field(default=3600.0, metadata=_about(LIMITS, "Seconds a request may take in all."))
    max_body: int = field(default=32 << 20, metadata=_about(LIMITS, "Bytes of a request body."))
    max_choices: int = field(default=16, metadata=_about(LIMITS, "Largest n."))
    max_stops: int = field(default=16, metadata=_about(LIMITS, "Stop strings of a request."))
    max_schema: int = field(default=64 << 10, metadata=_about(LIMITS, "Characters of a JSON schema or grammar."))
    template_timeout: float = field(default=5.0, metadata=_about(LIMITS, "Seconds to render a chat template."))
    drain_timeout: float = field(default=30.0, metadata=_about(LIMITS, "Seconds to finish answers at the end."))
    metrics_names: tuple[str, ...] = field(
        default=(), metadata=_about(NETWORK, "What names of metrics begin with: forerun, vllm; default: forerun.")
    )
    kv_events: str | None = field(
        default=None,
        metadata=_about(
            NETWORK, "Tell subscribers what the prefix cache holds: tcp://127.0.0.1:5557.", metavar="ADDRESS"
        ),
    )
    kv_events_topic: str | None = field(
        default=None, metadata=_about(NETWORK, "Topic of these events; default: kv@, the host's name, @, the model's.")
    )
    ping: float = field(default=15.0, metadata=_about(NETWORK, "Seconds between pings in a silent stream."))

    def __post_init__(self) -> None:
        object.__setattr__(self, "host", self.host.strip("[]"))  # an IPv6 address as URLs write it

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """Those that are set, by the names of the options."""
        given = {
            e.name.removeprefix(DEFAULT): getattr(self, e.name) for e in fields(self) if e.name.startswith(DEFAULT)
        }
        return {name: value for name, value in given.items() if value is not None}
