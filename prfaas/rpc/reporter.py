"""Reporter of an agent: registers the node, sends heartbeats, streams pool changes, and recovers from every break.

reporter = Reporter(["10.0.0.1:7410"], node=Node(...), secret=secret)
reporter.add_layout(layout)  # An engine has attached.
reporter.publish([BlockStored(...)])  # Called by the pool, never waits.
task = asyncio.create_task(reporter.run())
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace

from prfaas import logs
from prfaas.errors import FencedError, IndexRefusal, ManagerUnreachable
from prfaas.index.inventory import Change, Inventory
from prfaas.index.membership import Figures, Node
from prfaas.index.segments import digest_of_node
from prfaas.kv.layout import Layout
from prfaas.rpc.channel import Channel
from prfaas.rpc.event_log import EventLog
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.rpc.tasks import cancel_tasks
from prfaas.rpc.translate import command_from, copy_end_message, link_message, load_message, node_message
from prfaas.transport.net.tls import CertificateFiles
from prfaas.types import CopyCommand, CopyEnd, TransferTiming

_CALL_SECONDS = 3.0
_FIGURES_SECONDS = 1.0  # Period of unchanged figures.
_LOOK_SECONDS = 0.5  # Period of changed figures, so that pages show them within two seconds.
_OUTCOMES_SECONDS = 1.0
_HEARTBEATS_PER_SILENCE = 4
_MAX_PROMISES = 10_000  # Bound while no manager takes them; the oldest are dropped.
_MAX_COPY_ENDS = 4096  # Bound while no manager takes them; the manager repeats lost commands.
_GATHER_SECONDS = 0.002  # Shortest time between two batches, so that changes travel together.
_MIN_BACKOFF_SECONDS = 0.1
_MAX_BACKOFF_SECONDS = 2.0

log = logs.get("rpc.reporter")


@dataclass(frozen=True)
class ReporterStatus:
    """State of the reports, for the agent's status page."""

    manager: str | None  # Manager that takes the events, or None.
    sequence: int
    acknowledged: int
    num_full_announcements: int
    num_orphans: int  # Blocks that wait for their parents before they are announced.
    num_refused: int  # Blocks that do not fit their hash chains and are not announced.
    digest: str  # Digest of all announced blocks, as in a manager's /digests if it knows them all.


class Reporter:
    """Reports of one node. Call `publish` and `add_layout` in the event loop of `run`."""

    def __init__(
        self,
        managers: Sequence[str],
        *,
        node: Node,
        secret: bytes,
        figures: Callable[[], Figures] | None = None,
        tls: CertificateFiles | None = None,
        on_command: Callable[[CopyCommand], None] = lambda command: None,
    ) -> None:
        """`figures` is called twice a second, `on_command` per command of the manager, possibly repeatedly."""
        self._managers = list(managers)
        self._node = node
        self._secret = secret
        self._figures = figures
        self._tls = tls
        self._on_command = on_command
        self._copy_ends: deque[CopyEnd] = deque(maxlen=_MAX_COPY_ENDS)
        self._copy_ended = asyncio.Event()
        self._log = EventLog(Inventory())
        for layout in node.layouts:
            self._log.inventory.add_layout(layout)
        self._promises: deque[pb.ReportTransferRequest.Promise] = deque(maxlen=_MAX_PROMISES)
        self._timings: deque[pb.ReportTransferRequest.Timing] = deque(maxlen=_MAX_PROMISES)
        self._fresh = asyncio.Event()
        self._changed = asyncio.Event()
        # Set while the manager knows the node's layouts, which must precede their events.
        self._registered = asyncio.Event()
        self._connected_to: str | None = None
        self._session_number = 0

    @property
    def status(self) -> ReporterStatus:
        event_log, inventory = self._log, self._log.inventory
        return ReporterStatus(
            self._connected_to,
            event_log.sequence,
            event_log.acknowledged,
            event_log.num_full_announcements,
            inventory.num_orphans,
            inventory.num_refused,
            str(digest_of_node(inventory.digests())),
        )

    def add_layout(self, layout: Layout) -> None:
        """Announce a layout. Must precede the first event with this layout."""
        if layout not in self._node.layouts:
            self._node = replace(self._node, layouts=(*self._node.layouts, layout))
            self._log.inventory.add_layout(layout)
            self._registered.clear()
            self._changed.set()

    def name_model(self, model: str) -> None:
        """Announce this model for engines whose model is not known yet."""
        engines = tuple(replace(engine, model=engine.model or model) for engine in self._node.engines)
        if engines != self._node.engines:
            self._node = replace(self._node, engines=engines)
            self._changed.set()

    def publish(self, events: Iterable[Change]) -> None:
        """Report changes of the pool, in order. Never waits.

        Raises:
            IndexRefusal: an event's layout was not added.
        """
        if self._log.publish(events):
            self._fresh.set()

    def note_promise(self, *, predicted_tokens: int, found_tokens: int) -> None:
        """Report within a second how a prediction of the manager turned out."""
        promise = pb.ReportTransferRequest.Promise(predicted_tokens=predicted_tokens, found_tokens=found_tokens)
        self._promises.append(promise)

    def note_timing(self, timing: TransferTiming) -> None:
        """Report within a second the phases of a transfer."""
        seconds = {f"{phase}_seconds": duration for phase, duration in timing.seconds.items()}
        self._timings.append(pb.ReportTransferRequest.Timing(transfer_id=timing.transfer_id, **seconds))

    def note_copy_end(self, end: CopyEnd) -> None:
        """Report at once how a command ended."""
        self._copy_ends.append(end)
        self._copy_ended.set()

    async def run(self) -> None:
        """Report to the manager that takes this cluster's events, until cancelled."""
        backoff, target, attempt = _MIN_BACKOFF_SECONDS, self._managers[0], 0
        while True:
            started = asyncio.get_running_loop().time()
            try:
                await self._session(target)
            except FencedError as error:
                attempt += 1
                target = error.writer or self._managers[attempt % len(self._managers)]
                log.info("manager.redirected", writer=target)
            except (ManagerUnreachable, IndexRefusal) as error:
                attempt += 1
                target = self._managers[attempt % len(self._managers)]
                log.warning("manager.lost", error=str(error))
            # Our own error, such as a figure that no message can hold, must not end the agent.
            except Exception:
                log.exception("manager.session_failed", manager=target)
            if asyncio.get_running_loop().time() - started > _MAX_BACKOFF_SECONDS:
                backoff = _MIN_BACKOFF_SECONDS
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, _MAX_BACKOFF_SECONDS)

    async def _session(self, address: str) -> None:
        """Report to one manager until it fails or redirects."""
        channel = Channel(address, name=self._node.name, secret=self._secret, tls=self._tls)
        try:
            response = await self._register(channel)
            log.info("manager.registered", manager=address)
            await _until_one_fails(
                *([self._send_figures(channel, self._figures)] if self._figures is not None else []),
                self._send_outcomes(channel),
                self._watch_commands(channel),
                self._send_copy_ends(channel),
                self._follow_changes(channel),
                self._stream_events(channel, response.heartbeat_seconds, response.silence_seconds),
            )
        finally:
            self._connected_to = None
            self._session_number += 1
            self._fresh.set()
            await channel.close()

    async def _register(self, channel: Channel) -> pb.RegisterResponse:
        self._changed.clear()
        request = pb.RegisterRequest(node=node_message(self._node))
        response: pb.RegisterResponse = await channel.call("Register", request, timeout_seconds=_CALL_SECONDS)
        if not self._changed.is_set():
            self._registered.set()
            self._fresh.set()
        return response

    async def _follow_changes(self, channel: Channel) -> None:
        while True:
            await self._changed.wait()
            await self._register(channel)

    async def _send_figures(self, channel: Channel, figures: Callable[[], Figures]) -> None:
        sent, due, loop = Figures(), 0.0, asyncio.get_running_loop()
        while True:
            current, node = figures(), self._node
            if current != sent or loop.time() >= due:
                links, engines = map(link_message, current.links), map(load_message, current.engines)
                request = pb.ReportLinksRequest(node=node.name, epoch=node.epoch, links=links, engines=engines)
                await channel.call("ReportLinks", request, timeout_seconds=_CALL_SECONDS)
                sent, due = current, loop.time() + _FIGURES_SECONDS
            await asyncio.sleep(_LOOK_SECONDS)

    async def _send_outcomes(self, channel: Channel) -> None:
        while True:
            promises, timings = list(self._promises), list(self._timings)
            self._promises.clear()
            self._timings.clear()
            node = self._node
            request = pb.ReportTransferRequest(node=node.name, epoch=node.epoch, promises=promises, timings=timings)
            try:
                if promises or timings:
                    await channel.call("ReportTransfer", request, timeout_seconds=_CALL_SECONDS)
            except BaseException:
                self._promises.extendleft(reversed(promises))
                self._timings.extendleft(reversed(timings))
                raise
            await asyncio.sleep(_OUTCOMES_SECONDS)

    async def _watch_commands(self, channel: Channel) -> None:
        request = pb.WatchCommandsRequest(node=self._node.name, epoch=self._node.epoch)
        with channel.translated_errors():
            async for message in channel.stream("WatchCommands", request):
                command = command_from(message)
                if command is not None:
                    self._on_command(command)
        raise ManagerUnreachable(f"manager {channel.address} ended the stream of commands")

    async def _send_copy_ends(self, channel: Channel) -> None:
        while True:
            await self._copy_ended.wait()
            self._copy_ended.clear()
            taken = list(self._copy_ends)
            request = pb.ReportCommandsRequest(
                node=self._node.name, epoch=self._node.epoch, ends=map(copy_end_message, taken)
            )
            try:
                await channel.call("ReportCommands", request, timeout_seconds=_CALL_SECONDS)
            except BaseException:
                self._copy_ended.set()
                raise
            for _ in taken:
                self._copy_ends.popleft()

    async def _stream_events(self, channel: Channel, digest_seconds: float, silence_seconds: float) -> None:
        """Stream the pool's changes and heartbeats. A manager of version 0.1.0 answers no heartbeats: 0 s of silence."""
        call = channel.stream("ReportEvents", self._requests(digest_seconds, silence_seconds / _HEARTBEATS_PER_SILENCE))
        try:
            responses = aiter(call)
            while True:
                async with asyncio.timeout(silence_seconds or None):
                    with channel.translated_errors():
                        response = await anext(responses, None)
                if response is None:
                    raise ManagerUnreachable(f"manager {channel.address} ended the event stream")
                self._take_response(response, channel.address)
        except TimeoutError as error:
            raise ManagerUnreachable(f"manager {channel.address}: silent for {silence_seconds:g} s") from error
        finally:
            call.cancel()

    def _take_response(self, response: pb.ReportEventsResponse, address: str) -> None:
        kind = response.WhichOneof("message")
        if kind == "alive":
            return
        if kind == "acknowledged":
            self._log.acknowledge(response.acknowledged)
            return
        if kind == "resume_after":
            self._connected_to = address
            self._log.resume(response.resume_after)
        else:
            log.warning("events.full_announcement_requested", reason=response.announce_everything)
            self._log.announce_everything()
        self._fresh.set()

    async def _requests(self, digest_seconds: float, heartbeat_seconds: float) -> AsyncIterator[pb.ReportEventsRequest]:
        """Yield the messages of this session, and end with it even if gRPC does not end the stream."""
        yield pb.ReportEventsRequest(hello=pb.Hello(node=self._node.name, epoch=self._node.epoch))
        session, loop = self._session_number, asyncio.get_running_loop()
        while self._connected_to is None and session == self._session_number:
            await self._fresh.wait()
            self._fresh.clear()
        digests_due, heartbeat_due = loop.time() + digest_seconds, loop.time()
        while session == self._session_number:
            next_batch_at = loop.time() + _GATHER_SECONDS
            messages = self._log.take() if self._registered.is_set() else []
            if self._registered.is_set() and loop.time() >= digests_due:
                messages.append(self._log.digests())
                digests_due = loop.time() + digest_seconds
            if heartbeat_seconds and loop.time() >= heartbeat_due:
                messages.insert(0, pb.ReportEventsRequest(alive=pb.Alive()))
                heartbeat_due = loop.time() + heartbeat_seconds
            for message in messages:
                yield message
            due = min(digests_due, heartbeat_due) if heartbeat_seconds else digests_due
            await self._wait_fresh(max(_GATHER_SECONDS, due - loop.time()), not_before=next_batch_at)

    async def _wait_fresh(self, seconds: float, *, not_before: float) -> None:
        """Wait for something to send, at most `seconds`, but not shorter than until `not_before`."""
        try:
            async with asyncio.timeout(seconds):
                await self._fresh.wait()
            await asyncio.sleep(max(0.0, not_before - asyncio.get_running_loop().time()))
        except TimeoutError:
            pass
        self._fresh.clear()


async def _until_one_fails(*coroutines: Coroutine[None, None, None]) -> None:
    """Run coroutines until the first one ends, and raise its failure; a redirect takes precedence.

    If our own messages fail, gRPC cancels the stream, which raises ManagerUnreachable. A TaskGroup would not do: until
    Python 3.13 it hides its own cancellation behind a failure at the same moment.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_tasks(tasks)
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception())]
    if not errors:
        raise ManagerUnreachable("a stream to the manager broke off")
    raise next((error for error in errors if isinstance(error, FencedError)), errors[0])
