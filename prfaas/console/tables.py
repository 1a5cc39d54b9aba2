"""Tables of a deployment, from the JSON of managers, routers and agents. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from prfaas.transport.congestion.rate_estimator import RETRANSMIT_RATIO

Mood = Literal["plain", "good", "warning", "bad"]
_URGENCY: tuple[Mood, ...] = ("bad", "warning", "plain", "good")
_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_BIT_UNITS = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")


@dataclass(frozen=True)
class Table:
    """Table for the terminal. `moods` has one word per row, or is empty. `notes` are lines below."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    moods: tuple[Mood, ...] = ()
    notes: tuple[str, ...] = ()

    def records(self) -> list[dict[str, str]]:
        """Return the rows by column, for programs."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def status_tables(state: Mapping[str, Any], plan: Mapping[str, Any]) -> list[Table]:
    """Return a summary: manager, clusters, instances."""
    return [_summary(state, plan), _clusters(state), _instances(state)]


def top_tables(state: Mapping[str, Any], plan: Mapping[str, Any]) -> list[Table]:
    """Return the live view: a summary in one row, instances that need attention first, and links."""
    summary, instances = _summary(state, plan), _instances(state)
    moods = sorted(zip(instances.moods, instances.rows, strict=True), key=lambda pair: _URGENCY.index(pair[0]))
    columns, values = zip(*summary.rows, strict=True)
    row = Table(summary.title, columns, (values,), (max(summary.moods, key=lambda mood: mood == "warning"),))
    ordered = replace(instances, rows=tuple(row for _, row in moods), moods=tuple(mood for mood, _ in moods))
    return [row, ordered, link_table(state)]


def _summary(state: Mapping[str, Any], plan: Mapping[str, Any]) -> Table:
    solved = plan.get("plan") or {}
    index = "stale: the record is unreachable" if state.get("index_stale") else "current"
    rows = [
        ("manager", str(state.get("manager", "")) + (" (settling)" if state.get("settling") else "")),
        ("index", index),
        ("threshold", f"{state.get('threshold_tokens', 0):,} tokens"),
        ("within a cluster", str(state.get("local_policy", ""))),
        (
            "plan",
            f"version {solved['version']}, limited by {solved['limit']}" if solved else "none: t from the settings",
        ),
    ]
    moods = tuple[Mood, ...]("warning" if value.startswith("stale") else "plain" for _, value in rows)
    return Table("Deployment", ("what", "value"), tuple(rows), moods)


def nodes_of(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the live nodes of a state, by cluster and name."""
    return sorted(state.get("nodes", []), key=lambda node: (node["node"]["cluster"], node["node"]["name"]))


def _clusters(state: Mapping[str, Any]) -> Table:
    by_cluster: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for node in nodes_of(state):
        by_cluster.setdefault((node["node"]["cluster"], node["node"]["cluster_kind"]), []).append(node)
    rows = []
    for (name, kind), nodes in by_cluster.items():
        loads = [load for node in nodes for load in node.get("engines", [])]
        running, waiting = (sum(load.get(key, 0) for load in loads) for key in ("num_running", "num_waiting"))
        instances = sum(len(node["node"].get("engines", [])) for node in nodes)
        rows.append((name, kind, str(len(nodes)), str(instances), str(running), str(waiting)))
    return Table("Clusters", ("cluster", "kind", "nodes", "instances", "running", "waiting"), tuple(rows))


def _instances(state: Mapping[str, Any]) -> Table:
    loads = {load["instance"]: load for node in nodes_of(state) for load in node.get("engines", [])}
    resting = frozenset(state.get("resting_instances", ()))
    rows, moods = [], list[Mood]()
    for node in nodes_of(state):
        for engine in node["node"].get("engines", []):
            load = loads.get(engine["instance"], {})
            condition = _condition(node, load, rests=engine["instance"] in resting)
            rows.append(_instance_row(node["node"], engine, load, condition))
            moods.append("bad" if condition.startswith("silent") else "warning" if condition else "plain")
    columns = ("instance", "node", "cluster", "role", "model", "running", "waiting", "KV in use")
    return Table("Instances", columns, tuple(rows), tuple(moods))


def _condition(node: Mapping[str, Any], load: Mapping[str, Any], *, rests: bool) -> str:
    """Return why an instance gets no new work; empty if it does."""
    if node.get("is_silent"):
        return f"silent for {node.get('silent_seconds', 0.0):.0f} s"
    if load.get("is_silent"):
        return "silent"
    return "drains" if rests else ""


def _instance_row(
    node: Mapping[str, Any], engine: Mapping[str, Any], load: Mapping[str, Any], condition: str
) -> tuple[str, ...]:
    counts = (
        str(load.get("num_running", 0)),
        str(load.get("num_waiting", 0)),
        percent(load.get("kv_usage_ratio", 0.0)),
    )
    role = f"{engine['role']}, {condition}" if condition else engine["role"]
    return (engine["instance"], node["name"], node["cluster"], role, engine["model"], *counts)


def link_table(state: Mapping[str, Any]) -> Table:
    """Return every outgoing link of the live nodes, busiest first. Short names fit into 80 columns."""
    links = [(node["node"], link) for node in nodes_of(state) for link in node.get("links", [])]
    links.sort(key=lambda pair: (not pair[1].get("is_down", False), -pair[1].get("bytes_per_second", 0.0)))
    moods = tuple[Mood, ...](link_mood(link) for _, link in links)
    columns = ("from", "to", "goodput", "capacity", "in use", "queued", "rtt", "resent", "conns")
    return Table("Links", columns, tuple(_link_row(node, link) for node, link in links), moods)


def _link_row(node: Mapping[str, Any], link: Mapping[str, Any]) -> tuple[str, ...]:
    carried, capacity = link.get("bytes_per_second", 0.0), link.get("capacity_bytes_per_second", 0.0)
    return (
        node["name"],
        link["peer"],
        "down" if link.get("is_down") else bit_rate(carried),
        bit_rate(capacity) if capacity else "not known",
        percent(carried / capacity) if capacity else "",
        size(int(link.get("queued_bytes", 0))),
        f"{link.get('rtt_seconds', 0.0) * 1000:.1f} ms",
        percent(link.get("retransmit_ratio", 0.0)),
        str(link.get("num_connections", 0)),
    )


def link_mood(link: Mapping[str, Any]) -> Mood:
    """Return the state of a link: down, congested or with many retransmissions, or fine."""
    if link.get("is_down"):
        return "bad"
    is_congested = link.get("congestion") or link.get("retransmit_ratio", 0.0) > RETRANSMIT_RATIO
    return "warning" if is_congested else "plain"


POOL_COLUMNS = {
    **{name: name for name in ("cluster", "node", "model")},
    "kind": "KV group",
    "tier": "tier",
    "num_blocks": "blocks",
    "num_bytes": "bytes",
}
HOT_COLUMNS = {
    "hash": "hash",
    "model": "model",
    "num_tokens": "tokens",
    "hits_per_second": "asked/s",
    "holders": "held by",
}


def records_table(title: str, records: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> Table:
    """Return one row per record. `columns` maps the keys of a record to headings."""
    rows = tuple(tuple(_cell(key, record[key]) for key in columns) for record in records)
    return Table(title, tuple(columns.values()), rows)


_EXPLAINED = (
    *("at", "page", "model", "tenant", "session", "client", "route", "reason", "explanation", "num_prompt_tokens"),
    *("num_uncached_tokens", "threshold_tokens", "prefill", "decode", "decided_by", "status", "outcome", "fallback"),
    *("transfer", "ttft_seconds", "tpot_seconds", "request_id", "decision_id", "transfer_id"),
)


def explanation_tables(record: Mapping[str, Any]) -> list[Table]:
    """Return what the dashboard's Explain shows: the request, its phases, the cost of each route, and the candidates."""
    decision, facts, ended = (record.get(key) or {} for key in ("decision", "facts", "ended"))
    known = {**facts, **decision, **ended, **{key: value for key, value in record.items() if value is not None}}
    if "at" in known:
        known["at"] = datetime.fromtimestamp(known["at"]).astimezone().isoformat(sep=" ", timespec="seconds")
    rows = tuple((_words(key), _cell(key, known[key])) for key in _EXPLAINED if known.get(key) not in (None, ""))
    snapshot, phases = record.get("snapshot") or {}, ended.get("phases") or record.get("phases") or {}
    instances = snapshot.get("instances", ())
    found = [
        Table("Request", ("what", "value"), rows),
        _phase_table(phases),
        _route_table(record.get("routes") or ()),
        _candidate_table(instances, known, facts.get("cached_tokens") or {}),
    ]
    return [table for table in found if table.rows]


def _phase_table(phases: Mapping[str, float]) -> Table:
    whole = sum(phases.values()) or 1.0
    rows = tuple((name, _cell("_seconds", seconds), percent(seconds / whole)) for name, seconds in phases.items())
    return Table("Time to first token", ("phase", "time", "share"), rows)


def _route_table(routes: Sequence[Mapping[str, Any]]) -> Table:
    """Return each path to the decode cluster with the time of a transfer and of a local prefill instead."""
    rows = tuple(
        (
            f"{route['source']} → {route['destination']}",
            f"{route['threshold_tokens']:,}",
            "down" if route["is_down"] else "abundant" if route["is_abundant"] else "scarce",
            *(
                "unknown" if route[key] is None else _cell(key, route[key])
                for key in ("transfer_seconds", "local_prefill_seconds")
            ),
        )
        for route in routes
    )
    return Table("Cost of each route", ("path", "t", "bandwidth", "transfer", "local prefill"), rows)


def _candidate_table(
    instances: Sequence[Mapping[str, Any]], decision: Mapping[str, Any], cached: Mapping[str, int]
) -> Table:
    rows = tuple(
        (
            item["instance"],
            item["cluster"],
            item["role"],
            str(item.get("num_requests", 0)),
            f"{cached.get(item['agent'], 0):,}",
            " and ".join(f"{work}s" for work in ("prefill", "decode") if decision.get(work) == item["instance"]),
        )
        for item in instances
    )
    return Table("Candidates", ("instance", "cluster", "role", "requests", "cached tokens", ""), rows)


def _words(key: str) -> str:
    return key.removesuffix("_seconds").replace("_", " ")


def _cell(key: str, value: Any) -> str:
    """Return a field of a record as people read it, with its unit."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, int | float) and key.endswith("_seconds"):
        return f"{value * 1000:,.0f} ms" if value < 1 else f"{value:,.2f} s"
    if isinstance(value, int | float) and key.endswith("_bytes"):
        return size(int(value))
    return f"{value:,.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def unanswered_tables(failures: Sequence[str]) -> list[Table]:
    """Return the servers that did not answer, or no table."""
    rows = tuple((failure,) for failure in failures)
    moods = tuple[Mood, ...]("warning" for _ in rows)
    return [Table("Not answered", ("server",), rows, moods)] if rows else []


def size(num_bytes: int) -> str:
    """Return bytes with a unit: 1536 is "1.5 KiB"."""
    return _scaled(num_bytes, 1024.0, _BINARY_UNITS)


def bit_rate(bytes_per_second: float) -> str:
    """Return a rate with a unit: 125e6 is "1.0 Gbit/s"."""
    return _scaled(bytes_per_second * 8, 1000.0, _BIT_UNITS)


def percent(ratio: float) -> str:
    return f"{ratio:.1%}"


def _scaled(value: float, step: float, units: Iterable[str]) -> str:
    *smaller, largest = units
    for position, unit in enumerate(smaller):
        if value < step:
            return f"{value:.{1 if position else 0}f} {unit}"
        value /= step
    return f"{value:.1f} {largest}"
