"""Client of KEDA's external scalers, built from the published contract and not from our .proto file."""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# Fields in the order of their numbers, from https://keda.sh/docs/latest/concepts/external-scalers/.
_TYPES = {"string": 9, "bool": 8, "int64": 3, "double": 1}
_MESSAGES = {
    "ScaledObjectRef": ("name string", "namespace string", "scalerMetadata Entry*"),
    "IsActiveResponse": ("result bool",),
    "GetMetricSpecResponse": ("metricSpecs MetricSpec*",),
    "MetricSpec": ("metricName string", "targetSize int64", "targetSizeFloat double"),
    "GetMetricsRequest": ("scaledObjectRef ScaledObjectRef", "metricName string"),
    "GetMetricsResponse": ("metricValues MetricValue*",),
    "MetricValue": ("metricName string", "metricValue int64", "metricValueFloat double"),
    "Entry": ("key string", "value string"),  # A map is a list of entries on the wire.
}
_METHODS = {
    "IsActive": "IsActiveResponse",
    "StreamIsActive": "IsActiveResponse",
    "GetMetricSpec": "GetMetricSpecResponse",
    "GetMetrics": "GetMetricsResponse",
}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="keda.proto", package="externalscaler", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, text in enumerate(fields, start=1):
            field, _, kind = text.partition(" ")
            added = message.field.add(name=field, number=number, label=3 if kind.endswith("*") else 1)
            if kind in _TYPES:
                added.type = _TYPES[kind]  # type: ignore[assignment]
            else:
                added.type_name = f".externalscaler.{kind.removesuffix('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"externalscaler.{name}"))
        for name in _MESSAGES
    }


CLASSES = _classes()


class KedaClient:
    """Calls of one ScaledObject with its trigger's metadata."""

    def __init__(self, channel: Any, **metadata: str) -> None:
        self._channel = channel
        entries = [CLASSES["Entry"](key=key, value=value) for key, value in metadata.items()]
        self._reference = CLASSES["ScaledObjectRef"](name="decode", namespace="prfaas", scalerMetadata=entries)

    async def is_active(self) -> bool:
        return bool((await self._call("IsActive", self._reference)).result)

    async def stream_is_active(self) -> bool:
        """Return the first message of the stream."""
        stream = self._method("StreamIsActive", self._channel.unary_stream)(self._reference)
        async for message in stream:
            stream.cancel()
            return bool(message.result)
        raise AssertionError("the stream ended")

    async def replicas(self) -> float:
        """Return the replicas that KEDA's HPA asks for: the metric over its target."""
        (spec,) = (await self._call("GetMetricSpec", self._reference)).metricSpecs
        request = CLASSES["GetMetricsRequest"](scaledObjectRef=self._reference, metricName=spec.metricName)
        (value,) = (await self._call("GetMetrics", request)).metricValues
        assert value.metricName == spec.metricName
        assert (value.metricValueFloat, spec.targetSizeFloat) == (value.metricValue, spec.targetSize)
        return float(value.metricValueFloat / spec.targetSizeFloat)

    async def _call(self, method: str, request: Any) -> Any:
        return await self._method(method, self._channel.unary_unary)(request)

    def _method(self, name: str, kind: Any) -> Any:
        return kind(
            f"/externalscaler.ExternalScaler/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=CLASSES[_METHODS[name]].FromString,
        )
