"""exp, log and Philox4x32-10 from basic arithmetic, for numpy arrays and torch tensors alike.

The exp and log of a maths library differ in the last bit between libraries, devices, and the vector and scalar forms
of one library. Here every step is an IEEE operation that rounds one way everywhere (+, −, ·, /, floor, moving bits), so
that numpy, torch on any device and compiled loops agree to the bit, wherever an element lies in a buffer.
"""

import math
from typing import Any

# exp: x = k·ln 2 + r with |r| ≤ ln 2 / 2, e^r by its series
LOG2_E = 1.4426950408889634
LN2_HIGH = 0.6931471803691238  # ln 2 to 32 bits, so that k · LN2_HIGH is exact for small k
LN2_LOW = 1.9082149292705877e-10  # the rest of ln 2
EXP_SERIES = tuple(1.0 / math.factorial(n) for n in range(11, -1, -1))

# log: x = m·2^e with m in (1/√2, √2], log m = 2·artanh s by its series in s², s = (m − 1) / (m + 1)
SQRT2 = math.sqrt(2.0)
LOG_SERIES = tuple(1.0 / (2 * n + 1) for n in range(10, -1, -1))
MANTISSA = (1 << 52) - 1
ONE_BITS = 1023 << 52  # the bits of 1.0
TO_INTEGER = float(1 << 52)  # adding it to 0 ≤ x < 2⁵¹ rounds x to an integer, held in the low bits of the sum
TO_INTEGER_BITS = (1023 + 52) << 52  # and back: an integer below 2⁵² under these bits is TO_INTEGER + the integer

# softmax weights as integers: sums of integers are exact, so their order does not matter
WEIGHT_BITS = 42  # weight 1 is 2⁴²; a vocabulary up to 2²⁰ sums below 2⁶²
LARGEST_VOCABULARY = 1 << 20
LOWEST_EXPONENT = -40.0  # e^-40 · 2⁴² rounds to 0

CHOOSE = 0  # the stream of noise that plain decoding draws with; `sample.noise` has others
MASK32 = 0xFFFFFFFF
PHILOX_M0 = 0xD2511F53
PHILOX_M1 = 0xCD9E8D57
PHILOX_W0 = 0x9E3779B9
PHILOX_W1 = 0xBB67AE85
PHILOX_ROUNDS = 10


def as_float(integers: Any, xp: Any) -> Any:
    """int64 in [0, 2⁵²) as float64."""
    return (integers | TO_INTEGER_BITS).view(xp.float64) - TO_INTEGER


def scaled_exp(x: Any, xp: Any) -> Any:
    """2^WEIGHT_BITS · e^x for float64 x ≤ 0, in float64; `xp` is numpy or torch. Below e^-40 it stays at e^-40."""
    x = xp.where(x < LOWEST_EXPONENT, LOWEST_EXPONENT, x)
    k = xp.floor(x * LOG2_E + 0.5)
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    total = r * EXP_SERIES[0] + EXP_SERIES[1]
    for coefficient in EXP_SERIES[2:]:
        total = total * r + coefficient
    # k + 1023 lands in the low bits of the sum; the shift makes it the exponent field of a power of two
    power = (k + (TO_INTEGER + 1023.0 + WEIGHT_BITS)).view(xp.int64) << 52
    return total * power.view(xp.float64)


def weights(x: Any, xp: Any) -> Any:
    """Softmax weights round(2^WEIGHT_BITS · e^x) as int64, for float64 x ≤ 0."""
    return (scaled_exp(x, xp) + TO_INTEGER).view(xp.int64) & MANTISSA


def log(x: Any, xp: Any) -> Any:
    """Natural logarithm of normal positive float64 x, accurate to the last bits around 1 too."""
    bits = x.view(xp.int64)
    exponent = bits >> 52  # still biased by 1023
    m = ((bits & MANTISSA) | ONE_BITS).view(xp.float64)
    upper = m > SQRT2
    m = xp.where(upper, m * 0.5, m)
    e = as_float(xp.where(upper, exponent + 1, exponent), xp) - 1023.0
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    total = z * LOG_SERIES[0] + LOG_SERIES[1]
    for coefficient in LOG_SERIES[2:]:
        total = total * z + coefficient
    return e * LN2_HIGH + (e * LN2_LOW + 2.0 * s * total)


def exponential(words: Any, xp: Any) -> Any:
    """Standard exponential noise −log u, u = (r + ½)·2⁻³², from int64 words r in [0, 2³²)."""
    return -log((as_float(words, xp) + 0.5) * 2.0**-32, xp)


def gumbel(words: Any, xp: Any) -> Any:
    """Standard Gumbel noise −log(−log u), u = (r + ½)·2⁻³². u and 1 − u are exact in float64: both tails survive."""
    return -log(exponential(words, xp), xp)


def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10 on int64 arrays that hold 32-bit words (or plain Python integers); shapes broadcast."""
    for _ in range(PHILOX_ROUNDS):
        # int64 products wrap: the low 64 bits are right, and the masks drop what the signed shift drags in
        first, second = c0 * PHILOX_M0, c2 * PHILOX_M1
        c0, c1, c2, c3 = (
            ((second >> 32) & MASK32) ^ c1 ^ k0,
            second & MASK32,
            ((first >> 32) & MASK32) ^ c3 ^ k1,
            first & MASK32,
        )
        k0, k1 = (k0 + PHILOX_W0) & MASK32, (k1 + PHILOX_W1) & MASK32
    return c0, c1, c2, c3
