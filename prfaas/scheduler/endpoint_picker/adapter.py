"""Instances as llm-d's endpoint picker sees them: its profiles choose in the place of `placement.py`."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable

from prfaas.scheduler.endpoint_picker.config import load
from prfaas.scheduler.endpoint_picker.picker import EndpointPicker, PickReason
from prfaas.scheduler.endpoint_picker.plugins import ROLE_LABEL, Endpoint, PickRequest
from prfaas.scheduler.placement import tie_break
from prfaas.scheduler.snapshot import InstanceState, RequestFacts, Snapshot
from prfaas.types import InstanceRole

# The label that llm-d's filters read, and the short one of its first pages.
SHORT_ROLE_LABEL, CLUSTER_LABEL = "role", "prfaas-cluster"
_ROLES: dict[InstanceRole, str] = {"prefill": "prefill", "decode": "decode", "both": "prefill-decode"}


def pick_decode(snapshot: Snapshot, request: RequestFacts) -> InstanceState | None:
    """Return the decode profile's choice among the healthy instances that decode; None where it leaves nobody."""
    candidates = _usable((instance for instance in snapshot.instances if instance.decodes), request)
    picked = _picker(snapshot).pick_decode(
        [_endpoint(candidate, request) for candidate in candidates], _asked(snapshot, request)
    )
    return _named(candidates, picked[0]) if picked else None


def pick_prefill(
    snapshot: Snapshot, request: RequestFacts, decode: InstanceState
) -> tuple[InstanceState | None, PickReason]:
    """The decider's verdict for a decode instance, and the prefill profile's choice among its cluster's PD-P instances."""
    candidates = _usable(
        (instance for instance in snapshot.instances if instance.prefills_within(decode.cluster)), request
    )
    endpoints = [_endpoint(candidate, request) for candidate in candidates]
    asked = _asked(snapshot, request)
    picked, reason = _picker(snapshot).pick_prefill(endpoints, asked, _endpoint(decode, request))
    return (_named(candidates, picked) if picked else None), reason


def _picker(snapshot: Snapshot) -> EndpointPicker:
    return load(snapshot.endpoint_picker, name="endpoint_picker")


def _usable(instances: Iterable[InstanceState], request: RequestFacts) -> list[InstanceState]:
    """In an order of each request's own: of equal scores the picker takes the first."""
    usable = (instance for instance in instances if instance.healthy and instance.instance not in request.excluded)
    return sorted(usable, key=lambda one: tie_break(one, request))


def _named(candidates: Iterable[InstanceState], endpoint: Endpoint) -> InstanceState:
    return next(candidate for candidate in candidates if candidate.instance == endpoint.name)


def _endpoint(its: InstanceState, request: RequestFacts) -> Endpoint:
    labels = {ROLE_LABEL: _ROLES[its.role], SHORT_ROLE_LABEL: its.role, CLUSTER_LABEL: its.cluster}
    return Endpoint(
        name=its.instance,
        labels=labels,
        num_waiting=its.num_waiting,
        num_running=its.num_running,
        kv_usage_ratio=its.kv_usage_ratio,
        num_matched_blocks=request.cached_at(its.agent) if request.caches_known else None,
        num_in_flight=its.num_in_flight,
        num_in_flight_tokens=its.num_in_flight_tokens,
        last_cold_use=its.last_cold_use,
    )


def _asked(snapshot: Snapshot, request: RequestFacts) -> PickRequest:
    """Return the request, with matches counted in tokens. Its session's endpoint is the first one on the session's node."""
    own = [instance.instance for instance in snapshot.instances if instance.agent == request.session_agent]
    token = b64encode(own[0].encode()).decode() if own else None
    return PickRequest(request.num_prompt_tokens, 1, session_token=token)
