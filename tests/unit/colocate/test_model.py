"""However a request's tokens are cut into passes, the next token is the same."""

import torch

from prfaas.colocate.model.model import DecodeRows, PromptPart
from tests.support.sequential_generation import generate
from tests.unit.colocate.tiny import tiny_model

PROMPT = list(range(7, 7 + 150))


def test_a_prompt_in_chunks_gives_the_token_of_the_whole_prompt() -> None:
    whole, chunked = tiny_model(), tiny_model()
    table = torch.tensor([5, 3, 9, 1, 7, 8, 2, 4, 6, 11])
    expected = generate(whole, PROMPT, 1)
    for start in range(0, len(PROMPT), 40):
        part = torch.tensor(PROMPT[start : start + 40])
        token = chunked.next_tokens(None, PromptPart(part, start, 2, table))
    assert [int(token)] == expected


def test_decoding_gives_the_token_of_prefilling_everything_again() -> None:
    tokens = generate(tiny_model(), PROMPT, 6)
    again = [generate(tiny_model(), PROMPT + tokens[:i], 1)[0] for i in range(6)]
    assert tokens == again


def test_a_lockstep_pass_gives_each_request_its_own_tokens() -> None:
    alone = tiny_model()
    first, second = generate(alone, PROMPT, 2), generate(alone, PROMPT[:33], 1)
    model = tiny_model()
    table, changed = torch.arange(1, 11), torch.arange(20, 30)
    token = model.next_tokens(None, PromptPart(torch.tensor(PROMPT), 0, 1, table))
    # The second row is idle: it decodes into scratch.
    rows = DecodeRows(
        torch.tensor([int(token), 0]),
        torch.tensor([len(PROMPT), 0]),
        torch.tensor([1, 0]),
        torch.stack((table, torch.zeros_like(table))),
    )
    model.cache.kv[:, :, 0], model.cache.states[:, 0] = 0, 0
    both = model.next_tokens(rows, PromptPart(torch.tensor(PROMPT[:33]), 0, 2, changed))
    assert [int(both[0]), int(both[2])] == [first[1], second[0]]
