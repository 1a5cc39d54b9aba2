"""`prfaas`: see a deployment, change it, and find what is wrong with a machine."""

from __future__ import annotations

import argparse
import asyncio
import ssl
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import prfaas
from prfaas import config, grants, units
from prfaas.cli import extras, named_files
from prfaas.console import tables
from prfaas.console.completion import completion
from prfaas.console.config import ConsoleConfig
from prfaas.console.doctor.examination import COMPONENTS, Patient, examine
from prfaas.console.doctor.finding import findings_table
from prfaas.console.pages import first_json, read_json, readiness, tls_of
from prfaas.console.terminal import Answer, show
from prfaas.console.waiting import told
from prfaas.console.watching import watch
from prfaas.errors import ConfigError, PageUnreachable, PrfaasError
from prfaas.router.http.admission import read_key
from prfaas.transport.net.tls import CertificateFiles, describe_certificate

CONFIGURED: dict[str, type[Any]] = {**COMPONENTS, "console": ConsoleConfig}
DIRECTORY = Path("/etc/prfaas")
AGENT_PAGE = "http://127.0.0.1:7401"


@dataclass(frozen=True)
class Call:
    """One command line: the settings in force, and the arguments of its command."""

    settings: ConsoleConfig
    arguments: argparse.Namespace

    def page(self, path: str) -> Any:
        """Return a page of the managers. Raises PageUnreachable."""
        its = self.settings
        tls = tls_of(its)
        return first_json(its.pages, path, timeout_seconds=its.timeout, tls=tls)


def _status(call: Call) -> Answer:
    if call.arguments.ready:
        return _ready(call)
    state, plan = call.page("/state"), call.page("/plan")
    return Answer({"state": state, **plan}, tables.status_tables(state, plan))


def _ready(call: Call) -> Answer:
    """What every manager says at /readyz, as probes ask."""
    its = call.settings
    tls = tls_of(its)
    found = {page: readiness(page, timeout_seconds=its.timeout, tls=tls) for page in its.pages}
    moods = tuple[tables.Mood, ...]("good" if said == "ready" else "bad" for said in found.values())
    table = tables.Table("Managers", ("pages", "readiness"), tuple(found.items()), moods)
    return Answer(found, [table], status=0 if set(moods) == {"good"} else 1)


def _links(call: Call) -> Answer:
    state = call.page("/state")
    links = [{"node": its["node"]["name"], **link} for its in tables.nodes_of(state) for link in its.get("links", [])]
    return Answer(links, [tables.link_table(state)])


def _connections(call: Call) -> Answer:
    """What an agent's own page says, which nobody else knows: managers hear of links."""
    its, page = call.settings, f"{call.arguments.agent.rstrip('/')}/status"
    status = read_json(page, timeout_seconds=its.timeout, tls=tls_of(its))
    if not isinstance(status, dict) or "links" not in status:
        raise PageUnreachable(f"{page}: it is no agent's; an agent's pages are at its status_listen")
    links = [{key: link.get(key, []) for key in ("peer", "address", "connections")} for link in status["links"]]
    return Answer(links, tables.connection_tables(links))


def _top(call: Call) -> Answer:
    """Return the deployment, or that no manager answers: the next refresh may meet one."""
    try:
        return _whole(call)
    except PageUnreachable as error:
        table = tables.Table("Managers", ("error",), ((str(error),),), ("bad",))
        return Answer({"error": str(error)}, [table])


def _whole(call: Call) -> Answer:
    state, plan = call.page("/state"), call.page("/plan")
    return Answer({"state": state, **plan}, [*tables.status_tables(state, plan), tables.link_table(state)])


def _explain(call: Call) -> Answer:
    request, its = call.arguments.request, call.settings
    of_managers, of_routers = (tls_of(its) for _ in range(2))
    if of_routers is not None:
        of_routers.load_default_certs()  # a router's clients may be shown a certificate that the world knows
    router_key = read_key(its.router_key_file, setting="router_key_file")
    pages = [f"{router.rstrip('/')}/debug/decision/{request}" for router in its.routers]
    records, failures = _records_at(pages, timeout_seconds=its.timeout, tls=of_routers, key=router_key)
    if not records:
        pages = [f"{manager.rstrip('/')}/decisions/{request}" for manager in its.pages]
        records, others = _records_at(pages, timeout_seconds=its.timeout, tls=of_managers)
        failures += others
    if not records:
        reasons = "".join(f"; {failure}" for failure in failures)
        raise PageUnreachable(f"{request}: none of the latest requests of the routers and managers asked{reasons}")
    newest, *older = sorted(records, key=lambda record: -record.get("at", 0.0))
    document = newest | ({"others": older} if older else {}) | ({"unanswered": failures} if failures else {})
    shown = [tables.explanation_table(record) for record in (newest, *older)]
    return Answer(document, shown + tables.unanswered_tables(failures))


def _records_at(
    pages: Iterable[str], *, timeout_seconds: float, tls: ssl.SSLContext | None, key: str = ""
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the requests that these pages tell of, each with its page; and why others do not answer."""
    records: list[dict[str, Any]] = []
    failures: list[str] = []
    for page in pages:
        try:
            found = read_json(page, timeout_seconds=timeout_seconds, tls=tls, key=key)
        except PageUnreachable as error:
            failures.append(str(error))
            continue
        if found is not None:
            others = found.pop("others", ())
            records += [{"page": page} | record for record in (found, *others)]
    return records, failures


def _drain(call: Call) -> Answer:
    changes = extras.load("prfaas.console.changes", extra="manager")
    secret = grants.read_secret(call.settings.secret_file)
    seconds = units.parse_seconds(call.arguments.within)
    with told(call.arguments.node, lambda: call.page("/state"), seconds=seconds):
        moved = asyncio.run(changes.drain(call.settings, secret, node=call.arguments.node, seconds=seconds))
    left = (moved["num_requests_left"], moved["num_engines_unknown"])
    counts = (str(moved["num_prefixes"]), tables.size(moved["moved_bytes"]), *map(str, left))
    columns = ("node", "prefixes moved", "bytes moved", "requests that still run", "engines that say nothing")
    title = "Drains, and is not known to be empty" if any(left) else "Drained"
    return Answer(moved, [tables.Table(title, columns, ((moved["node"], *counts),))], status=1 if any(left) else 0)


def _undrain(call: Call) -> Answer:
    changes = extras.load("prfaas.console.changes", extra="manager")
    secret = grants.read_secret(call.settings.secret_file)
    done = asyncio.run(changes.undrain(call.settings, secret, node=call.arguments.node))
    return Answer(done, [tables.Table("Placed on again", ("node",), ((done["node"],),))])


def _flip(call: Call) -> Answer:
    changes = extras.load("prfaas.console.changes", extra="manager")
    secret = grants.read_secret(call.settings.secret_file)
    asked = {name: getattr(call.arguments, name) for name in ("node", "role")}
    seconds = units.parse_seconds(call.arguments.within)
    with told(asked["node"], lambda: call.page("/state"), seconds=seconds):
        changed = asyncio.run(changes.flip(call.settings, secret, seconds=seconds, **asked))
    left = ("unknown" if its["num_requests_left"] is None else str(its["num_requests_left"]) for its in changed)
    rows = tuple((its["instance"], its["before"], its["after"], num) for its, num in zip(changed, left, strict=True))
    return Answer(changed, [tables.Table("Roles", ("instance", "before", "role", "requests that still ran"), rows)])


def _certs(call: Call) -> Answer:
    certs = extras.load("prfaas.console.certs", extra="console")
    given = call.arguments
    match given.work:
        case "new":
            found = certs.make(given.directory, given.names, hosts=given.host, days=given.days)
        case "revoke":
            found = certs.revoke(given.directory, given.names)
        case _:
            found = certs.entries(given.directory)
    return Answer([asdict(its) for its in found], [certs.entries_table(found)])


def _pool_ls(call: Call) -> Answer:
    holdings = call.page("/pool")
    return Answer(holdings, [tables.pool_table(holdings)])


def _pool_hot(call: Call) -> Answer:
    prefixes = call.page("/hot")
    return Answer(prefixes, [tables.hot_table(prefixes)])


def _pool_order(call: Call) -> Answer:
    """Pin, unpin or remove a prefix on nodes, by default on all."""
    changes = extras.load("prfaas.console.changes", extra="manager")
    secret = grants.read_secret(call.settings.secret_file)
    order = "soft_pin" if call.arguments.order == "pin" and call.arguments.soft else call.arguments.order
    nodes = call.arguments.node or [its["node"]["name"] for its in tables.nodes_of(call.page("/state"))]
    end_hash = _hash(call.arguments.hash)
    found = asyncio.run(changes.order_pool(call.settings, secret, nodes=nodes, end_hash=end_hash, order=order))
    rows = tuple(
        (its["node"], its["outcome"], tables.size(its["held_bytes"]), tables.size(its["removed_bytes"]))
        for its in found
    )
    moods = tuple[tables.Mood, ...]("good" if its["outcome"] in ("completed", "evicted") else "bad" for its in found)
    is_done = any(its["outcome"] == "completed" for its in found)
    table = tables.Table("Pool", ("node", "outcome", "bytes", "bytes removed"), rows, moods)
    return Answer(found, [table], status=0 if is_done else 1)


def _hash(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise ConfigError(f"HASH: {text!r}; write hexadecimal digits, as `prfaas pool hot` shows them") from error


def _doctor(call: Call) -> Answer:
    given = {name: getattr(call.arguments, name) for name in COMPONENTS}
    named = {name: path for name, path in given.items() if path is not None}
    managers = extras.load("prfaas.console.doctor.managers", extra="manager")
    record = extras.load("prfaas.console.doctor.record", extra="manager")
    found = examine(
        Patient(
            files=named or _usual_files(COMPONENTS),
            proc=call.arguments.proc,
            console=call.settings,
            ask_managers=managers.manager_findings,
            check=named_files.check,
            ask_record=record.record_finding,
        )
    )
    is_well = all(its.outcome == "good" for its in found)
    return Answer([asdict(its) for its in found], [findings_table(found)], status=0 if is_well else 1)


def _usual_files(names: Iterable[str]) -> dict[str, Path]:
    """Return the settings that this machine has: not every component runs on each."""
    usual = {name: DIRECTORY / f"{name}.yaml" for name in names}
    return {name: path for name, path in usual.items() if path.exists()}


def _config_check(call: Call) -> Answer:
    """Read each file as its component would."""
    rows: list[tuple[str, str, str]] = []
    files = [Path(path) for path in call.arguments.files] or [*_usual_files(CONFIGURED).values()]
    if not files:
        raise ConfigError(f"{DIRECTORY} has no settings of {', '.join(CONFIGURED)}; name files")
    for path in files:
        rows += [_checked(path, component=call.arguments.component)]
    moods = tuple[tables.Mood, ...]("good" if outcome == "good" else "bad" for _, _, outcome in rows)
    table = tables.Table("Configuration", ("file", "component", "outcome"), tuple(rows), moods)
    document = [dict(zip(table.columns, row, strict=True)) for row in rows]
    return Answer(document, [table], status=0 if set(moods) == {"good"} else 1)


def _checked(path: Path, *, component: str | None) -> tuple[str, str, str]:
    name = component or next((name for name in CONFIGURED if path.stem.startswith(name)), None)
    if name is None:
        return str(path), "?", f"say which component it is for: --component {'|'.join(CONFIGURED)}"
    try:
        config.load(CONFIGURED[name], component=name, file=path, check=named_files.check)
    except ConfigError as error:
        return str(path), name, str(error)
    return str(path), name, "good"


def _completion(call: Call) -> Answer:
    sys.stdout.write(completion(call.arguments.shell, _parser()))
    sys.exit(0)


Command = Callable[[Call], Answer]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prfaas", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {prfaas.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    status = _add(commands, "status", _status, "the deployment in short: clusters, instances, threshold, plan")
    status.add_argument(
        "--ready", action="store_true", help="only whether the managers are ready; ends with 1 if one is not"
    )
    _add(commands, "links", _links, "every link between nodes: goodput, capacity, round trip, what is sent again")
    connections = _add(commands, "connections", _connections, "each connection of an agent's links, to find a bad path")
    connections.add_argument(
        "agent",
        nargs="?",
        default=AGENT_PAGE,
        metavar="AGENT",
        help=f"its pages (status_listen); by default {AGENT_PAGE}",
    )
    _add_top(commands)
    explain = _add(commands, "explain", _explain, "why a recent request went where it went")
    explain.add_argument("request", metavar="REQUEST", help="its x-request-id, or the id that a manager decided under")
    drain = _add(commands, "drain", _drain, "have a node get nothing new and give away what is only there")
    drain.add_argument("node", metavar="NODE", help="the agent's name")
    drain.add_argument(
        "--within", default="60s", metavar="TIME", help="how long copies and what runs may take; by default 60s"
    )
    undrain = _add(commands, "undrain", _undrain, "place on a drained node again")
    undrain.add_argument("node", metavar="NODE", help="the agent's name")
    flip = _add(commands, "flip", _flip, "give a node's instances another role, once what runs on them has ended")
    flip.add_argument("node", metavar="NODE", help="the agent's name")
    flip.add_argument("role", choices=("prefill", "decode", "both", "announced"), help="announced: the configured one")
    flip.add_argument(
        "--within", default="120s", metavar="TIME", help="how long requests may take to end; by default 120s"
    )
    _add_certs(commands)
    _add_pool(commands)
    _add_doctor(commands)
    _add_config(commands)
    shell = _add(commands, "completion", _completion, "a script that completes this command in a shell")
    shell.add_argument("shell", choices=("bash", "zsh"), help='for example: eval "$(prfaas completion bash)"')
    return parser


def _add(commands: Any, name: str, command: Command, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(command=command)
    parser.add_argument("--json", action="store_true", dest="as_json", help="JSON, as where no terminal is")
    config.add_flags(parser, ConsoleConfig, reads_files=True)
    return parser


def _add_top(commands: Any) -> None:
    top = _add(commands, "top", _top, "the deployment, live")
    top.add_argument("--every", default="1s", metavar="TIME", help="how often; by default 1s")
    top.add_argument("--refreshes", type=int, default=0, metavar="N", help="end after so many; 0: when interrupted")


def _add_pool(commands: Any) -> None:
    pool = commands.add_parser("pool", help="what the pools hold").add_subparsers(metavar="COMMAND", required=True)
    _add(pool, "ls", _pool_ls, "blocks and bytes by cluster, node, model, KV group and tier")
    _add(pool, "hot", _pool_hot, "the prefixes that a manager was asked for most of late")
    pin = _add(pool, "pin", _pool_order, "keep a prefix in memory until it is unpinned")
    pin.add_argument("--soft", action="store_true", help="until nothing else can leave")
    unpin = _add(pool, "unpin", _pool_order, "let a pinned prefix leave like any other")
    remove = _add(pool, "rm", _pool_order, "remove a prefix, what follows it and what only it needed, unless in use")
    for parser, order in ((pin, "pin"), (unpin, "unpin"), (remove, "remove")):
        parser.set_defaults(order=order)
        parser.add_argument("hash", metavar="HASH", help="of its last token, as `prfaas pool hot` shows it")
        parser.add_argument("--node", action="append", metavar="NODE", help="an agent's name; by default all")


def _add_doctor(commands: Any) -> None:
    doctor = _add(commands, "doctor", _doctor, "what is wrong with this machine and what is configured on it")
    for name in COMPONENTS:
        usual = DIRECTORY / f"{name}.yaml"
        doctor.add_argument(
            f"--{name}", type=Path, metavar="FILE", help=f"settings of prfaas-{name}; {usual} if it exists"
        )
    doctor.add_argument(
        "--proc", type=Path, default=Path("/proc"), metavar="DIR", help="the kernel's files; by default /proc"
    )


def _add_certs(commands: Any) -> None:
    group = commands.add_parser("certs", help="certificates to try mutual TLS out with")
    works = group.add_subparsers(metavar="COMMAND", required=True)
    new = _add(works, "new", _certs, "certificates for these names; founds the authority where there is none")
    revoke = _add(works, "revoke", _certs, "put the certificates of these names on the revocation list")
    ls = _add(works, "ls", _certs, "the certificates of a directory, and which of them count")
    for work, parser in (("new", new), ("revoke", revoke), ("ls", ls)):
        parser.set_defaults(work=work)
        parser.add_argument("directory", type=Path, metavar="DIR", help="where the authority and its files are")
    for parser in (new, revoke):
        parser.add_argument("names", nargs="+", metavar="NAME", help="an agent's name, `router`, `manager`, `operator`")
    new.add_argument("--host", action="append", default=[], help="an address or name where they serve; repeatable")
    new.add_argument("--days", type=int, default=90, metavar="N", help="how long they are valid; by default 90")


def _add_config(commands: Any) -> None:
    group = commands.add_parser("config", help="configuration files").add_subparsers(metavar="COMMAND", required=True)
    check = _add(group, "check", _config_check, "read files as their components would, and say what is wrong")
    check.add_argument("files", nargs="*", metavar="FILE", help="by default those in /etc/prfaas")
    check.add_argument("--component", choices=tuple(CONFIGURED), help="by default what the file's name begins with")


def main(argv: Sequence[str] | None = None) -> int:
    """Do what a command line says; 1 when something is wrong, 2 when it could not be looked at."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    settings: ConsoleConfig | None = None
    try:
        settings = config.load(
            ConsoleConfig,
            component="console",
            file=_file(arguments),
            flags=config.given_flags(arguments),
            check=named_files.check if arguments.check_config else None,
        )
        if arguments.check_config:
            sys.stdout.write(config.show(settings))
            return 0
        return _run(Call(settings, arguments))
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    except (PrfaasError, ValueError, OSError) as error:
        sys.stderr.write(f"prfaas: {error}{_own_certificate(error, settings)}\n")
        return 2


def _own_certificate(error: Exception, settings: ConsoleConfig | None) -> str:
    """What can be said of the operator's own certificate where a page refuses one."""
    files = CertificateFiles.of(settings) if settings else None
    return (
        f"; {describe_certificate(files)}" if files and isinstance(error, PageUnreachable) and error.is_refusal else ""
    )


def _file(arguments: argparse.Namespace) -> Path | None:
    """Return the settings' file: the one named, or the machine's."""
    file: Path | None = arguments.config
    usual = DIRECTORY / "console.yaml"
    return file or (usual if usual.exists() else None)


def _run(call: Call) -> int:
    command: Command = call.arguments.command
    if command is _top:
        every = units.parse_seconds(call.arguments.every)
        num_refreshes, as_json = call.arguments.refreshes, call.arguments.as_json
        watch(lambda: command(call), interval_seconds=every, num_refreshes=num_refreshes, as_json=as_json)
        return 0
    answer = command(call)
    show(answer, as_json=call.arguments.as_json)
    return answer.status


if __name__ == "__main__":
    sys.exit(main())
