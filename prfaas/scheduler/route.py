"""The route of one request: `Snapshot + RequestFacts → Decision(reason)`, pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prfaas.scheduler.snapshot import InstanceState, RequestFacts, Snapshot
from prfaas.types import InstanceId

Route = Literal["local", "remote", "refused"]
Reason = Literal[
    "short",  # its uncached tokens do not exceed the threshold
    "long",  # they do, and another cluster prefills it
    "not_transferable",  # images, several prompts or answers, prompt log-probabilities, an adapter
    "no_prefill_instance",  # long, but no healthy instance of a PrfaaS cluster is there
    "link_down",  # long, but no link to the decode cluster is up
    "no_decode_instance",  # nobody can answer
]
EXPLANATIONS: dict[Reason, str] = {
    "short": "its uncached tokens do not exceed the threshold, so the decode cluster prefills it",
    "long": "its uncached tokens exceed the threshold, so a PrfaaS cluster prefills it and its KV is streamed here",
    "not_transferable": "its KV cannot be named by one list of token ids, so it stays where it is decoded",
    "no_prefill_instance": "it is long, but no healthy instance of a PrfaaS cluster is there",
    "link_down": "it is long, but no link from a PrfaaS cluster to the decode cluster is up",
    "no_decode_instance": "no healthy instance can decode",
}


@dataclass(frozen=True)
class Decision:
    """Where a request goes, and why."""

    route: Route
    reason: Reason
    decode: InstanceId | None = None
    prefill: InstanceId | None = None


LOAD_SLACK = 4  # requests that a node with the better cache may be ahead of the least loaded one


def route(snapshot: Snapshot, request: RequestFacts) -> Decision:
    """The decision for one request: PrfaaS section 3.4, rule "uncached > t" with t = `threshold_tokens`.

    Each cluster's cache counts on its own (the paper's bandwidth-scarce rule): what decides is the increment over the
    prefix that the decode node holds.
    """
    usable = [instance for instance in snapshot.instances if instance.instance not in request.excluded]
    decode = _affine([instance for instance in usable if instance.decodes], request)
    if decode is None:
        return Decision("refused", "no_decode_instance")
    if not request.transferable:
        return Decision("local", "not_transferable", decode.instance)
    if request.uncached_at(decode.agent) <= snapshot.threshold_tokens:
        return Decision("local", "short", decode.instance)
    candidates = [instance for instance in usable if instance.prefills_for_others]
    if not candidates:
        return Decision("local", "no_prefill_instance", decode.instance)
    reachable = [one for one in candidates if (one.cluster, decode.cluster) not in snapshot.links_down]
    prefill = _affine(reachable, request)
    if prefill is None:
        return Decision("local", "link_down", decode.instance)
    return Decision("remote", "long", decode.instance, prefill.instance)


def _affine(candidates: Sequence[InstanceState], request: RequestFacts) -> InstanceState | None:
    """The instance whose node holds most of the prompt, the conversation's own among equals, unless it is overloaded.

    Among instances that hold as much: the fewest requests under way, then the first by name.
    """
    if not candidates:
        return None
    least = min(instance.num_requests for instance in candidates)
    free = [instance for instance in candidates if instance.num_requests <= least + LOAD_SLACK]
    return min(
        free,
        key=lambda instance: (
            -request.cached_at(instance.agent),
            instance.agent != request.session_agent,
            instance.num_requests,
            instance.instance,
        ),
    )
