"""`common.ports.servers.Log` on Kafka: the one home of confluent-kafka besides `embedded`."""

from __future__ import annotations

from common.adapters.kafka.log import KafkaLog
from common.adapters.kafka.settings import KafkaSettings, TopicMaker

__all__ = ["KafkaLog", "KafkaSettings", "TopicMaker"]
