"""Models of the GPU benchmark: their jobs, and random records for them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from load.harness.counting import spec_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from common.data.records import Records
    from common.jobs.spec import JobSpec

LORA = "lora_tasks:TextClassifier"
GROUP = 16  # K


@dataclass(frozen=True)
class Model:
    """A model, its records, and the share of the reference's speed that it requires on a GPU."""

    name: str
    task: Mapping[str, object]
    fields: Mapping[str, Mapping[str, Any]]
    # Of each field, the number above the largest one.
    above: Mapping[str, int]
    batch_size: int  # b
    bar: float

    def job(self, name: str, streams: Sequence[str], **more: object) -> JobSpec:
        """Return a job that trains the model. The rest is as in a job file."""
        return spec_of(
            dict(self.fields),
            name=name,
            streams=list(streams),
            task=dict(self.task),
            batch_size=self.batch_size,
            group_size=GROUP,
            optimizer={"name": "adamw", "learning_rate": 1e-4},
            **more,
        )

    def records(self, count: int, seed: int) -> Records:
        """Draw records."""
        draws = np.random.default_rng(seed)
        return {
            name: draws.integers(
                0, self.above[name], (count, *field.get("shape", ())), field["dtype"]
            )
            for name, field in self.fields.items()
        }


def model_of(name: str, folder: Path, *, small: bool) -> Model:
    """Return a model in a size for a GPU, or in a small size for a CPU.

    Args:
        name: `cnn` (28x28 images), `resnet` (ResNet-32 on 32x32 images) or `lora` (adapters of a
            frozen transformer of 6 layers, like DistilBERT, without dropout).
        folder: Folder to which the transformer's random weights are written.
        small: True for a CPU.
    """
    label: dict[str, dict[str, object]] = {"label": {"dtype": "uint8"}}
    if name == "lora":
        length, width, layers = (16, 32, 2) if small else (128, 768, 6)
        words = _write_transformer(folder, width, layers, length)
        task = {"entrypoint": LORA, "model": str(folder), "classes": 2}
        fields = label | {"tokens": {"dtype": "int32", "shape": [length]}}
        above = {"tokens": words, "label": 2}
        return Model(name, task, fields, above, 4 if small else 64, 0.9)
    is_cnn = name == "cnn"
    shape, size = ([1, 28, 28], 1024) if is_cnn else ([3, 32, 32], 512)
    if small:
        # Many processors compute bfloat16 slowly.
        shape, size = ([1, 16, 16], 4) if is_cnn else ([3, 8, 8], 2)
    network, bar = ("cnn-28", 0.8) if is_cnn else ("resnet-32", 0.9)
    task = {"name": "image-classifier", "classes": 10, "network": network}
    fields = label | {"image": {"dtype": "uint8", "shape": shape}}
    return Model(name, task, fields, {"image": 256, "label": 10}, size, bar)


def missing(name: str) -> str:
    """Return which packages of a model this machine lacks, or ""."""
    needed = ("transformers", "peft") if name == "lora" else ()
    return ", ".join(each for each in needed if find_spec(each) is None)


def _write_transformer(folder: Path, width: int, layers: int, length: int) -> int:
    """Save a transformer with random weights, and return the size of its vocabulary."""
    import torch  # noqa: PLC0415 -- producers import this module, too
    from transformers import BertConfig, BertModel  # noqa: PLC0415 -- it may be missing

    config = BertConfig(
        vocab_size=256 if width < 64 else 30_522,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 64, 1),
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    return int(config.vocab_size)
