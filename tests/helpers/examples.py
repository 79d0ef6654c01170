"""How many examples a property is tried on: a third of them as a rule, three times as many with
`--hypothesis-profile many` (`make test-many`). How long one takes says nothing: the machine may be busy.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

SOME = "some"
_ALL = 99

_ON_ANY_MACHINE: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile(SOME, max_examples=_ALL // 3, **_ON_ANY_MACHINE)
settings.register_profile("many", max_examples=_ALL * 3, **_ON_ANY_MACHINE)


def examples(count: int, **more: Any) -> settings:
    """Hypothesis's settings for a property that is well tried on so many examples.

    `more`: of `hypothesis.settings`.
    """
    return settings(max_examples=max(2, count * settings().max_examples // _ALL), **more)
