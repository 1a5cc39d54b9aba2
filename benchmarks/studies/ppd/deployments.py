"""The deployments of PPD's experiment by their names: P and D nodes, pD nodes that prefill later turns, R replicas."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, Literal

from benchmarks.studies.ppd.model import GRID_HARNESS, KV_BYTES_PER_TOKEN, MODEL, Harness, PpdModel
from prfaas.errors import ConfigError
from prfaas.model.cost.curve import polynomial
from prfaas.scheduler.ppd import PpdTable
from prfaas.scheduler.route import Decision
from prfaas.scheduler.snapshot import InstanceState, RequestFacts, Snapshot
from prfaas.sim.model.request import SimulatedRequest
from prfaas.sim.twin import NetworkSpec, RoutingRules, SimulatedNode, Twin
from prfaas.sim.workload.conversations import Conversations, Turn
from prfaas.types import AgentName, ClusterName, InstanceId, InstanceRole

NodeKind = Literal["P", "D", "pD", "R"]
GRID = (
    "4R", "1P_3D", "1P_3pD", "2P_2D", "2P_2pD", "3P_1D", "3P_1pD", "1P_1D_2pD", "1P_2D_1pD", "2P_1D_1pD", "1R_1P_2D",
    "1R_1P_2pD", "1R_1P_1D_1pD", "1R_2P_1D", "1R_2P_1pD", "2R_1P_1D", "2R_1P_1pD",
)  # fmt: skip
_ROLES: dict[NodeKind, InstanceRole] = {"P": "prefill", "D": "decode", "pD": "decode", "R": "both"}
_CLUSTER = ClusterName("pd")
# Constants of a fixed shuffle of (conversation, turn).
_KNUTH, _WEYL, _SPREAD = (2_654_435_761, 40_503, 1 << 32)


def kinds(configuration: str) -> list[NodeKind]:
    """Return the kind of each node of a name such as "2P_2D", "1P_1D_2pD" or "4R".

    Raises:
        ConfigError: another form, or nobody decodes.
    """
    parts = [re.fullmatch(r"([1-9])(P|D|pD|R)", part) for part in configuration.split("_")]
    found: list[NodeKind] = []
    for part in parts:
        if part is None:
            raise ConfigError(f"PPD configuration {configuration!r}: write 2P_2D, 1P_1D_2pD or 4R")
        found += int(part[1]) * [_kind(part[2])]
    if not {"D", "pD", "R"} & set(found) or ({"D", "pD"} & set(found) and "P" not in found):
        raise ConfigError(f"PPD configuration {configuration!r}: D needs P, and somebody has to decode")
    return found


def _kind(text: str) -> NodeKind:
    return next(kind for kind in _ROLES if kind == text)


def roles_and_ratio(configuration: str) -> tuple[dict[InstanceId, InstanceRole], float]:
    """The settings by which a deployment is of a configuration under `local_policy: static`: its instances' roles, and x.

    Raises:
        ConfigError: as `kinds`.
    """
    found = kinds(configuration)
    decoding = [kind for kind in found if kind in ("D", "pD")]
    ratio = decoding.count("pD") / len(decoding) if decoding else 0.0
    return {InstanceId(f"{kind}-{index}"): _ROLES[kind] for index, kind in enumerate(found)}, ratio


_ALWAYS_P = Snapshot(1 << 40, (), local_policy="static", local_turns_ratio=0.0)
_ALWAYS_LOCAL = replace(_ALWAYS_P, local_turns_ratio=1.0)


@dataclass(frozen=True)
class LaterTurns:
    """Prefill of later turns by D and pD nodes: a share x by themselves, or dynamic, by a table at a rate."""

    local_ratio: float = 0.0
    table: PpdTable | None = None
    qps: float = 0.0


class Proxy:
    """As the authors' proxy assigns: conversations to the nodes that decode in turn, later turns to the same node.

    Called with a request, it returns the request's own rules and the decode nodes that must not take it.
    `strayed_ratio` of the later turns go P→D whatever their node does. `later` overrules the names D and pD.
    """

    def __init__(
        self, nodes: Sequence[tuple[NodeKind, InstanceId]], strayed_ratio: float, later: LaterTurns | None = None
    ) -> None:
        self._later = later
        self._kind = {name: kind for kind, name in nodes if kind != "P"}
        self._next = cycle(self._kind)
        self._node_of: dict[int, InstanceId] = {}
        self._strayed_ratio = strayed_ratio

    def __call__(self, request: SimulatedRequest) -> tuple[Snapshot, frozenset[InstanceId]]:
        name = self._node_of.get(request.session)
        if name is None:
            name = self._node_of[request.session] = next(self._next)
        return self._rules(self._kind[name], request), frozenset(self._kind.keys() - {name})

    def _rules(self, kind: NodeKind, request: SimulatedRequest) -> Snapshot:
        if self._later is not None and kind != "R":
            return self._overruled(self._later, request)
        return _ALWAYS_LOCAL if kind == "pD" and not _falls_below(self._strayed_ratio, request) else _ALWAYS_P

    def _overruled(self, later: LaterTurns, request: SimulatedRequest) -> Snapshot:
        if later.table is not None:
            return replace(_ALWAYS_P, local_policy="ppd", ppd_table=later.table, requests_per_second=later.qps)
        return _ALWAYS_LOCAL if _falls_below(later.local_ratio, request) else _ALWAYS_P


def _falls_below(ratio: float, request: SimulatedRequest) -> bool:
    """Return whether a later turn belongs to a fixed share of all later turns."""
    mixed = (request.session * _KNUTH + request.turn * _WEYL) % _SPREAD
    return request.turn > 1 and mixed < ratio * _SPREAD


class PpdTwin(Twin):
    """Twin with the authors' proxy and client: delays before engines and after transfers, and a limit of conversations.

    A conversation beyond the limit is sent when an earlier one has ended. All blocks are sent, also those that the
    receiver holds.
    """

    def __init__(
        self,
        nodes: Sequence[tuple[NodeKind, InstanceId]],
        model: PpdModel,
        proxy: Proxy,
        chats: Conversations,
    ) -> None:
        wires = NetworkSpec(polynomial(0.0, KV_BYTES_PER_TOKEN), {}, intra_bytes_per_second=model.kv_bytes_per_second)
        super().__init__(
            [_node(*node, model) for node in nodes], wires, RoutingRules(_ALWAYS_P), follow_up=self._next_turn
        )
        self._model, self._proxy, self._chats = model, proxy, chats
        has_proxy = any(kind == "P" for kind, _ in nodes)
        self._overhead_seconds = model.overhead_seconds + (model.proxy_seconds if has_proxy else 0.0)
        self._unsent: deque[SimulatedRequest] = deque()
        self._num_chats = 0

    def _take_next(self, request: SimulatedRequest) -> None:
        self._await_next()
        if self._num_chats < self._model.max_sessions:
            self._num_chats += 1
            self._arrive(request)
        else:
            self._unsent.append(request)

    def _next_turn(self, request: SimulatedRequest, now: float) -> SimulatedRequest | None:
        following = self._chats.following(request, now)
        if following is None and self._unsent:
            # Its latency counts from its own arrival: the wait at the client is part of it.
            self.timeline.at(now, self._arrive, self._unsent.popleft())
        elif following is None:
            self._num_chats -= 1
        return following

    def _inputs(self, request: SimulatedRequest) -> tuple[Snapshot, RequestFacts]:
        snapshot, facts = super()._inputs(request)
        rules, excluded = self._proxy(request)
        return replace(rules, instances=snapshot.instances), replace(facts, excluded=excluded)

    def _start(self, request: SimulatedRequest, decision: Decision) -> None:
        delay = self._overhead_seconds + self._model.overhead_per_token_seconds * request.num_prompt_tokens
        start = super()._start
        self.timeline.at(self.timeline.now + delay, lambda _: start(request, decision), None)

    def _missing_bytes(self, request: SimulatedRequest, agent: AgentName) -> float:
        return self.network.kv(request.num_prompt_tokens)

    def _arrived(self, request: SimulatedRequest) -> None:
        self.timeline.at(self.timeline.now + self._model.handover_seconds, super()._arrived, request)


class ForgetfulConversations(Conversations):
    """Conversations whose later turns find only prompts in caches, since answers are tokenized differently again."""

    def _request(self, *turn: Any) -> SimulatedRequest:
        request = super()._request(*turn)
        request.blocks_after = request.blocks
        return request


def conversations(scripts: Sequence[Sequence[Turn]], harness: Harness) -> Conversations:
    """Return conversations whose answers are found in caches as the harness says."""
    return Conversations(scripts) if harness.finds_answers else ForgetfulConversations(scripts)


def twin(
    configuration: str,
    scripts: Sequence[Sequence[Turn]],
    model: PpdModel = MODEL,
    *,
    harness: Harness = GRID_HARNESS,
    later: LaterTurns | None = None,
) -> Twin:
    """Return a deployment that serves such conversations.

    Raises:
        ConfigError: as `kinds`.
    """
    nodes = [(kind, InstanceId(f"{kind}-{index}")) for index, kind in enumerate(kinds(configuration))]
    proxy = Proxy(nodes, harness.strayed_ratio, later)
    return PpdTwin(nodes, model, proxy, conversations(scripts, harness))


def _node(kind: NodeKind, name: InstanceId, model: PpdModel) -> SimulatedNode:
    spec = model.prefill_engine if kind == "P" else model.decode_engine
    return SimulatedNode(InstanceState(name, _CLUSTER, "pd", _ROLES[kind], AgentName(name)), spec)
