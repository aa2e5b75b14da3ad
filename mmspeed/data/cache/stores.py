"""Remote stores by fsspec: file systems of URLs, tries of what may fail for a moment, and causes of failures in one line."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import fsspec
from fsspec.registry import known_implementations

from mmspeed.errors import UserError

Result = TypeVar("Result")
TRIES = 3
_LATER = frozenset({408, 425, 429})  # statuses below 500 after which another try may succeed
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "http": "aiohttp", "https": "aiohttp", "hf": "huggingface_hub", "gs": "gcsfs"}
_SILENT_SECONDS = 60.0  # without a byte, after which a connection counts as dead


def protocol_of(url: str) -> str:
    """The protocol of a URL, in lower case."""
    return url.partition("://")[0].lower()


def open_store(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL and the path on it; fsspec keeps one for each process, also after a fork.

    Raises UserError for an unknown protocol, and if the package that reads it is missing.
    """
    protocol = protocol_of(url)
    try:
        filesystem, path = fsspec.core.url_to_fs(url, **_options(protocol))
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


def _options(protocol: str) -> dict[str, Any]:
    """Options of a file system: aiohttp's own limit of five minutes for a whole file would cut long ones."""
    if protocol not in ("http", "https"):
        return {}
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENT_SECONDS, sock_read=_SILENT_SECONDS)
    return {"client_kwargs": {"timeout": timeout, "trust_env": True}, "headers": {"Accept-Encoding": "identity"}}


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
    if isinstance(cause, FileNotFoundError | PermissionError | IsADirectoryError | ImportError | UserError):
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
    return cause if isinstance(cause, OSError | TimeoutError) or type(cause).__module__.startswith("aiohttp") else error


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
