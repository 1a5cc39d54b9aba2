"""The loader: precedence, nesting, and a message with place, key and accepted form for every mistake."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from prfaas import config
from prfaas.config import record, records, setting
from prfaas.config_checks import ABSENT, GIVEN
from prfaas.errors import ConfigError
from prfaas.units import choice


@dataclass(frozen=True)
class Wire:
    connections: int = setting("count", default=8, minimum=1, maximum=64, doc="TCP connections.")
    linger_seconds: float = setting("seconds", default=0.5, doc="Time to close.")
    depth: int = setting("count", default=4, only_where={"connections": frozenset({1, 2})}, doc="Depth.")


@dataclass(frozen=True)
class Peer:
    name: str = setting("text", required=True, doc="Its name.")
    address: str = setting("address", required=True, doc="Where it listens.")
    capacity: float | None = setting("rate", default=None, doc="Its rate.")


@dataclass(frozen=True)
class Example:
    pool_bytes: int = setting("bytes", default=4 << 30, doc="Memory.")
    name: str = setting("text", required=True, doc="Name.")
    role: str = setting(choice("prefill", "decode"), default="decode", doc="Role.")
    verbose: bool = setting("flag", default=False, doc="Say more.")
    note: str = setting("text", default="", doc="Note.")
    models: tuple[str, ...] = setting("text_list", default=(), doc="Models.")
    secret_file: Path | None = setting("path", default=None, doc="Secret.")
    wire: Wire = setting(record(Wire), doc="The wire.")
    lead: float = setting("seconds", default=0.5, only_where={"role": "prefill"}, doc="Head start.")
    age: float = setting(
        "seconds", default=9.0, only_where={"secret_file": GIVEN, "verbose": True}, doc="Of the secret."
    )
    peers: tuple[Peer, ...] = setting(records(Peer), default=(), doc="Peers.")
    patience: float = setting("seconds", default=1.0, only_where={"peers": GIVEN}, doc="With peers.")
    alone: float = setting("seconds", default=1.0, only_where={"peers": ABSENT}, doc="Without peers.")

    def __post_init__(self) -> None:
        if self.role == "prefill" and self.models:
            raise ValueError("role prefill takes no models")


def load(text: str | None = "name: east", *, path: Path | None = None, **sources: dict[str, str]) -> Example:
    file = None
    if path and text is not None:
        file = path / "example.yaml"
        file.write_text(text)
    return config.load(
        Example,
        component="example",
        file=file,
        environment=sources.get("environment", {}),
        flags=sources.get("flags", {}),
    )


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    text = "name: file\npool_bytes: 1GiB\nrole: prefill\n"
    environment = {"PRFAAS_EXAMPLE_NAME": "environment", "PRFAAS_EXAMPLE_POOL_BYTES": "2GiB", "PRFAAS_OTHER": "x"}
    loaded = load(text, path=tmp_path, environment=environment, flags={"name": "flag"})
    assert (loaded.name, loaded.pool_bytes, loaded.role) == ("flag", 2 << 30, "prefill")


def test_nested_records_and_lists_are_read_from_a_file(tmp_path: Path) -> None:
    text = """
name: east
models: [a, b]
wire: {connections: 4}
peers:
  - name: west
    address: 10.0.0.2:9000
    capacity: 10Gbps
"""
    loaded = load(text, path=tmp_path)
    assert loaded.models == ("a", "b")
    assert loaded.wire == Wire(connections=4)
    assert loaded.peers == (Peer(name="west", address="10.0.0.2:9000", capacity=1.25e9),)


def test_a_nested_key_has_a_variable_and_a_flag(tmp_path: Path) -> None:
    environment = {"PRFAAS_EXAMPLE_WIRE_CONNECTIONS": "3"}
    loaded = load("name: e\nwire:\n", path=tmp_path, environment=environment, flags={"wire.linger_seconds": "2s"})
    assert loaded.wire == Wire(connections=3, linger_seconds=2.0)


def test_a_list_of_records_can_be_given_as_yaml_in_a_variable() -> None:
    environment = {"PRFAAS_EXAMPLE_NAME": "e", "PRFAAS_EXAMPLE_PEERS": "[{name: w, address: 'h:1'}]"}
    assert load(environment=environment).peers == (Peer(name="w", address="h:1"),)


def test_an_optional_setting_takes_an_empty_value(tmp_path: Path) -> None:
    loaded = load("name: e\nsecret_file:\nnote: ''\n", path=tmp_path)
    assert (loaded.secret_file, loaded.note) == (None, "")
    assert load(environment={"PRFAAS_EXAMPLE_NOTE": ""}, flags={"name": "e"}).note == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: e\npool_bites: 1", r"example.yaml line 2: pool_bites: unknown key, did you mean pool_bytes\?"),
        ("name: e\n\npool_bytes: 4 parsecs", r"line 3: pool_bytes: '4 parsecs': unit 'parsecs'.*write a size such as"),
        ("name: e\nrole: boss", r"line 2: role: 'boss'.*one of \"prefill\", \"decode\""),
        ("name: e\nwire:\n  connections: 0", r"line 3: wire.connections: '0': too small.*at least 1, at most 64"),
        ("name: e\nwire: 7", r"line 2: wire: expected a record with keys out of connections"),
        ("name: e\npeers: 7", r"line 2: peers: expected a list of records"),
        ("name: e\npeers:\n- name: w", r"line 3: peers\[0\].address: missing; write host:port"),
        ("name: e\nname: f", r"line 2: name: given twice"),
        ("name: [e]", r"line 1: name: a single value is expected; write text"),
        ("name: e\nlead: 2s", r"example.yaml line 2: lead: needs role: prefill"),
        ("name: e\nage: 1s", r"line 2: age: needs secret_file, verbose: true$"),
        ("name: e\nwire:\n  depth: 5", r"line 3: wire.depth: needs connections: 1 or 2$"),
        ("alone: 2s\nname: e\npeers: [{name: w, address: 'h:1'}]", r"line 1: alone: needs no peers$"),
        ("name: e\nmodels: a\nrole: prefill", r"line 3: role prefill takes no models"),
        ("pool_bytes: 1GiB", r"example.yaml.*: name: missing; write text, or set PRFAAS_EXAMPLE_NAME or --name"),
        ("- name", r"line 1: expected a record with keys out of pool_bytes, name"),
        ("name: {", r"example.yaml line 1: not YAML: expected the node content, but found '<stream end>'$"),
        ("name: \x01", r"example.yaml: not YAML: unacceptable character #x0001: special characters are not allowed$"),
    ],
)
def test_a_mistake_in_the_file_names_line_key_and_accepted_form(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(text, path=tmp_path)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PRFAAS_EXAMPLE_NAM": "e"}, r"PRFAAS_EXAMPLE_NAM: unknown setting, did you mean PRFAAS_EXAMPLE_NAME\?"),
        ({"PRFAAS_EXAMPLE_VERBOSE": "2"}, r"environment variable PRFAAS_EXAMPLE_VERBOSE: verbose: '2'"),
        ({"PRFAAS_EXAMPLE_PEERS": "{"}, r"environment variable PRFAAS_EXAMPLE_PEERS line 1: not YAML"),
    ],
)
def test_a_mistake_in_the_environment_names_the_variable(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(environment=environment, flags={"name": "e"})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        config.load(Example, component="example", file=tmp_path / "none.yaml", environment={})


def test_a_command_reads_its_flags_and_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRFAAS_EXAMPLE_NAME", raising=False)
    (tmp_path / "e.yaml").write_text("name: file\npool_bytes: 1MiB\n")
    argv = ["--config", str(tmp_path / "e.yaml"), "--name", "flag", "--verbose", "--wire-connections", "2"]
    loaded = config.parse(Example, component="example", argv=argv)
    assert loaded == Example(name="flag", pool_bytes=1 << 20, verbose=True, wire=Wire(connections=2))


def test_a_wrong_setting_ends_the_command_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        config.parse(Example, component="example", argv=["--name", "e", "--pool-bytes", "much"])
    assert "prfaas-example: flag --pool-bytes: pool_bytes: 'much'" in capsys.readouterr().err


def test_the_checked_configuration_reads_back_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "--name",
        "e",
        "--check-config",
        "--peers",
        "[{name: w, address: 'h:1', capacity: 3Mbps}]",
        "--models",
        "a,b",
    ]
    with pytest.raises(SystemExit, match="0"):
        config.parse(Example, component="example", argv=argv)
    file = tmp_path / "shown.yaml"
    file.write_text(capsys.readouterr().out)
    peers = (Peer(name="w", address="h:1", capacity=375_000.0),)
    assert config.load(Example, component="example", file=file, environment={}) == Example(
        name="e", peers=peers, models=("a", "b")
    )


def test_help_shows_every_flag_and_every_accepted_form(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        config.parse(Example, component="example", argv=["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for path, item in config.paths(Example):
        assert config.flag(path) in shown
        assert item.doc in shown


def test_plain_values_of_another_program_are_read_alike() -> None:
    values = {"name": "e", "verbose": True, "pool_bytes": 4096, "models": ["a"], "wire": {"linger_seconds": 2.5}}
    loaded = config.load_mapping(Example, values, where="extra_config")
    wanted = Example(name="e", verbose=True, pool_bytes=4096, models=("a",), wire=Wire(linger_seconds=2.5))
    assert loaded == wanted


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "e", "verbose": 3}, r"^extra_config: verbose: '3': neither true nor false"),
        ({"name": "e", "nam": 3}, r"^extra_config: nam: unknown key, did you mean name\?"),
        ({}, r"^extra_config: name: missing; write text$"),
    ],
)
def test_a_mistake_in_plain_values_names_key_and_accepted_form(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.load_mapping(Example, values, where="extra_config")


def test_a_setting_is_taken_beside_what_it_needs_and_says_what_that_is(tmp_path: Path) -> None:
    text = "name: e\nrole: prefill\nlead: 2s\nsecret_file: /s\nverbose: true\nage: 1s"
    loaded = load(text, path=tmp_path)
    assert (loaded.lead, loaded.age) == (2.0, 1.0)
    beside = load(
        "name: e\nwire: {connections: 2, depth: 5}\npeers: [{name: w, address: 'h:1'}]\npatience: 2s", path=tmp_path
    )
    assert (beside.wire.depth, beside.patience) == (5, 2.0)
    assert load("name: e\npeers: []\nalone: 2s", path=tmp_path).alone == 2.0
    docs = {name: item.doc for name, item in config.settings(Example)}
    assert docs["lead"] == "With role: prefill. Head start."
    assert docs["age"] == "With secret_file, verbose: true. Of the secret."


def test_a_setting_without_what_it_needs_may_repeat_its_default(tmp_path: Path) -> None:
    text = "name: e\nwire: {depth: 4}\nlead: 500ms\nage: 9\npatience: 1s"
    assert load(text, path=tmp_path) == load("name: e", path=tmp_path)
    assert load(path=tmp_path, environment={"PRFAAS_EXAMPLE_PATIENCE": "1000ms"}).patience == 1.0


def test_a_setting_that_others_overrule_is_refused_even_with_its_default(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 3: alone: needs no peers"):
        load("name: e\npeers: [{name: w, address: 'h:1'}]\nalone: 1s", path=tmp_path)


def test_only_settings_that_mean_something_are_shown_as_in_force() -> None:
    assert "lead" not in config.show(Example(name="e"))
    assert "lead: 500ms" in config.show(Example(name="e", role="prefill"))


@dataclass(frozen=True)
class Renamed:
    REMOVED_SETTINGS: ClassVar[dict[str, str]] = {"linger": "connections close at once"}

    socket_path: str = setting("text", default="", formerly=("socket",), doc="Path.")


@pytest.mark.parametrize("source", ["file", "environment", "flag"])
def test_a_former_name_sets_the_renamed_setting_with_a_warning(tmp_path: Path, source: str) -> None:
    file = tmp_path / "renamed.yaml"
    file.write_text("socket: /run/a" if source == "file" else "{}")
    environment = {"PRFAAS_EXAMPLE_SOCKET": "/run/a"} if source == "environment" else {}
    flags = {"socket": "/run/a"} if source == "flag" else {}
    with pytest.warns(FutureWarning, match="socket_path"):
        loaded = config.load(Renamed, component="example", file=file, environment=environment, flags=flags)
    assert loaded.socket_path == "/run/a"


def test_the_present_name_wins_over_the_former_one(tmp_path: Path) -> None:
    file = tmp_path / "renamed.yaml"
    file.write_text("socket: /run/old\nsocket_path: /run/new")
    with pytest.warns(FutureWarning, match="socket_path"):
        assert config.load(Renamed, component="example", file=file, environment={}).socket_path == "/run/new"


def test_a_removed_setting_is_accepted_with_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "renamed.yaml"
    file.write_text("linger: 3s")
    with pytest.warns(FutureWarning, match="linger"):
        assert config.load(Renamed, component="example", file=file, environment={}) == Renamed()


def test_the_command_line_takes_former_names_but_does_not_list_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(FutureWarning, match="linger"), pytest.warns(FutureWarning, match="socket_path"):
        loaded = config.parse(Renamed, component="example", argv=["--socket", "/run/a", "--linger", "3s"])
    assert loaded.socket_path == "/run/a"
    with pytest.raises(SystemExit):
        config.parse(Renamed, component="example", argv=["--help"])
    shown = capsys.readouterr().out
    assert "--socket-path" in shown and "--linger" not in shown


@dataclass(frozen=True)
class Files:
    certificate: str = setting("text", default="", doc="Certificate.")
    key: str = setting("text", default="", doc="Key.")


@dataclass(frozen=True)
class Folded:
    tls: Files = setting(config.record(Files), formerly=("tls_*",), doc="Files.")


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        ("tls_certificate: /c\ntls_key: /k", {}, Files(certificate="/c", key="/k")),
        ("tls_key: /old\ntls: {key: /k}", {}, Files(key="/k")),
        ("tls_certificate: /c\ntls: {key: /k}", {}, Files(certificate="/c", key="/k")),
        ("tls_certificate: /c", {"PRFAAS_EXAMPLE_TLS_KEY": "/k"}, Files(certificate="/c", key="/k")),
        ("tls_key: /c\ntls:", {}, Files(key="/c")),
    ],
)
def test_former_flat_names_set_keys_of_a_record(
    tmp_path: Path, text: str, environment: dict[str, str], expected: Files
) -> None:
    file = tmp_path / "folded.yaml"
    file.write_text(text)
    assert config.load(Folded, component="example", file=file, environment=environment).tls == expected


def test_a_former_flat_name_warns_but_the_same_variable_and_flag_do_not(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    config.load(Folded, component="example", environment={"PRFAAS_EXAMPLE_TLS_KEY": "/k"})
    config.parse(Folded, component="example", argv=["--tls-key", "/k"])
    assert not recwarn.list
    (tmp_path / "folded.yaml").write_text("tls_key: /k")
    with pytest.warns(FutureWarning, match=r"tls\.key"):
        config.load(Folded, component="example", file=tmp_path / "folded.yaml", environment={})
