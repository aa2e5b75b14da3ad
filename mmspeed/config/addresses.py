"""Addresses in networks: whether one is public, and whether a config names it (`data.allow_addresses`)."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit

Address = IPv4Address | IPv6Address
_NAT64 = ip_network("64:ff9b::/96")  # the last four bytes are the IPv4 address that is asked
_HOST = re.compile(r"[\w-]+(\.[\w-]+)*\.?")
PROTOCOL = re.compile(r"[a-z][a-z0-9+.-]*://")


def checked_address(one: str) -> str:
    """A host, an address, a network or a protocol, in lower case. Raises ValueError for anything else."""
    one = one.strip().lower()
    with suppress(ValueError):
        return str(ip_network(one, strict=False))
    if not _HOST.fullmatch(one) and not PROTOCOL.fullmatch(one):
        raise ValueError(
            f"{one!r} is no host, address, network (10.0.0.0/8) or protocol (oss://); leave out ports and paths"
        )
    return one.rstrip(".")


def host_of(url: str) -> str:
    """The host of a URL, in lower case; empty where there is none."""
    with suppress(ValueError):
        return (urlsplit(url).hostname or "").rstrip(".")
    return ""


def numeric(host: str) -> Address | None:
    """The address that a host is itself, as resolvers read it: also one number, octal or hexadecimal. None for a name."""
    with suppress(ValueError):
        return ip_address(host)
    with suppress(OSError, ValueError):
        return IPv4Address(socket.inet_aton(host))
    return None


def is_public(address: Address) -> bool:
    """False for private, local and reserved addresses, and for those of IPv6 that lead to such of IPv4."""
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address.is_site_local:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def may_ask(host: str, address: str, allowed: Iterable[str]) -> bool:
    """True if the `address` of a host is public, or it or the host is `allowed` (`checked_address`, `host_of`)."""
    found = numeric(address)
    if found is not None and is_public(found):
        return True
    for one in allowed:
        if one == host.lower().rstrip("."):
            return True
        with suppress(ValueError):
            if found is not None and found in ip_network(one):
                return True
    return False
