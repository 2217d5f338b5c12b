"""Parameters, history and language sets: what is refused, what is counted, which tokens belong where."""

import math
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from forerun.errors import ForerunError
from forerun.sample import SamplingParams, TokenHistory, fresh_seed, language_bias, parse_language_bias

BAD = [
    ("temperature", -1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 1e-9),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 1.1),
    ("top_p", -0.1),
    ("top_p", math.nan),
    ("top_k", -1),
    ("top_k", 2.5),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("repetition_penalty", math.inf),
    ("presence_penalty", math.nan),
    ("frequency_penalty", math.inf),
    ("logit_bias", {3: math.inf}),
    ("logit_bias", {3: math.nan}),
    ("logit_bias", {3: "much"}),
    ("logit_bias", {-1: 1.0}),
    ("suppress", frozenset({-4})),
    ("seed", -1),
    ("seed", 2**64),
    ("choice", 2**32),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_parameters_are_refused_in_one_line(name, value):
    with pytest.raises(ForerunError) as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)
    assert name in str(caught.value) or name == "suppress"


def test_good_parameters_are_kept_and_copied():
    bias = {5: -math.inf, 3: 2}
    params = SamplingParams(temperature=1, logit_bias=bias, suppress=frozenset({3}), seed=2**64 - 1)
    bias[9] = 1.0
    assert params.temperature == 1.0 and params.logit_bias == {5: -math.inf, 3: 2.0}
    assert params.bias_ids.tolist() == [3, 5] and params.bias_values.tolist() == [-math.inf, -math.inf]
    assert params == SamplingParams(temperature=1, logit_bias={3: 2, 5: -math.inf}, suppress={3}, seed=2**64 - 1)
    assert SamplingParams().greedy and not SamplingParams().filtered and not SamplingParams().penalised
    hash(params)


def test_ids_beyond_the_vocabulary_can_be_refused():
    SamplingParams(logit_bias={9: 1.0}, suppress=frozenset({3})).check_vocabulary(10)
    with pytest.raises(ForerunError, match="names token 10"):
        SamplingParams(suppress=frozenset({10})).check_vocabulary(10)


def test_fresh_seeds_differ_and_fit_json():
    seeds = {fresh_seed() for _ in range(50)}
    assert len(seeds) == 50 and max(seeds) < 2**53
    SamplingParams(seed=max(seeds))


def test_history_counts_like_a_plain_recount():
    rng = np.random.default_rng(0)
    prompt, answer = rng.integers(0, 50, 30).tolist(), []
    history = TokenHistory(prompt)
    for _ in range(200):
        token = int(rng.integers(0, 300))
        history.append(token)
        answer.append(token)
        drafted = tuple(rng.integers(0, 300, int(rng.integers(0, 5))).tolist())
        ids, counts = history.answer(drafted)
        full = [*answer, *drafted]
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {t: full.count(t) for t in full}
        seen = history.seen(drafted).tolist()
        assert sorted(seen) == sorted({*prompt, *full})
    assert sorted(history.seen().tolist()) == sorted({*prompt, *answer})  # looking changed nothing


class ByteTokenizer:
    """The parts of a transformers tokenizer that the language sets use, over byte-level pieces."""

    def __init__(self, pieces):
        alphabet = bytes_to_letters()
        vocab = {"".join(alphabet[byte] for byte in piece): n for n, piece in enumerate(pieces)}
        self.backend_tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        self.backend_tokenizer.decoder = decoders.ByteLevel()
        self.backend_tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
        self.added_tokens_decoder = self.backend_tokenizer.get_added_tokens_decoder()

    def __len__(self):
        return self.backend_tokenizer.get_vocab_size()


def bytes_to_letters():
    """The letter that byte-level tokenizers write for each byte: themselves if printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    for n, byte in enumerate(byte for byte in range(256) if byte not in letters):
        letters[byte] = chr(256 + n)
    assert set(letters.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    return letters


WORDS = [
    "の",
    "カ",
    "漢",
    "한",
    " hello",
    "привет",
    "مرحبا",
    "ไทย",
    "नमस्ते",
    "שלום",
    "γεια",
    "123",
    " ?!",
    "é",
    "ि",
    "๓",
    "々",
]
PIECES = [word.encode() for word in WORDS] + [b"\xe3\x81", b"\x81", "漢".encode() + b"\xe3", b" a\xe3"]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("ja", {"の", "カ", "漢", "々", "漢\ufffd"}),
        ("zh", {"漢", "々", "漢\ufffd"}),
        ("ko", {"한"}),
        ("en", {" hello", "é", " a\ufffd"}),
        ("ru", {"привет"}),
        ("ar", {"مرحبا"}),
        ("th", {"ไทย"}),
        ("hi", {"नमस्ते", "ि"}),
        ("he", {"שלום"}),
        ("el", {"γεια"}),
    ],
)
def test_languages_are_told_by_script(code, expected):
    bias = language_bias(ByteTokenizer(PIECES), f"{code}=-3")
    assert {PIECES[token].decode(errors="replace") for token in bias} == expected
    assert set(bias.values()) == {-3.0}


def test_biases_of_overlapping_languages_add_up():
    bias = language_bias(ByteTokenizer(PIECES), " ja=-inf, zh=2 ")
    assert bias[WORDS.index("漢")] == -math.inf and bias[WORDS.index("の")] == -math.inf
    assert language_bias(ByteTokenizer(PIECES), {"ja": -1.0, "zh": -2.0})[WORDS.index("漢")] == -3.0
    SamplingParams(logit_bias=bias)


@pytest.mark.parametrize("text", ["", "xx=-1", "ja", "ja=", "ja=much", "ja=nan", "ja=inf", "ja=-1,ja=-2", "ja=-1,"])
def test_bad_language_bias_is_refused(text):
    with pytest.raises(ForerunError, match="lang-bias"):
        parse_language_bias(text)


def test_sampling_imports_without_numba():
    code = (
        "import sys; sys.modules['numba'] = None; import torch; from forerun.sample import *;"
        "row = Row(SamplingParams(temperature=1.0, top_p=0.9), TokenHistory(), (), 3);"
        "assert 0 <= choose(torch.randn(1, 50), [row], 50)[0] < 50;"
        "assert accept_rejection(probabilities(torch.randn(1, 50), [row], 50), [], None, row.params, 3)[0] == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
