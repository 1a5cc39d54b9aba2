"""Catalogue of all Prometheus metrics.

A name begins with `prfaas_` and the process. Units are bytes and seconds. Reasons are words of a closed set.
`docs/metrics.md` is generated from this module.
"""

from prometheus_client import Counter, Gauge, Histogram

# Cached short prompts are at the lower end, long prompts over a slow link in the tens of seconds.
TTFT_BUCKETS_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)


TRANSFERS = Counter(
    "prfaas_agent_transfers",
    "Ended transfers. direction is in or out. outcome is completed or the failure reason.",
    ("direction", "outcome"),
)
WIRE_BYTES = Counter(
    "prfaas_agent_wire_bytes", "Bytes of chunks sent or received, with headers and retransmissions.", ("direction",)
)
CHECKSUM_FAILURES = Counter("prfaas_agent_checksum_failures", "Chunks that arrived corrupted and were requested again.")
TRANSFER_PHASE_SECONDS = Histogram(
    "prfaas_agent_transfer_phase_seconds",
    "Phases of completed transfers. Sender: queue (until the first layer), prefill (until the last), "
    "wire (until acknowledged). Receiver: load (until the engine has read the blocks).",
    ("phase",),
    buckets=(0.001, 0.005, 0.02, *TTFT_BUCKETS_SECONDS),
)
POOL_SLOTS = Gauge(
    "prfaas_agent_pool_slots",
    "Slots of the pool. kind is prefix (reusable), transfer (for one transfer), quarantined or free.",
    ("kind",),
)
SSD_BYTES = Counter(
    "prfaas_agent_ssd_bytes", "Payload bytes moved by the SSD tier. direction is read or write.", ("direction",)
)
SSD_FAILURES = Counter(
    "prfaas_agent_ssd_failures",
    "Blocks that the SSD tier lost. reason is read (wrong data or no answer) or write.",
    ("reason",),
)
SIDECAR_TLS_REFUSALS = Counter(
    "prfaas_sidecar_tls_refusals",
    "Connections rejected for their certificate. port is listen or status_listen.",
    ("port", "reason"),
)
GATEWAY_REFUSALS = Counter(
    "prfaas_router_gateway_refusals", "Gateway connections rejected for their certificate.", ("reason",)
)
CLIENT_TLS_REFUSALS = Counter(
    "prfaas_router_client_tls_refusals",
    "Client connections rejected for their certificate, or as unencrypted.",
    ("reason",),
)
ENGINE_PORT_REFUSALS = Counter(
    "prfaas_agent_engine_port_refusals",
    "Connections to engines refused for their certificate.",
    ("reason",),
)
PAGES_REFUSALS = Counter(
    "prfaas_agent_pages_refusals", "Connections to status pages rejected for their certificate.", ("reason",)
)
GRANTS_REFUSED = Counter(
    "prfaas_agent_grants_refused", "Transfers rejected because their grant was missing or invalid.", ("reason",)
)
WIRE_REFUSALS = Counter(
    "prfaas_agent_wire_refusals", "Agent connections rejected or closed by either side.", ("reason",)
)
LINK_STALLS = Counter(
    "prfaas_agent_link_stalls",
    "Stalled connections whose chunks took other connections.",
    ("peer",),
)
LINK_CONGESTED = Gauge(
    "prfaas_agent_link_congested",
    "1 while the link is congested for this reason: queue, loss or rtt.",
    ("peer", "reason"),
)
LINK_QUEUED_BYTES = Gauge(
    "prfaas_agent_link_queued_bytes", "Payload bytes ready to send, not taken by a connection.", ("peer",)
)
LINK_RTT_SECONDS = Gauge(
    "prfaas_agent_link_rtt_seconds",
    "Round-trip time of the active connection where it grew most; idle: the minimum.",
    ("peer",),
)
LINK_RETRANSMITS = Gauge(
    "prfaas_agent_link_retransmit_ratio", "Share of bytes retransmitted in the last third of a second.", ("peer",)
)
LINK_ACHIEVABLE = Gauge(
    "prfaas_agent_link_achievable_bytes_per_second", "Payload rate that the link can carry; 0: unknown.", ("peer",)
)
CONNECTOR_TRANSFERS = Counter(
    "prfaas_connector_transfers",
    "KV movements: send, receive, reuse (from the pool), store (at the end), checkpoint (during prefill). outcome is "
    "completed or the reason. fallback: prompts computed here after the router gave the transfer up.",
    ("direction", "outcome"),
)
CONNECTOR_COPIED_BYTES = Counter(
    "prfaas_connector_copied_bytes",
    "Bytes copied between engine blocks and pool slots, over all ranks. direction is send or receive.",
    ("direction",),
)
CONNECTOR_STATE_TAIL_BYTES = Counter(
    "prfaas_connector_state_tail_bytes", "Bytes of linear states sent after the forward pass instead of layer by layer."
)
CONNECTOR_RING_OVERFLOWS = Counter(
    "prfaas_connector_ring_overflows", "Times that the ring to the agent became full: the agent hangs or is too slow."
)

REQUESTS = Counter(
    "prfaas_router_requests",
    "All requests, refused ones included. route is local, remote, refused, forwarded or none. "
    "outcome is completed, fell_back, refused, failed, broken or cancelled.",
    ("status", "route", "outcome"),
)
DECISIONS = Counter(
    "prfaas_router_decisions", "Requests with a decision. route is local, remote or refused.", ("route", "reason")
)
TTFT_SECONDS = Histogram(
    "prfaas_router_ttft_seconds",
    "Time from a request's arrival to the first token.",
    ("route",),
    buckets=TTFT_BUCKETS_SECONDS,
)
CLIENT_REFUSALS = Counter(
    "prfaas_router_client_refusals",
    "Connections, late headers and bodies, and requests refused by the limits on clients.",
    ("reason",),
)
PAGE_REFUSALS = Counter(
    "prfaas_router_page_refusals", "Requests for an operator page without an operator key.", ("page",)
)
CLIENT_TOKENS = Counter(
    "prfaas_router_client_tokens", "Tokens of a client's answered requests, prompts and answers together.", ("client",)
)
ROUTER_TASKS_ENDED = Counter(
    "prfaas_router_tasks_ended", "Background tasks that failed unexpectedly; they restart after one second.", ("task",)
)
FALLBACKS = Counter(
    "prfaas_router_fallbacks", "Remote requests that were recomputed locally before the first token.", ("reason",)
)
SIDECAR_REQUESTS = Counter(
    "prfaas_sidecar_requests",
    "Completions by outcome: local (no prefill host named), disaggregated, fell_back, failed, refused (prefill "
    "host not allowed).",
    ("outcome",),
)
FETCHES = Counter(
    "prfaas_router_fetches",
    "Prefix fetches that requests waited for. outcome is completed, late, unreachable, refused or the failure reason.",
    ("outcome",),
)
LEG_FAILURES = Counter(
    "prfaas_router_leg_failures", "Request legs that failed before the first byte of an answer.", ("reason",)
)
REPORTS_DROPPED = Counter(
    "prfaas_router_reports_dropped",
    "Requests that no manager counts, because all were silent for long or refused the report.",
)

FLEET_STALE = Gauge("prfaas_router_fleet_stale", "1 while no manager has answered since the start of the router.")
ENGINE_SILENCES = Counter(
    "prfaas_router_engine_silences", "Times an engine stopped answering health checks.", ("engine",)
)

MANAGER_NODES = Gauge("prfaas_manager_nodes", "Live nodes that this manager knows.", ("cluster",))
THRESHOLD_TOKENS = Gauge(
    "prfaas_manager_threshold_tokens",
    "Threshold t in force, from the plan or the settings, before congestion raises it.",
)
STAGE_UTILIZATION = Gauge(
    "prfaas_manager_stage_utilization_ratio",
    "Requests in progress divided by the capacity of the role's instances, smoothed.",
    ("cluster", "stage"),
)
STAGE_WAITING = Gauge("prfaas_manager_stage_waiting_requests", "Requests beyond that capacity.", ("cluster", "stage"))
ROLE_CHANGES = Counter(
    "prfaas_manager_role_changes",
    "Role changes of instances. outcome is recommended, begun or done.",
    ("role", "outcome"),
)
MANAGER_TLS_REFUSALS = Counter(
    "prfaas_manager_tls_refusals",
    "Connections rejected for their certificate. port is grpc or pages.",
    ("port", "reason"),
)
ADMIN_ACTIONS = Counter(
    "prfaas_manager_admin_actions",
    "Operator actions. outcome is done, failed, refused (not an operator), elsewhere (another manager's job) or "
    "cut_off (the caller or the manager left).",
    ("action", "outcome"),
)
PATH_MULTIPLIER = Gauge(
    "prfaas_manager_path_threshold_multiplier",
    "Factor applied to t while a path is congested. 1 means no congestion.",
    ("source", "destination"),
)
PATH_GOODPUT = Gauge(
    "prfaas_manager_path_bytes_per_second",
    "Payload rate of a path in the last second, as agents report it.",
    ("source", "destination"),
)
PATH_CAPACITY = Gauge(
    "prfaas_manager_path_capacity_bytes_per_second",
    "Known capacity of a path. 0 while unknown.",
    ("source", "destination"),
)
PATH_QUEUED = Gauge(
    "prfaas_manager_path_queued_bytes", "KV that waits to leave over a path.", ("source", "destination")
)
PATH_UP = Gauge(
    "prfaas_manager_path_up", "1 while at least one link of a path is up, else 0.", ("source", "destination")
)
MANAGER_INSTANCES = Gauge("prfaas_manager_instances", "Live instances by current role.", ("cluster", "role"))
MANAGER_NEEDED_INSTANCES = Gauge(
    "prfaas_manager_needed_instances",
    "Instances of the cheapest fleet that serves the measured arrivals; absent while unknown.",
    ("cluster", "role"),
)
FAILED_REPLAYS = Counter(
    "prfaas_manager_failed_replays", "Plans that the twin could not check: timeout, killed, failed.", ("reason",)
)
RESOURCE_VALUE = Gauge(
    "prfaas_manager_resource_value",
    "Requests per second that one more unit adds to what the deployment sustains: instance:CLUSTER, gbps:SOURCE->TARGET.",
    ("resource",),
)
MANAGER_SILENT = Gauge(
    "prfaas_manager_silent_instances",
    "Instances that get no new requests since they or their agent are silent.",
    ("cluster",),
)
MANAGER_RUNNING = Gauge("prfaas_manager_running_requests", "Requests that engines report as running.", ("cluster",))
MANAGER_WAITING = Gauge("prfaas_manager_waiting_requests", "Requests that engines report as waiting.", ("cluster",))
MANAGER_HELD_BLOCKS = Gauge(
    "prfaas_manager_held_blocks",
    "Blocks and checkpoints in the pools of live nodes. group is the KV kind.",
    ("cluster", "group", "tier"),
)
MANAGER_HELD_BYTES = Gauge(
    "prfaas_manager_held_bytes",
    "Payload bytes of blocks in the pools of live nodes. group is the KV kind.",
    ("cluster", "group", "tier"),
)
MANAGER_SESSIONS = Gauge("prfaas_manager_sessions", "Sessions that this manager remembers.")
MANAGER_BLOCKS = Gauge("prfaas_manager_index_blocks", "Blocks and checkpoints in the index, once per holder.")
MANAGER_RESYNCS = Counter("prfaas_manager_full_announcements", "Full announcements requested from nodes.", ("reason",))
MANAGER_REFUSALS = Counter(
    "prfaas_manager_refusals", "Calls and announcements rejected, by reason.", ("call", "reason")
)
MANAGER_CALL_SECONDS = Histogram(
    "prfaas_manager_call_seconds",
    "Time from a call's arrival to its answer.",
    ("call",),
    buckets=(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2, 1.0),
)
MANAGER_RECORD_UP = Gauge("prfaas_manager_record_up", "1 while the durable record accepts writes.")
MANAGER_WRITES = Gauge("prfaas_manager_clusters_written", "Clusters whose record this manager writes.")
MANAGER_RELOADS = Counter("prfaas_manager_reloads", "Times a cluster was read again from the record.")
MANAGER_TASKS_ENDED = Counter(
    "prfaas_manager_tasks_ended", "Background tasks that failed unexpectedly; they restart after one second.", ("task",)
)
MANAGER_DECISIONS = Counter("prfaas_manager_decisions", "Requests routed.", ("route", "reason"))
MANAGER_WITHOUT_LAYOUT = Counter(
    "prfaas_manager_decisions_without_layout",
    "Requests routed before any node had a layout of their model; nothing counted as cached.",
    ("model",),
)
MANAGER_ANSWERED = Counter(
    "prfaas_manager_answered_requests",
    "Requests with a decision, as routers report their end. outcome is as in prfaas_router_requests_total.",
    ("route", "reason", "outcome"),
)
MANAGER_FALLBACKS = Counter(
    "prfaas_manager_fallbacks", "Requests that fell back, as in prfaas_router_fallbacks_total.", ("reason",)
)
MANAGER_TTFT = Histogram(
    "prfaas_manager_ttft_seconds",
    "Time to first token, as routers report it.",
    ("route",),
    buckets=TTFT_BUCKETS_SECONDS,
)
MANAGER_TTFT_PHASE_SECONDS = Counter(
    "prfaas_manager_ttft_phase_seconds",
    "Time to first token by phase: decide, queue, prefill, wire, load, rest. Without agents' times: leg and "
    "handover. Local requests: engine.",
    ("route", "phase"),
)
MANAGER_COPIES = Counter(
    "prfaas_manager_copies",
    "Prefix copies that ended. purpose is rebalance, drain, fetch or order. outcome is completed or the failure "
    "reason.",
    ("purpose", "outcome"),
)
MANAGER_COPIED_BYTES = Counter(
    "prfaas_manager_copied_bytes", "Payload bytes that prefix copies moved between nodes.", ("purpose",)
)
MANAGER_PREDICTED_TOKENS = Counter(
    "prfaas_manager_predicted_tokens",
    "Cached tokens in decisions. kind is found or missing, as engines report.",
    ("cluster", "kind"),
)
MANAGER_PROMISES = Counter(
    "prfaas_manager_promises",
    "Decisions that predicted cached tokens, by what the engine found.",
    ("cluster", "outcome"),
)
