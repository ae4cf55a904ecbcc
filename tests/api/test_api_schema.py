"""The published OpenAPI description against the running server: schemathesis asks everything, as an admin.

Each operation gets requests that the description allows and requests that it does not; every answer must have a status,
a type and a body that are described, never a 5xx, and wrong requests must be refused.
"""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from test_api_roles import TABLE, spelled

from kit.api_world import World

EXAMPLES = 10
ENDLESS = {"GET /v1/stream"}  # tested in test_api_streams
OPERATIONS = sorted(set(TABLE) - ENDLESS - {"GET /v1/openapi.json"})
# Some rules join fields, or look at the cluster or into an archive: no schema can say them.
CAN_REFUSE_MORE = {"POST /v1/jobs", "POST /v1/jobs/plan", "POST /v1/snapshots"}

# A wrong request may also be too large: that is found out before anybody has looked inside.
REFUSALS = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429]
CONFIG = schemathesis.Config.from_dict({"checks": {"negative_data_rejection": {"expected-statuses": REFUSALS}}})

schemathesis.openapi.media_type("application/gzip", st.binary(max_size=1000))


@pytest.fixture(scope="module")
def operations(world: World) -> dict[str, Any]:
    job = world.client("admin").submit("true", env={"A": "b"})  # job 1, so that some ids are good
    world.end(job.id)
    assert job.wait(60)["done"]
    schema = schemathesis.openapi.from_dict(world.app.openapi(), config=CONFIG)
    found = (result.ok() for result in schema.get_all_operations())
    return {spelled(f"{one.method.upper()} {one.path}"): one for one in found}


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("operation", OPERATIONS)
def test_answers_are_as_described(world: World, operations: dict[str, Any], operation: str, mode: Any) -> None:
    if operation == "GET /v1/healthz" and mode is GenerationMode.NEGATIVE:
        pytest.skip("it takes nothing that could be wrong")
    excluded = [CHECKS.get_one("positive_data_acceptance")] if operation in CAN_REFUSE_MORE else []
    headers = {"Authorization": f"Bearer {world.tokens['admin']}"}

    @seed(1)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    @given(case=operations[operation].as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        case.call_and_validate(base_url=world.url, headers=headers, timeout=60, excluded_checks=excluded)

    ask()


def test_every_operation_is_asked(operations: dict[str, Any]) -> None:
    assert set(operations) == set(OPERATIONS) | ENDLESS
