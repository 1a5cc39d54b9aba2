"""Generator of the reference tables in docs/ and of the annotated settings files in deploy/.

Settings come from the configuration classes, metrics from their module, states from the transition tables, and results
from `benchmarks/results`. `python -m tools.reference_tables` rewrites the files; a test compares them with
`current_files()`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client.metrics import MetricWrapperBase

from prfaas import config_checks, metrics
from prfaas.agent.config import AgentConfig
from prfaas.colocate.config import ColocateConfig
from prfaas.config import RecordKind, Setting, default, settings, shown_default
from prfaas.console.config import ConsoleConfig
from prfaas.index import membership
from prfaas.manager.config import ManagerConfig
from prfaas.manager.state import quiescence
from prfaas.router.config import RouterConfig
from prfaas.router.sidecar.config import SidecarConfig
from prfaas.state_machine import TransitionTable
from prfaas.transport.protocol import wire
from prfaas.transport.receiver import transfers
from prfaas.transport.sender import outbound_transfer
from prfaas.units import KINDS, KindName, ValueKind
from tools import distance_table, missed_bars, wire_tables

ROOT = Path(__file__).resolve().parent.parent
COMPONENTS: dict[str, type[Any]] = {
    "agent": AgentConfig,
    "manager": ManagerConfig,
    "router": RouterConfig,
    "sidecar": SidecarConfig,
    "colocate": ColocateConfig,
    "console": ConsoleConfig,
}

STATE_MACHINES: tuple[TransitionTable[Any, Any], ...] = (
    wire.TRANSITIONS,
    outbound_transfer.TRANSITIONS,
    transfers.TRANSITIONS,
    membership.TRANSITIONS,
    quiescence.TRANSITIONS,
)
TITLES = {
    "connector": "The connector, inside vLLM",
    "colocate": "Colocated instances",
    "console": "The command `prfaas`",
}
TWO_CLUSTERS = """\
  - name: west
    kind: pd
    instances:
      - {name: west-0, url: "http://10.0.1.1:8000", role: both, agent: west-0, wire: "10.0.1.1:7400"}
  - name: east
    kind: prfaas
    instances:
      - {name: east-0, url: "http://10.0.2.1:8000", role: prefill, agent: east-0, wire: "10.0.2.1:7400"}
"""

FORMS: dict[KindName, str] = {
    "text": "text",
    "path": "path",
    "bytes": "size",
    "seconds": "time",
    "count": "number",
    "ratio": "0 to 1",
    "flag": "yes/no",
    "address": "address",
    "rate": "rate",
    "tokens": "tokens",
    "text_list": "texts",
}

# Values for settings without a default, or with a default that only suits a trial.
EXAMPLES = {
    "agent": {"name": "west-0", "secret_file": "/etc/prfaas/secret"},
    "manager": {"secret_file": "/etc/prfaas/secret", "redis_directory": "/var/lib/prfaas/redis"},
    "router": {"secret_file": "/etc/prfaas/secret", "clusters": TWO_CLUSTERS},
}


def settings_table(cls: type[Any]) -> str:
    """Return a table with one row per setting, except shared ones; nested settings follow their record."""
    shared = _shared_rows()
    rows = [row for row in _rows(cls, prefix=()) if row not in shared]
    return "\n".join(["| key | default | form | meaning |", "|---|---|---|---|", *rows])


def shared_settings_table() -> str:
    """Return a table of the settings that several components share."""
    rows = [
        f"{row} {'all' if len(names) == len(COMPONENTS) else ', '.join(names)} |"
        for row, names in _shared_rows().items()
    ]
    return "\n".join(["| key | default | form | meaning | components |", "|---|---|---|---|---|", *rows])


def _shared_rows() -> dict[str, list[str]]:
    """Return each row that at least three components have in common, with the names of these components."""
    components_of: dict[str, list[str]] = {}
    for component, cls in COMPONENTS.items():
        for row in _rows(cls, prefix=()):
            components_of.setdefault(row, []).append(component)
    return {row: names for row, names in components_of.items() if len(names) >= 3}


def _rows(cls: type[Any], *, prefix: tuple[str, ...]) -> list[str]:
    rows: list[str] = []
    described: set[type[Any]] = set()
    for name, setting in settings(cls):
        path = (*prefix, name)
        nested = isinstance(setting.kind, RecordKind)
        many = isinstance(setting.kind, RecordKind) and setting.kind.many
        key = "`" + ".".join(path) + ("[]`" if many else "`")
        shown = "required" if setting.required else f"`{_one_line(cls, name, setting)}`"
        form = ("records" if many else "record") if nested else _form(setting)
        rows.append(f"| {key} | {shown} | {form} | {setting.doc} |".replace("``", ""))
        if isinstance(setting.kind, RecordKind) and setting.kind.cls not in described:
            rows += _rows(setting.kind.cls, prefix=path)
            described.add(setting.kind.cls)
    return rows


def _form(setting: Setting) -> str:
    """Return the form of a setting in a few words, with limits. The page explains the forms once."""
    assert isinstance(setting.kind, ValueKind)
    names = [FORMS[name] for name, kind in KINDS.items() if kind is setting.kind]
    form = names[0] if names else setting.kind.accepted.removeprefix("one of ").replace('"', "")
    limits = [f"≥ {setting.kind.show(setting.minimum)}"] if setting.minimum is not None else []
    limits += [f"≤ {setting.kind.show(setting.maximum)}"] if setting.maximum is not None else []
    return " ".join([form, *limits])


def _one_line(cls: type[Any], name: str, setting: Setting) -> str:
    if isinstance(setting.kind, RecordKind):
        return "[]" if setting.kind.many else ""
    shown = shown_default(cls, name)
    if shown is None:
        return "none"
    return f"[{', '.join(shown)}]" if isinstance(shown, list) else str(shown)


@dataclass(frozen=True)
class Metric:
    """Documentation of one metric."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def metric_catalogue() -> list[Metric]:
    """Return all metrics in the order of their definition."""
    return [_metric(value) for value in vars(metrics).values() if isinstance(value, MetricWrapperBase)]


def _metric(metric: MetricWrapperBase) -> Metric:
    (described,) = metric.describe()
    name = f"{described.name}_total" if described.type == "counter" else described.name
    return Metric(name, described.type, tuple(metric._labelnames), described.documentation)


def metrics_table(component: str) -> str:
    """Return a table with one row per metric of a component."""
    rows = ["| metric | labels | meaning |", "|---|---|---|"]
    for metric in metric_catalogue():
        if metric.name.startswith(f"prfaas_{component}_"):
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            meaning = f"Histogram. {metric.meaning}" if metric.kind == "histogram" else metric.meaning
            rows.append(f"| `{metric.name}` | {labels} | {meaning} |")
    return "\n".join(rows)


def annotated_yaml(component: str, cls: type[Any]) -> str:
    """Return the component's configuration file with every setting at its default."""
    command = "prfaas" if component == "console" else f"prfaas-{component}"
    head = [
        f"# {command}: every setting with its default; what stays at its default may be left out.",
        f"# Written by `make docs` from {cls.__module__.replace('.', '/')}.py. `prfaas config check FILE` checks it.",
    ]
    return "\n".join(head + _yaml_lines(cls, EXAMPLES.get(component, {}), indent="")) + "\n"


def _yaml_lines(cls: type[Any], examples: dict[str, str], *, indent: str) -> list[str]:
    lines = []
    for name, setting in settings(cls):
        lines += ["", f"{indent}# {setting.doc}"]
        if not isinstance(setting.kind, RecordKind):
            lines.append(f"{indent}# Write {setting.accepted}.{' Required.' if setting.required else ''}")
        lines += _yaml_value(cls, name, setting, example=examples.get(name), indent=indent)
    return lines


def _yaml_value(cls: type[Any], name: str, setting: Setting, *, example: str | None, indent: str) -> list[str]:
    if isinstance(setting.kind, RecordKind) and setting.kind.many:
        keys = [f"{indent}# Write a list of records with these keys:", *_record_sketch(setting.kind.cls, indent=indent)]
        return [*keys, f"{indent}{name}: {'' if example else '[]'}".rstrip(), *(example or "").splitlines()]
    if isinstance(setting.kind, RecordKind):
        if default(cls, name) is None:
            return [f"{indent}{name}:", *_record_sketch(setting.kind.cls, indent=indent)]
        return [f"{indent}{name}:", *_yaml_lines(setting.kind.cls, {}, indent=indent + "  ")]
    if setting.required:
        return [f"{indent}{name}: {example or 'CHANGE-ME'}"]
    shown = _one_line(cls, name, setting)
    is_overruled = config_checks.ABSENT in setting.only_where.values() and not example
    unmet = is_overruled or config_checks.unmet(setting.only_where, _defaults(cls, setting))
    mark = "# " if unmet else ""
    return [f"{indent}{mark}{name}: {example or ('' if default(cls, name) is None else shown)}".rstrip()]


def _defaults(cls: type[Any], setting: Setting) -> SimpleNamespace:
    """Return the defaults of the settings that `setting` depends on."""
    return SimpleNamespace(**{name: default(cls, name) for name in setting.only_where})


def _record_sketch(cls: type[Any], *, indent: str) -> list[str]:
    """Return comment lines with the keys of a record that is absent by default."""
    lines = []
    for name, setting in settings(cls):
        nested = setting.kind.cls if isinstance(setting.kind, RecordKind) else None
        accepted = ("a list of records" if nested else setting.accepted) + (", required" if setting.required else "")
        lines.append(f"{indent}#   {name}: {accepted}. {setting.doc}")
        lines += _record_sketch(nested, indent=f"{indent}#   ") if nested else []
    return lines


def state_diagram(table: TransitionTable[Any, Any]) -> str:
    """Return a fenced Mermaid diagram of a transition table, with one line for each pair of states."""
    events: dict[tuple[Enum, Enum], list[str]] = {}
    for (state, event), following in table.transitions.items():
        events.setdefault((state, following), []).append(event.name)
    lines = ["stateDiagram-v2", f"    [*] --> {table.initial.name}"]
    lines += [
        f"    {state.name} --> {following.name}: {', '.join(names)}" for (state, following), names in events.items()
    ]
    lines += [f"    {state.name} --> [*]" for state in sorted(table.final_states, key=lambda state: state.name)]
    return "\n".join(["```mermaid", *lines, "```"])


def _filled(page: str, tables: dict[str, str]) -> str:
    """Replace the text between each `<!-- name -->` and the next `<!-- end -->`; add a section for a new name."""
    for name, table in tables.items():
        start, end = f"<!-- {name} -->\n", "<!-- end -->\n"
        if start not in page:
            component = name.split()[-1]
            page += f"\n## {TITLES.get(component, f'prfaas-{component}')}\n\n{start}{end}"
        before, _, rest = page.partition(start)
        page = f"{before}{start}{table}\n{end}{rest.partition(end)[2]}"
    return page


def current_files() -> dict[Path, str]:
    """Return each generated file with the text that it should have."""
    configuration, metrics_page = ROOT / "docs/configuration.md", ROOT / "docs/metrics.md"
    benchmarks_page, machines_page = ROOT / "benchmarks/README.md", ROOT / "docs/state-machines.md"
    tables = {f"settings of {name}": settings_table(cls) for name, cls in COMPONENTS.items()}
    tables = {"shared settings": shared_settings_table(), **tables}
    components = sorted({metric.name.split("_")[1] for metric in metric_catalogue()})
    metric_tables = {f"metrics of {name}": metrics_table(name) for name in components}
    wire = {"missed bars of the wire": missed_bars.current(), **wire_tables.current()}
    diagrams = {f"states of {table.name}": state_diagram(table) for table in STATE_MACHINES}
    distance, headline = distance_table.current()
    return {
        ROOT / "README.md": _filled((ROOT / "README.md").read_text(), {**headline, **distance}),
        benchmarks_page: _filled(benchmarks_page.read_text(), {**wire, **distance}),
        configuration: _filled(configuration.read_text(), tables),
        metrics_page: _filled(metrics_page.read_text(), metric_tables),
        machines_page: _filled(machines_page.read_text(), diagrams),
        **{ROOT / f"deploy/{name}.yaml": annotated_yaml(name, cls) for name, cls in COMPONENTS.items()},
    }


def main() -> int:
    """Rewrite the files that are out of date."""
    for path, text in current_files().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
