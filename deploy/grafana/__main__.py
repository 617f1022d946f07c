"""Writes the dashboards that Grafana reads: `python -m deploy.grafana`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from deploy.grafana.cost import COST
from deploy.grafana.learning import LEARNING
from deploy.grafana.pipeline import PIPELINE

DASHBOARDS = (PIPELINE, LEARNING, COST)
FOLDER = Path(__file__).parent / "dashboards"


def written() -> dict[Path, str]:
    """Return the content of each file."""
    return {
        FOLDER / f"{dashboard.name}.json": json.dumps(dashboard.json(), indent=1) + "\n"
        for dashboard in DASHBOARDS
    }


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m deploy.grafana",
        description="Writes the dashboards that Grafana reads, from the files beside this one.",
        epilog="example: python -m deploy.grafana && git diff deploy/grafana/dashboards",
    ).parse_args()
    for path, text in written().items():
        path.write_text(text)
