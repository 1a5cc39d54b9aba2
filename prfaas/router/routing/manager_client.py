"""Router's client of the managers: keeps the fleet up to date, asks for decisions, and reports completed requests."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

from prfaas import grants, logs, metrics
from prfaas.errors import IndexRefusal, ManagerUnreachable, PrfaasError
from prfaas.hashing import HASH_UNIT_TOKENS, HashChain
from prfaas.router.config import RouterConfig
from prfaas.router.engines.fleet import Fleet, FleetPolicy, addresses_of
from prfaas.router.engines.stored_fleet import StoredFleet, read, write
from prfaas.router.routing.plan import RoutePlan, RoutingRequest
from prfaas.router.routing.reports import RequestReports
from prfaas.rpc.client import ManagerClient
from prfaas.rpc.generated import manager_pb2 as pb
from prfaas.scheduler.route import EXPLANATIONS, Decision
from prfaas.scheduler.snapshot import Snapshot
from prfaas.types import InstanceId, TransferId

FETCH_SECONDS = 10.0  # Longest wait for a prefix from another node. Afterwards the prefix is computed.
REFUSED_SECONDS = 2.0  # Pause after a manager has refused the router.
MAX_ROUNDS = 2  # A second request states the hashes that the first response asked for.
_log = logs.get("router.manager")


class DecisionClient:
    """Client of the managers."""

    def __init__(self, config: RouterConfig, secret: bytes, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self._client = ManagerClient(
            config.managers,
            name="router",
            secret=secret,
            deadline_seconds=config.manager_timeout,
            tls=config.tls.files(),
        )
        self.reports = RequestReports(self._client)
        self._states_in_flight = False
        self._stored: StoredFleet | None = None
        self._restore()

    def _restore(self) -> None:
        """Begin with the fleet of the last run, which the first answer of a manager replaces."""
        file = self._config.fleet_file
        stored = read(file) if file is not None else None
        metrics.FLEET_STALE.set(1)
        if stored is None:
            return
        self._fleet.policy = stored.policy
        self._fleet.update(stored.instances)
        names = [instance.name for instance in stored.instances]
        _log.warning("fleet.restored", file=str(file), instances=names)

    def _store(self) -> None:
        """Keep the fleet for a start without managers."""
        current = StoredFleet(self._fleet.policy, [instance.address for instance in self._fleet])
        if self._config.fleet_file is not None and current != self._stored:
            write(self._config.fleet_file, current)
            self._stored = current

    async def watch_forever(self) -> None:
        """Update the fleet from the managers' states. Without a manager it stays as it is."""
        while True:
            try:
                async for state in self._client.watch_state():
                    self._apply(state)
            except PrfaasError as error:
                _log.error("manager.watch_refused", error=str(error))
            await asyncio.sleep(REFUSED_SECONDS)

    def _apply(self, state: pb.StateSnapshot) -> None:
        fleet = self._fleet
        fleet.policy = FleetPolicy(
            state.threshold_tokens,
            "pd" if state.local_policy == "pd" else "decode",
            counts_all=state.local_policy not in ("", "decode"),
        )
        self._states_in_flight = state.local_policy == "endpoint_picker"
        fleet.resting = frozenset(InstanceId(name) for name in state.resting_instances)
        addresses = [address for node_state in state.nodes for address in addresses_of(node_state.node)]
        if state.settling or state.index_stale:  # Not all instances have reported to the manager yet.
            named = {address.name for address in addresses}
            addresses += [instance.address for instance in fleet if instance.address.name not in named]
        if addresses != [instance.address for instance in fleet]:
            fleet.update(addresses)
            _log.info("fleet.changed", manager=state.manager, instances=[address.name for address in addresses])
        fleet.is_stale = False
        metrics.FLEET_STALE.set(0)
        self._store()

    async def decide(
        self, model: str, chain: HashChain, routing: RoutingRequest, snapshot: Snapshot
    ) -> RoutePlan | None:
        """Return the plan of the manager's decision; None if no manager answers in time or knows the model."""
        unavailable = [instance.address.name for instance in self._fleet if not instance.is_available]
        request = pb.RouteRequest(
            model=model,
            units=b"".join(chain.units),
            num_prompt_tokens=routing.facts.num_prompt_tokens,
            prompt_hash=chain.at(chain.num_tokens),
            tenant=routing.tenant,
            tenant_clusters=sorted(routing.facts.clusters),
            session=routing.session,
            cluster=self._config.cluster,
            overflow=self._config.overflow,
            max_output_tokens=routing.facts.max_output_tokens,
            turn=routing.facts.turn,
            request_id=routing.request_id,
            excluded_instances=[*routing.facts.excluded, *unavailable],
            in_flight=_in_flight(self._fleet) if self._states_in_flight else (),
        )
        try:
            response = await self._client.route(request)
            for _ in range(MAX_ROUNDS - 1):
                lengths = [length for length in response.odd_lengths if length <= chain.num_tokens]
                if not lengths:
                    break
                request.checkpoints.extend(pb.StatedCheckpoint(num_tokens=n, hash=chain.at(n)) for n in lengths)
                response = await self._client.route(request)
        except (ManagerUnreachable, IndexRefusal) as error:
            _log.warning("manager.decision_missing", error=str(error))
            return None
        fetched_tokens = await self._fetch(model, chain, response)
        return self._read(routing, snapshot, response, fetched_tokens)

    async def _fetch(self, model: str, chain: HashChain, response: pb.RouteResponse) -> int:
        """Copy the prefix that the decision asks for. Return the tokens copied; 0 if the rest must be computed."""
        fetch = response.fetch
        if not response.HasField("fetch") or not 0 < fetch.num_tokens <= chain.num_tokens:
            return 0
        units = b"".join(chain.units[: fetch.num_tokens // HASH_UNIT_TOKENS])
        end_hash = chain.at(fetch.num_tokens)
        request = pb.CopyRequest(
            prefix=pb.Prefix(model=model, units=units, num_tokens=fetch.num_tokens, end_hash=end_hash),
            source=fetch.source,
            destination=fetch.destination,
            timeout_seconds=FETCH_SECONDS,
            is_fetch=True,
        )
        outcome = await self._copy(request)
        metrics.FETCHES.labels(outcome=outcome).inc()
        if outcome == "completed":
            return int(fetch.num_tokens)
        _log.warning("prefix.fetch_failed", source=fetch.source, destination=fetch.destination, outcome=outcome)
        return 0

    async def _copy(self, request: pb.CopyRequest) -> str:
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                return (await self._client.copy(request, timeout_seconds=FETCH_SECONDS)).outcome
        except TimeoutError:
            return "late"
        except ManagerUnreachable:
            return "unreachable"
        except IndexRefusal:
            return "refused"

    def _read(
        self, routing: RoutingRequest, snapshot: Snapshot, response: pb.RouteResponse, fetched_tokens: int
    ) -> RoutePlan | None:
        """Return the plan in a response; None if it has a newer manager's reason or names unknown instances."""
        if response.reason not in EXPLANATIONS:
            return None
        facts = replace(
            routing.facts,
            num_cached_tokens=max(response.cached_tokens, fetched_tokens),
            caches_known=not response.layout_unknown,
        )
        is_remote = response.route == "remote"
        decision = Decision(
            "remote" if is_remote else "local",
            response.reason,
            InstanceId(response.decode.instance),
            InstanceId(response.prefill.instance) if is_remote else None,
        )
        if any(name is not None and name not in self._fleet for name in (decision.decode, decision.prefill)):
            return None
        return RoutePlan(
            decision,
            facts,
            snapshot,
            "manager",
            routing.request_id.hex(),
            TransferId(response.transfer_id) if is_remote else None,
            grants.to_text(response.grant) if is_remote else "",
        )

    async def close(self) -> None:
        await self._client.close()


def _in_flight(fleet: Fleet) -> Iterator[pb.InFlight]:
    for instance in fleet:
        if instance.num_requests:
            name, num_requests, num_tokens = instance.address.name, instance.num_requests, instance.num_tokens
            yield pb.InFlight(instance=name, num_requests=num_requests, num_tokens=num_tokens)
