"""Writes what docs/ and deploy/ say of settings and metrics, from the dataclasses and the catalogue that the code uses,
and what pages say of the wire and of the connector over distance, from what was measured.

`python -m tools.reference_tables` rewrites the files; `current_files()` is what a test compares them with.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prfaas import config_checks, metrics
from prfaas.agent.config import AgentConfig
from prfaas.colocate.config import ColocateConfig
from prfaas.config import Record, Setting, default, flag, settings, shown_default, variable
from prfaas.console.config import ConsoleConfig
from prfaas.manager.config import ManagerConfig
from prfaas.router.config import RouterConfig
from prfaas.router.sidecar.config import SidecarConfig
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

TITLES = {
    "connector": "The connector, inside vLLM",
    "colocate": "The colocated executor",
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

# What a reader puts in place of his own for settings that have no default, or one for trying out alone.
EXAMPLES = {
    "agent": {"name": "west-0", "secret_file": "/etc/prfaas/secret"},
    "manager": {"secret_file": "/etc/prfaas/secret", "redis_directory": "/var/lib/prfaas/redis"},
    "router": {"secret_file": "/etc/prfaas/secret", "clusters": TWO_CLUSTERS},
}


def settings_table(component: str, cls: type[Any]) -> str:
    """One row for each setting of a component, nested ones after their record."""
    rows = ["| key | default | accepted | meaning |", "|---|---|---|---|"]
    return "\n".join(rows + _rows(component, cls, prefix=(), flagged=True))


def _rows(component: str, cls: type[Any], *, prefix: tuple[str, ...], flagged: bool) -> list[str]:
    rows = []
    for name, its in settings(cls):
        path = (*prefix, name)
        nested = isinstance(its.kind, Record)
        many = isinstance(its.kind, Record) and its.kind.many
        key = "`" + ".".join(path) + ("[]`" if many else "`")
        names = f"<br>`{variable(component, path)}`<br>`{flag(path)}`" if flagged and (many or not nested) else ""
        shown = "required" if its.required else f"`{_one_line(cls, name, its)}`"
        accepted = ("a list of records" if many else "a record") if nested else its.accepted
        rows.append(f"| {key}{names} | {shown} | {accepted} | {its.doc} |".replace("``", ""))
        if isinstance(its.kind, Record):
            rows += _rows(component, its.kind.cls, prefix=path, flagged=flagged and not many)
    return rows


def _one_line(cls: type[Any], name: str, its: Setting) -> str:
    if isinstance(its.kind, Record):
        return "[]" if its.kind.many else ""
    shown = shown_default(cls, name)
    if shown is None:
        return "none"
    return f"[{', '.join(shown)}]" if isinstance(shown, list) else str(shown)


def metrics_table(component: str) -> str:
    """One row for each metric that a component counts."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for its in metrics.CATALOGUE:
        if its.name.startswith(f"prfaas_{component}_"):
            labels = ", ".join(f"`{label}`" for label in its.labels)
            rows.append(f"| `{its.name}` | {its.kind} | {labels} | {its.meaning} |")
    return "\n".join(rows)


def annotated_yaml(component: str, cls: type[Any]) -> str:
    """The component's configuration file with every setting at its default."""
    command = "prfaas" if component == "console" else f"prfaas-{component}"
    head = [
        f"# {command}: every setting with its default; what stays at its default may be left out.",
        f"# Written by `make docs` from {cls.__module__.replace('.', '/')}.py. `--check-config` shows what is in force.",
    ]
    return "\n".join(head + _yaml_lines(cls, EXAMPLES.get(component, {}), indent="")) + "\n"


def _yaml_lines(cls: type[Any], examples: dict[str, str], *, indent: str) -> list[str]:
    lines = []
    for name, its in settings(cls):
        lines += ["", f"{indent}# {its.doc}"]
        if not isinstance(its.kind, Record):
            lines.append(f"{indent}# Write {its.accepted}.{' Required.' if its.required else ''}")
        lines += _yaml_value(cls, name, its, example=examples.get(name), indent=indent)
    return lines


def _yaml_value(cls: type[Any], name: str, its: Setting, *, example: str | None, indent: str) -> list[str]:
    if isinstance(its.kind, Record) and its.kind.many:
        keys = [f"{indent}# Write a list of records with these keys:", *_record_sketch(its.kind.cls, indent=indent)]
        return [*keys, f"{indent}{name}: {'' if example else '[]'}".rstrip(), *(example or "").splitlines()]
    if isinstance(its.kind, Record):
        if default(cls, name) is None:
            return [f"{indent}{name}:", *_record_sketch(its.kind.cls, indent=indent)]
        return [f"{indent}{name}:", *_yaml_lines(its.kind.cls, {}, indent=indent + "  ")]
    if its.required:
        return [f"{indent}{name}: {example or 'CHANGE-ME'}"]
    shown = _one_line(cls, name, its)
    mark = "# " if config_checks.unmet(its.only_where, _defaults(cls, its)) else ""
    return [f"{indent}{mark}{name}: {example or ('' if default(cls, name) is None else shown)}".rstrip()]


def _defaults(cls: type[Any], its: Setting) -> SimpleNamespace:
    """Of the settings beside which this one means something."""
    return SimpleNamespace(**{other: default(cls, other) for other in its.only_where})


def _record_sketch(cls: type[Any], *, indent: str) -> list[str]:
    """Comment lines with the keys of a record that the file does not have by default."""
    lines = []
    for name, its in settings(cls):
        nested = its.kind.cls if isinstance(its.kind, Record) else None
        accepted = ("a list of records" if nested else its.accepted) + (", required" if its.required else "")
        lines.append(f"{indent}#   {name}: {accepted}. {its.doc}")
        lines += _record_sketch(nested, indent=f"{indent}#   ") if nested else []
    return lines


def _filled(page: str, tables: dict[str, str]) -> str:
    """`page` with the text between each `<!-- name -->` and its `<!-- end -->` replaced; a new name gets a section."""
    for name, table in tables.items():
        start, end = f"<!-- {name} -->\n", "<!-- end -->\n"
        if start not in page:
            component = name.split()[-1]
            page += f"\n## {TITLES.get(component, f'prfaas-{component}')}\n\n{start}{end}"
        before, _, rest = page.partition(start)
        page = f"{before}{start}{table}\n{end}{rest.partition(end)[2]}"
    return page


def current_files() -> dict[Path, str]:
    """Every generated file with the text it should have."""
    configuration, metrics_page = ROOT / "docs/configuration.md", ROOT / "docs/metrics.md"
    benchmarks_page = ROOT / "benchmarks/README.md"
    tables = {f"settings of {name}": settings_table(name, cls) for name, cls in COMPONENTS.items()}
    components = sorted({its.name.split("_")[1] for its in metrics.CATALOGUE})
    metric_tables = {f"metrics of {name}": metrics_table(name) for name in components}
    wire = {"missed bars of the wire": missed_bars.current(), **wire_tables.current()}
    distance = {"time to the first token over distance": distance_table.current()}
    return {
        ROOT / "README.md": _filled((ROOT / "README.md").read_text(), distance),
        benchmarks_page: _filled(benchmarks_page.read_text(), {**wire, **distance}),
        configuration: _filled(configuration.read_text(), tables),
        metrics_page: _filled(metrics_page.read_text(), metric_tables),
        **{ROOT / f"deploy/{name}.yaml": annotated_yaml(name, cls) for name, cls in COMPONENTS.items()},
    }


def main() -> int:
    """Rewrite what is not current."""
    for path, text in current_files().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            sys.stdout.write(f"wrote {path.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
