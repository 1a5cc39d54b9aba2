"""Measured prefill rate of an engine, which predicts the duration of a local prefill."""

from collections import deque

# Before the first measurement, a prediction errs on the side of waiting.
UNKNOWN_TOKENS_PER_SECOND = 1000.0
# Shorter pieces of prompts say little: a step has a minimum duration.
MIN_STEP_TOKENS = 64
# Weight of earlier steps after each new one. Sixteen steps count for most of the rate.
DECAY = 15 / 16
_MAX_PLANNED_STEPS = 8


class PrefillRate:
    """Tokens per second of the steps that computed prompts. Times are monotonic seconds.

    Steps end in the order in which they were planned. An engine may plan a step before the previous one has ended.
    """

    def __init__(self) -> None:
        self._planned: deque[tuple[int, float]] = deque(maxlen=_MAX_PLANNED_STEPS)
        self._ended_at = 0.0
        self._tokens = 0.0
        self._seconds = 0.0

    def on_planned(self, prompt_tokens: int, *, now: float) -> None:
        """Note a step that computes this many tokens of prompts."""
        self._planned.append((prompt_tokens, now))

    def on_step_end(self, *, now: float) -> None:
        """Note the end of the oldest planned step."""
        if not self._planned:
            return
        tokens, planned_at = self._planned.popleft()
        seconds = now - max(planned_at, self._ended_at)
        self._ended_at = now
        if tokens >= MIN_STEP_TOKENS and seconds > 0:
            self._tokens = DECAY * self._tokens + tokens
            self._seconds = DECAY * self._seconds + seconds

    @property
    def tokens_per_second(self) -> float:
        """Measured rate, or the assumed one before the first measurement."""
        return self._tokens / self._seconds if self._seconds else UNKNOWN_TOKENS_PER_SECOND

    def seconds(self, num_tokens: int) -> float:
        """Return the predicted duration of the prefill of a prompt."""
        return num_tokens / self.tokens_per_second
