"""Messages of KEDA's external scalers, built at import from the compiled `externalscaler.proto`."""

from prfaas.rpc.generated.compiled import messages, read_descriptor

DESCRIPTOR = read_descriptor("externalscaler.binpb")
globals().update(messages(DESCRIPTOR))
