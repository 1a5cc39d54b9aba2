"""Choice of engines for a gateway's request: the router's own decision, as headers for the gateway and the sidecar."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from urllib.parse import unquote, urlsplit

from prfaas.router.engines.fleet import Fleet, Instance
from prfaas.router.http.admission import Client, RequestAdmission
from prfaas.router.http.proxy import check_path
from prfaas.router.openai.headers import GRANT_HEADER, PREFILL_HEADER, SESSION_HEADER, session_of
from prfaas.router.openai.request import ENDPOINTS, parse, prepare_forwarded
from prfaas.router.routing.plan import RoutePlan
from prfaas.router.routing.record import RequestRecord, RequestRecords
from prfaas.router.routing.serve import NoEngineReady, RequestHandler
from prfaas.types import InstanceId

DESTINATION = "x-gateway-destination-endpoint"  # Address of the engine, in a header and in the metadata envoy.lb.
SUBSET = "x-gateway-destination-endpoint-subset"  # Addresses to choose from, in the metadata envoy.lb.subset_hint.
OWN_HEADERS = (DESTINATION, PREFILL_HEADER, GRANT_HEADER)  # Removed if a client sends them.


@dataclass(frozen=True)
class GatewayRequest:
    """Request as the gateway shows it. `subset` has the addresses (host:port) that may decode; None allows all."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    subset: frozenset[str] | None = None


@dataclass(frozen=True)
class EndpointChoice:
    """Headers for the request, and the instances that are busy with it. `body` replaces the client's if it has a salt."""

    headers: Mapping[str, str]
    instances: tuple[Instance, ...]
    num_tokens: int = 0
    body: bytes | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count the request at its instances while the block runs."""
        with contextlib.ExitStack() as stack:
            for instance in self.instances:
                stack.enter_context(instance.busy(self.num_tokens))
            yield


@dataclass(frozen=True)
class EndpointChooser:
    """Admits a gateway's requests and chooses their engines."""

    fleet: Fleet
    handler: RequestHandler
    admission: RequestAdmission
    records: RequestRecords

    def admit(self, headers: Mapping[str, str], record: RequestRecord) -> Client:
        """Return the client of a request, and keep its record. Only the gateway can count the tokens of the answer.

        Raises:
            AdmissionRefused: there is no valid key.
        """
        client = self.admission.admit(headers.get("authorization"))
        record.client = client.name
        self.records.add(record)
        return client

    async def choose(self, request: GatewayRequest, client: Client, record: RequestRecord) -> EndpointChoice:
        """Return the choice for a client's request, and note the plan in its record.

        Raises:
            BadRequest: the body is no JSON object, or has a field that only routers may write.
            PathRefused: clients may not use this path.
            NoEngineReady: no allowed instance can decode, or the policy refuses the request.
        """
        path = unquote(request.path.partition("?")[0])
        endpoint = ENDPOINTS.get(path)
        if endpoint is None:
            record.path = path
            check_path(path)
            forwarded = prepare_forwarded(request.body, tenant=client.tenant)
            choice, body = self._choose_any(request, record, forwarded.model, client.tenant), forwarded.raw
        else:
            parsed = parse(endpoint, request.body, tenant=client.tenant)
            session = session_of(request.headers.get(SESSION_HEADER))
            routing = await self.handler.routing_request(parsed, session)
            facts = replace(routing.facts, excluded=self._outside(request.subset))
            record.plan = await self.handler.decisions.plan(replace(routing, facts=facts))
            choice, body = self._follow(record.plan, record), parsed.raw
        if body == request.body:
            return choice
        return replace(choice, body=body, headers={**choice.headers, "content-length": str(len(body))})

    def _outside(self, subset: frozenset[str] | None) -> frozenset[InstanceId]:
        """Return the decode instances that the gateway's hint excludes, healthy or not."""
        if subset is None:
            return frozenset()
        decode = (instance for instance in self.fleet if replace(instance.state(), healthy=True).decodes)
        return frozenset(instance.address.name for instance in decode if host_port(instance.url) not in subset)

    def _choose_any(
        self, request: GatewayRequest, record: RequestRecord, model: str | None, tenant: str
    ) -> EndpointChoice:
        """Return a decode instance for a request that needs no decision, if possible one that serves `model`."""
        instance = self.fleet.any_decode(model, tenant, excluded=self._outside(request.subset))
        if instance is None:
            raise NoEngineReady("no engine is ready")
        return EndpointChoice(_headers(record, instance), (instance,))

    def _follow(self, plan: RoutePlan, record: RequestRecord) -> EndpointChoice:
        """Return the choice that a plan leads to."""
        decision = plan.decision
        if decision.decode is None:
            raise NoEngineReady.of(decision)
        if any(name is not None and name not in self.fleet for name in (decision.decode, decision.prefill)):
            raise NoEngineReady("the chosen instance has just left")
        decode = self.fleet[decision.decode]
        headers, instances = _headers(record, decode), [decode]
        if plan.is_remote and decision.prefill is not None:
            prefill = self.fleet[decision.prefill]
            headers |= {PREFILL_HEADER: host_port(prefill.url), GRANT_HEADER: plan.grant}
            instances.append(prefill)
        return EndpointChoice(headers, tuple(instances), plan.facts.num_prompt_tokens)


def _headers(record: RequestRecord, decode: Instance) -> dict[str, str]:
    return {"x-request-id": record.request_id, DESTINATION: host_port(decode.url)}


def host_port(url: str) -> str:
    """Return the address (host:port) in an engine's base URL, with IPv6 in brackets."""
    parts = urlsplit(url)
    default = 443 if parts.scheme == "https" else 80
    return parts.netloc if parts.port else f"{parts.netloc}:{default}"
