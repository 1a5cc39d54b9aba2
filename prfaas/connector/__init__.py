"""vLLM connector: copies KV between the engine's blocks and the agent's pool.

The scheduler side opens transfers at the agent and plans the copies of each step. The worker side makes them, layer by
layer. Only `vllm` and `prfaas.colocate` import vLLM.

If the agent dies, pending transfers fail as `agent_lost` and vLLM computes these prompts itself. New requests run without
transfers until the connector has attached to the restarted agent (`scheduler/scheduler.py`, `worker/worker.py`).
"""
