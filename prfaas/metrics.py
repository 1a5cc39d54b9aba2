"""Every Prometheus metric of the project, and the HTTP server that shows them.

Names begin with `prfaas_` and the process that counts; units are bytes and seconds; reasons are closed words.
`docs/metrics.md` lists them all.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from wsgiref.simple_server import WSGIServer

from prometheus_client import Counter, Gauge, Histogram, start_http_server

from prfaas.units import join_address, split_address

# From a cached short prompt to the time-out of a client. The tens of seconds are where a long prompt on a slow link lies.
TTFT_BUCKETS_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True)
class Description:
    """One metric as the documentation shows it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


CATALOGUE: list[Description] = []


def _counter(name: str, meaning: str, labels: tuple[str, ...] = ()) -> Counter:
    CATALOGUE.append(Description(f"{name}_total", "counter", labels, meaning))
    return Counter(name, meaning, labels)


def _gauge(name: str, meaning: str, labels: tuple[str, ...] = ()) -> Gauge:
    CATALOGUE.append(Description(name, "gauge", labels, meaning))
    return Gauge(name, meaning, labels)


def _histogram(name: str, meaning: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
    CATALOGUE.append(Description(name, "histogram", labels, meaning))
    return Histogram(name, meaning, labels, buckets=buckets)


TRANSFERS = _counter(
    "prfaas_agent_transfers",
    "Transfers that ended; direction is in or out, outcome is complete or the reason of the failure.",
    ("direction", "outcome"),
)
WIRE_BYTES = _counter(
    "prfaas_agent_wire_bytes",
    "Bytes of chunks that went over the wire, headers included, retransmitted ones each time.",
    ("direction",),
)
ACKNOWLEDGED_BYTES = _counter(
    "prfaas_agent_acknowledged_bytes", "Payload bytes that left and that the peer has checked and acknowledged."
)
CHECKSUM_FAILURES = _counter("prfaas_agent_checksum_failures", "Chunks that arrived changed and were asked for again.")
TRANSFER_PHASE_SECONDS = _histogram(
    "prfaas_agent_transfer_phase_seconds",
    "Phases of whole transfers: queue (of the sending engine, until its first layer), prefill (until its last forward pass), "
    "wire (until all was acknowledged), and at the receiver load (from all in memory until the engine has read it).",
    (0.001, 0.005, 0.02, *TTFT_BUCKETS_SECONDS),
    ("phase",),
)
COPIES = _counter(
    "prfaas_agent_copies",
    "Prefix copies that a manager commanded and that ended here; outcome is completed or the reason of the failure.",
    ("outcome",),
)
LINK_PROBES = _counter(
    "prfaas_agent_link_probes",
    "Probes of links that a manager commanded; direction is out or in, outcome is completed or the reason of the failure, of "
    "those that come in taken.",
    ("direction", "outcome"),
)
COPIED_BYTES = _counter("prfaas_agent_copied_bytes", "Payload bytes that prefix copies brought to nodes without them.")
POOL_SLOTS = _gauge(
    "prfaas_agent_pool_slots",
    "Slots of the pool; kind is prefix (reusable blocks), transfer (blocks of one transfer), quarantined or free.",
    ("kind",),
)
POOL_NEWCOMER_BYTES = _gauge(
    "prfaas_agent_pool_newcomer_bytes", "Prefix blocks that nobody has asked for since they were stored."
)
POOL_PINNED_BYTES = _gauge("prfaas_agent_pool_pinned_bytes", "Prefix blocks that operators have pinned.")
POOL_TENANT_BYTES = _gauge(
    "prfaas_agent_pool_tenant_bytes", "Prefix blocks of a tenant that the agent's `tenants` names.", ("tenant",)
)
SSD_SLOTS = _gauge("prfaas_agent_ssd_slots", "Slots of the SSD tier, by the kinds of the pool.", ("kind",))
SSD_BYTES = _counter(
    "prfaas_agent_ssd_bytes", "Payload that the SSD tier has moved; direction is read or write.", ("direction",)
)
SSD_FAILURES = _counter(
    "prfaas_agent_ssd_failures",
    "Blocks that the SSD tier lost: reason read (not what was written, or no answer from the disk) or write.",
    ("reason",),
)
SIDECAR_TLS_REFUSALS = _counter(
    "prfaas_sidecar_tls_refusals",
    "Connections that were not let in for their certificate; port is listen or status_listen, reason what was wrong.",
    ("port", "reason"),
)
COLOCATE_TLS_REFUSALS = _counter(
    "prfaas_colocate_tls_refusals",
    "Connections that were not let in for their certificate; reason says what was wrong.",
    ("reason",),
)
GATEWAY_REFUSALS = _counter(
    "prfaas_router_gateway_refusals",
    "Connections of gateways that were not let in for their certificate; reason says what was wrong.",
    ("reason",),
)
CLIENT_TLS_REFUSALS = _counter(
    "prfaas_router_client_tls_refusals",
    "Connections of clients that were not let in for their certificate, or unencrypted; reason says what was wrong.",
    ("reason",),
)
PAGES_REFUSALS = _counter(
    "prfaas_agent_pages_refusals",
    "Connections to the agent's pages that were not let in for their certificate; reason says what was wrong.",
    ("reason",),
)
GRANTS_REFUSED = _counter("prfaas_agent_grants_refused", "Transfers without a valid grant.", ("reason",))
WIRE_REFUSALS = _counter(
    "prfaas_agent_wire_refusals",
    "Connections with other agents that were refused, or ended for what came on them, by either side; reason says why.",
    ("reason",),
)
CONNECTIONS = _gauge("prfaas_agent_connections", "Open data connections to other agents.", ("direction",))
LINK_STALLS = _counter(
    "prfaas_agent_link_stalls",
    "Connections to a peer that stood still while others were answered, and whose chunks left over the others.",
    ("peer",),
)
LINK_CONGESTED = _gauge(
    "prfaas_agent_link_congested",
    "1 for the reason why the link to a peer is choked: queue, loss or rtt; 0 for the others, for all of one that is not.",
    ("peer", "reason"),
)
LINK_LIMITED = _gauge(
    "prfaas_agent_link_limited",
    "1 for what the connections to a peer mostly waited for, by the kernel: application (nothing to send), receiver_window, "
    "send_buffer or network.",
    ("peer", "reason"),
)
LINK_QUEUE_SECONDS = _gauge(
    "prfaas_agent_link_queue_seconds", "What waits for the link to a peer, over its achievable rate.", ("peer",)
)
LINK_QUEUED_BYTES = _gauge(
    "prfaas_agent_link_queued_bytes", "Payload that is ready and that no connection to a peer has taken yet.", ("peer",)
)
LINK_UNSENT_BYTES = _gauge(
    "prfaas_agent_link_unsent_bytes", "What the send buffers of the connections to a peer hold unsent.", ("peer",)
)
LINK_UNACKNOWLEDGED_BYTES = _gauge(
    "prfaas_agent_link_unacknowledged_bytes",
    "Payload that connections to a peer have taken and that it has not acknowledged.",
    ("peer",),
)
LINK_RTT_SECONDS = _gauge(
    "prfaas_agent_link_rtt_seconds",
    "Round trip to a peer, of the connection in use on which it has risen most; while none is used, the least there was.",
    ("peer",),
)
LINK_RTT_INFLATION = _gauge(
    "prfaas_agent_link_rtt_inflation_ratio", "That round trip over the smallest one of the same connection.", ("peer",)
)
LINK_RETRANSMITS = _gauge(
    "prfaas_agent_link_retransmit_ratio",
    "Of the bytes sent to a peer in the last third of a second, those that were sent again.",
    ("peer",),
)
LINK_UTILIZATION = _gauge(
    "prfaas_agent_link_utilization_ratio",
    "What the link to a peer carried in the last third of a second, over its achievable rate; 0 while that is not known.",
    ("peer",),
)
LINK_ACHIEVABLE = _gauge(
    "prfaas_agent_link_achievable_bytes_per_second",
    "Payload that the link to a peer carries when there is enough to send; 0 while that is not known.",
    ("peer",),
)
CONNECTOR_TRANSFERS = _counter(
    "prfaas_connector_transfers",
    "What this engine's requests sent and received, and what they took out of their node's pool (reuse), left there at their "
    "end (store) or on the way (checkpoint); outcome is completed or the reason why they went without it.",
    ("direction", "outcome"),
)
CONNECTOR_COPIED_BYTES = _counter(
    "prfaas_connector_copied_bytes",
    "Bytes copied between the engine's blocks and the agent's slots, over all ranks; direction is send or receive.",
    ("direction",),
)
CONNECTOR_STATE_TAIL_BYTES = _counter(
    "prfaas_connector_state_tail_bytes",
    "Bytes of recurrent states that left in one burst after the forward pass instead of as their layers ended.",
)
CONNECTOR_RING_OVERFLOWS = _counter(
    "prfaas_connector_ring_overflows",
    "Steps, of an engine without requests too, that began with finished layers which the agent had no room to be told "
    "of: it hangs, or does not keep up.",
)

REQUESTS = _counter(
    "prfaas_router_requests",
    "Requests answered; route is local or remote, reason is the decision's.",
    ("route", "reason"),
)
PASSED_ON = _counter(
    "prfaas_router_passed_on", "Requests of paths that need no decision, by the answer's status.", ("status",)
)
TTFT_SECONDS = _histogram(
    "prfaas_router_ttft_seconds",
    "Time from the request's arrival to the first token received from the engine.",
    TTFT_BUCKETS_SECONDS,
    ("route",),
)
TOKENISED_CHATS = _counter(
    "prfaas_router_tokenised_chats",
    "Chats whose tokens were asked for: whole, added (the new messages alone), or compared (both, to see that they are equal).",
    ("how",),
)
QUOTA_REFUSALS = _counter(
    "prfaas_router_quota_refusals",
    "Requests of a client that had used up its quota (429); limit is requests or tokens.",
    ("client", "limit"),
)
PAGE_REFUSALS = _counter(
    "prfaas_router_page_refusals",
    "Questions for an operator's page (metrics, decision) without an operator's key.",
    ("page",),
)
CLIENT_TOKENS = _counter(
    "prfaas_router_client_tokens",
    "Tokens charged to a client: of prompts as they come, of answers and what was estimated too low when they have ended.",
    ("client",),
)
ROUTER_TASKS_ENDED = _counter(
    "prfaas_router_tasks_ended",
    "Background work that an error of ours has ended; it begins anew after a second.",
    ("task",),
)
FALLBACKS = _counter(
    "prfaas_router_fallbacks", "Remote requests that ended in a local recompute before the first token.", ("reason",)
)
SIDECAR_REQUESTS = _counter(
    "prfaas_sidecar_requests",
    "Completions: local (no prefill host named), disaggregated, fell_back (prefilled here after all), failed, refused (host).",
    ("outcome",),
)
FETCHES = _counter(
    "prfaas_router_fetches",
    "Prefixes that requests waited for; outcome is completed, late, unreachable, refused or the reason of the failure.",
    ("outcome",),
)
LEG_FAILURES = _counter(
    "prfaas_router_leg_failures",
    "Legs that failed before the first byte of an answer; the request then went on without the transfer or elsewhere.",
    ("reason",),
)

BREAKERS_OPENED = _counter(
    "prfaas_router_breakers_opened",
    "Times an engine was left alone for a while because requests on end failed there.",
    ("instance",),
)

MANAGER_NODES = _gauge("prfaas_manager_nodes", "Live nodes that this manager knows.", ("cluster",))
THRESHOLD_TOKENS = _gauge(
    "prfaas_manager_threshold_tokens", "t in force, the plan's or the configured one, before any path raises it."
)
DASHBOARD_WATCHERS = _gauge("prfaas_manager_dashboard_watchers", "Pages that this manager's dashboard feeds.")
DASHBOARD_REFUSALS = _counter(
    "prfaas_manager_dashboard_refusals", "Pages that were not fed because as many as may be were (503)."
)
STAGE_UTILIZATION = _gauge(
    "prfaas_manager_stage_utilization_ratio",
    "Of the instances of a role in a PD cluster: requests under way over what they run at once, smoothed.",
    ("cluster", "stage"),
)
STAGE_WAITING = _gauge(
    "prfaas_manager_stage_waiting_requests",
    "Requests beyond what the instances of a role in a PD cluster run at once.",
    ("cluster", "stage"),
)
ROLE_CHANGES = _counter(
    "prfaas_manager_role_changes",
    "Instances that were to take a role; outcome is recommended, begun or done.",
    ("role", "outcome"),
)
MANAGER_TLS_REFUSALS = _counter(
    "prfaas_manager_tls_refusals",
    "Connections that were not let in for their certificate; port is grpc or pages, reason what was wrong.",
    ("port", "reason"),
)
ADMIN_ACTIONS = _counter(
    "prfaas_manager_admin_actions",
    "What operators asked for; outcome is done, failed, refused (no operator), elsewhere (another manager does it) or cut_off "
    "(who asked left, or the manager ended, before it was done).",
    ("action", "outcome"),
)
PATH_MULTIPLIER = _gauge(
    "prfaas_manager_path_threshold_multiplier",
    "What t is multiplied by while the links between two clusters are congested; 1: calm.",
    ("source", "destination"),
)
PATH_GOODPUT = _gauge(
    "prfaas_manager_path_bytes_per_second",
    "Payload that the links from one cluster to another carried in the last second, as agents report it.",
    ("source", "destination"),
)
PATH_CAPACITY = _gauge(
    "prfaas_manager_path_capacity_bytes_per_second",
    "What the links from one cluster to another are known to carry at most; 0 while that is not known.",
    ("source", "destination"),
)
PATH_UP = _gauge(
    "prfaas_manager_path_up",
    "1 while a link from one cluster to another is up, 0 when all that were dialled are down.",
    ("source", "destination"),
)
MANAGER_INSTANCES = _gauge(
    "prfaas_manager_instances", "Live instances by the role that they have now.", ("cluster", "role")
)
MANAGER_RUNNING = _gauge(
    "prfaas_manager_running_requests", "Requests that engines compute, as they report it.", ("cluster",)
)
MANAGER_WAITING = _gauge(
    "prfaas_manager_waiting_requests", "Requests that wait in engines, as they report it.", ("cluster",)
)
MANAGER_HELD_BLOCKS = _gauge(
    "prfaas_manager_held_blocks",
    "Blocks and checkpoints in the pools of live nodes; group is the kind of KV group.",
    ("cluster", "group", "tier"),
)
MANAGER_HELD_BYTES = _gauge(
    "prfaas_manager_held_bytes",
    "Payload of the blocks in the pools of live nodes; group is the kind of KV group.",
    ("cluster", "group", "tier"),
)
MANAGER_SESSIONS = _gauge("prfaas_manager_sessions", "Conversations that this manager remembers.")
MANAGER_BLOCKS = _gauge("prfaas_manager_index_blocks", "Blocks and checkpoints in the index, once per holder.")
MANAGER_RUNS = _gauge("prfaas_manager_index_runs", "Runs of up to 64 blocks in the index.")
MANAGER_EVENTS = _counter("prfaas_manager_announcements", "Segments and checkpoints that nodes announced.")
MANAGER_RESYNCS = _counter(
    "prfaas_manager_full_announcements", "Times a node was asked to announce everything anew.", ("reason",)
)
MANAGER_REFUSALS = _counter(
    "prfaas_manager_refusals",
    "Calls and announcements that were refused: unknown models, wrong block sizes, alien hashes, old epochs, too many "
    "copies of one caller.",
    ("call", "reason"),
)
MANAGER_CALL_SECONDS = _histogram(
    "prfaas_manager_call_seconds",
    "Time to answer a call, from its arrival to its answer.",
    (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2, 1.0),
    ("call",),
)
MANAGER_RECORD_UP = _gauge("prfaas_manager_record_up", "1 while the durable record takes what this manager writes.")
MANAGER_WRITES = _gauge("prfaas_manager_clusters_written", "Clusters whose record this manager writes.")
MANAGER_SNAPSHOTS = _counter("prfaas_manager_snapshots", "Snapshots of a cluster written.", ("outcome",))
MANAGER_RELOADS = _counter("prfaas_manager_reloads", "Times a cluster was read anew from the record.")
MANAGER_TASKS_ENDED = _counter(
    "prfaas_manager_tasks_ended",
    "Background work that an error of ours has ended; it begins anew after a second.",
    ("task",),
)
MANAGER_DECISIONS = _counter("prfaas_manager_decisions", "Requests routed.", ("route", "reason"))
MANAGER_WITHOUT_LAYOUT = _counter(
    "prfaas_manager_decisions_without_layout",
    "Requests routed while no node had registered a layout of their model, so that nothing counted as cached.",
    ("model",),
)
MANAGER_ANSWERED = _counter(
    "prfaas_manager_answered_requests",
    "Requests that routers answered, those included that they decided by themselves; outcome is answered, fell_back or failed.",
    ("route", "reason", "outcome"),
)
MANAGER_TTFT = _histogram(
    "prfaas_manager_ttft_seconds", "Time to the first token, as routers report it.", TTFT_BUCKETS_SECONDS, ("route",)
)
MANAGER_TTFT_PHASE_SECONDS = _counter(
    "prfaas_manager_ttft_phase_seconds",
    "Time to the first token of requests without a failed leg, by phase: decide, then queue, prefill, wire, load (as agents "
    "time them) and rest; leg and handover where the agents told this manager nothing; engine: all of it beside one instance.",
    ("route", "phase"),
)
MANAGER_COPIES = _counter(
    "prfaas_manager_copies",
    "Prefix copies between nodes that ended; purpose is rebalance, drain, fetch or order, outcome is completed or the "
    "reason of the failure.",
    ("purpose", "outcome"),
)
MANAGER_LINK_PROBES = _counter(
    "prfaas_manager_link_probes",
    "Probes of links between clusters that ended; outcome is completed or the reason of the failure.",
    ("outcome",),
)
MANAGER_COPIED_BYTES = _counter(
    "prfaas_manager_copied_bytes", "Payload bytes that prefix copies moved between nodes.", ("purpose",)
)
MANAGER_PREDICTED_TOKENS = _counter(
    "prfaas_manager_predicted_tokens",
    "Cached tokens that decisions promised, by what the engine then found of them; kind is found or missing.",
    ("cluster", "kind"),
)
MANAGER_MISSING_TOKENS = _counter(
    "prfaas_manager_missing_tokens",
    "Cached tokens that decisions promised and that KV groups of one kind lacked by themselves; several kinds may lack the "
    "same token.",
    ("cluster", "group"),
)
MANAGER_PROMISES = _counter(
    "prfaas_manager_promises",
    "Decisions that promised cached tokens, by what the engine then found; a broken one costs a recompute.",
    ("cluster", "outcome"),
)

ENGINE_EVENT_BATCHES = _counter(
    "prfaas_agent_engine_event_batches",
    "Batches of KV events from engines beside this agent; outcome is taken, lost (not repeated either) or malformed.",
    ("outcome",),
)
ENGINE_EVENT_ORPHANS = _counter(
    "prfaas_agent_engine_event_orphans",
    "Blocks on an engine's device that are not announced: their hash covers extras, or tokens, parent or layout are unknown.",
    ("reason",),
)

COLOCATE_REQUESTS = _counter(
    "prfaas_colocate_requests", "Completions answered; outcome is complete, cancelled, refused or failed.", ("outcome",)
)
COLOCATE_RESTARTS = _counter("prfaas_colocate_restarts", "Times a side died and was started again.", ("side",))


@dataclass(frozen=True)
class MetricsServer:
    """The running /metrics server; `address` is where it listens."""

    address: str
    _server: WSGIServer
    _thread: threading.Thread

    def close(self) -> None:
        """Stop listening; returns when the server's thread has ended."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(address: str) -> MetricsServer:
    """Answer GET /metrics on "host:port" from a thread; port 0 takes a free one.

    Raises:
        OSError: the address is taken.
    """
    host, port = split_address(address)
    server, thread = start_http_server(port, host)
    return MetricsServer(join_address(host, server.server_port), server, thread)
