"""Fine-tune a text classifier with LoRA: docs/howto/finetuning.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification

import doll

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn
    from transformers.modeling_outputs import SequenceClassifierOutput


class TextClassifier:
    """Classify texts: a frozen transformer with adapters of low rank, and a new head.

    Args:
        model: Folder of the transformer, as `save_pretrained` writes it, on every machine.
        classes: Number of classes.
        rank: Rank of the adapters.
    """

    def __init__(self, model: str, classes: int, rank: int = 8) -> None:
        self.model, self.classes, self.rank = model, classes, rank

    def inputs(self) -> dict[str, doll.Input]:
        """Return the fields: token ids of any length, the same in each record, and a class."""
        return {
            "tokens": doll.Input(None, ("int32", "int64")),
            "label": doll.Input((), ("uint8", "int32", "int64")),
        }

    def build(self) -> nn.Module:
        """Load the transformer from its folder, freeze it, and add adapters and a head."""
        network = AutoModelForSequenceClassification.from_pretrained(
            self.model, num_labels=self.classes, dtype=torch.float32, local_files_only=True
        )
        return get_peft_model(network, LoraConfig(task_type=TaskType.SEQ_CLS, r=self.rank))

    def forward(self, module: nn.Module, records: Mapping[str, Tensor]) -> SequenceClassifierOutput:
        """Return the output of Hugging Face, which has logits, (n, classes)."""
        tokens, config = records["tokens"], module.config
        _check("tokens", tokens, config.vocab_size)
        found: SequenceClassifierOutput = module(
            input_ids=tokens, attention_mask=tokens != config.pad_token_id
        )
        return found

    def losses(self, outputs: SequenceClassifierOutput, records: Mapping[str, Tensor]) -> Tensor:
        """Return the cross-entropy, (n,)."""
        _check("label", records["label"], self.classes)
        return cross_entropy(outputs.logits, records["label"].long(), reduction="none")

    def metrics(
        self, outputs: SequenceClassifierOutput, records: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return 1 for each record of which the most likely class is right, otherwise 0, (n,)."""
        return {"accuracy": (outputs.logits.argmax(1) == records["label"]).float()}


def _check(name: str, numbers: Tensor, size: int) -> None:
    """Refuse impossible numbers. An index out of range on a GPU would end the job's process."""
    if bool(((numbers < 0) | (numbers >= size)).any()):
        raise ValueError(f"{name}: a number is outside 0..{size - 1}")
