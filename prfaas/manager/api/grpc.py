"""gRPC server of the manager: caller identity, refusals, health, orderly stop."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from prfaas import logs, metrics, tracing
from prfaas.errors import ConfigError, FencedError, IndexRefusal
from prfaas.manager.api.scaler import Scaler
from prfaas.manager.api.service import UNREADABLE, Service
from prfaas.manager.config import ManagerConfig
from prfaas.manager.operations.commands import Copies
from prfaas.manager.operations.operations import Operations, check_is_no_node
from prfaas.manager.record.cluster_writer import ClusterWriter
from prfaas.manager.record.event_stream import EventStream
from prfaas.manager.record.replication import Replication
from prfaas.manager.state.world import World, forgotten_record, node_record
from prfaas.rpc.channel import MAX_MESSAGE_BYTES
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.methods import SCALER_SERVICE, SERVICE_NAME, server_handlers
from prfaas.rpc.streams import BATCHES_KEY
from prfaas.rpc.tokens import REASON_KEY, WRITER_KEY, caller
from prfaas.rpc.translate import command_message, copy_end_from, node_from
from prfaas.transport.net.tls import Certificates
from prfaas.transport.net.tls_proxy import TlsProxy
from prfaas.types import AgentName, TransferId
from prfaas.units import split_address

_WATCH_SECONDS = 1.0
_WATCH_POLL_SECONDS = 0.05
_STATUS = {
    "unknown_model": grpc.StatusCode.NOT_FOUND,
    "unknown_layout": grpc.StatusCode.NOT_FOUND,
    "unknown_node": grpc.StatusCode.FAILED_PRECONDITION,
    "stale_epoch": grpc.StatusCode.FAILED_PRECONDITION,
    "not_writer": grpc.StatusCode.FAILED_PRECONDITION,
    "no_route": grpc.StatusCode.UNAVAILABLE,
    "too_many_copies": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
}

log = logs.get("manager.grpc")
Reply = Callable[[Any, Any], Awaitable[Any]]


class GrpcServer:
    """gRPC server on one address."""

    def __init__(
        self,
        config: ManagerConfig,
        *,
        secret: bytes,
        service: Service,
        world: World,
        replication: Replication,
        copies: Copies,
        operations: Operations,
        stop_seconds: float,
        digest_seconds: float,
    ) -> None:
        self._config = config
        self._stop_seconds = stop_seconds
        self._digest_seconds = digest_seconds
        self._secret = secret
        self._service = service
        self._world = world
        self._replication = replication
        self._copies = copies
        self._operations = operations
        self._proxy: TlsProxy | None = None
        self._inner = ""
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 4_000),
            )
        )
        self.address = ""

    def bind(self) -> None:
        """Bind the address, so that it is known before the first call is answered.

        Raises:
            ConfigError: the address is taken, or the certificates cannot be used.
        """
        config, certificates = self._config, Certificates.of(self._config.tls, alpn_protocols=("h2",))
        if certificates is not None:
            refused = metrics.MANAGER_TLS_REFUSALS
            self._proxy = TlsProxy(
                config.listen,
                certificates,
                setting="listen",
                refused=lambda reason: refused.labels(port="grpc", reason=reason).inc(),
            )
            self._proxy.bind()
            self._inner = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
            self.address = self._proxy.address
            return
        host, _ = split_address(config.listen)
        try:
            self.address = f"{host}:{self._server.add_insecure_port(config.listen)}"
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"listen {config.listen}: {error}") from error

    async def start(self) -> None:
        """Answer calls. Health reports NOT_SERVING until `set_serving`."""
        scaler = Scaler(self._world, plan_seconds=self._config.plan_seconds, wall_clock=time.time)
        handlers = server_handlers(self._methods()), server_handlers(scaler.methods(), service=SCALER_SERVICE)
        self._server.add_generic_rpc_handlers(handlers)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self.set_serving(False)
        await self._server.start()
        if self._proxy is not None:
            self._proxy.start(self._inner)

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    async def close(self) -> None:
        """Report NOT_SERVING, wait for the calls in progress, and stop."""
        await self.set_serving(False)
        await self._health.enter_graceful_shutdown()
        await self._server.stop(self._stop_seconds)
        if self._proxy is not None:
            await self._proxy.close()

    def _methods(self) -> dict[str, Callable[..., Any]]:
        service = self._service
        return {
            "Register": self._unary("Register", self._register),
            "Heartbeat": self._unary("Heartbeat", self._heartbeat),
            "ReportLinks": self._unary("ReportLinks", self._report_links),
            "Match": self._unary("Match", service.match),
            "Route": self._unary("Route", service.route),
            "ReportTransfer": self._unary("ReportTransfer", self._report_transfer),
            "ReportRequests": self._unary("ReportRequests", self._report_requests),
            "ReportCommands": self._unary("ReportCommands", self._report_commands),
            "Drain": self._unary("Drain", self._operations.drain),
            "Undrain": self._unary("Undrain", self._operations.undrain),
            "SetRole": self._unary("SetRole", self._operations.set_role),
            "Copy": self._unary("Copy", self._operations.copy),
            "WatchCommands": self._watch_commands,
            "Ask": self._ask,
            "ReportEvents": self._report_events,
            "WatchState": self._watch_state,
        }

    # -- identity and refusals

    def _unary(self, call: str, reply: Reply) -> Reply:
        timer, span = metrics.MANAGER_CALL_SECONDS.labels(call=call), f"manager.{call}"

        async def answer(request: Any, context: Any) -> Any:
            started = time.perf_counter()
            metadata = _metadata_of(context)
            try:
                who = await self._caller(metadata, context, call)
                _check_is_read(request)
                with tracing.within(tracing.continued(span, str(metadata.get(tracing.HEADER, "")))):
                    response = await reply(request, who)
            except (IndexRefusal, FencedError) as error:
                await _abort(context, call, error)
            timer.observe(time.perf_counter() - started)
            return response

        return answer

    async def _caller(self, metadata: Mapping[str, str | bytes], context: Any, call: str) -> str:
        """Return the caller's name, as its token and its certificate prove."""
        name = caller(metadata, self._secret)
        if name is None:
            message = "the caller's name and token do not match the secret: compare its secret_file with the manager's"
            await _abort(context, call, IndexRefusal("unauthenticated", message))
        if (
            self._proxy is not None
            and (certified := self._proxy.peer_name(int(context.peer().rpartition(":")[2]))) != name
        ):
            message = f"the call is in the name of {name}, but its certificate is for {certified or 'no name'}"
            remedy = f"use that name, or a certificate with the common name {name}"
            await _abort(context, call, IndexRefusal("unauthenticated", f"{message}: {remedy}"))
        return name

    # -- agents

    async def _register(self, request: pb.RegisterRequest, who: str) -> pb.RegisterResponse:
        node = node_from(request.node)
        _check_speaks_for_itself(who, node.name)
        writer = await self._replication.writer_for(node.cluster)
        if self._world.forget_later_life(node):
            writer.append(forgotten_record(node.name))
        if self._world.register(node):
            writer.append(node_record(node))
            counts = {"num_layouts": len(node.layouts), "num_engines": len(node.engines)}
            log.info("node.registered", node=node.name, cluster=node.cluster, epoch=node.epoch, **counts)
        config = self._config
        return pb.RegisterResponse(
            heartbeat_seconds=self._digest_seconds,
            expiry_seconds=config.expiry_seconds,
            gives_commands=True,
            silence_seconds=config.silence_seconds,
        )

    async def _writer_of(self, who: str, name: str) -> ClusterWriter:
        _check_speaks_for_itself(who, name)
        return await self._replication.writer_for(self._world.cluster_of(AgentName(name)))

    async def _heartbeat(self, request: pb.HeartbeatRequest, who: str) -> pb.HeartbeatResponse:
        await self._writer_of(who, request.node)
        self._world.record_report(AgentName(request.node), epoch=request.epoch, links=None)
        return pb.HeartbeatResponse()

    async def _report_links(self, request: pb.ReportLinksRequest, who: str) -> pb.ReportLinksResponse:
        await self._writer_of(who, request.node)
        links = (list(request.links), list(request.engines))
        self._world.record_report(AgentName(request.node), epoch=request.epoch, links=links)
        return pb.ReportLinksResponse()

    async def _report_events(
        self, requests: AsyncIterator[pb.ReportEventsRequest], context: Any
    ) -> AsyncIterator[pb.ReportEventsResponse]:
        who = await self._caller(_metadata_of(context), context, "ReportEvents")
        stream = EventStream(self._world, self._replication)
        try:
            async for request in requests:
                _check_is_read(request)
                _check_speaks_for_itself(who, request.hello.node or stream.node or who)
                for response in await stream.take(request):
                    yield response
        except (IndexRefusal, FencedError) as error:
            await _abort(context, "ReportEvents", error)

    async def _report_transfer(self, request: pb.ReportTransferRequest, who: str) -> pb.ReportTransferResponse:
        _check_speaks_for_itself(who, request.node)
        self._service.report_transfer(request)
        return pb.ReportTransferResponse()

    async def _watch_commands(self, request: pb.WatchCommandsRequest, context: Any) -> AsyncIterator[pb.Command]:
        who = await self._caller(_metadata_of(context), context, "WatchCommands")
        try:
            _check_is_read(request)
            await self._writer_of(who, request.node)
        except (IndexRefusal, FencedError) as error:
            await _abort(context, "WatchCommands", error)
        sent: dict[TransferId, pb.Command] = {}
        while True:
            version = self._copies.version
            pending = self._copies.commands_of(AgentName(request.node))
            commands = {command.transfer_id: command_message(command) for command in pending}
            for command_id, message in commands.items():
                if sent.get(command_id) != message:  # New, or with another priority.
                    yield message
            sent = commands
            while self._copies.version == version:  # noqa: ASYNC110 - orders are synchronous
                await asyncio.sleep(_WATCH_POLL_SECONDS)

    async def _report_commands(self, request: pb.ReportCommandsRequest, who: str) -> pb.ReportCommandsResponse:
        _check_speaks_for_itself(who, request.node)
        for end in map(copy_end_from, request.ends):
            self._copies.report(AgentName(request.node), end)
        return pb.ReportCommandsResponse()

    # -- routers

    async def _report_requests(self, request: pb.ReportRequestsRequest, who: str) -> pb.ReportRequestsResponse:
        check_is_no_node(self._world, who)
        self._service.report_requests(request)
        return pb.ReportRequestsResponse()

    async def _ask(self, questions: AsyncIterator[pb.Question | None], context: Any) -> None:
        who = await self._caller(_metadata_of(context), context, "Ask")
        await context.send_initial_metadata(((BATCHES_KEY, "1"),))

        async def write(reply: pb.Reply) -> None:
            with contextlib.suppress(grpc.aio.InternalError):  # The caller may have left.
                await context.write(reply)

        try:
            await self._service.each(questions, who, write)
        except IndexRefusal as error:
            await _abort(context, "Ask", error)

    async def _watch_state(self, request: pb.WatchStateRequest, context: Any) -> AsyncIterator[pb.StateSnapshot]:
        await self._caller(_metadata_of(context), context, "WatchState")
        while True:
            version, deadline = self._world.version, _now() + _WATCH_SECONDS
            yield self._service.state(index_stale=self._replication.is_stale)
            while self._world.version == version and _now() < deadline:  # noqa: ASYNC110 - the world is synchronous
                await asyncio.sleep(_WATCH_POLL_SECONDS)


def _check_is_read(request: object) -> None:
    if request is None:
        raise IndexRefusal("malformed", UNREADABLE)


def _check_speaks_for_itself(who: str, node: str) -> None:
    if who != node:
        raise IndexRefusal("unauthenticated", f"{who} may not report for {node}")


def _metadata_of(context: Any) -> Mapping[str, str | bytes]:
    """Return the metadata of a call."""
    return dict(context.invocation_metadata() or ())


async def _abort(context: Any, call: str, error: IndexRefusal | FencedError) -> NoReturn:
    reason = error.reason if isinstance(error, IndexRefusal) else "not_writer"
    metrics.MANAGER_REFUSALS.labels(call=call, reason=reason).inc()
    trailing = [(REASON_KEY, reason)]
    if isinstance(error, FencedError):
        trailing.append((WRITER_KEY, error.writer))
    await context.abort(_STATUS.get(reason, grpc.StatusCode.INVALID_ARGUMENT), str(error), tuple(trailing))
    raise AssertionError("abort raises")


def _now() -> float:
    return asyncio.get_running_loop().time()
