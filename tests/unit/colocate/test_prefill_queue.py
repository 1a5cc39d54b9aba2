"""From pending_kv to waiting_prefill, in decode's order."""

from prfaas.colocate.prefill.queue import PrefillQueue, Prompt
from prfaas.colocate.processes.messages import NO_STOP_TOKEN, Request


def request(number: int) -> Request:
    return Request(number, 0, 1, NO_STOP_TOKEN, (1, 2))


def test_a_prompt_waits_for_its_blocks_and_for_its_tokens_whichever_comes_last() -> None:
    queue = PrefillQueue()
    queue.add(request(1))
    assert queue.next() is None
    queue.blocks(1, 4, [8, 9])
    assert queue.next() == Prompt(request(1), 4, (8, 9))
    queue.blocks(2, 5, [7])
    assert queue.next() is None
    queue.add(request(2))
    assert queue.next() == Prompt(request(2), 5, (7,))


def test_nobody_overtakes_a_prompt_whose_tokens_are_late() -> None:
    queue = PrefillQueue()
    queue.blocks(1, 1, [1])
    queue.blocks(2, 2, [2])
    queue.add(request(2))
    assert queue.next() is None


def test_a_dropped_prompt_never_runs_whatever_had_come() -> None:
    queue = PrefillQueue()
    queue.add(request(1))
    queue.blocks(1, 1, [1])
    assert queue.drop(1)
    assert queue.drop(2)
    queue.add(request(2))
    queue.blocks(3, 2, [2])
    queue.add(request(3))
    assert queue.next() == Prompt(request(3), 2, (2,))


def test_a_prompt_that_was_taken_off_cannot_be_dropped() -> None:
    queue = PrefillQueue()
    queue.add(request(1))
    queue.blocks(1, 1, [1])
    queue.next()
    assert not queue.drop(1)
