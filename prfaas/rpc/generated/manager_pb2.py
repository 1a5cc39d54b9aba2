"""Messages of the manager's calls, built at import from the compiled `manager.proto`.

The code that protoc writes would be bound to one release of protobuf. `tools/generate_rpc.sh` writes the other files here.
"""

from importlib import resources

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_compiled = resources.files("prfaas.rpc.generated").joinpath("manager.binpb").read_bytes()
(_file,) = descriptor_pb2.FileDescriptorSet.FromString(_compiled).file
descriptor_pool.Default().AddSerializedFile(_file.SerializeToString())
DESCRIPTOR = descriptor_pool.Default().FindFileByName(_file.name)
for _name, _message in DESCRIPTOR.message_types_by_name.items():
    globals()[_name] = message_factory.GetMessageClass(_message)
