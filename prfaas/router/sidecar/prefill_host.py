"""Prefill host of a request's header, and the list of hosts that it may name."""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from prfaas.errors import ConfigError
from prfaas.units import split_address

Network = IPv4Network | IPv6Network


class PrefillHostRefused(Exception):
    """Host that the sidecar may not ask, or no host:port. The text is for the client."""


def named_host(values: Sequence[str]) -> str | None:
    """Return the first host:port of the values of `x-prefiller-host-port`, each a list separated by commas.

    Without a host the decode engine prefills, and the result is None.
    """
    hosts = (host for value in values for host in map(str.strip, value.split(",")) if host)
    return next(hosts, None)


class AllowList:
    """Hosts that the sidecar may ask. An empty list allows addresses of private networks and of this machine, but no names.

    Link-local addresses must be listed, because clouds serve metadata at one of them (169.254.169.254). So must the
    unspecified addresses 0.0.0.0 and ::.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        """Read the entries.

        Raises:
            ConfigError: an entry with a slash is no network.
        """
        networks = [_network(host) for host in hosts]
        self._names = frozenset(host for host, network in zip(hosts, networks, strict=True) if network is None)
        self._networks = [network for network in networks if network is not None]

    def check(self, host_port: str) -> None:
        """Check that the sidecar may ask this host.

        Raises:
            PrefillHostRefused: it may not.
        """
        try:
            host, _ = split_address(host_port)
        except ValueError as error:
            raise PrefillHostRefused(f"x-prefiller-host-port: {error}") from error
        if not self._allows(host):
            raise PrefillHostRefused(f"x-prefiller-host-port: {host} is not among prefill_hosts")

    def _allows(self, host: str) -> bool:
        if host in self._names:
            return True
        try:
            address = _address(host)
        except ValueError:
            return False
        if not self._names and not self._networks:
            return address.is_private and not address.is_link_local and not address.is_unspecified
        return any(address in network for network in self._networks)


def _address(host: str) -> IPv4Address | IPv6Address:
    """Return the address that a connection reaches: for IPv4 written as IPv6 (::ffff:10.0.0.1) the IPv4 address."""
    address = ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _network(host: str) -> Network | None:
    """Return an entry as a network, where an address is a network of one host; None for a name."""
    try:
        return ip_network(host)
    except ValueError as error:
        if "/" in host:
            raise ConfigError(f"prefill_hosts: {host} is no network: {error}") from error
        return None
