"""Checks for every result file of a benchmark."""

import json
from dataclasses import fields

from comparison.record import SCHEMA, STATUSES, Row


def check_schema(result):
    """Fail unless a result file has all fields, and figures for all measured rows."""
    assert result["schema"] == SCHEMA
    assert {"commit", "date", "machine", "versions", "settings"} <= set(result)
    assert {"gpu", "driver", "cuda", "cpu", "cores"} <= set(result["machine"])
    assert {"python", "torch", "numpy", "pinstage"} <= set(result["versions"])
    assert {"tensordict", "spdl-io", "accvlab.multi_tensor_copier"} <= set(result["versions"])
    for row in result["rows"]:
        assert set(row) == {field.name for field in fields(Row)}
        assert row["status"] in STATUSES
        assert row["benchmark"] == result["benchmark"]
        if row["status"] == "ok":
            assert row["repeats"] > 0
            assert 0 < row["p10"] <= row["median"] <= row["p90"]
        else:
            assert row["median"] is None


def read(path):
    """Return the checked contents of a result file."""
    result = json.loads(path.read_text())
    check_schema(result)
    return result
