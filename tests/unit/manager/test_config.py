"""Manager settings that cannot work stop the start with a message that names them."""

import pytest

from prfaas.config import load_mapping
from prfaas.errors import ConfigError
from prfaas.index.store.redis_store import RedisStore
from prfaas.manager.config import ManagerConfig


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("advertise", "10.0.0.1", "advertise: '10.0.0.1': not host:port"),
        ("traces_endpoint", "nonsense", "traces_endpoint: 'nonsense'; write http://host:4318"),
        ("http_listen", "127.0.0.1:7410", "http_listen: 127.0.0.1:7410 is also used by listen; write another port"),
        ("listen", "127.0.0.1:7411", "http_listen: 127.0.0.1:7411 is also used by listen"),
        (
            "redis_directory",
            "/" + "a" * 96,
            "redis_directory: .*/redis.sock would be the path .* has 108 bytes; write one",
        ),
        ("threshold_tokens", "4294967296", "threshold_tokens"),
    ],
)
def test_impossible_value_is_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_mapping(ManagerConfig, {"secret_file": "secret", name: value}, where="test")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("foo", "'foo' is not a supported scheme"),
        ("http://foo:1", "'http' is not a supported scheme"),
        ("redis+sentinel://h1,h2/x", "not host:port"),
        ("redis+sentinel://h1:1", "the name of the Sentinels' master is missing"),
        ("redis+tls://h1:1/x", "'redis.tls' is not a supported scheme"),
        ("redis+cluster://h1:1", "'redis.cluster' is not a supported scheme"),
    ],
)
def test_redis_url_of_unknown_form_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"redis_url: {message}; write redis://.*redis\+sentinel://"):
        RedisStore(url)


def test_revocations_without_an_authority_are_refused() -> None:
    given = {"secret_file": "secret", "tls": {"revocations": "ca.crl"}}
    with pytest.raises(ConfigError, match=r"tls.revocations: needs authority$"):
        load_mapping(ManagerConfig, given, where="test")
