"""How many examples a property is tried on: a third of them as a rule, three times as many with
`--hypothesis-profile many` (`make test-many`), which draws others each time. How long one takes says nothing:
the machine may be busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, settings

SOME = "some"
_ALL = 99

_TOO_SLOW = (HealthCheck.too_slow,)
_ON_ANY_MACHINE: dict[str, Any] = {"deadline": None, "suppress_health_check": _TOO_SLOW}

settings.register_profile(SOME, max_examples=_ALL // 3, derandomize=True, **_ON_ANY_MACHINE)
settings.register_profile("many", max_examples=_ALL * 3, **_ON_ANY_MACHINE)


def examples(count: int, suppressed: Sequence[HealthCheck] = ()) -> settings:
    """Hypothesis's settings for a property that is well tried on so many examples.

    `suppressed`: health checks that it fails.
    """
    tried = max(2, count * settings().max_examples // _ALL)
    return settings(max_examples=tried, suppress_health_check=(*_TOO_SLOW, *suppressed))
