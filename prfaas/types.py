"""Plain data shared by packages: ids, shards, block lists of a transfer, prefixes and commands."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NewType

TransferId = NewType("TransferId", bytes)  # 16 random bytes, chosen by the signer of the grant.
BlockHash = NewType("BlockHash", bytes)  # 16 bytes; hashing.py defines them.
InstanceId = NewType("InstanceId", str)
AgentName = NewType("AgentName", str)
ClusterName = NewType("ClusterName", str)

TRANSFER_ID_BYTES = 16

InstanceRole = Literal["prefill", "decode", "both"]
ClusterKind = Literal["prfaas", "pd"]
# Rules for requests that no PrfaaS cluster prefills (`scheduler/pd_prefill.py`).
OwnPolicy = Literal["decode", "pd", "ppd", "static"]
LocalPolicy = OwnPolicy | Literal["endpoint_picker"]

# Reason for which a transfer failed: on the wire, to the engine, in logs, as a metric label.
FailureReason = Literal[
    "grant_refused",  # The grant is forged, expired, or for another agent.
    "no_layout",  # No worker of this instance has registered.
    "no_memory",  # No slots are left for transfer blocks.
    "unreachable",  # The other agent does not answer.
    "layout_mismatch",  # The two engines store their KV differently.
    "evicted",  # A block that should have been held was evicted.
    "prompt_mismatch",  # An engine's prompt is not the granted one.
    "incomplete",  # The sender's request ended before all layers were sent.
    "cancelled",  # Either side gave up.
    "deadline",  # The transfer did not end in time.
    "checksum",  # A chunk arrived corrupted repeatedly.
    "protocol",  # The other agent broke the protocol.
    "shutdown",  # An agent stopped.
]
# Outcome of a transfer at an engine, and the reason why the engine computed the prompt after all.
TransferOutcome = (
    FailureReason
    | Literal[
        "completed",  # Sent: the agent has every layer. Received: loaded into the engine's blocks.
        "no_grant",  # The parameters carry no grant, or an unreadable one.
        "wrong_role",  # The engine's kv_role does not send, or does not receive.
        "wrong_length",  # The grant is for a prompt of another length.
        "unhashable",  # The request has extras that no hash covers.
        "rejected",  # The engine's API refused the request, or its client left early.
        "whole_prompt",  # The engine computes the whole prompt, for its log-probabilities.
        "in_use",  # Another request of this engine has the transfer.
        "agent_silent",  # This machine's agent has not answered for `silence_seconds`.
        "agent_lost",  # The connection to the agent was lost.
        "recomputed",  # A local prefill was predicted to end before the transfer.
        "held",  # The engine's own prefix cache covers the whole transfer.
        "overwritten",  # A slot was given to another block while a worker read it.
        "no_prefix",  # This node's pool holds no more of the prompt than the engine's own cache.
        "aborted",  # The request ended before its transfer.
        "reset",  # The engine was ordered to forget the KV of earlier weights.
    ]
)
# Reason why the router gave up a leg before its first byte.
# `prefill_without_transfer`: the engine computed the prompt, but its connector gave the transfer up.
LegReason = Literal[
    "prefill_unreachable",
    "prefill_broke_off",
    "prefill_error",
    "prefill_late",
    "prefill_silent",
    "prefill_without_transfer",
    "decode_unreachable",
    "decode_broke_off",
    "decode_error",
    "decode_silent",
]
# Outcome of a client's request. `fell_back`: the decode instance computed a prompt of the remote route. `refused`:
# status 4xx. `failed`: status 5xx. `broken`: the answer ended early. `cancelled`: the client left.
OutcomeKind = Literal["completed", "fell_back", "refused", "failed", "broken", "cancelled"]


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `size` tensor-parallel ranks."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True)
class GroupBlocks:
    """Blocks of one KV group in a transfer or a query.

    `hashes[i]` names block `first_block + i` of the request. `hashing.NO_HASH` marks a partial block,
    which cannot be a prefix block. A linear state is one block whose hash covers exactly the transferred tokens.
    `parent` is the hash of the block before the first one, or the root. For a linear state it is the hash
    of the last full 16-token unit at or before its length.
    """

    group: int
    first_block: int
    hashes: tuple[BlockHash, ...]
    parent: BlockHash = BlockHash(bytes(16))

    @property
    def num_blocks(self) -> int:
        return len(self.hashes)


# Outcome of a prefix copy or a pool command.
CopyOutcome = Literal["completed"] | FailureReason


@dataclass(frozen=True)
class Prefix:
    """First `num_tokens` tokens of a prompt. `units` joins the hashes of the full 16-token units."""

    model: str
    units: bytes
    num_tokens: int
    end_hash: BlockHash  # Hash of exactly `num_tokens` tokens.


@dataclass(frozen=True)
class CopyCommand:
    """Manager's command to send the blocks of a prefix that the grant's destination lacks."""

    transfer_id: TransferId
    grant: bytes
    prefix: Prefix
    priority: int


TransferPhase = Literal[
    "queue",  # Sending engine: from the request to the first layer.
    "prefill",  # From the first layer to the end of the last forward pass.
    "wire",  # From there until the receiver has acknowledged everything.
    "load",  # Receiver: from complete in memory until the engine has read it.
]


@dataclass(frozen=True)
class TransferTiming:
    """Seconds of a transfer's phases as one agent saw them: three at the sender, one at the receiver."""

    transfer_id: TransferId
    seconds: Mapping[TransferPhase, float]


@dataclass(frozen=True)
class CopyEnd:
    """Outcome of a command. Bytes are payload."""

    transfer_id: TransferId
    outcome: CopyOutcome
    message: str = ""
    moved_bytes: int = 0
    held_bytes: int = 0
