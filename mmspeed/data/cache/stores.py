"""Remote stores by fsspec: file systems of URLs, tries of what may fail for a moment, and causes of failures in one line."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.request import getproxies

import fsspec
from fsspec.registry import known_implementations

from mmspeed.config.addresses import host_of, may_ask, numeric
from mmspeed.errors import UserError

if TYPE_CHECKING:
    import aiohttp

Result = TypeVar("Result")
TRIES = 3
_LATER = frozenset({408, 425, 429})  # statuses below 500 after which another try may succeed
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "http": "aiohttp", "https": "aiohttp", "hf": "huggingface_hub", "gs": "gcsfs"}
_first_answers: dict[str, tuple[str, ...]] = {}  # addresses of names that the user chose
_SILENT_SECONDS = 60.0  # without a byte, after which a connection counts as dead


class RefusedAddressError(Exception):
    """An address is not public, and nothing says that it may be asked."""


def protocol_of(url: str) -> str:
    """The protocol of a URL, in lower case."""
    return url.partition("://")[0].lower()


def open_store(url: str, hosts: tuple[str, ...] | None = None) -> tuple[Any, str]:
    """The fsspec file system of a URL and the path on it; fsspec keeps one for each process, also after a fork. `::` makes no chain.

    `hosts`: behind http none but public addresses and these are asked, also after redirections (`may_ask`); None: any is. One with `//` before
    it is a name that the user chose: what it has resolved to first is asked, and another private address only if that was private, too.
    Raises UserError for an unknown protocol, and if the package that reads it is missing.
    """
    protocol = protocol_of(url)
    plain = f"{protocol}{url[len(protocol) :]}"
    try:
        kind = fsspec.get_filesystem_class(protocol)
        filesystem = kind(**kind._get_kwargs_from_urls(plain), **_options(protocol, hosts))
        path: str = kind._strip_protocol(plain)
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        hint = f"pip install {package}" if package else str(error).splitlines()[0]
        raise UserError(
            f"{url}: {protocol}:// needs {f'the package {package}' if package else 'a package'}: {hint}"
        ) from None
    except ValueError as error:
        known = protocol in known_implementations
        why = str(error).splitlines()[0] if known else f"unknown protocol {protocol}://"
        raise UserError(f"{url}: {why}; such as s3://, https:// or hf:// are read") from None
    return filesystem, path


def _options(protocol: str, hosts: tuple[str, ...] | None) -> dict[str, Any]:
    """Options of a file system: aiohttp's own limit of five minutes for a whole file would cut long ones."""
    if protocol not in ("http", "https"):
        return {}
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENT_SECONDS, sock_read=_SILENT_SECONDS)
    options: dict[str, Any] = {"client_kwargs": {"timeout": timeout, "trust_env": True}}
    options["headers"] = {"Accept-Encoding": "identity"}
    return options if hosts is None else options | {"get_client": partial(_guarded_client, hosts)}


async def _guarded_client(hosts: tuple[str, ...], loop: Any = None, **options: Any) -> aiohttp.ClientSession:
    """A client that asks public addresses and `hosts` alone: names are judged by what they resolve to, when they are connected to."""
    import aiohttp
    from aiohttp.abc import AbstractResolver

    homes = [one[2:] for one in hosts if one.startswith("//")]

    def judge(host: str, address: str) -> None:
        if may_ask(host, address, hosts):
            return
        for home in homes:
            first = _first_answers.get(home, ())
            private = first and not any(may_ask(home, one, ()) for one in first)
            if address in first or (private and home == host):
                break
        else:
            shown = host if host == address else f"{host} ({address})"
            raise RefusedAddressError(f"{shown} is no public address, and data.allow_addresses does not name it")

    class Resolver(AbstractResolver):
        def __init__(self) -> None:
            self._own = aiohttp.DefaultResolver()

        async def resolve(self, host: str, *place: Any, **options: Any) -> Any:
            found = await self._own.resolve(host, *place, **options)
            name = host.rstrip(".")
            if name in homes:
                _first_answers.setdefault(name, tuple(one["host"] for one in found))
            if name not in map(host_of, getproxies().values()):  # those are the user's own settings
                for one in found:
                    judge(name, one["host"])
            return found

        async def close(self) -> None:
            await self._own.close()

    class Connector(aiohttp.TCPConnector):
        async def connect(self, req: Any, *place: Any, **options: Any) -> Any:
            host = req.url.raw_host or ""
            if numeric(host) is not None or ":" in host or host.replace(".", "").isdigit():  # no resolver is asked
                judge(host, host)
            return await super().connect(req, *place, **options)

    return aiohttp.ClientSession(connector=Connector(resolver=Resolver()), **options)


def attempt(action: Callable[[], Result], pause: float = 0.1) -> Result:
    """The result of `action`, after at most `TRIES` tries where another may succeed. Raises what the last one raised."""
    for number in range(TRIES):
        try:
            return action()
        except Exception as error:  # every store raises its own types
            if number + 1 == TRIES or is_final(error):
                raise
            time.sleep(pause * 4**number)
    raise AssertionError


def is_final(error: BaseException) -> bool:
    """True for a failure that another try would meet too: absent, forbidden, refused, or a circle of redirections."""
    cause = root_cause(error)
    status = _status(cause)
    if status is not None and status >= 300:
        return status < 500 and status not in _LATER
    if isinstance(
        cause, RefusedAddressError | FileNotFoundError | PermissionError | IsADirectoryError | ImportError | UserError
    ):
        return True
    return type(cause).__name__ in ("TooManyRedirects", "NoCredentialsError", "InvalidURL")


def is_absent(error: BaseException) -> bool:
    """True if a failure means that the file, or its bucket, does not exist."""
    cause = root_cause(error)
    return _status(cause) in (404, 410) or (isinstance(cause, FileNotFoundError) and _status(cause) is None)


def root_cause(error: BaseException) -> BaseException:
    """The error behind a FileNotFoundError, which fsspec's HTTP raises for any."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or cause is None:
        return error
    known = isinstance(cause, RefusedAddressError | OSError | TimeoutError)
    return cause if known or type(cause).__module__.startswith("aiohttp") else error


def _status(error: BaseException) -> int | None:
    """The HTTP status of an error, where it has one."""
    status: Any = getattr(error, "status", None)
    response: Any = getattr(error, "response", None)
    if status is None:
        status = getattr(response, "status_code", None)
    if status is None and isinstance(response, dict):  # botocore's
        with suppress(AttributeError):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if isinstance(status, int) else None


def reason_of(error: BaseException) -> str:
    """The reason in a store's error, in one line without the request's headers."""
    cause = root_cause(error)
    status, name = _status(cause), type(cause).__name__
    if isinstance(cause, RefusedAddressError):
        return str(cause)
    if name == "TooManyRedirects":
        return "its redirections never end"
    if name == "NoCredentialsError":
        return "no credentials: set them as the store's own tools read them"
    if status in (401, 403) or isinstance(cause, PermissionError):
        return f"no permission{f' (status {status})' if status else ''}"
    if status is not None and status >= 300:
        return f"status {status} {getattr(cause, 'message', '') or ''}".strip()
    if is_absent(error):
        return "no such file"
    lines = str(cause).splitlines()
    return f"{name}: {lines[0][:300]}" if lines else f"the store gave no reason ({name})"
