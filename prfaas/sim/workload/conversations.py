"""Conversations of several turns. Each prompt is all earlier text and new tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prfaas.errors import ConfigError
from prfaas.sim.model.prefix_cache import block_name
from prfaas.sim.model.request import SimulatedRequest
from prfaas.sim.scenario import Scenario
from prfaas.solve.files.traces import read_requests
from prfaas.types import BlockHash

# Block numbers of different conversations are this far apart.
_MAX_BLOCKS = 1 << 20


@dataclass(frozen=True)
class Turn:
    """New prompt tokens and output tokens of a turn."""

    num_new_tokens: int
    num_output_tokens: int


class Conversations:
    """Conversations that follow `scripts` in turn, with a pause of `think_seconds` after each answer."""

    def __init__(
        self, scripts: Sequence[Sequence[Turn]], *, block_tokens: int = 16, think_seconds: float = 0.0
    ) -> None:
        self._scripts = scripts
        self._longest = max(map(len, scripts))
        self._block_tokens = block_tokens
        self._think_seconds = think_seconds

    @property
    def longest_tokens(self) -> int:
        """Return prompt and answer tokens of the longest request."""
        return max(sum(turn.num_new_tokens + turn.num_output_tokens for turn in script) for script in self._scripts)

    def first(self, session: int, arrival: float) -> SimulatedRequest:
        """Return the request that opens a conversation."""
        return self._request(session, 0, arrival, 0)

    def following(self, request: SimulatedRequest, now: float) -> SimulatedRequest | None:
        """Return the next turn after an answer, as a `FollowUp`; None after the last."""
        if request.turn == len(self._script(request.session)):
            return None
        earlier = request.num_prompt_tokens + request.num_output_tokens
        return self._request(request.session, request.turn, now + self._think_seconds, earlier)

    def _script(self, session: int) -> Sequence[Turn]:
        return self._scripts[session % len(self._scripts)]

    def _request(self, session: int, index: int, arrival: float, earlier_tokens: int) -> SimulatedRequest:
        turn = self._script(session)[index]
        prompt = earlier_tokens + turn.num_new_tokens
        return SimulatedRequest(
            session * self._longest + index,
            arrival,
            num_prompt_tokens=prompt,
            num_output_tokens=turn.num_output_tokens,
            session=session,
            turn=index + 1,
            blocks=self._blocks(session, prompt),
            blocks_after=self._blocks(session, prompt + turn.num_output_tokens),
        )

    def _blocks(self, session: int, num_tokens: int) -> list[BlockHash]:
        start = session * _MAX_BLOCKS
        return [block_name(start + index) for index in range(num_tokens // self._block_tokens)]


def read_conversations(scenario: Scenario) -> Conversations | None:
    """Return the scenario's conversations; None if its requests are independent.

    Raises:
        ConfigError: the turns are malformed, or the file cannot be used.
    """
    if scenario.turns and scenario.conversations:
        raise ConfigError("turns, conversations: one of the two")
    if scenario.turns:
        scripts = [_parse_turns(scenario.turns)]
    elif scenario.conversations:
        scripts = recorded(scenario.conversations)
    else:
        return None
    return Conversations(scripts, block_tokens=scenario.block_tokens, think_seconds=scenario.think)


def _parse_turns(text: str) -> list[Turn]:
    try:
        pairs = [[int(number) for number in turn.split(">")] for turn in text.split(",")]
        turns = [Turn(new, output) for new, output in pairs]
    except ValueError:
        raise ConfigError(f'turns {text!r}: write new>output tokens of each, "1024>256,64>256"') from None
    if any(min(turn.num_new_tokens, turn.num_output_tokens) < 1 for turn in turns):
        raise ConfigError(f"turns {text!r}: each brings a token or more and is answered with one or more")
    return turns


def recorded(path: Path) -> list[list[Turn]]:
    """Return the conversations of a file; each begins with a request of turn 1.

    Raises:
        ConfigError: the file cannot be used.
    """
    scripts: list[list[Turn]] = []
    for request in read_requests(path)[0]:
        turn = Turn(int(request.prompt_tokens - request.cached_tokens), int(request.output_tokens or 1))
        if request.turn == 1:
            scripts.append([])
        elif not scripts:
            raise ConfigError(f"{path}: its first request is turn {request.turn} of its conversation")
        scripts[-1].append(turn)
    return scripts
