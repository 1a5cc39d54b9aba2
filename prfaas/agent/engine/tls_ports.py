"""Encrypted ports of engines: the agent ends mutual TLS in front of each engine, which listens on loopback alone."""

from urllib.parse import urlsplit

from prfaas import metrics
from prfaas.agent.config import AgentConfig, EngineConfig
from prfaas.transport.net.tls import Certificates
from prfaas.transport.net.tls_proxy import TlsProxy
from prfaas.units import join_address, split_address

_ALL_HOSTS = ("0.0.0.0", "::")
_HTTP_PORT = 80


def announced_url(engine: EngineConfig, advertise: str) -> str:
    """Return the base URL at which routers reach an engine. `advertise` is the address (host:port) of the agent's wire."""
    if not engine.tls_listen:
        return engine.url
    host, port = split_address(engine.tls_listen)
    return f"https://{join_address(split_address(advertise)[0] if host in _ALL_HOSTS else host, port)}"


def start_tls_ports(config: AgentConfig) -> list[TlsProxy]:
    """Return the running proxies of the engines that have an encrypted port. Call it on the event loop.

    Raises:
        ConfigError: an address cannot be bound, or the certificates cannot be used.
    """
    engines = [engine for engine in config.engines if engine.tls_listen]
    certificates = Certificates.of(config.tls, alpn_protocols=("http/1.1",)) if engines else None
    proxies: list[TlsProxy] = []
    for engine in engines:
        assert certificates is not None, "the settings require certificates beside `tls_listen`"
        proxy = TlsProxy(
            engine.tls_listen,
            certificates,
            setting="engines.tls_listen",
            refused=lambda reason: metrics.ENGINE_PORT_REFUSALS.labels(reason=reason).inc(),
        )
        proxy.bind()
        target = urlsplit(engine.url)
        proxy.start(join_address(target.hostname or "", target.port or _HTTP_PORT))
        proxies.append(proxy)
    return proxies
