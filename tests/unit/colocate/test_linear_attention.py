"""Both forms of gated linear attention compute the same."""

import pytest
import torch

from prfaas.colocate.model import attention


def _inputs(num_tokens: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    decay = torch.nn.functional.logsigmoid(normal(num_tokens, 2))
    return normal(num_tokens, 2, 4), normal(num_tokens, 2, 4), normal(num_tokens, 2, 3), decay, normal(2, 4, 3)


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200])
def test_the_chunkwise_form_equals_the_recurrence_token_by_token(num_tokens: int) -> None:
    q, k, v, decay, state = _inputs(num_tokens)
    chunked, after = attention.chunkwise(q, k, v, log_decay=decay, state=state)
    outputs, state = [], state[None]
    for i in range(num_tokens):
        out, state = attention.recurrent(
            q[i : i + 1], k[i : i + 1], v[i : i + 1], log_decay=decay[i : i + 1], state=state
        )
        outputs.append(out)
    torch.testing.assert_close(chunked, torch.cat(outputs), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(after, state[0], rtol=1e-10, atol=1e-10)


def test_a_state_decays_to_nothing_where_the_decay_is_strong() -> None:
    q, k, v, _, state = _inputs(3)
    _, after = attention.chunkwise(q, k * 0, v, log_decay=torch.full((3, 2), -200.0), state=state)
    assert after.abs().max() < 1e-100
