"""The route of one request: `Snapshot + RequestFacts → Decision(reason)`, pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


def route(snapshot: Snapshot, request: RequestFacts) -> Decision:
    """The decision for one request: PrfaaS section 3.4, rule "uncached > t" with t = `threshold_tokens`."""
    decode = _least_loaded(snapshot, lambda instance: instance.decodes)
    if decode is None:
        return Decision("refused", "no_decode_instance")
    if not request.transferable:
        return Decision("local", "not_transferable", decode.instance)
    if request.num_uncached_tokens <= snapshot.threshold_tokens:
        return Decision("local", "short", decode.instance)
    candidates = [instance for instance in snapshot.instances if instance.prefills_for_others]
    if not candidates:
        return Decision("local", "no_prefill_instance", decode.instance)
    reachable = [one for one in candidates if (one.cluster, decode.cluster) not in snapshot.links_down]
    if not reachable:
        return Decision("local", "link_down", decode.instance)
    return Decision("remote", "long", decode.instance, _least(reachable).instance)


def _least_loaded(snapshot: Snapshot, wanted: Callable[[InstanceState], bool]) -> InstanceState | None:
    candidates = [instance for instance in snapshot.instances if wanted(instance)]
    return _least(candidates) if candidates else None


def _least(instances: Iterable[InstanceState]) -> InstanceState:
    """The one with the fewest requests under way, the first by name among equals."""
    return min(instances, key=lambda instance: (instance.num_requests, instance.instance))
