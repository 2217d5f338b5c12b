"""Fields that clients of other servers send, and that cannot change the text of an answer here.

A field with null in it is absent. One of these is taken and named in the header `X-Forerun-Warning`, unless
`--strict-fields` refuses it. Any other field that this server does not have is a 400 that names it: it may be a
misspelt one, or one that other servers heed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Whatever is in them.
_ALWAYS = frozenset(
    (
        # OpenAI: what an account sees, caches, and hints that only cost or save time
        *("user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
        *("prompt_cache_options", "safety_identifier", "prediction", "verbosity", "moderation"),
        # Anthropic, and how its messages are sent through other clouds
        *("betas", "anthropic_beta", "anthropic_version", "inference_geo"),
        # OpenRouter and LiteLLM: which provider answers, and at what price
        *("provider", "models", "fallbacks", "route", "transforms", "usage", "include_reasoning", "session_id"),
        *("trace", "tags", "num_retries", "timeout", "max_retries", "drop_params", "litellm_session_id"),
        # vLLM: places in queues and caches, ids, and what comes beside the text
        *("priority", "request_id", "kv_transfer_params", "return_token_ids"),
        *("return_tokens_as_token_ids", "guided_decoding_backend", "spaces_between_special_tokens"),
        # sglang
        *("rid", "separate_reasoning", "stream_reasoning", "extra_key", "data_parallel_rank", "session_params"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "log_metrics", "return_cached_tokens_details"),
        # llama.cpp: slots, timings, where thoughts and calls are put; then what only counts beside a sampler of its own
        *("cache_prompt", "id_slot", "slot_id", "n_keep", "n_discard", "n_cache_reuse", "timings_per_token"),
        *("parse_tool_calls", "reasoning_format", "reasoning_in_content", "post_sampling_probs", "return_tokens"),
        *("return_progress", "verbose"),
        *("response_fields", "backend_sampling", "dynatemp_exponent", "xtc_threshold", "mirostat_tau", "mirostat_eta"),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "adaptive_decay"),
        # Ollama and others
        *("keep_alive", "chat_id", "conversation_id", "truncation", "safety_settings"),
    )
)
# With these values they ask for what holds anyway.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "plugins": ([],),
    "documents": ([],),
    "bad_words": ([],),
    "lora": ([],),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "length_penalty": (1,),
    "prompt_logprobs": (0,),
    "n_probs": (0,),
    "n_indent": (0,),
    "t_max_predict_ms": (0, -1),
    "typical_p": (1,),
    "typ_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (0, -1),
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "adaptive_target": (-1,),
    "repeat_last_n": (-1,),
    "min_keep": (0, 1),
    "safe_prompt": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "detokenize": (True,),
    "guidance_scale": (1,),
}


def is_harmless(name: str, value: Any) -> bool:
    """Can a field that this server does not have be left out?"""
    return value is not None and (name in _ALWAYS or value in _NEUTRAL.get(name, ()))
