"""Which prefill engine a request's header names, and whether it may."""

from __future__ import annotations

import random
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from prfaas.errors import ConfigError
from prfaas.units import split_address

Network = IPv4Network | IPv6Network


class PrefillHostRefused(Exception):
    """The header names a host that may not be asked, or no host:port; the text is for the client."""


def named_host(values: Sequence[str], *, sample: bool) -> str | None:
    """Return the host:port out of the values of `x-prefiller-host-port`, of which one may hold several, separated by commas.

    None when they name nobody: the decode engine prefills as well.
    """
    hosts = [host for value in values for host in map(str.strip, value.split(",")) if host]
    if not hosts:
        return None
    return random.choice(hosts) if sample else hosts[0]


class AllowList:
    """Hosts that may be asked. Without any: addresses of private networks and of this machine, but no names.

    Link-local addresses are listed or refused, since a cloud's metadata are behind one (169.254.169.254); so are the
    unspecified ones, 0.0.0.0 and ::.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        """
        Raises:
            ConfigError: an entry with a slash is no network.
        """
        networks = [_network(host) for host in hosts]
        self._names = frozenset(host for host, network in zip(hosts, networks, strict=True) if network is None)
        self._networks = [network for network in networks if network is not None]

    def check(self, host_port: str) -> None:
        """Return when this host may be asked.

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
    """Return the address that a connection goes to: of an IPv4 address written as IPv6 (::ffff:10.0.0.1) the former."""
    address = ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _network(host: str) -> Network | None:
    """Return an entry as a network, an address being one of a single host; None for a name."""
    try:
        return ip_network(host)
    except ValueError as error:
        if "/" in host:
            raise ConfigError(f"prefill_hosts: {host} is no network: {error}") from error
        return None
