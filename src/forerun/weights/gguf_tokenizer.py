"""The tokenizer inside a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import ForerunError, first_line
from forerun.text.detokenizer import byte_spelling
from forerun.text.tokenizer import Tokenizer
from forerun.weights.generation_config import sampling_defaults
from forerun.weights.gguf_header import GgufHeader, header_of, strings
from forerun.weights.gguf_metadata import Metadata

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# Ways to cut text before merging (`tokenizer.ggml.pre`): what is kept together, as regular expressions.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (  # marks stay with letters
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*|\p{{N}}{_REST}"
_GPT4O = rf"{_UPPER}*{_LOWER}+{_ENDING}|{_UPPER}+{_LOWER}*{_ENDING}|\p{{N}}{{1,3}}{_REST}"
SPLITTERS = {
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), _QWEN2),
    "qwen35": _QWEN35,
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"), _LLAMA3),
    **dict.fromkeys(("midm-2.0", "lfm2", "jina-v5-nano", "dbrx", "smaug-bpe"), _LLAMA3),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
}
# These split every digit off, then work like GPT-2.
DIGIT_SPLITTERS = frozenset({"smollm", "starcoder", "refact", "codeshell", "command-r"})
PLAIN_SPLITTERS = frozenset({"default", "gpt-2", "gpt2"})
# llama.cpp puts the begin token first for these when the file does not say.
BEGIN_BY_DEFAULT = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
# What files of Qwen models leave unsaid about their tokens, and Hugging Face's files of the same models say.
QWEN = frozenset({"qwen2", "qwen3", "qwen35", "qwen35moe"})
COMPOSED = frozenset({"qwen2", "qwen35"})  # ways to cut text whose models compose characters first
END_OF_TEXT = "<|endoftext|>"  # ends a text as <|im_end|> ends an answer; files name only one of them
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # types of tokens
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
# Special in every file of their kind, whatever type they are given.
ALWAYS_SPECIAL = {
    "gpt2": (END_OF_TEXT,),
    "llama": ("<unk>", "<s>", "</s>"),
    "gemma": ("<unk>", "<bos>", "<eos>", "<pad>", "<mask>"),
}
SPACE = "▁"  # in sentencepiece's spelling


def gguf_tokenizer(file: Path) -> Tokenizer:
    """The file's tokenizer with its chat template."""
    header = header_of(file)
    if "tokenizer.ggml.tokens" not in header.metadata:
        raise ForerunError(f"{file} carries no tokenizer, so it cannot be used on its own")
    template = header.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ForerunError(f"{file}: metadata tokenizer.chat_template must be text, found {str(template)[:40]}")
    _check_splitter(header, file)
    tokens = strings(file, header, "tokenizer.ggml.tokens")
    try:
        backend, special = _build(header, file, tokens)
    except ForerunError:
        raise
    except Exception as error:  # the library raises anything for a bad vocabulary
        raise ForerunError(f"{file}: its tokenizer cannot be read ({first_line(error)})") from error
    tokenizer = Tokenizer(backend, special, template)
    rows = Metadata(header, str(file)).shapes.get("token_embd.weight", (0,))[0]
    if len(tokenizer) > rows:
        raise ForerunError(f"{file}: its tokenizer has {len(tokenizer)} tokens, its embedding only {rows} rows")
    return tokenizer


def generation_config(header: GgufHeader, file: Path) -> dict[str, Any]:
    """The ids that end an answer: end of text, end of turn, end of message; those that never come; how to sample."""
    metadata = Metadata(header, "")
    ends = {metadata.token("eos"), metadata.token("eot"), metadata.token("eom")} - {None}
    listed = header.metadata.get("tokenizer.ggml.suppress_tokens")
    never = list(listed) if isinstance(listed, tuple) else []
    if metadata.architecture in QWEN:
        types = _types(header)
        ends |= {
            number
            for number, token in enumerate(strings(file, header, "tokenizer.ggml.tokens"))
            if token == END_OF_TEXT and types[number : number + 1] in ((CONTROL,), (USER_DEFINED,))
        }
        # Ids that fill the vocabulary up: Hugging Face's tokenizer does not have them, so they never come.
        never += [token for token, kind in enumerate(types) if kind == UNUSED]
    config: dict[str, Any] = {"bos_token_id": metadata.token("bos"), "eos_token_id": sorted(ends)}
    config |= sampling_defaults(header.metadata)
    return config | ({"suppress_tokens": never} if never else {})


def _types(header: GgufHeader) -> tuple[Any, ...]:
    types = header.metadata.get("tokenizer.ggml.token_type")
    return types if isinstance(types, tuple) else ()


def _check_splitter(header: GgufHeader, file: Path) -> None:
    """Byte-level tokenizers only: the others carry their way of cutting text in their kind."""
    splitter = header.metadata.get("tokenizer.ggml.pre", "default")
    known = DIGIT_SPLITTERS | PLAIN_SPLITTERS | SPLITTERS.keys()
    if header.metadata.get("tokenizer.ggml.model") == "gpt2" and splitter not in known:
        raise ForerunError(
            f"{file}: its tokenizer cuts text in a way that is not known here ({str(splitter)[:40]!r}); "
            "use the model's safetensors folder"
        )


def _build(header: GgufHeader, file: Path, tokens: list[str]) -> tuple[Backend, dict[str, str]]:
    """The library's tokenizer, and the texts of its special tokens by their meaning."""
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    kind, metadata = str(header.metadata.get("tokenizer.ggml.model")), Metadata(header, str(file))
    if kind == "llama" and metadata.architecture.startswith("gemma"):
        # Tokens of several spaces are stored as such; merges follow the order of the tokens.
        tokens = [SPACE * len(token) if " " in token and not token.strip() else token for token in tokens]
        backend = _gemma(tokens, _implied_merges(tokens, range(0, -len(tokens), -1)))
        kind = "gemma"
    elif kind == "gemma4":
        backend, kind = _gemma(tokens, _merges(header, file, tokens)), "gemma"
    elif kind == "llama":
        backend = _sentencepiece(tokens, _merges(header, file, tokens), header)
    elif kind == "gpt2":
        backend = _byte_level(tokens, header, _merges(header, file, tokens))
    else:
        raise ForerunError(f"{file}: a tokenizer of the kind {kind[:40]!r} is not read; use the safetensors folder")
    special = {}
    for name, meaning in SPECIAL.items():
        number = metadata.token(meaning)
        if number is not None and number < len(tokens):
            special[name] = tokens[number]
    known = set(tokens)
    control = [token for token, type in zip(tokens, _types(header), strict=False) if type == CONTROL]
    whole = [token for token, type in zip(tokens, _types(header), strict=False) if type == USER_DEFINED]
    control += [token for token in ALWAYS_SPECIAL[kind] if token in known and token not in whole]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in whole])
    named = [token for token in dict.fromkeys(special.values()) if token not in {*control, *whole}]
    backend.add_special_tokens([AddedToken(token, special=True) for token in named])
    begin = special.get("bos_token") if _begins(header) else None
    backend.post_processor = TemplateProcessing(
        single=[begin, "$A"] if begin else ["$A"],
        pair=[begin, "$A", f"{begin}:1", "$B:1"] if begin else ["$A", "$B:1"],
        special_tokens=[(begin, backend.token_to_id(begin))] if begin else [],
    )
    return backend, special


def _begins(header: GgufHeader) -> bool:
    stated = header.metadata.get("tokenizer.ggml.add_bos_token")
    if isinstance(stated, bool):
        return stated
    sentencepiece = header.metadata.get("tokenizer.ggml.model") == "llama"
    return sentencepiece or header.metadata.get("tokenizer.ggml.pre") in BEGIN_BY_DEFAULT


def _byte_level(tokens: list[str], header: GgufHeader, merges: list[tuple[str, str]]) -> Backend:
    """Tokens are spelled in the byte alphabet; those that are found in a text before it is cut, in plain characters."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    spelling = {byte: character for character, byte in byte_spelling().items()}
    alphabet, types = set(spelling.values()), _types(header)
    vocabulary: dict[str, int] = {}
    for number, token in enumerate(tokens):
        plain = alphabet.issuperset(token) or types[number : number + 1] in ((CONTROL,), (USER_DEFINED,))
        vocabulary[token if plain else "".join(spelling[byte] for byte in token.encode())] = number
    backend = Tokenizer(BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix=""))
    splitter = str(header.metadata.get("tokenizer.ggml.pre", "default"))
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitter not in SPLITTERS)
    if splitter in SPLITTERS:
        before: list[Any] = [pre_tokenizers.Split(Regex(SPLITTERS[splitter]), behavior="isolated")]
    else:
        before = [pre_tokenizers.Digits(individual_digits=True)] if splitter in DIGIT_SPLITTERS else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, bytes_alone]) if before else bytes_alone
    if splitter in COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(tokens: list[str], merges: list[tuple[str, str]], header: GgufHeader) -> Backend:
    """A space before a text unless the file says otherwise."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    backend = Tokenizer(BPE(_numbers(tokens), merges, fuse_unk=True, byte_fallback=True))
    spaced = header.metadata.get("tokenizer.ggml.add_space_prefix") is not False
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if spaced else "never", split=False)
    stripped = [decoders.Strip(content=" ", left=1)] if spaced else []
    backend.decoder = decoders.Sequence([*_spelled_out(), *stripped])
    return backend


def _gemma(tokens: list[str], merges: list[tuple[str, str]]) -> Backend:
    """Never a space before a text."""
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    backend = Tokenizer(BPE(_numbers(tokens), merges, fuse_unk=True, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    backend.decoder = decoders.Sequence(_spelled_out())
    backend.normalizer = normalizers.Replace(" ", SPACE)
    return backend


def _spelled_out() -> list[Any]:
    from tokenizers.decoders import ByteFallback, Fuse, Replace

    return [Replace(SPACE, " "), ByteFallback(), Fuse()]


def _numbers(tokens: Sequence[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _merges(header: GgufHeader, file: Path, tokens: list[str]) -> list[tuple[str, str]]:
    """The merges that the file lists, or those that scores of its tokens imply."""
    if "tokenizer.ggml.merges" in header.metadata:
        pairs = (merge.split(" ") for merge in strings(file, header, "tokenizer.ggml.merges"))
        return [(left, right) for left, right in pairs]
    scores = header.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, tuple) or len(scores) != len(tokens):
        raise ForerunError(f"{file}: its tokenizer has neither merges nor a score for every token")
    return _implied_merges(tokens, scores)


def _implied_merges(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to cut a token into two others, tokens with the highest score first."""
    number, score = _numbers(tokens), dict(zip(tokens, scores, strict=True))

    def cuts() -> Iterator[tuple[str, str, float]]:
        for token in number:
            halves = ((token[:at], token[at:]) for at in range(1, len(token)))
            known = [(left, right) for left, right in halves if left in number and right in number]
            for left, right in sorted(known, key=lambda pair: (number[pair[0]], number[pair[1]])):
                yield left, right, score[token]

    ordered = sorted(cuts(), key=lambda cut: (cut[2], len(cut[0]), len(cut[1])), reverse=True)
    return [(left, right) for left, right, _ in ordered]
