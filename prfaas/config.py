"""Settings: one frozen dataclass per component, read from YAML file < environment < command-line flag.

    @dataclass(frozen=True)
    class AgentConfig:
        name: str = setting("text", required=True, doc="Name of this node, unique in the deployment.")
        pool_bytes: int = setting("bytes", default=4 << 30, doc="Host memory that the pool may use.")
        links: tuple[LinkConfig, ...] = setting(records(LinkConfig), default=(), doc="Paths to other clusters.")

    config = parse(AgentConfig, component="agent", argv=sys.argv[1:])

`pool_bytes` above is the key `pool_bytes` of the file, the variable PRFAAS_AGENT_POOL_BYTES and the flag --pool-bytes.
A key of a nested record (`wire: {port: 1}`) is PRFAAS_AGENT_WIRE_PORT and --wire-port."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import yaml

import prfaas
from prfaas import config_checks
from prfaas.errors import ConfigError
from prfaas.units import KINDS, Kind, KindName

T = TypeVar("T")


@dataclass(frozen=True)
class Record:
    """The kind of a setting that is itself a record of settings, or a list of such records."""

    cls: type[Any]
    many: bool


@dataclass(frozen=True)
class Setting:
    """What the loader and the documentation know of one field."""

    kind: Kind | Record
    required: bool
    doc: str
    minimum: float | None
    maximum: float | None
    only_where: config_checks.Conditions

    @property
    def accepted(self) -> str:
        """What people may write, in words, limits included."""
        if isinstance(self.kind, Record):
            keys = ", ".join(name for name, _ in settings(self.kind.cls))
            return f"a {'list of records' if self.kind.many else 'record'} with keys out of {keys}"
        limits = [f"at least {self.kind.show(self.minimum)}"] if self.minimum is not None else []
        limits += [f"at most {self.kind.show(self.maximum)}"] if self.maximum is not None else []
        return ", ".join([self.kind.accepted, *limits])


def record(cls: type[Any]) -> Record:
    """The kind of a setting that is one nested record; without a default it is a record of its own defaults."""
    return Record(cls, many=False)


def records(cls: type[Any]) -> Record:
    """The kind of a setting that is a list of records, which becomes a tuple of `cls`."""
    return Record(cls, many=True)


def setting(
    kind: KindName | Kind | Record,
    *,
    doc: str,
    default: Any = dataclasses.MISSING,
    required: bool = False,
    minimum: float | None = None,
    maximum: float | None = None,
    only_where: config_checks.Conditions = MappingProxyType({}),
) -> Any:
    """A dataclass field with all that the loader needs; `default` and the limits are in base units.

    A `default` of None, or of "" for a text, makes the setting optional: people may leave it empty. `only_where`: other
    settings of the dataclass beside which alone this one means something; its documentation begins with that.
    Every field is keyword-only, so that order does not matter.
    """
    resolved = KINDS[kind] if isinstance(kind, str) else kind
    condition = f"With {config_checks.shown(only_where)}. " if only_where else ""
    metadata = {"setting": Setting(resolved, required, condition + doc, minimum, maximum, only_where)}
    if required:
        return dataclasses.field(kw_only=True, metadata=metadata)
    if isinstance(resolved, Record) and default is dataclasses.MISSING:
        return dataclasses.field(kw_only=True, default_factory=resolved.cls, metadata=metadata)
    return dataclasses.field(kw_only=True, default=default, metadata=metadata)


def settings(cls: type[Any]) -> Iterator[tuple[str, Setting]]:
    """Name and setting of every field of a configuration dataclass, in order."""
    return ((field.name, field.metadata["setting"]) for field in dataclasses.fields(cls))


def default(cls: type[Any], name: str) -> Any:
    """The default of a setting that is not required, in base units."""
    field = cls.__dataclass_fields__[name]
    return field.default_factory() if field.default is dataclasses.MISSING else field.default


def paths(cls: type[Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Setting]]:
    """Every setting that a variable or a flag can give: those of nested records too, lists of records as one text."""
    for name, its in settings(cls):
        if isinstance(its.kind, Record) and not its.kind.many:
            yield from paths(its.kind.cls, (*prefix, name))
        else:
            yield (*prefix, name), its


def variable(component: str, path: tuple[str, ...]) -> str:
    """The environment variable of a setting."""
    return "_".join(("PRFAAS", component, *path)).upper()


def flag(path: tuple[str, ...]) -> str:
    """The command-line flag of a setting."""
    return "--" + "-".join(path).replace("_", "-")


@dataclass(frozen=True)
class _Given:
    """A value as somebody wrote it, and where ("" where nobody did); None is YAML's empty value."""

    where: str
    content: str | list[_Given] | dict[str, _Given] | None

    @property
    def before(self) -> str:
        """What a message begins with."""
        return f"{self.where}: " if self.where else ""


def load(
    cls: type[T],
    *,
    component: str,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
    varied: str = "",
    check: Callable[[T], None] | None = None,
) -> T:
    """The configuration of `component`; `flags` maps dotted setting names to texts, `environment` is the process's own.

    `varied` is a setting that is given several values in turn: what means something beside one of them only is kept.
    `check` raises ConfigError, with the setting's name, for what else is wrong, such as files that are named and missing.

    Raises:
        ConfigError: a key is unknown or missing, a value malformed or out of range, or a setting given other than
            its default beside which another one must be; it names place, key and accepted form. Of what is wrong with
            keys and values it has each, a line for one; of what does not fit together the first, once these are right.
    """
    environment = os.environ if environment is None else environment
    given = _read_file(file) if file else _Given("", {})
    by_path = dict(paths(cls))
    known = {variable(component, path): path for path in by_path}
    for name in sorted(environment):
        if name.startswith(variable(component, ("",))):
            where = f"environment variable {name}"
            if name not in known:
                raise ConfigError(f"{where}: unknown setting{_suggestion(name, known)}")
            _put(given, known[name], _from_text(by_path[known[name]], environment[name], where))
    for dotted, text in (flags or {}).items():
        path = tuple(dotted.split("."))
        _put(given, path, _from_text(by_path[path], text, f"flag {flag(path)}"))
    config = _build(cls, given, component=component, prefix=())
    assert isinstance(config, cls)
    _refuse_meaningless(config, given, varied)
    if check is not None:
        try:
            check(config)
        except ConfigError as error:
            raise ConfigError(f"{_written(given, str(error)).before}{error}") from error
    return config


def _written(given: _Given, message: str) -> _Given:
    """The first setting of a record that a message names; the record itself when none was given."""
    content = given.content if isinstance(given.content, dict) else {}
    return next((content[word] for word in re.findall(r"\w+", message) if word in content), given)


def _refuse_meaningless(config: Any, given: _Given, varied: str = "", *, prefix: tuple[str, ...] = ()) -> None:
    """Raise ConfigError for one of a component's settings, or its single records', that was given without what it needs.

    With its default it is taken: it asks for nothing, and the annotated files have such lines.
    """
    for name, its in settings(type(config)):
        written = given.content.get(name) if isinstance(given.content, dict) else None
        if isinstance(its.kind, Record) and not its.kind.many and written is not None and written.content:
            _refuse_meaningless(getattr(config, name), written, prefix=(*prefix, name))
        needs = {other: one for other, one in config_checks.unmet(its.only_where, config).items() if other != varied}
        if needs and written is not None and getattr(config, name) != default(type(config), name):
            raise ConfigError(f"{written.where}: {'.'.join((*prefix, name))}: needs {config_checks.shown(needs)}")


def load_file(cls: type[T], file: Path) -> T:
    """The records of a file that no variable and no flag overrides: a description, not a component's settings.

    Raises:
        ConfigError: as `load` does.
    """
    config = _build(cls, _read_file(file), component=None, prefix=())
    assert isinstance(config, cls)
    return config


def load_mapping(cls: type[T], values: Mapping[str, Any], *, where: str) -> T:
    """The configuration that another program's settings hold as plain values; `where` names that place in messages.

    Raises:
        ConfigError: as `load` does.
    """
    config = _build(cls, given := _from_plain(values, where), component=None, prefix=())
    assert isinstance(config, cls)
    _refuse_meaningless(config, given)
    return config


def _from_plain(value: Any, where: str) -> _Given:
    if isinstance(value, Mapping):
        return _Given(where, {str(key): _from_plain(item, where) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return _Given(where, [_from_plain(item, where) for item in value])
    return _Given(where, None if value is None else str(value))


def _put(given: _Given, path: tuple[str, ...], value: _Given) -> None:
    """Override one setting in the tree, in place; `_build` refuses a node that should be a record and is none."""
    for name in path[:-1]:
        if not isinstance(given.content, dict):
            return
        inner = given.content.get(name)
        if inner is None or inner.content is None:
            inner = given.content[name] = _Given(value.where, {})
        given = inner
    if isinstance(given.content, dict):
        given.content[path[-1]] = value


def _read_file(file: Path) -> _Given:
    try:
        return _read_text(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error


def _read_text(text: str, name: str) -> _Given:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        where = f"{name} line {error.problem_mark.line + 1}" if error.problem_mark else name
        raise ConfigError(f"{where}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:  # a character that may not be in YAML
        raise ConfigError(f"{name}: not YAML: {str(error).splitlines()[0]}") from error
    return _Given(name, {}) if node is None else _from_node(node, name, node.start_mark.line)


def _from_text(its: Setting, text: str, where: str) -> _Given:
    """What a variable or a flag gives: a list of records is written there as YAML."""
    return _read_text(text, where) if isinstance(its.kind, Record) else _Given(where, text)


def _from_node(node: yaml.Node, name: str, line: int) -> _Given:
    where = f"{name} line {line + 1}"
    if isinstance(node, yaml.ScalarNode):
        return _Given(where, None if node.tag == "tag:yaml.org,2002:null" else node.value)
    if isinstance(node, yaml.SequenceNode):
        return _Given(where, [_from_node(item, name, item.start_mark.line) for item in node.value])
    content: dict[str, _Given] = {}
    for key, value in node.value:
        if key.value in content:
            raise ConfigError(f"{name} line {key.start_mark.line + 1}: {key.value}: given twice")
        content[str(key.value)] = _from_node(value, name, key.start_mark.line)
    return _Given(where, content)


def _build(cls: type[Any], given: _Given, *, component: str | None, prefix: tuple[str, ...]) -> Any:
    known = dict(settings(cls))
    if not isinstance(given.content, dict):
        raise ConfigError(f"{given.before}{_dotted(prefix)}expected a record with keys out of {', '.join(known)}")
    values: dict[str, Any] = {}
    faults = _Faults()
    for name, value in given.content.items():
        with faults.kept():
            if name not in known:
                raise ConfigError(f"{value.where}: {'.'.join((*prefix, name))}: unknown key{_suggestion(name, known)}")
            values[name] = _convert(cls, known[name], value, component=component, path=(*prefix, name))
    for name in [name for name in known if name not in given.content]:
        with faults.kept():
            values |= _absent(cls, known[name], given, component=component, path=(*prefix, name))
    faults.tell()
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigError(f"{_written(given, str(error)).before}{_dotted(prefix)}{error}") from error


class _Faults:
    """What is wrong with several settings, told together."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """What the block raises is told later."""
        try:
            yield
        except ConfigError as error:
            self._texts.append(str(error))

    def tell(self) -> None:
        """Raise ConfigError if there is any, a line for each."""
        if self._texts:
            raise ConfigError("\n".join(self._texts))


def _absent(
    cls: type[Any], its: Setting, given: _Given, *, component: str | None, path: tuple[str, ...]
) -> dict[str, Any]:
    """The value of a setting that is not given, where that is not its default. Raises ConfigError where it must be given."""
    if its.required:
        raise ConfigError(f"{given.before}{_missing(path, its, component=component)}")
    if not isinstance(its.kind, Record) or its.kind.many or default(cls, path[-1]) is None:
        return {}
    return {path[-1]: _build(its.kind.cls, _Given(given.where, {}), component=component, prefix=path)}


def _missing(path: tuple[str, ...], its: Setting, *, component: str | None) -> str:
    elsewhere = f", or set {variable(component, path)} or {flag(path)}" if component else ""
    return f"{'.'.join(path)}: missing; write {its.accepted}{elsewhere}"


def _dotted(prefix: tuple[str, ...]) -> str:
    return ".".join(prefix) + ": " if prefix else ""


def _suggestion(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"


def _convert(cls: type[Any], its: Setting, given: _Given, *, component: str | None, path: tuple[str, ...]) -> Any:
    if not given.content and not its.required and default(cls, path[-1]) in (None, ""):
        return default(cls, path[-1])
    if isinstance(its.kind, Record):
        return _convert_record(its.kind, given, component=component, path=path)
    try:
        return _parse(its, its.kind, given)
    except (ValueError, OverflowError) as error:
        written = f"{given.content!r}: " if isinstance(given.content, str) else ""
        raise ConfigError(f"{given.where}: {'.'.join(path)}: {written}{error}; write {its.accepted}") from error


def _convert_record(kind: Record, given: _Given, *, component: str | None, path: tuple[str, ...]) -> Any:
    if not kind.many:
        return _build(kind.cls, given, component=component, prefix=path)
    if not isinstance(given.content, list):
        raise ConfigError(f"{given.where}: {'.'.join(path)}: expected a list of records")
    built, faults = [], _Faults()
    for index, item in enumerate(given.content):
        with faults.kept():
            built.append(_build(kind.cls, item, component=component, prefix=(*path[:-1], f"{path[-1]}[{index}]")))
    faults.tell()
    return tuple(built)


def _parse(its: Setting, kind: Kind, given: _Given) -> Any:
    if kind is KINDS["text_list"] and isinstance(given.content, list):
        return tuple(KINDS["text"].parse(_scalar(item)) for item in given.content)
    value = kind.parse(_scalar(given))
    if its.minimum is not None and value < its.minimum:
        raise ValueError("too small")
    if its.maximum is not None and value > its.maximum:
        raise ValueError("too large")
    return value


def _scalar(given: _Given) -> str:
    if isinstance(given.content, str):
        return given.content
    raise ValueError("empty" if given.content is None else "a single value is expected")


def add_flags(parser: argparse.ArgumentParser, cls: type[Any], *, reads_files: bool) -> None:
    """Add --config, --check-config and one flag for each setting of `cls`; all values stay texts.

    `reads_files`: whether --check-config looks at the files that settings name, for its help.
    """
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings as YAML")
    before = "read the files that settings name, " if reads_files else ""
    parser.add_argument("--check-config", action="store_true", help=f"{before}print the settings and exit")
    for path, its in paths(cls):
        on = {"nargs": "?", "const": "true"} if its.kind is KINDS["flag"] else {}
        help_text = f"{its.doc} Write {its.accepted}.".replace("%", "%%")
        dest = "setting " + ".".join(path)
        parser.add_argument(flag(path), dest=dest, metavar=path[-1].upper(), help=help_text, **on)  # type: ignore[arg-type]


def given_flags(namespace: argparse.Namespace) -> dict[str, str]:
    """The settings that the command line gave, as `load` takes them."""
    items = vars(namespace).items()
    return {
        name.removeprefix("setting "): text for name, text in items if name.startswith("setting ") and text is not None
    }


def parse(
    cls: type[T], *, component: str, argv: Sequence[str], doc: str = "", check: Callable[[T], None] | None = None
) -> T:
    """The configuration of a command; ends the process for --help, --version, --check-config and a wrong setting.

    `check` is what is looked at besides (`load`), as --check-config does.
    """
    parser = argparse.ArgumentParser(prog=f"prfaas-{component}", description=doc)
    parser.add_argument("--version", action="version", version=f"%(prog)s {prfaas.__version__}")
    add_flags(parser, cls, reads_files=check is not None)
    namespace = parser.parse_args(argv)
    try:
        config = load(cls, component=component, file=namespace.config, flags=given_flags(namespace), check=check)
    except ConfigError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    if namespace.check_config:
        sys.stdout.write(show(config))
        parser.exit(0)
    return config


def show(config: Any) -> str:
    """The settings in force as YAML that `load` reads back to an equal configuration."""
    return yaml.safe_dump(_shown(config), sort_keys=False, allow_unicode=True)


def shown_default(cls: type[Any], name: str) -> Any:
    """The default of a setting as people would write it."""
    return _shown_value(dict(settings(cls))[name], default(cls, name))


def _shown(config: Any) -> dict[str, Any]:
    meant = ((name, its) for name, its in settings(type(config)) if not config_checks.unmet(its.only_where, config))
    return {name: _shown_value(its, getattr(config, name)) for name, its in meant}


def _shown_value(its: Setting, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(its.kind, Record):
        return [_shown(item) for item in value] if its.kind.many else _shown(value)
    return list(value) if its.kind is KINDS["text_list"] else its.kind.show(value)
