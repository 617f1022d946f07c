"""What the OpenAPI document shows as examples of larger bodies."""

from __future__ import annotations

from typing import Any, Final

JOB: Final[dict[str, Any]] = {
    "name": "digits",
    "streams": ["clinic-a", "clinic-b"],
    "records": {
        "codec": "tensor",
        "fields": {"image": {"dtype": "uint8", "shape": [1, 8, 8]}, "label": {"dtype": "int64"}},
    },
    "task": {"name": "image-classifier", "classes": 10},
    "batch_size": 64,
    "group_size": 4,
    "optimizer": {"name": "adam", "learning_rate": 0.002},
    "stop": {"updates": 10000, "loss": 0.05, "deadline_s": 6720},
    "checkpoint": {"every_updates": 200, "keep": 3},
    "provisioning": {"workers": 8, "policy": "adaptive"},
}
