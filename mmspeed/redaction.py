"""Text that can be shown: without secrets (passwords and signatures in addresses, values of secret environment variables), and readable."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

SHOWN = "***"
# USER:PASSWORD up to the last at sign, since a password may hold signs of an address; a port before a path with one is hidden with it.
_USER = re.compile(r"(?<=://)[^/\s?#'\":]*(?::(?:(?!://)[^\s'\"])*)?(?=@)")
_WORDS = "token|sig|secret|passw|pwd|credential|key|auth|policy"
_QUERY = re.compile(rf"([?&;][\w.%-]*(?:{_WORDS})[\w.%-]*=)[^&;\s#'\"<>]+", re.IGNORECASE)
_HEADER = re.compile(r"(\bauthorization\s*:\s*(?:\w+\s+)?|\bbearer\s+)[^\s'\"]{8,}", re.IGNORECASE)
_NAME = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|APIKEY|API_KEY|ACCESS_KEY|SECRET_KEY|CREDENTIALS?)(?:_|$)")
# Control characters, line separators and marks that change the direction of writing: a name must not control a terminal.
_UNSHOWN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_SHORTEST = 8  # characters of a variable's value; a shorter one may be a common word


def redacted(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text with `***` for each secret in it.

    Secrets are the user part of addresses (`https://USER:PASSWORD@host`), values of query parameters whose names speak of tokens, keys
    or signatures (`X-Amz-Signature`), what follows `Authorization:` and `Bearer`, and the values of variables in `environment` (None:
    that of this process) whose names speak of tokens, secrets or passwords, such as HF_TOKEN.
    """
    variables = os.environ if environment is None else environment
    for value in sorted(_secret_values(variables), key=len, reverse=True):
        text = text.replace(value, SHOWN)
    text = _USER.sub(SHOWN, text)
    text = _QUERY.sub(rf"\g<1>{SHOWN}", text)
    return _HEADER.sub(rf"\g<1>{SHOWN}", text)


def _secret_values(variables: Mapping[str, str]) -> set[str]:
    values = {value for name, value in variables.items() if _NAME.search(name.upper()) and len(value) >= _SHORTEST}
    return {value for value in values if not os.path.exists(value)}  # a file of credentials is no secret itself


def redacted_tree(value: Any) -> Any:
    """A value of JSON with each text in it redacted."""
    if isinstance(value, dict):
        return {name: redacted_tree(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_tree(one) for one in value]
    return redacted(value) if isinstance(value, str) else value


def readable(text: str) -> str:
    """`text` as printable Unicode: control characters, and bytes of a file name that are not UTF-8, become escapes."""
    valid = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return _UNSHOWN.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), valid)
