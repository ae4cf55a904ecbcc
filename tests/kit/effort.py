"""How hard Hypothesis tries: a profile for each occasion, and `effort(n)` for a test that usually tries n examples.

| profile    | examples               | for                                                                  |
|------------|------------------------|----------------------------------------------------------------------|
| `quick`    | a fifth of the usual   | while one writes                                                     |
| `dev`      | the usual, always same | everybody, by default                                                |
| `ci`       | as `dev`, none kept    | machines that are thrown away                                        |
| `thorough` | ten times, drawn anew  | before a release: `pytest --hypothesis-profile thorough`             |

THEBES_TEST_EFFORT=25 makes the default profile try 25 times the usual number, drawn anew.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings

USUAL = 100  # what a test tries that says nothing; others are scaled by it


def register_profiles() -> None:
    """All profiles are known and the default one is chosen; `--hypothesis-profile` may choose another."""
    times = int(os.environ.get("THEBES_TEST_EFFORT", "1"))
    # Compiled code is loaded inside the first example of a test; a deadline would measure that.
    # Nor is it a fault of ours how long a busy machine takes to draw one.
    common: dict[str, Any] = {
        "deadline": None,
        "suppress_health_check": [HealthCheck.too_slow],
        "print_blob": True,
    }
    settings.register_profile("quick", max_examples=USUAL // 5, derandomize=True, **common)
    settings.register_profile("dev", max_examples=USUAL * times, derandomize=times == 1, **common)
    settings.register_profile("ci", max_examples=USUAL, derandomize=True, database=None, **common)
    settings.register_profile("thorough", max_examples=USUAL * 10, derandomize=False, **common)
    settings.load_profile("dev")


def effort(examples: int, **more: Any) -> settings:
    """Settings of a property test that usually tries so many examples."""
    return settings(max_examples=max(1, examples * settings.default.max_examples // USUAL), **more)
