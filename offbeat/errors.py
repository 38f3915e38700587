"""The exception tree of Offbeat.

Rules for adding to it: a new class only where a caller acts differently on it; the message says what was
expected, what was found, and what to do.
"""


class OffbeatError(Exception):
    """Base of all errors that Offbeat raises on purpose. Its text is fit to be shown to a user."""


class ConfigError(OffbeatError):
    """A recipe or a setting can't be used. Retrying does not help."""


class DataError(OffbeatError):
    """A data set, prompt, or column can't be used."""


class ModelError(OffbeatError):
    """A model folder or tokenizer can't be used."""


class RewardError(OffbeatError):
    """A reward function failed or returned something that is not a score."""


class EngineError(OffbeatError):
    """A generation engine failed, or was asked for something that it can't do."""


class StreamError(OffbeatError):
    """The sample streams can't be used as asked."""


class BacklogFull(StreamError):
    """Redis has no memory left for new prompt tasks. Try again after some were consumed."""


class Fenced(OffbeatError):
    """A newer learner has taken over; this one must stop and may change nothing more."""


class WeightsError(OffbeatError):
    """Weights can't be published, fetched, or loaded."""


class IntegrityError(WeightsError):
    """Bytes do not match their hash, or a generator's log-probs do not match the learner's."""


class ServiceUnavailable(OffbeatError):
    """Another service did not answer within the deadline; the text names it, its address, and what was asked."""


class CheckpointError(OffbeatError):
    """A checkpoint of the learner can't be written or read."""


class ProcessFailed(OffbeatError):
    """A process of a run ended and is not started again; the text shows the end of its log."""
