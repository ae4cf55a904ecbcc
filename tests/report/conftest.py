"""Results that several tests of the report look at."""

from __future__ import annotations

import pytest
from toy import toy_results

from thebes.report.result import Result


@pytest.fixture(scope="session")
def four() -> list[Result]:
    return toy_results(4)


@pytest.fixture(scope="session")
def twelve() -> list[Result]:
    return toy_results(12)
