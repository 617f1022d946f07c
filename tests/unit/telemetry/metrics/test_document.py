"""docs/reference/metrics.md lists the metrics that services declare."""

from __future__ import annotations

from pathlib import Path

from common.telemetry.metrics.__main__ import document, sections

DOCUMENT = Path(__file__).parents[4] / "docs/reference/metrics.md"


def test_metrics_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == document(), (
        "python -m common.telemetry.metrics > docs/reference/metrics.md"
    )


def test_every_metric_has_one_line_in_the_document() -> None:
    lines = document().splitlines()
    for metrics in sections().values():
        for metric in metrics:
            assert sum(line.startswith(f"| `{metric.name}` |") for line in lines) == 1
