"""A plain FastAPI server of the same network, as a user might write it.

Its argument is the port.
"""

from __future__ import annotations

import sys
from pathlib import Path

# If this file is run by path, import from this checkout.
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from common.learning.tasks import build_model, make_task
from load.throughput.cases import CASES


class Question(BaseModel):
    """Images to classify."""

    images: list[list[list[list[int]]]]


class Answer(BaseModel):
    """A logit for each class of each image."""

    outputs: list[list[float]]


def app() -> FastAPI:
    """Return an app with the network behind one route."""
    case = CASES["cnn"]
    network = build_model(make_task(case.task, case.options), 0).eval()
    served = FastAPI()

    @served.post("/predict")
    async def predict(question: Question) -> Answer:
        images = torch.tensor(question.images, dtype=torch.float32) / 255
        with torch.inference_mode():
            return Answer(outputs=network(images).tolist())

    return served


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvicorn.run(app(), port=int(sys.argv[1]), log_level="error", access_log=False)
