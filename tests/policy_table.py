"""A table of what `auto` makes of simulated settings, for tuning: python tests/policy_table.py [--seeds N]."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from statistics import mean

from policy_settings import SETTINGS, Setting
from policy_world import Fixed, serve

from forerun.policy.decision import Decision


@dataclass
class Outcome:
    setting: Setting
    of_plain: float
    worst: float
    of_best: float
    best: str
    best_of_plain: float
    decide_us: float  # of the policy, for each round
    learn_us: float


def measure(setting: Setting, seeds: int = 5, fixed: bool = True) -> Outcome:
    """Speed of `auto` as a share of plain decoding and of the best fixed arm, over some seeds."""
    shares, rates, deciding, learning, rounds = [], [], 0.0, 0.0, 0
    others: dict[str, list[float]] = {}
    for seed in range(seeds):
        answers = setting.answers(random.Random(seed), setting.clients)
        plain = serve(setting.machine, answers, setting.arms, setting.clients, Fixed(), seed)
        auto = serve(setting.machine, answers, setting.arms, setting.clients, None, seed)
        shares.append(auto.rate / plain.rate)
        rates.append(auto.rate)
        deciding, learning, rounds = deciding + auto.deciding, learning + auto.learning, rounds + len(auto.sizes)
        others.setdefault("plain", []).append(plain.rate)
        for arm in setting.arms if fixed else ():
            for depth in (1, 2, 3, 4, 6, 8, 12):
                if depth <= setting.arms[arm]:
                    found = serve(
                        setting.machine, answers, setting.arms, setting.clients, Fixed(Decision(arm, depth)), seed
                    )
                    others.setdefault(f"{arm} {depth}", []).append(found.rate)
    best = max(others, key=lambda name: mean(others[name]))
    return Outcome(
        setting,
        mean(shares),
        min(shares),
        mean(rates) / mean(others[best]),
        best,
        mean(others[best]) / mean(others["plain"]),
        1e6 * deciding / rounds,
        1e6 * learning / rounds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--quick", action="store_true", help="no fixed arms")
    options = parser.parse_args()
    print(
        f"{'setting':32} {'/plain':>7} {'worst':>7} {'/best':>7}  {'best fixed arm':>22} {'decide':>7} {'learn':>7} us"
    )
    for setting in SETTINGS:
        if options.only in setting.name:
            found = measure(setting, options.seeds, not options.quick)
            least = 0.985 if setting.short else 0.99
            bad = "  <-- below plain" if found.of_plain < least else ""
            bad += "  <-- below the best" if found.best_of_plain > 1.1 and found.of_best < 0.95 else ""
            print(
                f"{setting.name:32} {found.of_plain:7.3f} {found.worst:7.3f} {found.of_best:7.3f}  "
                f"{found.best:>13} {found.best_of_plain:8.2f} {found.decide_us:7.1f} {found.learn_us:7.1f}{bad}",
                flush=True,
            )


if __name__ == "__main__":
    main()
