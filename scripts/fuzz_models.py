"""Look for small random models that would be trained as others than in plain PyTorch.

    python scripts/fuzz_models.py [--models N] [--seed S] [--first K] [--seconds T]

Each model is analysed as every workload is, and one step of it is computed in 2, 3 and 4 uneven shares of
the batch and as a whole, in float64: loss, gradients and buffers must be the same. Prints every model that
differs, and what is not split, or refused, although nothing in it couples samples. Exits with 1 if a model
differs.
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
    given = parser.parse_args()
    started = time.monotonic()
    outcomes: list[Outcome] = []
    for number in range(given.first, given.first + given.models):
        if given.seconds is not None and time.monotonic() - started > given.seconds:
            break
        outcomes.append(compare(recipe(given.seed, number)))
        if outcomes[-1].wrong is not None:
            print(f"model {number} differs by {outcomes[-1].wrong:.1e}: {outcomes[-1].recipe}", flush=True)
    _report(outcomes, given.seed, time.monotonic() - started)
    return 1 if any(outcome.wrong is not None for outcome in outcomes) else 0


def _report(outcomes: list[Outcome], seed: int, seconds: float) -> None:
    needless = [outcome for outcome in outcomes if outcome.is_needless]
    separate = sum(not outcome.recipe.couples for outcome in outcomes)
    wrong = sum(outcome.wrong is not None for outcome in outcomes)
    print(f"seed {seed}: {len(outcomes)} models in {seconds:.0f} s, {wrong} trained as others")
    print(f"{separate} couple nothing; of these {len(needless)} are whole somewhere, or refused:")
    reasons = Counter(outcome.refused or outcome.whole[0].split(": ", 1)[1] for outcome in needless)
    examples = {outcome.refused or outcome.whole[0].split(": ", 1)[1]: outcome for outcome in needless}
    for reason, count in reasons.most_common(30):
        print(
            f"  {count:4} {reason} (model {examples[reason].recipe.number}, {examples[reason].recipe.loss})"
        )


if __name__ == "__main__":
    sys.exit(main())
