"""Component settings as frozen dataclasses. A flag overrides an environment variable, which overrides the YAML file.

    @dataclass(frozen=True)
    class AgentConfig:
        name: str = setting("text", required=True, doc="Name of this node, unique in the deployment.")
        pool_bytes: int = setting("bytes", default=4 << 30, doc="Host memory that the pool may use.")
        links: tuple[LinkConfig, ...] = setting(records(LinkConfig), default=(), doc="Links to other agents.")

    config = parse(AgentConfig, component="agent", argv=sys.argv[1:])

`pool_bytes` above is the YAML key `pool_bytes`, the variable PRFAAS_AGENT_POOL_BYTES and the flag --pool-bytes.
A key of a nested record (`wire: {port: 1}`) is PRFAAS_AGENT_WIRE_PORT and --wire-port.

A renamed setting lists the former names in `formerly`; `tls_*` stands for one former name of each key of a record.
A removed setting stands in the class variable `REMOVED_SETTINGS`.
Both are accepted for one version with a FutureWarning."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import yaml

import prfaas
from prfaas import config_checks
from prfaas.errors import ConfigError
from prfaas.units import KINDS, KindName, ValueKind

T = TypeVar("T")


@dataclass(frozen=True)
class RecordKind:
    """Kind of a setting that is itself a record of settings, or a list of such records."""

    cls: type[Any]
    many: bool


@dataclass(frozen=True)
class Setting:
    """Metadata of one field, for the loader and the documentation."""

    kind: ValueKind | RecordKind
    required: bool
    doc: str
    minimum: float | None
    maximum: float | None
    only_where: config_checks.Conditions
    formerly: tuple[str, ...]

    @property
    def accepted(self) -> str:
        """Return the accepted form in words, with limits."""
        if isinstance(self.kind, RecordKind):
            keys = ", ".join(name for name, _ in settings(self.kind.cls))
            return f"a {'list of records' if self.kind.many else 'record'} with keys out of {keys}"
        limits = [f"at least {self.kind.show(self.minimum)}"] if self.minimum is not None else []
        limits += [f"at most {self.kind.show(self.maximum)}"] if self.maximum is not None else []
        return ", ".join([self.kind.accepted, *limits])


def record(cls: type[Any]) -> RecordKind:
    """Return the kind of a nested record. Without a default it is a record of defaults."""
    return RecordKind(cls, many=False)


def records(cls: type[Any]) -> RecordKind:
    """Return the kind of a list of records, which becomes a tuple of `cls`."""
    return RecordKind(cls, many=True)


def setting(
    kind: KindName | ValueKind | RecordKind,
    *,
    doc: str,
    default: Any = dataclasses.MISSING,
    required: bool = False,
    minimum: float | None = None,
    maximum: float | None = None,
    only_where: config_checks.Conditions = MappingProxyType({}),
    formerly: tuple[str, ...] = (),
) -> Any:
    """Return a keyword-only dataclass field with all that the loader needs.

    Args:
        kind: Accepted form, such as "bytes" or `records(LinkConfig)`.
        doc: Description for the reference and `--help`.
        default: Value in base units. None, or "" for a text, makes the setting optional.
        required: Refuse to start without a value.
        minimum: Smallest accepted value in base units.
        maximum: Largest accepted value in base units.
        only_where: Values of other settings of the dataclass that this setting depends on.
        formerly: Earlier names of the setting.
    """
    resolved = KINDS[kind] if isinstance(kind, str) else kind
    condition = f"With {config_checks.describe(only_where)}. " if only_where else ""
    metadata = {"setting": Setting(resolved, required, condition + doc, minimum, maximum, only_where, formerly)}
    if required:
        return dataclasses.field(kw_only=True, metadata=metadata)
    if isinstance(resolved, RecordKind) and default is dataclasses.MISSING:
        return dataclasses.field(kw_only=True, default_factory=resolved.cls, metadata=metadata)
    return dataclasses.field(kw_only=True, default=default, metadata=metadata)


def settings(cls: type[Any]) -> Iterator[tuple[str, Setting]]:
    """Yield the name and setting of every field of a configuration dataclass, in order."""
    return ((field.name, field.metadata["setting"]) for field in dataclasses.fields(cls))


def default(cls: type[Any], name: str) -> Any:
    """Return the default of an optional setting, in base units."""
    field = cls.__dataclass_fields__[name]
    return field.default_factory() if field.default is dataclasses.MISSING else field.default


def paths(cls: type[Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Setting]]:
    """Yield every setting that a variable or a flag can give, nested records included. A list of records is one text."""
    for name, spec in settings(cls):
        if isinstance(spec.kind, RecordKind) and not spec.kind.many:
            yield from paths(spec.kind.cls, (*prefix, name))
        else:
            yield (*prefix, name), spec


def _former_names(cls: type[Any]) -> dict[str, tuple[str, ...] | None]:
    """Return former names of top-level settings, each with the present path; None for a removed setting."""
    former: dict[str, tuple[str, ...] | None] = dict.fromkeys(_removed_settings(cls))
    for name, spec in settings(cls):
        for old in spec.formerly:
            if isinstance(spec.kind, RecordKind) and old.endswith("*"):
                former |= {old[:-1] + key: (name, key) for key, _ in settings(spec.kind.cls)}
            else:
                former[old] = (name,)
    return former


def _removed_settings(cls: type[Any]) -> Mapping[str, str]:
    """Return the names of removed settings, each with what replaces them."""
    return getattr(cls, "REMOVED_SETTINGS", {})


def _warn(text: str) -> None:
    warnings.warn(text, FutureWarning, stacklevel=2)


def variable(component: str, path: tuple[str, ...]) -> str:
    """Return the environment variable of a setting."""
    return "_".join(("PRFAAS", component, *path)).upper()


def flag(path: tuple[str, ...]) -> str:
    """Return the command-line flag of a setting."""
    return "--" + "-".join(path).replace("_", "-")


@dataclass(frozen=True)
class _Given:
    """Value as written by the user, with the place where it was written ("" for none). None is YAML's empty value."""

    where: str
    content: str | list[_Given] | dict[str, _Given] | None

    @property
    def before(self) -> str:
        """Return the beginning of a message about this value."""
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
    """Return the configuration of a component.

    Args:
        cls: Dataclass of the component's settings.
        component: Name of the component in variables and messages.
        file: YAML file.
        environment: Environment variables; the process's own by default.
        flags: Texts by dotted setting name.
        varied: Setting that takes several values in turn. Settings that depend on it are not refused.
        check: Further check, which raises ConfigError with the setting's name.

    Raises:
        ConfigError: a key is unknown or missing, a value is malformed or out of range, or settings contradict each
            other. The text names place, key and accepted form. It has one line for each wrong key or value.
    """
    environment = os.environ if environment is None else environment
    given = _read_file(file) if file else _Given("", {})
    by_path = dict(paths(cls))
    former = ((name,) for name in _former_names(cls))
    known = {variable(component, path): path for path in (*former, *by_path)}  # A path may share a former variable.
    for name in sorted(environment):
        if name.startswith(variable(component, ("",))):
            where = f"environment variable {name}"
            if name not in known:
                raise ConfigError(f"{where}: unknown setting{_suggestion(name, known)}")
            _put(given, known[name], _from_text(by_path.get(known[name]), environment[name], where))
    for dotted, text in (flags or {}).items():
        path = tuple(dotted.split("."))
        _put(given, path, _from_text(by_path.get(path), text, f"flag {flag(path)}"))
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
    """Return the first setting of a record that a message names, or the record itself."""
    for word in re.findall(r"\w+", message):
        if isinstance(given.content, dict) and word in given.content:
            given = given.content[word]
            if not isinstance(given.content, dict):
                break
    return given


def _refuse_meaningless(config: Any, given: _Given, varied: str = "", *, prefix: tuple[str, ...] = ()) -> None:
    """Raise ConfigError for a setting that has no effect because another setting is missing.

    A setting with the default value is accepted: the annotated configuration files contain such lines. It is refused
    where another component has a setting of that name, since this value would be taken for the one in force.
    """
    for name, spec in settings(type(config)):
        written = given.content.get(name) if isinstance(given.content, dict) else None
        if isinstance(spec.kind, RecordKind) and not spec.kind.many and written is not None and written.content:
            _refuse_meaningless(getattr(config, name), written, prefix=(*prefix, name))
        unmet = config_checks.unmet(spec.only_where, config)
        needs = {required: value for required, value in unmet.items() if required != varied}
        value = getattr(config, name)
        is_overruled = config_checks.ABSENT in needs.values() and bool(value)
        if needs and written is not None and (is_overruled or value != default(type(config), name)):
            raise ConfigError(f"{written.where}: {'.'.join((*prefix, name))}: needs {config_checks.describe(needs)}")


def load_file(cls: type[T], file: Path) -> T:
    """Return the records of a file that no variable and no flag overrides, such as a deployment.

    Raises:
        ConfigError: as `load` does.
    """
    config = _build(cls, _read_file(file), component=None, prefix=())
    assert isinstance(config, cls)
    return config


def load_mapping(cls: type[T], values: Mapping[str, Any], *, where: str) -> T:
    """Return the configuration from plain values of another program; `where` names that place in messages.

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
    """Override one setting of the tree in place. `_build` refuses a value that should be a record."""
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
    except yaml.YAMLError as error:  # For example a forbidden character.
        raise ConfigError(f"{name}: not YAML: {str(error).splitlines()[0]}") from error
    return _Given(name, {}) if node is None else _from_node(node, name, node.start_mark.line)


def _from_text(spec: Setting | None, text: str, where: str) -> _Given:
    """Return the value of a variable or a flag. A list of records is written there as YAML."""
    return _read_text(text, where) if spec and isinstance(spec.kind, RecordKind) else _Given(where, text)


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
    _replace_former_names(cls, given)
    for name, value in given.content.items():
        with faults.collect():
            if name not in known:
                raise ConfigError(f"{value.where}: {'.'.join((*prefix, name))}: unknown key{_suggestion(name, known)}")
            values[name] = _convert(cls, known[name], value, component=component, path=(*prefix, name))
    for name in [name for name in known if name not in given.content]:
        with faults.collect():
            values |= _absent(cls, known[name], given, component=component, path=(*prefix, name))
    faults.raise_collected()
    try:
        return cls(**values)
    except ValueError as error:
        raise ConfigError(f"{_written(given, str(error)).before}{_dotted(prefix)}{error}") from error


def _replace_former_names(cls: type[Any], given: _Given) -> None:
    """Rename settings of a record in place and drop removed ones, with a warning for each."""
    assert isinstance(given.content, dict)
    former, removed = _former_names(cls), _removed_settings(cls)
    for name in [name for name in given.content if name in former]:
        path, value = former[name], given.content.pop(name)
        if path is None:
            _warn(f"{value.before}{name}: this setting was removed and has no effect; {removed[name]}")
            continue
        _warn(
            f"{value.before}{name}: this setting is now called {'.'.join(path)}; the old name works until version 0.2"
        )
        if not _has(given, path):
            _put(given, path, value)


def _has(given: _Given | None, path: tuple[str, ...]) -> bool:
    """Return whether a setting of the tree is given."""
    for name in path:
        given = given.content.get(name) if given is not None and isinstance(given.content, dict) else None
    return given is not None


class _Faults:
    """Errors of several settings, reported together."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Collect a ConfigError that the block raises."""
        try:
            yield
        except ConfigError as error:
            self._texts.append(str(error))

    def raise_collected(self) -> None:
        """Raise one ConfigError with a line for each collected error."""
        if self._texts:
            raise ConfigError("\n".join(self._texts))


def _absent(
    cls: type[Any], spec: Setting, given: _Given, *, component: str | None, path: tuple[str, ...]
) -> dict[str, Any]:
    """Return the values that replace an absent setting, if not the default.

    Raises:
        ConfigError: the setting is required.
    """
    if spec.required:
        raise ConfigError(f"{given.before}{_missing(path, spec, component=component)}")
    if not isinstance(spec.kind, RecordKind) or spec.kind.many or default(cls, path[-1]) is None:
        return {}
    return {path[-1]: _build(spec.kind.cls, _Given(given.where, {}), component=component, prefix=path)}


def _missing(path: tuple[str, ...], spec: Setting, *, component: str | None) -> str:
    elsewhere = f", or set {variable(component, path)} or {flag(path)}" if component else ""
    return f"{'.'.join(path)}: missing; write {spec.accepted}{elsewhere}"


def _dotted(prefix: tuple[str, ...]) -> str:
    return ".".join(prefix) + ": " if prefix else ""


def _suggestion(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"


def _convert(cls: type[Any], spec: Setting, given: _Given, *, component: str | None, path: tuple[str, ...]) -> Any:
    if not given.content and not spec.required and default(cls, path[-1]) in (None, ""):
        return default(cls, path[-1])
    if isinstance(spec.kind, RecordKind):
        return _convert_record(spec.kind, given, component=component, path=path)
    try:
        return _parse(spec, spec.kind, given)
    except (ValueError, OverflowError) as error:
        written = f"{given.content!r}: " if isinstance(given.content, str) else ""
        raise ConfigError(f"{given.where}: {'.'.join(path)}: {written}{error}; write {spec.accepted}") from error


def _convert_record(kind: RecordKind, given: _Given, *, component: str | None, path: tuple[str, ...]) -> Any:
    if not kind.many:
        return _build(kind.cls, given, component=component, prefix=path)
    if not isinstance(given.content, list):
        raise ConfigError(f"{given.where}: {'.'.join(path)}: expected a list of records")
    built, faults = [], _Faults()
    for index, item in enumerate(given.content):
        with faults.collect():
            built.append(_build(kind.cls, item, component=component, prefix=(*path[:-1], f"{path[-1]}[{index}]")))
    faults.raise_collected()
    return tuple(built)


def _parse(spec: Setting, kind: ValueKind, given: _Given) -> Any:
    if kind is KINDS["text_list"] and isinstance(given.content, list):
        return tuple(KINDS["text"].parse(_scalar(item)) for item in given.content)
    value = kind.parse(_scalar(given))
    if spec.minimum is not None and value < spec.minimum:
        raise ValueError("too small")
    if spec.maximum is not None and value > spec.maximum:
        raise ValueError("too large")
    return value


def _scalar(given: _Given) -> str:
    if isinstance(given.content, str):
        return given.content
    raise ValueError("empty" if given.content is None else "a single value is expected")


def add_flags(parser: argparse.ArgumentParser, cls: type[Any]) -> None:
    """Add --config and one flag for each setting of `cls`. All values stay texts."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings as YAML")
    for path, spec in paths(cls):
        on = {"nargs": "?", "const": "true"} if spec.kind is KINDS["flag"] else {}
        help_text = f"{spec.doc} Write {spec.accepted}.".replace("%", "%%")
        dest = "setting " + ".".join(path)
        parser.add_argument(flag(path), dest=dest, metavar=path[-1].upper(), help=help_text, **on)  # type: ignore[arg-type]
    present = {flag(path) for path, _ in paths(cls)}
    for name in _former_names(cls):
        if flag((name,)) not in present:
            parser.add_argument(flag((name,)), dest=f"setting {name}", nargs="?", const="true", help=argparse.SUPPRESS)


def given_flags(namespace: argparse.Namespace) -> dict[str, str]:
    """Return the settings of the command line in the form that `load` takes."""
    items = vars(namespace).items()
    return {
        name.removeprefix("setting "): text for name, text in items if name.startswith("setting ") and text is not None
    }


def parse(
    cls: type[T],
    *,
    component: str,
    argv: Sequence[str],
    doc: str = "",
    check: Callable[[T], None] | None = None,
    local: Callable[[], Mapping[str, str]] | None = None,
) -> T:
    """Return the configuration of a command. End the process for --help, --version, --check-config and wrong settings.

    `check` is passed on to `load`. `local` returns texts by setting that apply if neither a file nor a secret is named.
    """
    parser = argparse.ArgumentParser(prog=f"prfaas-{component}", description=doc)
    parser.add_argument("--version", action="version", version=f"%(prog)s {prfaas.__version__}")
    check_help = "read the files that settings name, print the settings and exit"
    parser.add_argument("--check-config", action="store_true", help=check_help)
    add_flags(parser, cls)
    namespace = parser.parse_args(argv)
    file, flags, environment = namespace.config, given_flags(namespace), dict(os.environ)
    has_secret = "secret_file" in flags or variable(component, ("secret_file",)) in environment
    try:
        if local is not None and file is None and not has_secret:
            environment = {variable(component, (name,)): text for name, text in local().items()} | environment
        config = load(cls, component=component, file=file, environment=environment, flags=flags, check=check)
    except ConfigError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    if namespace.check_config:
        sys.stdout.write(show(config))
        parser.exit(0)
    return config


def show(config: Any) -> str:
    """Return the settings in force as YAML. `load` reads it back to an equal configuration."""
    return yaml.safe_dump(_shown(config), sort_keys=False, allow_unicode=True)


def shown_default(cls: type[Any], name: str) -> Any:
    """Return the default of a setting in the form that users write."""
    return _shown_value(dict(settings(cls))[name], default(cls, name))


def _shown(config: Any) -> dict[str, Any]:
    meant = ((name, spec) for name, spec in settings(type(config)) if not config_checks.unmet(spec.only_where, config))
    return {name: _shown_value(spec, getattr(config, name)) for name, spec in meant}


def _shown_value(spec: Setting, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(spec.kind, RecordKind):
        return [_shown(item) for item in value] if spec.kind.many else _shown(value)
    return list(value) if spec.kind is KINDS["text_list"] else spec.kind.show(value)
