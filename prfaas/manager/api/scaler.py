"""KEDA's external scaler: the instances that a cluster and role need, from the plan in force.

Calls name no caller. Where the port has certificates, KEDA needs one too.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from prfaas.manager.state.world import World
from prfaas.rpc.generated import externalscaler_pb2 as pb

METRIC_NAME = "needed-instances"
_MAX_PLAN_AGE = 3  # In units of `plan_seconds`. An older plan says nothing about the present arrivals.
_POLL_SECONDS = 1.0


class _Refusal(Exception):
    """A question without an answer. KEDA then keeps the present number of replicas."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Scaler:
    """Answers of KEDA's service `ExternalScaler`. `wall_clock` is Unix time."""

    def __init__(self, world: World, *, plan_seconds: float, wall_clock: Callable[[], float]) -> None:
        self._world = world
        self._max_age_seconds = _MAX_PLAN_AGE * plan_seconds
        self._wall_clock = wall_clock

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Return the implementation of each method."""
        return {
            "IsActive": self._is_active,
            "StreamIsActive": self._stream_is_active,
            "GetMetricSpec": self._metric_spec,
            "GetMetrics": self._metrics,
        }

    async def _is_active(self, request: pb.ScaledObjectRef | None, context: Any) -> pb.IsActiveResponse:
        return pb.IsActiveResponse(result=await self._needed(request, context) > 0)

    async def _stream_is_active(
        self, request: pb.ScaledObjectRef | None, context: Any
    ) -> AsyncIterator[pb.IsActiveResponse]:
        """Yield at the start and after each change. An unknown need is no change."""
        told: bool | None = None
        while True:
            try:
                is_active = self._needed_of(request) > 0
            except _Refusal as refusal:
                if refusal.code is grpc.StatusCode.INVALID_ARGUMENT:
                    await context.abort(refusal.code, str(refusal))
            else:
                if is_active != told:
                    yield pb.IsActiveResponse(result=is_active)
                told = is_active
            await asyncio.sleep(_POLL_SECONDS)

    async def _metric_spec(self, request: pb.ScaledObjectRef | None, context: Any) -> pb.GetMetricSpecResponse:
        try:
            target = _instances_per_replica(request)
        except _Refusal as refusal:
            await context.abort(refusal.code, str(refusal))
        spec = pb.MetricSpec(metricName=METRIC_NAME, targetSize=target, targetSizeFloat=target)
        return pb.GetMetricSpecResponse(metricSpecs=[spec])

    async def _metrics(self, request: pb.GetMetricsRequest | None, context: Any) -> pb.GetMetricsResponse:
        needed = await self._needed(request.scaledObjectRef if request is not None else None, context)
        value = pb.MetricValue(metricName=METRIC_NAME, metricValue=needed, metricValueFloat=needed)
        return pb.GetMetricsResponse(metricValues=[value])

    async def _needed(self, request: pb.ScaledObjectRef | None, context: Any) -> int:
        try:
            return self._needed_of(request)
        except _Refusal as refusal:
            await context.abort(refusal.code, str(refusal))
            raise

    def _needed_of(self, request: pb.ScaledObjectRef | None) -> int:
        """Return the instances that a ScaledObject should have.

        Raises:
            _Refusal: the metadata is wrong, or the need is unknown.
        """
        cluster, roles = _cluster_and_roles(request)
        plan = self._world.plan
        if plan is None or self._wall_clock() - plan.made_at > self._max_age_seconds:
            raise _Refusal(grpc.StatusCode.UNAVAILABLE, "there is no recent plan; managers plan with `deployment`")
        if not plan.needed_instances:
            message = "unknown: no requests were reported lately, or instances of the deployment file have both roles"
            raise _Refusal(grpc.StatusCode.UNAVAILABLE, message)
        counts = plan.needed_instances.get(cluster)
        if counts is None:
            known = ", ".join(sorted(plan.needed_instances))
            raise _Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"cluster: {cluster!r} is none of {known}")
        return sum(counts.get(role, 0) for role in roles)


def _cluster_and_roles(request: pb.ScaledObjectRef | None) -> tuple[str, tuple[str, ...]]:
    """Return the cluster and the roles of a trigger's metadata. Without a role all roles count."""
    metadata = dict(request.scalerMetadata) if request is not None else {}
    if not metadata.get("cluster"):
        raise _Refusal(grpc.StatusCode.INVALID_ARGUMENT, "cluster: missing in the trigger's metadata")
    match metadata.get("role", ""):
        case "":
            return metadata["cluster"], ("prefill", "decode")
        case "prefill" | "decode" as role:
            return metadata["cluster"], (role,)
        case unknown:
            raise _Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"role: {unknown!r}; write prefill, decode or none")


def _instances_per_replica(request: pb.ScaledObjectRef | None) -> int:
    text = request.scalerMetadata.get("instancesPerReplica", "1") if request is not None else "1"
    if not text.isascii() or not text.isdigit() or not int(text):
        raise _Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"instancesPerReplica: {text!r}; write a whole number")
    return int(text)
