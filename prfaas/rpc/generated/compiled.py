"""Descriptors and message classes from compiled .proto files.

The code that protoc writes would be bound to one release of protobuf. `tools/generate_rpc.sh` writes the other files here.
"""

from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


def read_descriptor(name: str) -> Any:
    """Return the descriptor of a compiled file beside this module."""
    compiled = resources.files("prfaas.rpc.generated").joinpath(name).read_bytes()
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(compiled).file
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
    return descriptor_pool.Default().FindFileByName(file.name)


def messages(descriptor: Any) -> dict[str, Any]:
    """Return the message classes of a file by name."""
    return {name: message_factory.GetMessageClass(kind) for name, kind in descriptor.message_types_by_name.items()}
