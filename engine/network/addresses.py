"""Addresses of this node: where the rendezvous listens, and by which interface the other nodes are reached."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass

import psutil

from ...specs.models import Spec

LOOPBACK = "lo"
LOOPBACK_ADDRESS = "127.0.0.1"


class NetworkError(Exception):
    """An address, port or interface that cannot be used; the message says which and why."""


@dataclass(frozen=True)
class Endpoint:
    """Where the nodes meet, as the spec says it."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Tell whether it is meant for one machine alone."""
        return self.host == "localhost" or is_loopback(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """Read `HOST:PORT`; the spec has been checked for that form."""
    host, _, port = text.rpartition(":")
    return Endpoint(host.strip("[]"), int(port))


def is_loopback(address: str) -> bool:
    """Tell whether an address is one of this machine alone; a name is none."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """The first address of a host. Raises NetworkError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise NetworkError(f"the rendezvous host {host} cannot be found: {error.strerror or error}") from error
    family, _, _, _, address = found[0]
    return socket.AddressFamily(family), (str(address[0]), port)


def listen(endpoint: Endpoint, port: int | None = None) -> socket.socket:
    """A listening socket of node 0 at the rendezvous, or at another port of that address. Raises NetworkError.

    A name that stands for a loopback address on its own machine, as some installers write it into /etc/hosts, is told
    to the other nodes as another one, so then it listens on all addresses.
    """
    port = endpoint.port if port is None else port
    family, (address, _) = resolve(endpoint.host, port)
    if is_loopback(address) and not endpoint.is_loopback:
        address = "::" if family == socket.AF_INET6 else "0.0.0.0"
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(512)
    except OSError as error:
        listener.close()
        raise NetworkError(_why_not(error, endpoint, port)) from error
    return listener


def _why_not(error: OSError, endpoint: Endpoint, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of the rendezvous {endpoint} is in use{_user_of(port)}; choose another, or end that process"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"the rendezvous {endpoint} is no address of this node; the node at {endpoint.host} is node 0 "
            "(--node-rank 0)"
        )
    return f"the rendezvous {endpoint} cannot be listened at: {error.strerror or error}"


def _user_of(port: int) -> str:
    try:
        found = (c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.pid)
        pid = next(found, None)
    except (psutil.Error, OSError):
        return ""
    return f" by process {pid}" if pid is not None else ""


def address_towards(host: str, port: int) -> str:
    """The address of this node that a packet to `host` would carry; none is sent. Raises NetworkError."""
    family, where = resolve(host, port)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(where)
        except OSError as error:
            raise NetworkError(f"no way to {host}: {error.strerror or error}") from error
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The interface that has an address; None when no interface of this node has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return None


def address_of(interface: str) -> str:
    """The first address of an interface, IPv4 before IPv6. Raises NetworkError when there is none."""
    interfaces = psutil.net_if_addrs()
    if interface not in interfaces:
        raise NetworkError(f"there is no network interface {interface}; there are {', '.join(sorted(interfaces))}")
    for family in (socket.AF_INET, socket.AF_INET6):
        for one in interfaces[interface]:
            if one.family == family:
                return one.address.partition("%")[0]
    raise NetworkError(f"the network interface {interface} has no address")


def interface_towards(host: str, port: int) -> str:
    """The interface by which this node reaches `host`. Raises NetworkError."""
    address = address_towards(host, port)
    return interface_of(address) or LOOPBACK


def check_interfaces(spec: Spec) -> None:
    """Raise NetworkError when an interface that the spec names is not there or has no address."""
    channels = spec.cluster.channels
    for key, interface in (("compute", channels.compute.interface), ("storage", channels.storage.interface)):
        if interface != "auto":
            try:
                address_of(interface)
            except NetworkError as error:
                raise NetworkError(f"cluster.channels.{key}.interface: {error}") from error


def interfaces(spec: Spec, found: str) -> tuple[str, str]:
    """The interfaces of the compute and the storage channel; `found` is what `auto` stands for on this node."""
    channels = spec.cluster.channels
    compute = found if channels.compute.interface == "auto" else channels.compute.interface
    return compute, compute if channels.storage.interface == "auto" else channels.storage.interface
