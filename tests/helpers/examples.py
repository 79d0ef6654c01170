"""How many examples a property is tried on: a third of them as a rule, three times as many with
`--hypothesis-profile many` (`make test-many`).
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings

SOME = "some"
_ALL = 99

settings.register_profile(SOME, max_examples=_ALL // 3)
settings.register_profile("many", max_examples=_ALL * 3)


def examples(count: int, **more: Any) -> settings:
    """Hypothesis's settings for a property that is well tried on so many examples.

    `more`: of `hypothesis.settings`.
    """
    return settings(max_examples=max(2, count * settings().max_examples // _ALL), deadline=None, **more)
