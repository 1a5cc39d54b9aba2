"""Messages of the manager's calls, built at import from the compiled `manager.proto`."""

from prfaas.rpc.generated.compiled import messages, read_descriptor

DESCRIPTOR = read_descriptor("manager.binpb")
globals().update(messages(DESCRIPTOR))
