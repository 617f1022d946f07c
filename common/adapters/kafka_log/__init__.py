"""The log of `common.ports` on Kafka: the one home of confluent-kafka besides `embedded`."""

from __future__ import annotations

from common.adapters.kafka_log.log import KafkaLog
from common.adapters.kafka_log.settings import KafkaSettings, TopicMaker

__all__ = ["KafkaLog", "KafkaSettings", "TopicMaker"]
