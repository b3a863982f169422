"""Opens the page in the user's browser."""

from __future__ import annotations

import ipaddress
import logging
import threading
import webbrowser

_log = logging.getLogger(__name__)


def address_of(host: str, port: int, scheme: str = "http") -> str:
    """Return the address of the page on this machine.

    Args:
        host: The address that the service listens on; that of loopback stands for "all addresses".
        scheme: ``http`` or ``https``.
    """
    bound = ipaddress.ip_address(host.partition("%")[0])
    if bound.is_unspecified:
        host = "127.0.0.1" if bound.version == 4 else "::1"
    return f"{scheme}://[{host}]:{port}/" if ":" in host else f"{scheme}://{host}:{port}/"


def open_page(address: str) -> None:
    """Open ``address`` in the default browser, in a thread: some browsers return only when they are closed.

    Without a browser the address is logged.
    """
    threading.Thread(target=_open, args=(address,), name="open-page", daemon=True).start()


def _open(address: str) -> None:
    if not webbrowser.open(address):
        _log.warning("no browser was found; open %s in one", address)
