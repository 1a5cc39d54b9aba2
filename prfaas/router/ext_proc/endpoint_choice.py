"""Which engines a gateway's request goes to: the front door's own decision, as headers for the gateway and the sidecar."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from urllib.parse import unquote, urlsplit

from prfaas.router.engines.fleet import Fleet, Instance
from prfaas.router.http.admission import Client, RequestAdmission
from prfaas.router.http.proxy import check_path
from prfaas.router.openai.headers import GRANT_HEADER, PREFILL_HEADER, SESSION_HEADER, session_of
from prfaas.router.openai.request import BYTES_PER_TOKEN, PATHS, parse, prepare_forwarded
from prfaas.router.routing.decide import RoutePlan
from prfaas.router.routing.record import RequestRecord, RequestRecords
from prfaas.router.routing.serve import NoEngineReady, RequestHandler
from prfaas.scheduler.placement import choose_instance
from prfaas.scheduler.route import EXPLANATIONS
from prfaas.scheduler.snapshot import RequestFacts
from prfaas.types import InstanceId

DESTINATION = "x-gateway-destination-endpoint"  # host:port, by header and in the metadata envoy.lb
SUBSET = "x-gateway-destination-endpoint-subset"  # in the metadata envoy.lb.subset_hint: who may be chosen
# What a client may have sent under the names that only a picker writes goes away.
OWN_HEADERS = (DESTINATION, PREFILL_HEADER, GRANT_HEADER)
_ENDPOINTS = {path: endpoint for endpoint, path in PATHS.items()}


@dataclass(frozen=True)
class GatewayRequest:
    """A request as the gateway shows it. `subset`: the host:ports that may decode; None: all."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    subset: frozenset[str] | None = None


@dataclass(frozen=True)
class EndpointChoice:
    """Headers for the request, and the instances that are busy with it until it ends.

    `body`: what takes the place of the client's, where a salt is in it.
    """

    headers: Mapping[str, str]
    instances: tuple[Instance, ...]
    num_tokens: int = 0
    body: bytes | None = None

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """While the request is under way."""
        with contextlib.ExitStack() as stack:
            for instance in self.instances:
                stack.enter_context(instance.busy(self.num_tokens))
            yield


@dataclass(frozen=True)
class EndpointChooser:
    """What a choice needs."""

    fleet: Fleet
    answering: RequestHandler
    admission: RequestAdmission
    records: RequestRecords

    def admit(self, headers: Mapping[str, str], record: RequestRecord) -> Client:
        """Whose request it is; it is among the records from now on.

        Raises:
            NotLetIn: no valid key, or its client has used up its quota; the answer's tokens are the gateway's to count.
        """
        client = self.admission.admit(headers.get("authorization"))
        record.client = client.name
        self.records.add(record)
        return client

    async def choose(self, asked: GatewayRequest, client: Client, record: RequestRecord) -> EndpointChoice:
        """Return where a client's request goes; its record is told of the plan.

        Raises:
            BadRequest: a completion or chat that is no JSON object, or a body that carries what only routers may write.
            PathRefused: clients may not ask for this path.
            NobodyReady: no instance that may be chosen can decode, or the policy has it refused.
        """
        path = unquote(asked.path.partition("?")[0])
        endpoint = _ENDPOINTS.get(path)
        if endpoint is None:
            record.path = path
            check_path(path)
            body = prepare_forwarded(asked.body, tenant=client.tenant)
            chosen = _salted(self._any(asked, record, body.model), asked, body.raw)
            self.admission.charge(client, len(asked.body) // BYTES_PER_TOKEN)
            return chosen
        session = session_of(asked.headers.get(SESSION_HEADER))
        parsed = parse(endpoint, asked.body, tenant=client.tenant)
        ask = await self.answering.ask(parsed, session)
        outside = self._outside(asked.subset)
        plan = await self.answering.deciding.plan(replace(ask, facts=replace(ask.facts, excluded=outside)))
        record.plan = plan
        chosen = _salted(self._planned(plan, record), asked, parsed.raw)
        facts = ask.facts
        self.admission.charge(client, facts.num_prompt_tokens if facts.counted else parsed.estimated_prompt_tokens)
        return chosen

    def _outside(self, subset: frozenset[str] | None) -> frozenset[InstanceId]:
        """Return the decode instances that the gateway's hint leaves out, whether they are well or not."""
        if subset is None:
            return frozenset()
        decode = (its for its in self.fleet if replace(its.state(), healthy=True).decodes)
        return frozenset(its.address.name for its in decode if host_port(its.url) not in subset)

    def _any(self, asked: GatewayRequest, record: RequestRecord, model: str | None) -> EndpointChoice:
        """Return a decode instance for a request that needs no decision; one that serves `model`, where some do."""
        outside = self._outside(asked.subset)
        ready = (instance for instance in self.fleet.snapshot(model).instances if instance.decodes and instance.healthy)
        chosen = choose_instance((its for its in ready if its.instance not in outside), RequestFacts(0))
        if chosen is None:
            raise NoEngineReady("no engine is ready")
        instance = self.fleet[chosen.instance]
        headers = {"x-request-id": record.request_id, DESTINATION: host_port(instance.url)}
        return EndpointChoice(headers, (instance,))

    def _planned(self, plan: RoutePlan, record: RequestRecord) -> EndpointChoice:
        decision = plan.decision
        if decision.decode is None:
            raise NoEngineReady(f"{decision.reason}: {EXPLANATIONS[decision.reason]}")
        if any(name is not None and name not in self.fleet for name in (decision.decode, decision.prefill)):
            raise NoEngineReady("the instance that was chosen has just left")
        decode = self.fleet[decision.decode]
        headers = {"x-request-id": record.request_id, DESTINATION: host_port(decode.url)}
        instances = [decode]
        if plan.is_remote and decision.prefill is not None:
            prefill = self.fleet[decision.prefill]
            headers |= {PREFILL_HEADER: host_port(prefill.url), GRANT_HEADER: plan.grant}
            instances.append(prefill)
        return EndpointChoice(headers, tuple(instances), plan.facts.num_prompt_tokens)


def _salted(chosen: EndpointChoice, asked: GatewayRequest, body: bytes) -> EndpointChoice:
    """Return the choice with the body that goes in place of the client's, where it is another one."""
    if body == asked.body:
        return chosen
    return replace(chosen, body=body, headers={**chosen.headers, "content-length": str(len(body))})


def host_port(url: str) -> str:
    """host:port of an engine's base URL, IPv6 in brackets."""
    parts = urlsplit(url)
    default = 443 if parts.scheme == "https" else 80
    return parts.netloc if parts.port else f"{parts.netloc}:{default}"
