#!/usr/bin/env bash
# Regenerate the .binpb and .pyi files of prfaas/rpc/generated from proto/. Needs grpcio-tools.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-.venv/bin/python}"
# The virtual path makes the generated modules import each other by their package path.
for proto in prfaas/v1/manager keda/externalscaler; do
  name="$(basename "$proto")"
  "$PYTHON" -m grpc_tools.protoc -Iprfaas/rpc/generated="proto/$(dirname "$proto")" \
    --descriptor_set_out="prfaas/rpc/generated/$name.binpb" --pyi_out=. "prfaas/rpc/generated/$name.proto"
done
