"""Credentials that somebody wrote into a spec: no report, log or document shows them."""

from __future__ import annotations

import re

HIDDEN = "…"
_MOST = 4096
"""Characters that are looked at; reports show fewer."""
ENVIRONMENT = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY"
"""Variables that the kinds of stores read, for messages."""

_NAME = (
    r"(?:[\w-]*[_-])?(?:secret|passw(?:or)?d|credentials?|token|sas)(?:[_-][\w-]*)?"
    r"|[\w-]*(?:access|account|secret|api|private|shared)[_-]?key(?:[_-][\w-]*)?"
)
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
_PAIR = re.compile(rf"(?<![\w-])((?:{_NAME})[\"']?\s*[:=]\s*)(\"[^\"]*\"|'[^']*'|[^\s,{{}}\[\]\"']+)", re.IGNORECASE)
_USER = re.compile(r"(://)[^\s\"']*@")
_QUERY = re.compile(r"(://[^\s\"'?]*\?)[^\s\"']+")


def is_secret(key: str) -> bool:
    """Tell whether a key is named like one that holds a credential: `secret_key`, not `tokenizer`."""
    return _SECRET_NAME.fullmatch(key) is not None


def masked(text: str) -> str:
    """Return a text without what stands before the `@` or behind the `?` of a URL, and without secret keys' values;

    what is longer than reports show is cut.
    """
    text = _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(rf"\1{HIDDEN}@", text[:_MOST]))
    return _PAIR.sub(rf"\1{HIDDEN}", text)
