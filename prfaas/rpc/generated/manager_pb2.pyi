from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Engine(_message.Message):
    __slots__ = ("instance", "url", "role", "model")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    instance: str
    url: str
    role: str
    model: str
    def __init__(self, instance: _Optional[str] = ..., url: _Optional[str] = ..., role: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("name", "cluster", "cluster_kind", "wire_address", "epoch", "layouts", "engines", "hardware")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_KIND_FIELD_NUMBER: _ClassVar[int]
    WIRE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    name: str
    cluster: str
    cluster_kind: str
    wire_address: str
    epoch: int
    layouts: _containers.RepeatedScalarFieldContainer[bytes]
    engines: _containers.RepeatedCompositeFieldContainer[Engine]
    hardware: str
    def __init__(self, name: _Optional[str] = ..., cluster: _Optional[str] = ..., cluster_kind: _Optional[str] = ..., wire_address: _Optional[str] = ..., epoch: _Optional[int] = ..., layouts: _Optional[_Iterable[bytes]] = ..., engines: _Optional[_Iterable[_Union[Engine, _Mapping]]] = ..., hardware: _Optional[str] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: Node
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("heartbeat_seconds", "expiry_seconds", "gives_commands", "silence_seconds")
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXPIRY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GIVES_COMMANDS_FIELD_NUMBER: _ClassVar[int]
    SILENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    heartbeat_seconds: float
    expiry_seconds: float
    gives_commands: bool
    silence_seconds: float
    def __init__(self, heartbeat_seconds: _Optional[float] = ..., expiry_seconds: _Optional[float] = ..., gives_commands: _Optional[bool] = ..., silence_seconds: _Optional[float] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("layout", "group", "tier")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    layout: bytes
    group: int
    tier: str
    def __init__(self, layout: _Optional[bytes] = ..., group: _Optional[int] = ..., tier: _Optional[str] = ...) -> None: ...

class HoldingDigest(_message.Message):
    __slots__ = ("holding", "num_blocks", "total")
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    holding: Holding
    num_blocks: int
    total: int
    def __init__(self, holding: _Optional[_Union[Holding, _Mapping]] = ..., num_blocks: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("node", "epoch")
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    node: str
    epoch: int
    def __init__(self, node: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Alive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Segment(_message.Message):
    __slots__ = ("holding", "head", "tails", "bitmap", "removed", "states")
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    TAILS_FIELD_NUMBER: _ClassVar[int]
    BITMAP_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    holding: int
    head: bytes
    tails: bytes
    bitmap: int
    removed: bool
    states: _containers.RepeatedCompositeFieldContainer[States]
    def __init__(self, holding: _Optional[int] = ..., head: _Optional[bytes] = ..., tails: _Optional[bytes] = ..., bitmap: _Optional[int] = ..., removed: _Optional[bool] = ..., states: _Optional[_Iterable[_Union[States, _Mapping]]] = ...) -> None: ...

class States(_message.Message):
    __slots__ = ("holding", "bitmap")
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    BITMAP_FIELD_NUMBER: _ClassVar[int]
    holding: int
    bitmap: int
    def __init__(self, holding: _Optional[int] = ..., bitmap: _Optional[int] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("holding", "block_hash", "anchor", "num_tokens", "removed", "head")
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    holding: int
    block_hash: bytes
    anchor: bytes
    num_tokens: int
    removed: bool
    head: bytes
    def __init__(self, holding: _Optional[int] = ..., block_hash: _Optional[bytes] = ..., anchor: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., removed: _Optional[bool] = ..., head: _Optional[bytes] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("segment", "checkpoint")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    segment: Segment
    checkpoint: Checkpoint
    def __init__(self, segment: _Optional[_Union[Segment, _Mapping]] = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("node", "epoch")
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    node: str
    epoch: int
    def __init__(self, node: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("sequence", "reset", "holdings", "changes")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    reset: bool
    holdings: _containers.RepeatedCompositeFieldContainer[Holding]
    changes: _containers.RepeatedCompositeFieldContainer[Change]
    def __init__(self, sequence: _Optional[int] = ..., reset: _Optional[bool] = ..., holdings: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ..., changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ...) -> None: ...

class Digests(_message.Message):
    __slots__ = ("holdings",)
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    holdings: _containers.RepeatedCompositeFieldContainer[HoldingDigest]
    def __init__(self, holdings: _Optional[_Iterable[_Union[HoldingDigest, _Mapping]]] = ...) -> None: ...

class ReportEventsRequest(_message.Message):
    __slots__ = ("hello", "batch", "digests", "alive")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    batch: Batch
    digests: Digests
    alive: Alive
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ..., digests: _Optional[_Union[Digests, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ...) -> None: ...

class ReportEventsResponse(_message.Message):
    __slots__ = ("resume_after", "acknowledged", "alive", "announce_everything")
    RESUME_AFTER_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_EVERYTHING_FIELD_NUMBER: _ClassVar[int]
    resume_after: int
    acknowledged: int
    alive: Alive
    announce_everything: str
    def __init__(self, resume_after: _Optional[int] = ..., acknowledged: _Optional[int] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., announce_everything: _Optional[str] = ...) -> None: ...

class LinkFigures(_message.Message):
    __slots__ = ("peer", "bytes_per_second", "capacity_bytes_per_second", "rtt_seconds", "min_rtt_seconds", "queued_bytes", "retransmit_ratio", "num_connections", "is_down", "queue_seconds", "congestion", "limit", "least_bytes_per_second")
    PEER_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    RTT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MIN_RTT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETRANSMIT_RATIO_FIELD_NUMBER: _ClassVar[int]
    NUM_CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    IS_DOWN_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CONGESTION_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    LEAST_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    peer: str
    bytes_per_second: float
    capacity_bytes_per_second: float
    rtt_seconds: float
    min_rtt_seconds: float
    queued_bytes: int
    retransmit_ratio: float
    num_connections: int
    is_down: bool
    queue_seconds: float
    congestion: str
    limit: str
    least_bytes_per_second: float
    def __init__(self, peer: _Optional[str] = ..., bytes_per_second: _Optional[float] = ..., capacity_bytes_per_second: _Optional[float] = ..., rtt_seconds: _Optional[float] = ..., min_rtt_seconds: _Optional[float] = ..., queued_bytes: _Optional[int] = ..., retransmit_ratio: _Optional[float] = ..., num_connections: _Optional[int] = ..., is_down: _Optional[bool] = ..., queue_seconds: _Optional[float] = ..., congestion: _Optional[str] = ..., limit: _Optional[str] = ..., least_bytes_per_second: _Optional[float] = ...) -> None: ...

class EngineLoad(_message.Message):
    __slots__ = ("instance", "num_running", "num_waiting", "kv_usage_ratio", "is_silent")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_RATIO_FIELD_NUMBER: _ClassVar[int]
    IS_SILENT_FIELD_NUMBER: _ClassVar[int]
    instance: str
    num_running: int
    num_waiting: int
    kv_usage_ratio: float
    is_silent: bool
    def __init__(self, instance: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., kv_usage_ratio: _Optional[float] = ..., is_silent: _Optional[bool] = ...) -> None: ...

class ReportLinksRequest(_message.Message):
    __slots__ = ("node", "epoch", "links", "engines")
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    node: str
    epoch: int
    links: _containers.RepeatedCompositeFieldContainer[LinkFigures]
    engines: _containers.RepeatedCompositeFieldContainer[EngineLoad]
    def __init__(self, node: _Optional[str] = ..., epoch: _Optional[int] = ..., links: _Optional[_Iterable[_Union[LinkFigures, _Mapping]]] = ..., engines: _Optional[_Iterable[_Union[EngineLoad, _Mapping]]] = ...) -> None: ...

class ReportLinksResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatedCheckpoint(_message.Message):
    __slots__ = ("num_tokens", "hash")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    hash: bytes
    def __init__(self, num_tokens: _Optional[int] = ..., hash: _Optional[bytes] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("model", "units", "limit_tokens", "checkpoints")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    units: bytes
    limit_tokens: int
    checkpoints: _containers.RepeatedCompositeFieldContainer[StatedCheckpoint]
    def __init__(self, model: _Optional[str] = ..., units: _Optional[bytes] = ..., limit_tokens: _Optional[int] = ..., checkpoints: _Optional[_Iterable[_Union[StatedCheckpoint, _Mapping]]] = ...) -> None: ...

class NodeMatch(_message.Message):
    __slots__ = ("node", "cluster", "usable_tokens", "attention_tokens", "reason")
    NODE_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    USABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    node: str
    cluster: str
    usable_tokens: int
    attention_tokens: int
    reason: str
    def __init__(self, node: _Optional[str] = ..., cluster: _Optional[str] = ..., usable_tokens: _Optional[int] = ..., attention_tokens: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ClusterMatch(_message.Message):
    __slots__ = ("cluster", "usable_tokens", "attention_tokens", "reason")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    USABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    usable_tokens: int
    attention_tokens: int
    reason: str
    def __init__(self, cluster: _Optional[str] = ..., usable_tokens: _Optional[int] = ..., attention_tokens: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class MatchResponse(_message.Message):
    __slots__ = ("nodes", "clusters", "odd_lengths")
    NODES_FIELD_NUMBER: _ClassVar[int]
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    ODD_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeMatch]
    clusters: _containers.RepeatedCompositeFieldContainer[ClusterMatch]
    odd_lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeMatch, _Mapping]]] = ..., clusters: _Optional[_Iterable[_Union[ClusterMatch, _Mapping]]] = ..., odd_lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class Question(_message.Message):
    __slots__ = ("id", "match", "route", "traceparent", "further")
    ID_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    FURTHER_FIELD_NUMBER: _ClassVar[int]
    id: int
    match: MatchRequest
    route: RouteRequest
    traceparent: str
    further: _containers.RepeatedCompositeFieldContainer[Question]
    def __init__(self, id: _Optional[int] = ..., match: _Optional[_Union[MatchRequest, _Mapping]] = ..., route: _Optional[_Union[RouteRequest, _Mapping]] = ..., traceparent: _Optional[str] = ..., further: _Optional[_Iterable[_Union[Question, _Mapping]]] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("id", "match", "route", "refusal", "further")
    ID_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    FURTHER_FIELD_NUMBER: _ClassVar[int]
    id: int
    match: MatchResponse
    route: RouteResponse
    refusal: Refusal
    further: _containers.RepeatedCompositeFieldContainer[Reply]
    def __init__(self, id: _Optional[int] = ..., match: _Optional[_Union[MatchResponse, _Mapping]] = ..., route: _Optional[_Union[RouteResponse, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., further: _Optional[_Iterable[_Union[Reply, _Mapping]]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class RouteRequest(_message.Message):
    __slots__ = ("model", "units", "num_prompt_tokens", "prompt_hash", "checkpoints", "tenant", "session", "cluster", "max_output_tokens", "excluded_instances", "turn", "request_id", "in_flight", "tenant_clusters", "overflow")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_HASH_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_INSTANCES_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    TENANT_CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    model: str
    units: bytes
    num_prompt_tokens: int
    prompt_hash: bytes
    checkpoints: _containers.RepeatedCompositeFieldContainer[StatedCheckpoint]
    tenant: str
    session: str
    cluster: str
    max_output_tokens: int
    excluded_instances: _containers.RepeatedScalarFieldContainer[str]
    turn: int
    request_id: bytes
    in_flight: _containers.RepeatedCompositeFieldContainer[InFlight]
    tenant_clusters: _containers.RepeatedScalarFieldContainer[str]
    overflow: bool
    def __init__(self, model: _Optional[str] = ..., units: _Optional[bytes] = ..., num_prompt_tokens: _Optional[int] = ..., prompt_hash: _Optional[bytes] = ..., checkpoints: _Optional[_Iterable[_Union[StatedCheckpoint, _Mapping]]] = ..., tenant: _Optional[str] = ..., session: _Optional[str] = ..., cluster: _Optional[str] = ..., max_output_tokens: _Optional[int] = ..., excluded_instances: _Optional[_Iterable[str]] = ..., turn: _Optional[int] = ..., request_id: _Optional[bytes] = ..., in_flight: _Optional[_Iterable[_Union[InFlight, _Mapping]]] = ..., tenant_clusters: _Optional[_Iterable[str]] = ..., overflow: _Optional[bool] = ...) -> None: ...

class InFlight(_message.Message):
    __slots__ = ("instance", "num_requests", "num_tokens")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    instance: str
    num_requests: int
    num_tokens: int
    def __init__(self, instance: _Optional[str] = ..., num_requests: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Target(_message.Message):
    __slots__ = ("instance", "url", "node", "cluster")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    instance: str
    url: str
    node: str
    cluster: str
    def __init__(self, instance: _Optional[str] = ..., url: _Optional[str] = ..., node: _Optional[str] = ..., cluster: _Optional[str] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("source", "destination", "num_tokens")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    source: str
    destination: str
    num_tokens: int
    def __init__(self, source: _Optional[str] = ..., destination: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class RouteResponse(_message.Message):
    __slots__ = ("route", "reason", "prefill", "decode", "transfer_id", "grant", "cached_tokens", "uncached_tokens", "missing_tokens", "threshold_tokens", "odd_lengths", "version", "fetch", "layout_unknown")
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISSING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ODD_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    route: str
    reason: str
    prefill: Target
    decode: Target
    transfer_id: bytes
    grant: bytes
    cached_tokens: int
    uncached_tokens: int
    missing_tokens: int
    threshold_tokens: int
    odd_lengths: _containers.RepeatedScalarFieldContainer[int]
    version: int
    fetch: Fetch
    layout_unknown: bool
    def __init__(self, route: _Optional[str] = ..., reason: _Optional[str] = ..., prefill: _Optional[_Union[Target, _Mapping]] = ..., decode: _Optional[_Union[Target, _Mapping]] = ..., transfer_id: _Optional[bytes] = ..., grant: _Optional[bytes] = ..., cached_tokens: _Optional[int] = ..., uncached_tokens: _Optional[int] = ..., missing_tokens: _Optional[int] = ..., threshold_tokens: _Optional[int] = ..., odd_lengths: _Optional[_Iterable[int]] = ..., version: _Optional[int] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., layout_unknown: _Optional[bool] = ...) -> None: ...

class ReportTransferRequest(_message.Message):
    __slots__ = ("node", "epoch", "promises", "timings")
    class Promise(_message.Message):
        __slots__ = ("predicted_tokens", "found_tokens")
        PREDICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        FOUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
        predicted_tokens: int
        found_tokens: int
        def __init__(self, predicted_tokens: _Optional[int] = ..., found_tokens: _Optional[int] = ...) -> None: ...
    class Timing(_message.Message):
        __slots__ = ("transfer_id", "queue_seconds", "prefill_seconds", "wire_seconds", "load_seconds")
        TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
        QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
        PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
        WIRE_SECONDS_FIELD_NUMBER: _ClassVar[int]
        LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
        transfer_id: bytes
        queue_seconds: float
        prefill_seconds: float
        wire_seconds: float
        load_seconds: float
        def __init__(self, transfer_id: _Optional[bytes] = ..., queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., wire_seconds: _Optional[float] = ..., load_seconds: _Optional[float] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMISES_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    node: str
    epoch: int
    promises: _containers.RepeatedCompositeFieldContainer[ReportTransferRequest.Promise]
    timings: _containers.RepeatedCompositeFieldContainer[ReportTransferRequest.Timing]
    def __init__(self, node: _Optional[str] = ..., epoch: _Optional[int] = ..., promises: _Optional[_Iterable[_Union[ReportTransferRequest.Promise, _Mapping]]] = ..., timings: _Optional[_Iterable[_Union[ReportTransferRequest.Timing, _Mapping]]] = ...) -> None: ...

class ReportTransferResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportRequestsRequest(_message.Message):
    __slots__ = ("requests", "reporter", "number")
    class Answered(_message.Message):
        __slots__ = ("decision_id", "route", "reason", "status", "fallback", "ttft_seconds", "decide_seconds", "prefill_seconds", "tpot_seconds", "transfer_id", "streamed", "outcome")
        DECISION_ID_FIELD_NUMBER: _ClassVar[int]
        ROUTE_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        STATUS_FIELD_NUMBER: _ClassVar[int]
        FALLBACK_FIELD_NUMBER: _ClassVar[int]
        TTFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
        DECIDE_SECONDS_FIELD_NUMBER: _ClassVar[int]
        PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
        TPOT_SECONDS_FIELD_NUMBER: _ClassVar[int]
        TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
        STREAMED_FIELD_NUMBER: _ClassVar[int]
        OUTCOME_FIELD_NUMBER: _ClassVar[int]
        decision_id: bytes
        route: str
        reason: str
        status: int
        fallback: str
        ttft_seconds: float
        decide_seconds: float
        prefill_seconds: float
        tpot_seconds: float
        transfer_id: bytes
        streamed: bool
        outcome: str
        def __init__(self, decision_id: _Optional[bytes] = ..., route: _Optional[str] = ..., reason: _Optional[str] = ..., status: _Optional[int] = ..., fallback: _Optional[str] = ..., ttft_seconds: _Optional[float] = ..., decide_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., tpot_seconds: _Optional[float] = ..., transfer_id: _Optional[bytes] = ..., streamed: _Optional[bool] = ..., outcome: _Optional[str] = ...) -> None: ...
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REPORTER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[ReportRequestsRequest.Answered]
    reporter: bytes
    number: int
    def __init__(self, requests: _Optional[_Iterable[_Union[ReportRequestsRequest.Answered, _Mapping]]] = ..., reporter: _Optional[bytes] = ..., number: _Optional[int] = ...) -> None: ...

class ReportRequestsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeState(_message.Message):
    __slots__ = ("node", "silent_seconds", "links", "engines", "is_silent")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SILENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    IS_SILENT_FIELD_NUMBER: _ClassVar[int]
    node: Node
    silent_seconds: float
    links: _containers.RepeatedCompositeFieldContainer[LinkFigures]
    engines: _containers.RepeatedCompositeFieldContainer[EngineLoad]
    is_silent: bool
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., silent_seconds: _Optional[float] = ..., links: _Optional[_Iterable[_Union[LinkFigures, _Mapping]]] = ..., engines: _Optional[_Iterable[_Union[EngineLoad, _Mapping]]] = ..., is_silent: _Optional[bool] = ...) -> None: ...

class StateSnapshot(_message.Message):
    __slots__ = ("version", "manager", "nodes", "threshold_tokens", "index_stale", "settling", "local_policy", "resting_instances")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MANAGER_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INDEX_STALE_FIELD_NUMBER: _ClassVar[int]
    SETTLING_FIELD_NUMBER: _ClassVar[int]
    LOCAL_POLICY_FIELD_NUMBER: _ClassVar[int]
    RESTING_INSTANCES_FIELD_NUMBER: _ClassVar[int]
    version: int
    manager: str
    nodes: _containers.RepeatedCompositeFieldContainer[NodeState]
    threshold_tokens: int
    index_stale: bool
    settling: bool
    local_policy: str
    resting_instances: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[int] = ..., manager: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[NodeState, _Mapping]]] = ..., threshold_tokens: _Optional[int] = ..., index_stale: _Optional[bool] = ..., settling: _Optional[bool] = ..., local_policy: _Optional[str] = ..., resting_instances: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchCommandsRequest(_message.Message):
    __slots__ = ("node", "epoch")
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    node: str
    epoch: int
    def __init__(self, node: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Prefix(_message.Message):
    __slots__ = ("model", "units", "num_tokens", "end_hash")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_HASH_FIELD_NUMBER: _ClassVar[int]
    model: str
    units: bytes
    num_tokens: int
    end_hash: bytes
    def __init__(self, model: _Optional[str] = ..., units: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., end_hash: _Optional[bytes] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("copy",)
    class Copy(_message.Message):
        __slots__ = ("transfer_id", "grant", "prefix", "priority")
        TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
        GRANT_FIELD_NUMBER: _ClassVar[int]
        PREFIX_FIELD_NUMBER: _ClassVar[int]
        PRIORITY_FIELD_NUMBER: _ClassVar[int]
        transfer_id: bytes
        grant: bytes
        prefix: Prefix
        priority: int
        def __init__(self, transfer_id: _Optional[bytes] = ..., grant: _Optional[bytes] = ..., prefix: _Optional[_Union[Prefix, _Mapping]] = ..., priority: _Optional[int] = ...) -> None: ...
    COPY_FIELD_NUMBER: _ClassVar[int]
    copy: Command.Copy
    def __init__(self, copy: _Optional[_Union[Command.Copy, _Mapping]] = ...) -> None: ...

class ReportCommandsRequest(_message.Message):
    __slots__ = ("node", "epoch", "ends")
    class End(_message.Message):
        __slots__ = ("transfer_id", "outcome", "message", "moved_bytes", "held_bytes")
        TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
        OUTCOME_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_FIELD_NUMBER: _ClassVar[int]
        MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
        HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
        transfer_id: bytes
        outcome: str
        message: str
        moved_bytes: int
        held_bytes: int
        def __init__(self, transfer_id: _Optional[bytes] = ..., outcome: _Optional[str] = ..., message: _Optional[str] = ..., moved_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    node: str
    epoch: int
    ends: _containers.RepeatedCompositeFieldContainer[ReportCommandsRequest.End]
    def __init__(self, node: _Optional[str] = ..., epoch: _Optional[int] = ..., ends: _Optional[_Iterable[_Union[ReportCommandsRequest.End, _Mapping]]] = ...) -> None: ...

class ReportCommandsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CopyRequest(_message.Message):
    __slots__ = ("prefix", "source", "destination", "priority", "timeout_seconds", "is_fetch")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IS_FETCH_FIELD_NUMBER: _ClassVar[int]
    prefix: Prefix
    source: str
    destination: str
    priority: int
    timeout_seconds: float
    is_fetch: bool
    def __init__(self, prefix: _Optional[_Union[Prefix, _Mapping]] = ..., source: _Optional[str] = ..., destination: _Optional[str] = ..., priority: _Optional[int] = ..., timeout_seconds: _Optional[float] = ..., is_fetch: _Optional[bool] = ...) -> None: ...

class CopyResponse(_message.Message):
    __slots__ = ("outcome", "message", "moved_bytes", "held_bytes")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    outcome: str
    message: str
    moved_bytes: int
    held_bytes: int
    def __init__(self, outcome: _Optional[str] = ..., message: _Optional[str] = ..., moved_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("node", "timeout_seconds")
    NODE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    node: str
    timeout_seconds: float
    def __init__(self, node: _Optional[str] = ..., timeout_seconds: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_prefixes", "moved_bytes", "num_requests_left", "num_engines_unknown")
    NUM_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_LEFT_FIELD_NUMBER: _ClassVar[int]
    NUM_ENGINES_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    num_prefixes: int
    moved_bytes: int
    num_requests_left: int
    num_engines_unknown: int
    def __init__(self, num_prefixes: _Optional[int] = ..., moved_bytes: _Optional[int] = ..., num_requests_left: _Optional[int] = ..., num_engines_unknown: _Optional[int] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class UndrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("node", "role", "timeout_seconds")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    node: str
    role: str
    timeout_seconds: float
    def __init__(self, node: _Optional[str] = ..., role: _Optional[str] = ..., timeout_seconds: _Optional[float] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ("changes",)
    class Change(_message.Message):
        __slots__ = ("instance", "before", "after", "num_requests_left", "is_load_unknown")
        INSTANCE_FIELD_NUMBER: _ClassVar[int]
        BEFORE_FIELD_NUMBER: _ClassVar[int]
        AFTER_FIELD_NUMBER: _ClassVar[int]
        NUM_REQUESTS_LEFT_FIELD_NUMBER: _ClassVar[int]
        IS_LOAD_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
        instance: str
        before: str
        after: str
        num_requests_left: int
        is_load_unknown: bool
        def __init__(self, instance: _Optional[str] = ..., before: _Optional[str] = ..., after: _Optional[str] = ..., num_requests_left: _Optional[int] = ..., is_load_unknown: _Optional[bool] = ...) -> None: ...
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[SetRoleResponse.Change]
    def __init__(self, changes: _Optional[_Iterable[_Union[SetRoleResponse.Change, _Mapping]]] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("node", "batch", "forgotten", "ordered_role", "leaving")
    class NodeBatch(_message.Message):
        __slots__ = ("node", "epoch", "batch")
        NODE_FIELD_NUMBER: _ClassVar[int]
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        BATCH_FIELD_NUMBER: _ClassVar[int]
        node: str
        epoch: int
        batch: Batch
        def __init__(self, node: _Optional[str] = ..., epoch: _Optional[int] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ...) -> None: ...
    class OrderedRole(_message.Message):
        __slots__ = ("node", "role")
        NODE_FIELD_NUMBER: _ClassVar[int]
        ROLE_FIELD_NUMBER: _ClassVar[int]
        node: str
        role: str
        def __init__(self, node: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...
    class Leaving(_message.Message):
        __slots__ = ("node", "epoch")
        NODE_FIELD_NUMBER: _ClassVar[int]
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        node: str
        epoch: int
        def __init__(self, node: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    ORDERED_ROLE_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    node: Node
    batch: Record.NodeBatch
    forgotten: str
    ordered_role: Record.OrderedRole
    leaving: Record.Leaving
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., batch: _Optional[_Union[Record.NodeBatch, _Mapping]] = ..., forgotten: _Optional[str] = ..., ordered_role: _Optional[_Union[Record.OrderedRole, _Mapping]] = ..., leaving: _Optional[_Union[Record.Leaving, _Mapping]] = ...) -> None: ...

class ClusterFigures(_message.Message):
    __slots__ = ("nodes", "turning_instances")
    NODES_FIELD_NUMBER: _ClassVar[int]
    TURNING_INSTANCES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeState]
    turning_instances: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeState, _Mapping]]] = ..., turning_instances: _Optional[_Iterable[str]] = ...) -> None: ...
