#!/usr/bin/env bash
# Write prfaas/rpc/generated/ from proto/prfaas/v1/ anew. Needs grpcio-tools.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-.venv/bin/python}"
# The virtual path makes the generated modules import each other where they lie.
"$PYTHON" -m grpc_tools.protoc -Iprfaas/rpc/generated=proto/prfaas/v1 \
  --python_out=. --pyi_out=. prfaas/rpc/generated/manager.proto
