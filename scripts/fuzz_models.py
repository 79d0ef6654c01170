"""Look for small random models that would be trained as others than in plain PyTorch.

    python scripts/fuzz_models.py [--models N] [--seed S] [--first K] [--seconds T] [--no-check]

Each model is analysed as every workload is, and one step of it, of one batch or two, is computed op by op in
1 to 4 uneven shares, and in plain PyTorch, in float64: loss, gradients and buffers must be the same. What is
the same, `profile`'s check by numbers must find to be the same. Prints every model that differs or is
misjudged, and what is not split, or refused, although nothing in it couples samples. Exits with 1 if a model
differs or is misjudged.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from model_fuzz.compare import Outcome, compare
from model_fuzz.models import recipe


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=int, default=2000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all models (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="stop after so long")
    parser.add_argument("--no-check", action="store_true", help="leave out profile's check by numbers")
    given = parser.parse_args()
    started = time.monotonic()
    outcomes: list[Outcome] = []
    for number in range(given.first, given.first + given.models):
        if given.seconds is not None and time.monotonic() - started > given.seconds:
            break
        outcome = compare(recipe(given.seed, number), with_check=not given.no_check)
        outcomes.append(outcome)
        if outcome.wrong is not None:
            print(f"model {number} differs by {outcome.wrong:.1e}: {outcome.recipe}", flush=True)
        if outcome.misjudged is not None:
            print(f"model {number} is misjudged: {outcome.misjudged}: {outcome.recipe}", flush=True)
    _report(outcomes, given.seed, time.monotonic() - started)
    return 1 if any(each.wrong is not None or each.misjudged is not None for each in outcomes) else 0


def _report(outcomes: list[Outcome], seed: int, seconds: float) -> None:
    needless = [outcome for outcome in outcomes if outcome.is_needless]
    separate = sum(not outcome.recipe.couples for outcome in outcomes)
    wrong = sum(outcome.wrong is not None for outcome in outcomes)
    misjudged = sum(outcome.misjudged is not None for outcome in outcomes)
    print(f"seed {seed}: {len(outcomes)} models in {seconds:.0f} s, {wrong} trained as others", end="")
    print(f", {misjudged} misjudged")
    print(f"{separate} couple nothing; of these {len(needless)} are whole somewhere, or refused:")
    reasons = Counter(outcome.refused or outcome.whole[0].split(": ", 1)[1] for outcome in needless)
    examples = {outcome.refused or outcome.whole[0].split(": ", 1)[1]: outcome for outcome in needless}
    for reason, count in reasons.most_common(30):
        print(
            f"  {count:4} {reason} (model {examples[reason].recipe.number}, {examples[reason].recipe.loss})"
        )


if __name__ == "__main__":
    sys.exit(main())
