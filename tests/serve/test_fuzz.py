"""Requests generated from the server's own description: no answer is a 500, and none is missing.

HEEDFUL_FUZZ is the number of requests of each route (`make fuzz`); without it there are few.
"""

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from running_server import wait_for_free_slots

schemathesis = pytest.importorskip("schemathesis", reason="the extra serve is not installed")

CASES = int(os.environ.get("HEEDFUL_FUZZ", "2"))


def test_no_request_is_a_500(served: Any) -> None:
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) == len(served_routes(served))
    seen: set[int] = set()
    for operation in operations:
        checked = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]

        @given(case=operation.as_strategy())
        @settings(
            max_examples=CASES,
            deadline=None,
            database=None,
            derandomize=CASES < 10,
            suppress_health_check=checked,
        )
        def answers(case: Any) -> None:
            if isinstance(case.body, dict) and case.body.get("model") is not None:
                models = [*served.models, "other"]  # most names would be unknown
                case.body["model"] = models[len(str(case.body)) % len(models)]
            if isinstance(case.body, dict) and "target" in case.body:
                size = len(str(case.body))  # most languages and models do not translate
                model = (None, "de-en", "gpt")[size % 3]
                case.body |= {"source": ("de", "auto")[size % 2], "target": "en", "model": model}
            response = case.call(timeout=30)
            seen.add(response.status_code)
            assert response.status_code < 500, (case.method, case.path, case.body, response.text)

        answers()
    assert {200, 400} <= seen
    wait_for_free_slots(served)


def served_routes(served: Any) -> list[str]:
    app = served.server.guard.app
    return [
        f"{method} {path}" for path, entry in app.openapi()["paths"].items() for method in entry
    ]
