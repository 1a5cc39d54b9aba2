"""States that the next step overwrites wait in GPU memory, which is bounded, until they are copied. The GPU is pretended."""

from dataclasses import replace

import pytest

from prfaas.agent.engine.client import AgentClient
from prfaas.connector.worker import worker
from prfaas.connector.worker.copy_cuda import CudaCopier
from prfaas.connector.worker.copy_host import slots_tensor
from tests.support.agent_nodes import NUM_TOKENS, Nodes, load_and_finish, prompt_of, receiving, sending
from tests.support.counting_device import CountingDevice
from tests.support.fake_engine import RECURRENT, FakeEngine, memory_of

STATE_BYTES = RECURRENT[0].layer_bytes[0]


@pytest.fixture
def device() -> CountingDevice:
    return CountingDevice()


@pytest.fixture
def prefiller(nodes: Nodes, device: CountingDevice, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """An engine without prefix caching, on a GPU with memory for two states that wait."""

    def copier(client: AgentClient, layout: object, **_: object) -> CudaCopier:
        agent = client.attached
        return CudaCopier(
            [
                slots_tensor(
                    arena, header_bytes=agent.header_bytes, slot_bytes=agent.slot_bytes, num_slots=agent.num_slots
                )
                for arena in client.arenas
            ],
            device,
        )

    memory = memory_of(RECURRENT, model=nodes.model)
    layers = {name: replace(layer, is_overwritten=layer.group == 0) for name, layer in memory.layers.items()}
    with monkeypatch.context() as patch:
        patch.setattr(worker, "copier_for", copier)
        return nodes.attach(nodes.east, replace(memory, layers=layers), staging_bytes=2 * STATE_BYTES + 100)


def test_states_beyond_the_bound_do_not_leave(nodes: Nodes, device: CountingDevice, prefiller: FakeEngine) -> None:
    """The third prompt is computed at its decode engine. Once the states are copied, a fourth one leaves again."""
    decoder = nodes.start(nodes.west, RECURRENT)
    device.gate.clear()
    prompts = [prompt_of(seed) for seed in range(1, 5)]
    grants = [nodes.grant(prompt) for prompt in prompts]
    parked = [receiving(decoder, prompt, grant) for prompt, grant in zip(prompts, grants, strict=True)]
    running = [sending(prefiller, prompt, grant) for prompt, grant in zip(prompts, grants, strict=True)]
    for leg in running[:3]:
        prefiller.await_answer(leg)
        prefiller.prefill(leg, chunk_tokens=100)
    assert len(device.snapshots) == 2
    device.gate.set()
    for leg in running[:3]:
        prefiller.finish(leg)
    for request in parked[:2]:
        load_and_finish(decoder, request)
    assert decoder.await_answer(parked[2]) == 0
    decoder.finish(parked[2])
    assert decoder.outcomes() == {"receive completed": 2, "receive incomplete": 1}
    prefiller.await_answer(running[3])
    prefiller.prefill(running[3], chunk_tokens=NUM_TOKENS)
    prefiller.finish(running[3])
    load_and_finish(decoder, parked[3])
    nodes.assert_nothing_is_left()
