"""The loops act on the adaptive resource manager: which share each step and each prompt is launched with."""

from __future__ import annotations

from dataclasses import dataclass, field

from prfaas.colocate.decode.loop import Adaptation
from prfaas.colocate.device.cpu import CpuRunner
from prfaas.colocate.device.runner import Row, Step
from prfaas.colocate.prefill.queue import Prompt
from prfaas.colocate.processes.shared_memory import Word
from prfaas.model.cost.colocation import ShareTable
from prfaas.scheduler.colocation import SharingPolicy
from tests.integration.colocate.two_sides import TwoSides
from tests.unit.colocate.tiny import CACHE, tiny_model

# A batch of one or two needs a quarter of the device; over-allocated it misses 40 ms.
TABLE = ShareTable((0.25, 0.5), (1, 2), ((0.03, 0.02), (0.035, 0.025)), (0.05, 0.06))
ROOMY_TABLE = ShareTable((0.25, 0.5), (1, 2), ((0.03, 0.02), (0.035, 0.025)), (0.01, 0.01))


@dataclass
class SlowPrefill:
    """A device on which a prompt is never done before somebody waits for it; remembers every launch's share."""

    device: CpuRunner
    decode_shares: list[float] = field(default_factory=list)
    prefill_shares: list[float] = field(default_factory=list)

    def decode(self, rows: list[Row], *, share: float) -> Step:
        self.decode_shares.append(share)
        return self.device.decode(rows, share=share)

    def prefill(self, prompt: Prompt, *, share: float) -> Step:
        self.prefill_shares.append(share)
        return Unfinished(self.device.prefill(prompt, share=share).tokens())


@dataclass(frozen=True)
class Unfinished:
    result: list[int]

    def done(self) -> bool:
        return False

    def tokens(self) -> list[int]:
        return self.result


def two_prompts(table: ShareTable) -> tuple[TwoSides, SlowPrefill]:
    """Return a second prompt is under way while the first request decodes: one decode step before, two beside, one after."""
    device = SlowPrefill(CpuRunner(tiny_model(), max_rows=4, max_blocks=CACHE.num_blocks))
    sides = TwoSides(tiny_model(), CACHE, adaptation=Adaptation(table, SharingPolicy(0.04, 3)), runner=device)
    sides.front.submit((1, 2, 3), 20, stop_token=None, on_token=lambda *_: None)
    for who in ("decode", "prefill", "prefill", "decode"):
        sides.turn(who)
    sides.front.submit((4, 5, 6), 20, stop_token=None, on_token=lambda *_: None)
    for who in ("decode", "prefill", "decode", "decode", "prefill", "decode"):
        sides.turn(who)
    return sides, device


def test_decode_has_its_least_share_beside_a_prompt_and_everything_before_and_after() -> None:
    sides, device = two_prompts(TABLE)
    assert device.decode_shares == [1.0, 1.0, 0.25, 0.25, 1.0]
    assert sides.board.share(Word.DECODE_SHARE) == 1.0
    sides.close()


def test_a_prompt_has_everything_while_nothing_decodes_and_the_rest_beside_decode() -> None:
    sides, device = two_prompts(TABLE)
    assert device.prefill_shares == [1.0, 0.75]
    sides.close()


def test_where_the_profile_allows_it_both_have_everything() -> None:
    sides, device = two_prompts(ROOMY_TABLE)
    assert set(device.decode_shares) == set(device.prefill_shares) == {1.0}
    sides.close()
