"""The JSON schema of a spec, for completion and checks in editors."""

from __future__ import annotations

from typing import Any

from .models import Spec

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """Return the schema; the same for the same version of dtrain."""
    schema = Spec.model_json_schema(mode="validation")
    return {"$schema": DIALECT, **schema, "title": "dtrain job spec"}
