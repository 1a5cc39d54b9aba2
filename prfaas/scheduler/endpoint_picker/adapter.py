"""Instances in the form of llm-d's endpoint picker, whose profiles then choose in place of `placement.py`."""

from collections.abc import Iterable

from prfaas.scheduler.endpoint_picker.config import load
from prfaas.scheduler.endpoint_picker.picker import EndpointPicker, PickReason
from prfaas.scheduler.endpoint_picker.plugins import ROLE_LABEL, Endpoint
from prfaas.scheduler.placement import tie_break, usable
from prfaas.scheduler.snapshot import InstanceState, RequestFacts, Snapshot
from prfaas.types import InstanceRole

# llm-d's filters read `ROLE_LABEL`. Its first documentation used the short label.
SHORT_ROLE_LABEL, CLUSTER_LABEL = "role", "prfaas-cluster"
_ROLES: dict[InstanceRole, str] = {"prefill": "prefill", "decode": "decode", "both": "prefill-decode"}


def pick_decode(snapshot: Snapshot, request: RequestFacts) -> InstanceState | None:
    """Return the decode profile's choice among the healthy instances that decode; None if it leaves none."""
    candidates = _candidates((instance for instance in snapshot.instances if instance.decodes), request)
    endpoints = [_endpoint(candidate, request) for candidate in candidates]
    picked = _picker(snapshot).pick_decode(endpoints, request.num_prompt_tokens)
    return _find(candidates, picked[0]) if picked else None


def pick_prefill(
    snapshot: Snapshot, request: RequestFacts, decode: InstanceState
) -> tuple[InstanceState | None, PickReason]:
    """Return the prefill profile's choice among the PD-P instances of the decode cluster, and the decider's reason."""
    instances = (instance for instance in snapshot.instances if instance.prefills_within(decode.cluster))
    candidates = _candidates(instances, request)
    endpoints = [_endpoint(candidate, request) for candidate in candidates]
    picked, reason = _picker(snapshot).pick_prefill(endpoints, request.num_prompt_tokens, _endpoint(decode, request))
    return (_find(candidates, picked) if picked else None), reason


def _picker(snapshot: Snapshot) -> EndpointPicker:
    return load(snapshot.endpoint_picker, name="endpoint_picker")


def _candidates(instances: Iterable[InstanceState], request: RequestFacts) -> list[InstanceState]:
    """Return the usable instances in an order of each request's own, because the picker takes the first of equal scores."""
    return sorted(usable(instances, request), key=lambda instance: tie_break(instance, request))


def _find(candidates: Iterable[InstanceState], endpoint: Endpoint) -> InstanceState:
    return next(candidate for candidate in candidates if candidate.instance == endpoint.name)


def _endpoint(instance: InstanceState, request: RequestFacts) -> Endpoint:
    labels = {ROLE_LABEL: _ROLES[instance.role], SHORT_ROLE_LABEL: instance.role, CLUSTER_LABEL: instance.cluster}
    return Endpoint(
        name=instance.instance,
        labels=labels,
        num_waiting=instance.num_waiting,
        num_running=instance.num_running,
        kv_usage_ratio=instance.kv_usage_ratio,
        num_cached_tokens=request.cached_at(instance.agent) if request.caches_known else None,
        num_in_flight=instance.num_in_flight,
        num_in_flight_tokens=instance.num_in_flight_tokens,
        last_cold_use=instance.last_cold_use,
    )
