#!/usr/bin/env bash
# Regenerate prfaas/rpc/generated/manager.binpb and manager_pb2.pyi from proto/prfaas/v1/. Needs grpcio-tools.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-.venv/bin/python}"
# The virtual path makes the generated modules import each other by their package path.
"$PYTHON" -m grpc_tools.protoc -Iprfaas/rpc/generated=proto/prfaas/v1 \
  --descriptor_set_out=prfaas/rpc/generated/manager.binpb --pyi_out=. prfaas/rpc/generated/manager.proto
