"""Renders the chart of deployments/helm without a cluster: Helm's own SDK, which the package helm-python-sdk bundles.

``python -m tests.deployments.helm_chart`` writes the golden files anew, after a change of the chart that is meant.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deployments" / "helm" / "rag-posfix"
VALUE_SETS = ("laptop", "gpu", "production")
GOLDEN = ROOT / "tests" / "deployments" / "golden"


def values_of(name: str) -> dict[str, Any]:
    """Return one of the value sets that are shipped."""
    return yaml.safe_load((CHART.parent / "values" / f"{name}.yaml").read_text("utf-8"))


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` with ``changes`` in them, as ``helm --set`` does it."""
    result = dict(values)
    for key, change in changes.items():
        old = result.get(key)
        result[key] = merged(old, change) if isinstance(old, dict) and isinstance(change, dict) else change
    return result


def rendered(values: dict[str, Any]) -> dict[str, str]:
    """Return what templates yield, by file, empty ones left out; values are checked against the schema first."""
    return _rendered(json.dumps(values))


@cache  # a rendering takes a good part of a second
def _rendered(values_as_json: str) -> dict[str, str]:
    values = json.loads(values_as_json)
    chart = Chart.load(CHART)
    chart.validate_schema(values)
    texts = chart.render(values, name="answers", namespace="rag")
    return {Path(file).name: text.strip() + "\n" for file, text in sorted(texts.items()) if text.strip()}


def manifests(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects that would be sent to Kubernetes."""
    texts = [text for file, text in rendered(values).items() if file.endswith(".yaml")]
    return [found for text in texts for found in yaml.safe_load_all(text) if found]


def one_of(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the one object of a kind."""
    (found,) = [each for each in manifests(values) if each["kind"] == kind]
    return found


def golden_text(name: str) -> str:
    """Return what the golden file of a value set should hold."""
    return "".join(f"---\n# {file}\n{text}" for file, text in rendered(values_of(name)).items())


def main() -> None:
    """Write the golden files."""
    for name in VALUE_SETS:
        (GOLDEN / f"{name}.yaml").write_text(golden_text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
