"""A manager that answers Match with nothing: what a call costs before anybody looks anything up. `python -m … HOST:PORT`."""

from __future__ import annotations

import sys
from typing import Any

import grpc
import uvloop

from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.methods import SERVICE_NAME


async def serve(address: str) -> None:
    async def match(_request: pb.MatchRequest, _context: Any) -> pb.MatchResponse:
        return pb.MatchResponse()

    handler = grpc.unary_unary_rpc_method_handler(
        match,
        request_deserializer=pb.MatchRequest.FromString,
        response_serializer=lambda message: message.SerializeToString(),
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, {"Match": handler}),))
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
