"""What an object store's error says, in one line and without anything that may be a credential."""

from __future__ import annotations

import os
import re

_SECRET_NAME = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|SAS|SIGNATURE|CREDENTIAL", re.IGNORECASE)
_SHORTEST_SECRET = 8
_USER = re.compile(r"//[^/\s@]+@")
_QUERY = re.compile(r"\?[^\s\"'<>)]+")
_STATUS = re.compile(r"status code: (\d{3}[^:\n]*)")
_CODE = re.compile(r"<Code>([^<]+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]+)</Message>")
_REQUEST = re.compile(r"performing [A-Z]+ (https?://[^/\s?,]+)")
_RETRIES = re.compile(r"after (\d+) retries")
_CAUSE = re.compile(r'(?:message|error): "([^"]+)"')
_NO_CREDENTIALS = ("169.254.169.254", "metadata.google.internal")
_SIGNS = (
    *(
        (address, "no credentials in the environment, and none from this machine's cloud")
        for address in _NO_CREDENTIALS
    ),
    ("kind: Timeout", "no answer in time"),
    ("IncompleteBody", "the connection broke off"),
    ("IncompleteMessage", "the connection broke off"),
    ("kind: Interrupted", "the connection broke off"),
    ("BadScheme", "an http:// address must be given as `endpoint`; without one only https:// is used"),
)
"""What an error's text holds, and what that means."""
_MAX_WORDS = 300


def said(error: BaseException) -> str:
    """The cause that an error of obstore names, with the host and the number of retries."""
    text = str(error)
    words = _cause(text)
    host, retries = _REQUEST.search(text), _RETRIES.search(text)
    if host is not None and host[1] not in words:
        words += f" (from {host[1]}{f', after {retries[1]} retries' if retries is not None else ''})"
    words = " ".join(masked(words).split())
    return words if len(words) <= _MAX_WORDS else f"{words[:_MAX_WORDS]}…"


def _cause(text: str) -> str:
    if status := _STATUS.search(text):
        details = [found[1] for found in (_CODE.search(text), _MESSAGE.search(text)) if found is not None]
        if not any(address in text for address in _NO_CREDENTIALS):
            return ": ".join([status[1].strip(), *details])
    for sign, words in _SIGNS:
        if sign in text:
            return words
    causes = _CAUSE.findall(text)
    return str(causes[-1]) if causes else text.partition("Debug source:")[0].rpartition(" - ")[2]


def masked(text: str) -> str:
    """The text without query strings, user names in URLs, and the values of secret variables of the environment."""
    text = _QUERY.sub("?…", _USER.sub("//…@", text))
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST_SECRET and _SECRET_NAME.search(name):
            text = text.replace(value, "…")
    return text
