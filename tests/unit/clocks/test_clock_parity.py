"""The filter behind the comparison of a replica's clocks."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.sparkfleet.serving.plugins.filter.host import clock_parity


def result(maximum: int | None, sm: int = 2190, load: int = 0) -> dict[str, Any]:
    reading = {
        "sm_mhz": sm,
        "load_percent": load,
        "power_w": 40.0,
        "temperature_c": 50,
        "pstate": "P0",
        "driver": "580.173.02",
    }
    return {
        "__gpu_clocks_result": {
            "clocks": {"confirmed": [0, maximum] if maximum else None, "reading": reading}
        }
    }


@pytest.mark.field("B28")
def test_ceilings_and_clocks_under_load_are_compared() -> None:
    assert clock_parity(["a", "b"], {"a": result(2200), "b": result(2200)}) == []
    assert "ceilings differ" in clock_parity(["a", "b"], {"a": result(2200), "b": result(1800)})[0]
    loaded = {"a": result(2200, 2190, 95), "b": result(2200, 1990, 95)}
    assert "under load" in clock_parity(["a", "b"], loaded)[0]
    idle = {"a": result(2200, 2190, 2), "b": result(2200, 1990, 95)}
    assert clock_parity(["a", "b"], idle) == [], "an idle reading is no comparison"


def test_a_host_outside_the_run_is_passed_over() -> None:
    assert clock_parity(["a", "b"], {"a": result(2200), "b": {}}) == []
    assert clock_parity(["a", "c"], {"a": result(2200)}) == []
    with pytest.raises(AnsibleFilterError):
        clock_parity("a", {})
