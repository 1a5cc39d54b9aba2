"""`prfaas`: shows, changes and diagnoses a deployment."""

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
from prfaas.cli import startup
from prfaas.cli.component import check_named_files
from prfaas.console import tables
from prfaas.console.components import Components, ask_components
from prfaas.console.config import ConsoleConfig
from prfaas.console.doctor.finding import findings_table
from prfaas.console.own_machine import COMPONENTS, beside_components
from prfaas.console.pages import first_json, read_json, readiness, tls_of
from prfaas.console.terminal import CommandOutput, show
from prfaas.console.watching import watch
from prfaas.errors import ConfigError, PageUnreachable, PrfaasError
from prfaas.router.http.admission import read_key
from prfaas.transport.net.tls import describe_certificate

CONFIGURED: dict[str, type[Any]] = {**COMPONENTS, "console": ConsoleConfig}
DIRECTORY = Path("/etc/prfaas")


@dataclass(frozen=True)
class Call:
    """Settings and arguments of one command line."""

    settings: ConsoleConfig
    arguments: argparse.Namespace

    def page(self, path: str) -> Any:
        """Return a page of the managers. Raises PageUnreachable."""
        settings = self.settings
        try:
            return first_json(settings.pages, path, timeout_seconds=settings.timeout, tls=tls_of(settings.tls))
        except PageUnreachable as error:
            if settings.managers:
                raise
            why = "no manager is named in the settings of this machine's components"
            raise PageUnreachable(f"{error}; {why}", is_refusal=error.is_refusal) from error

    def page_or_components(self, path: str) -> Any:
        """Return a page of the managers, or what routers and agents say if no manager answers.

        Raises:
            PageUnreachable: nobody answers.
        """
        try:
            return self.page(path)
        except PageUnreachable as error:
            return ask_components(self.settings, error)


def _status(call: Call) -> CommandOutput:
    return _ready(call) if call.arguments.ready else _summary(call)


def _summary(call: Call) -> CommandOutput:
    state = call.page_or_components("/state")
    if isinstance(state, Components):
        return CommandOutput(state.document(), state.status_tables(), status=1 if state.failures else 0)
    plan = call.page("/plan")
    return CommandOutput({"state": state, **plan}, tables.status_tables(state, plan))


def _ready(call: Call) -> CommandOutput:
    """Return each manager's reply at /readyz."""
    settings = call.settings
    tls = tls_of(settings.tls)
    found = {page: readiness(page, timeout_seconds=settings.timeout, tls=tls) for page in settings.pages}
    moods = tuple[tables.Mood, ...]("good" if reply == "ready" else "bad" for reply in found.values())
    table = tables.Table("Managers", ("pages", "readiness"), tuple(found.items()), moods)
    return CommandOutput(found, [table], status=0 if set(moods) == {"good"} else 1)


def _links(call: Call) -> CommandOutput:
    found = call.page_or_components("/state")
    state = found.state if isinstance(found, Components) else found
    links = [
        {"node": node["node"]["name"], **link} for node in tables.nodes_of(state) for link in node.get("links", [])
    ]
    return CommandOutput(links, [tables.link_table(state)])


def _top(call: Call) -> CommandOutput:
    """Return the deployment, or the error if no manager answers, so that the next refresh can try again."""
    try:
        status = _summary(call)
    except PageUnreachable as error:
        table = tables.Table("Managers", ("error",), ((str(error),),), ("bad",))
        return CommandOutput({"error": str(error)}, [table])
    document = status.document
    if "state" not in document:
        return CommandOutput(document, [*status.tables, _links(call).tables[0]])
    return CommandOutput(document, tables.top_tables(document["state"], document))


_OF_ROUTER = frozenset({"page", "at", "explanation"})  # A router knows more than the manager that decided.


def _explain(call: Call) -> CommandOutput:
    request, settings = call.arguments.request, call.settings
    manager_tls, router_tls = tls_of(settings.tls), tls_of(settings.tls)
    if router_tls is not None:
        router_tls.load_default_certs()  # A router may show its clients a publicly trusted certificate.
    router_key = read_key(settings.router_key_file, setting="router_key_file")
    pages = [f"{router.rstrip('/')}/debug/decision/{request}" for router in settings.routers]
    records, failures = _records_at(pages, timeout_seconds=settings.timeout, tls=router_tls, key=router_key)

    def decided(decision_id: str) -> dict[str, Any]:
        pages = [f"{manager.rstrip('/')}/decisions/{decision_id}" for manager in settings.pages]
        found, unanswered = _records_at(pages, timeout_seconds=settings.timeout, tls=manager_tls)
        failures.extend(unanswered)
        return found[0] if found else {}

    if records:
        records = [
            record | {key: value for key, value in decided(record["decision_id"]).items() if key not in _OF_ROUTER}
            if record.get("decision_id")
            else record
            for record in records
        ]
    elif manager_record := decided(request):
        records = [manager_record]
    if not records:
        reasons = "".join(f"; {failure}" for failure in failures)
        raise PageUnreachable(f"{request}: none of the latest requests of the routers and managers asked{reasons}")
    newest, *older = sorted(records, key=lambda record: -record.get("at", 0.0))
    document = newest | ({"others": older} if older else {}) | ({"unanswered": failures} if failures else {})
    shown = [table for record in (newest, *older) for table in tables.explanation_tables(record)]
    return CommandOutput(document, shown + tables.unanswered_tables(failures))


def _records_at(
    pages: Iterable[str], *, timeout_seconds: float, tls: ssl.SSLContext | None, key: str = ""
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the records of these pages, each with its page, and the errors of pages that failed."""
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


def _carry_out(call: Call, method: str, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    """Have the managers carry out operations, and return the fields of the answers."""
    if not call.settings.managers:
        raise ConfigError("managers: missing; drains and role changes need a manager")
    changes, secret = (
        startup.load_extra("prfaas.console.changes", extra="site"),
        grants.read_secret(call.settings.secret_file),
    )
    answers: list[dict[str, Any]] = asyncio.run(changes.carry_out(call.settings, secret, method, *requests))
    return answers


def _drain(call: Call) -> CommandOutput:
    node, seconds = call.arguments.node, units.parse_seconds(call.arguments.within)
    _report_wait(call.arguments)
    (moved,) = _carry_out(call, "Drain", {"node": node, "timeout_seconds": seconds})
    moved["node"] = node
    left = (moved["num_requests_left"], moved["num_engines_unknown"])
    counts = (str(moved["num_prefixes"]), tables.size(moved["moved_bytes"]), *map(str, left))
    columns = ("node", "prefixes moved", "bytes moved", "requests still running", "engines without a report")
    title = "Draining, not yet empty" if any(left) else "Drained"
    return CommandOutput(
        moved, [tables.Table(title, columns, ((moved["node"], *counts),))], status=1 if any(left) else 0
    )


def _report_wait(arguments: argparse.Namespace) -> None:
    if units.parse_seconds(arguments.within):
        sys.stderr.write(f"prfaas: {arguments.node}: waiting for running requests, {arguments.within} at most\n")


def _undrain(call: Call) -> CommandOutput:
    node = call.arguments.node
    _carry_out(call, "Undrain", {"node": node})
    return CommandOutput({"node": node}, [tables.Table("Placement resumed", ("node",), ((node,),))])


def _flip(call: Call) -> CommandOutput:
    asked = {name: getattr(call.arguments, name) for name in ("node", "role")}
    seconds = units.parse_seconds(call.arguments.within)
    _report_wait(call.arguments)
    (response,) = _carry_out(call, "SetRole", {**asked, "timeout_seconds": seconds})
    changed = response["changes"]
    for change in changed:
        if change.pop("is_load_unknown"):
            change["num_requests_left"] = None
    rows = tuple(
        (
            change["instance"],
            change["before"],
            change["after"],
            "unknown" if change["num_requests_left"] is None else str(change["num_requests_left"]),
        )
        for change in changed
    )
    return CommandOutput(changed, [tables.Table("Roles", ("instance", "before", "role", "requests left"), rows)])


def _certs(call: Call) -> CommandOutput:
    certs = startup.load_extra("prfaas.console.certs", extra="site")
    given = call.arguments
    match given.work:
        case "new":
            found = certs.make(given.directory, given.names, hosts=given.host, days=given.days)
        case "revoke":
            found = certs.revoke(given.directory, given.names)
        case _:
            found = certs.entries(given.directory)
    return CommandOutput(found.records(), [found])


def _pool_ls(call: Call) -> CommandOutput:
    holdings = call.page_or_components("/pool")
    if isinstance(holdings, Components):
        return CommandOutput(holdings.document()["agents"], [holdings.pool_table()])
    return CommandOutput(holdings, [tables.records_table("Pool", holdings, tables.POOL_COLUMNS)])


def _pool_hot(call: Call) -> CommandOutput:
    prefixes = call.page("/hot")
    return CommandOutput(prefixes, [tables.records_table("Hot prefixes", prefixes, tables.HOT_COLUMNS)])


def _init(call: Call) -> CommandOutput:
    site_files = startup.load_extra("prfaas.console.site_files", extra="site")
    given = call.arguments
    folder: Path = given.folder or Path(f"prfaas-{given.site}")
    peer = "east" if given.site == "west" else "west"
    answers = site_files.read_answers(folder)
    if answers is None:
        model = _answer(given, "model", "model folder, or name at a hub")
        found = {
            given.site: _answer(given, "address", "this machine's address"),
            peer: _answer(given, "other", "the other machine's address"),
            "model": model,
            "served_name": _answer(given, "served_name", "served name", usual=model.rstrip("/").rpartition("/")[2]),
        }
        answers = site_files.Answers(**found)
    pool = _answer(given, "pool", "host memory for KV", usual="4GiB")
    share = site_files.write_site(given.site, folder, answers, pool=pool)
    folder = folder.resolve()
    steps = [f"prfaas up {folder}"]
    if share is not None:
        steps = [f"scp -rp {share} {answers.address(peer)}:prfaas-{peer}", f"there: prfaas init {peer}", *steps]
    rows = tuple((str(path.relative_to(folder)),) for path in sorted(folder.rglob("*")) if path.is_file())
    document = {"folder": str(folder), "files": [row[0] for row in rows], "next": steps}
    return CommandOutput(document, [tables.Table(str(folder), ("file",), rows, notes=("next:", *steps))])


def _answer(given: argparse.Namespace, name: str, question: str, *, usual: str = "") -> str:
    """Return a fact from its flag, or from the user on a terminal, or the usual one.

    Raises:
        ConfigError: nobody can be asked.
    """
    flag: str = getattr(given, name) or ""
    if flag:
        return flag
    if sys.stdin.isatty():
        written = input(f"{question}{f' [{usual}]' if usual else ''}: ").strip() or usual
        if written:
            return written
    if usual:
        return usual
    raise ConfigError(f"--{name.replace('_', '-')}: missing; name {question}")


def _up(call: Call) -> CommandOutput:
    site_processes = startup.load_extra("prfaas.console.site_processes", extra="site")
    folder, seconds = call.arguments.folder, units.parse_seconds(call.arguments.within)
    started = site_processes.start_all(
        folder, within_seconds=seconds, tell=lambda text: sys.stderr.write(f"prfaas: {text}\n")
    )
    return CommandOutput(
        {process.name: process.pid() for process in started}, [site_processes.processes_table(started)]
    )


def _down(call: Call) -> CommandOutput:
    site_processes = startup.load_extra("prfaas.console.site_processes", extra="site")
    ended = site_processes.end_all(call.arguments.folder)
    return CommandOutput([process.name for process in ended], [site_processes.processes_table(ended)])


def _doctor(call: Call) -> CommandOutput:
    given = {name: getattr(call.arguments, name) for name in COMPONENTS}
    named = {name: path for name, path in given.items() if path is not None}
    examination = startup.load_extra("prfaas.console.doctor.examination", extra="site")
    patient = examination.Patient(
        files=named or _usual_files(COMPONENTS, _directory(call.arguments)),
        proc=call.arguments.proc,
        console=call.settings,
        check=check_named_files,
    )
    found = examination.examine(patient)
    is_healthy = all(finding.outcome == "good" for finding in found)
    return CommandOutput([asdict(finding) for finding in found], [findings_table(found)], status=0 if is_healthy else 1)


def _usual_files(names: Iterable[str], directory: Path) -> dict[str, Path]:
    """Return the settings files that exist in a folder."""
    usual = {name: directory / f"{name}.yaml" for name in names}
    return {name: path for name, path in usual.items() if path.exists()}


def _config_check(call: Call) -> CommandOutput:
    """Read each file in the way of the component."""
    rows: list[tuple[str, str, str]] = []
    directory = _directory(call.arguments)
    files = [Path(path) for path in call.arguments.files] or [*_usual_files(CONFIGURED, directory).values()]
    if not files:
        raise ConfigError(f"{directory} has no settings files of {', '.join(CONFIGURED)}; name files")
    for path in files:
        rows += [_checked(path, component=call.arguments.component)]
    moods = tuple[tables.Mood, ...]("good" if outcome == "good" else "bad" for _, _, outcome in rows)
    table = tables.Table("Configuration", ("file", "component", "outcome"), tuple(rows), moods)
    return CommandOutput(table.records(), [table], status=0 if set(moods) == {"good"} else 1)


def _checked(path: Path, *, component: str | None) -> tuple[str, str, str]:
    name = component or next((name for name in CONFIGURED if path.stem.startswith(name)), None)
    if name is None:
        return str(path), "?", f"name the component: --component {'|'.join(CONFIGURED)}"
    try:
        config.load(CONFIGURED[name], component=name, file=path, check=check_named_files)
    except ConfigError as error:
        return str(path), name, str(error)
    return str(path), name, "good"


Command = Callable[[Call], CommandOutput]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prfaas", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {prfaas.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    status = _add(commands, "status", _status, "summary of the deployment: clusters, instances, threshold, plan")
    status.add_argument(
        "--ready", action="store_true", help="only the readiness of the managers; exit status 1 if one is not ready"
    )
    _add(commands, "links", _links, "all links between nodes: goodput, capacity, round trip, retransmissions")
    _add_top(commands)
    explain = _add(commands, "explain", _explain, "the decision about a recent request")
    explain.add_argument("request", metavar="REQUEST", help="x-request-id of the request, or a manager's decision id")
    drain = _add(commands, "drain", _drain, "send no new work to a node and copy its unique prefixes elsewhere")
    drain.add_argument("node", metavar="NODE", help="the agent's name")
    drain.add_argument(
        "--within", default="60s", metavar="TIME", help="time limit for copies and running requests; default 60s"
    )
    undrain = _add(commands, "undrain", _undrain, "send work to a drained node again")
    undrain.add_argument("node", metavar="NODE", help="the agent's name")
    flip = _add(commands, "flip", _flip, "give a node's instances another role after their requests have ended")
    flip.add_argument("node", metavar="NODE", help="the agent's name")
    flip.add_argument("role", choices=("prefill", "decode", "both", "announced"), help="announced: the configured role")
    flip.add_argument("--within", default="120s", metavar="TIME", help="time limit for running requests; default 120s")
    _add_certs(commands)
    _add_pool(commands)
    _add_doctor(commands)
    _add_config(commands)
    _add_site(commands)
    return parser


def _add(commands: Any, name: str, command: Command, text: str) -> argparse.ArgumentParser:
    parser = _add_plain(commands, name, command, text)
    config.add_flags(parser, ConsoleConfig)
    return parser


def _add_plain(commands: Any, name: str, command: Command, text: str) -> argparse.ArgumentParser:
    """Add a command without the console's settings."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(command=command, config=None)
    parser.add_argument("--json", action="store_true", dest="as_json", help="print JSON, as without a terminal")
    return parser


def _add_top(commands: Any) -> None:
    top = _add(commands, "top", _top, "live view of the deployment")
    top.add_argument("--every", default="1s", metavar="TIME", help="refresh interval; default 1s")


def _add_pool(commands: Any) -> None:
    pool = commands.add_parser("pool", help="contents of the pools").add_subparsers(metavar="COMMAND", required=True)
    _add(pool, "ls", _pool_ls, "blocks and bytes by cluster, node, model, KV group and tier")
    _add(pool, "hot", _pool_hot, "the most requested prefixes of late")


def _add_doctor(commands: Any) -> None:
    doctor = _add(commands, "doctor", _doctor, "checks of this machine and the components configured on it")
    for name in COMPONENTS:
        usual = DIRECTORY / f"{name}.yaml"
        doctor.add_argument(
            f"--{name}", type=Path, metavar="FILE", help=f"settings of prfaas-{name}; default {usual} if it exists"
        )
    doctor.add_argument(
        "--proc", type=Path, default=Path("/proc"), metavar="DIR", help="the kernel's files; default /proc"
    )


def _add_certs(commands: Any) -> None:
    group = commands.add_parser("certs", help="certificates for a trial of mutual TLS")
    works = group.add_subparsers(metavar="COMMAND", required=True)
    new = _add(works, "new", _certs, "issue certificates for these names; create the authority if there is none")
    revoke = _add(works, "revoke", _certs, "put the certificates of these names on the revocation list")
    ls = _add(works, "ls", _certs, "the certificates of a directory and their state")
    for work, parser in (("new", new), ("revoke", revoke), ("ls", ls)):
        parser.set_defaults(work=work)
        parser.add_argument("directory", type=Path, metavar="DIR", help="directory of the authority and its files")
    for parser in (new, revoke):
        parser.add_argument("names", nargs="+", metavar="NAME", help="an agent's name, `router`, `manager`, `operator`")
    new.add_argument("--host", action="append", default=[], help="address or name of the server; repeatable")
    new.add_argument("--days", type=int, default=90, metavar="N", help="days of validity; default 90")


def _add_site(commands: Any) -> None:
    init = _add_plain(commands, "init", _init, "write every file of this machine's part of a two-machine deployment")
    init.add_argument("site", choices=("west", "east"), help="west decodes and serves clients, east prefills")
    init.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="default prfaas-west or prfaas-east")
    init.add_argument("--address", metavar="HOST", help="this machine's address, as the other reaches it")
    init.add_argument("--other", metavar="HOST", help="the other machine's address")
    init.add_argument("--model", help="model folder, or name at a hub")
    init.add_argument("--served-name", metavar="NAME", help="served model name; default: the model's last part")
    init.add_argument("--pool", metavar="SIZE", help="host memory for KV on this machine; default 4GiB")
    up = _add_plain(commands, "up", _up, "start the processes of a folder that `prfaas init` wrote")
    up.add_argument("--within", default="30m", metavar="TIME", help="time limit for the start; default 30m")
    down = _add_plain(commands, "down", _down, "end the processes of a folder that `prfaas init` wrote")
    for parser in (up, down):
        parser.add_argument("folder", type=Path, metavar="FOLDER", help="this machine's folder")


def _add_config(commands: Any) -> None:
    group = commands.add_parser("config", help="configuration files").add_subparsers(metavar="COMMAND", required=True)
    check = _add(group, "check", _config_check, "read files in the way of the components and report errors")
    check.add_argument("files", nargs="*", metavar="FILE", help="default: those in /etc/prfaas")
    check.add_argument("--component", choices=tuple(CONFIGURED), help="default: from the file's name")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return 1 when something is wrong, 2 when it could not be checked."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    settings: ConsoleConfig | None = None
    try:
        settings = config.load(
            ConsoleConfig, component="console", file=_file(arguments), flags=config.given_flags(arguments)
        )
        settings = beside_components(settings, _directory(arguments))
        return _run(Call(settings, arguments))
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    except (PrfaasError, ValueError, OSError) as error:
        sys.stderr.write(f"prfaas: {error}{_own_certificate(error, settings)}\n")
        return 2


def _own_certificate(error: Exception, settings: ConsoleConfig | None) -> str:
    """Return a description of the operator's own certificate if a page rejected the connection."""
    files = settings.tls.files() if settings else None
    return (
        f"; {describe_certificate(files)}" if files and isinstance(error, PageUnreachable) and error.is_refusal else ""
    )


def _file(arguments: argparse.Namespace) -> Path | None:
    """Return the named settings file, or the machine's."""
    file: Path | None = arguments.config
    usual = _directory(arguments) / "console.yaml"
    return file if file and not file.is_dir() else usual if usual.exists() else None


def _directory(arguments: argparse.Namespace) -> Path:
    """Return the folder of settings files: a site's folder if --config names it."""
    return arguments.config if arguments.config and arguments.config.is_dir() else DIRECTORY


def _run(call: Call) -> int:
    command: Command = call.arguments.command
    if command is _top:
        watch(lambda: command(call), interval_seconds=units.parse_seconds(call.arguments.every))
        return 0
    answer = command(call)
    show(answer, as_json=call.arguments.as_json)
    return answer.status


if __name__ == "__main__":
    sys.exit(main())
