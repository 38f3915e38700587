"""The real adapter of the sample streams: Redis (7.0 or newer) or Valkey. Services import from here.

The worker side is in `redis_worker`, the learner side in `redis_learner`, what both share in `link`; everything that
must be atomic is a Lua script in `scripts/`, where each says what it does.
"""

from offbeat.streams.link import wait_for_redis
from offbeat.streams.redis_learner import RedisLearnerStreams
from offbeat.streams.redis_worker import RedisWorkerStreams
from offbeat.streams.version_mark import RedisVersionMark

__all__ = ["RedisLearnerStreams", "RedisVersionMark", "RedisWorkerStreams", "wait_for_redis"]
