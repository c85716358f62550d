"""What a person probably meant by an address of an object store that dtrain does not take."""

from __future__ import annotations

import re

from ..secrets import ENVIRONMENT

_SCHEMES = {
    **dict.fromkeys(("s3a", "s3n", "aws", "minio", "r2"), "s3"),
    **dict.fromkeys(("gcs", "gcp", "google"), "gs"),
    **dict.fromkeys(("azure", "abfs", "abfss", "wasb", "wasbs", "adl", "blob"), "az"),
}
"""Other tools' schemes → dtrain's."""
_TAKEN = ("s3", "gs", "az", "file")
_CREDENTIALS = f"remove the credentials: they come from the environment ({ENVIRONMENT})"
_PROVIDERS = {"amazonaws.com": "s3", "googleapis.com": "gs", "windows.net": "az"}


def for_url(text: str) -> str:
    """Advise on a value that is no URL of an object tier."""
    scheme, sign, rest = text.strip().partition("://")
    if not sign:
        return _no_scheme(text.strip())
    if "@" in rest.partition("/")[0] or "?" in rest:
        return _CREDENTIALS
    folded = scheme.lower()
    return _other_scheme(folded, rest) if folded not in _TAKEN or scheme != folded else _own_scheme(scheme, rest)


def _other_scheme(folded: str, rest: str) -> str:
    """Advise on what begins with another tool's scheme, or with ours in capitals."""
    if folded in ("http", "https"):
        provider = next((kind for host, kind in _PROVIDERS.items() if host in rest), None)
        other = "" if provider else "; the address of a store of your own is the key `endpoint`"
        return f"write it as `{provider or 's3'}://bucket/folder`{other}"
    if folded in _SCHEMES or folded in _TAKEN:
        return f"dtrain calls it `{_SCHEMES.get(folded, folded)}://`"
    return "other kinds of stores are reached by mounting them: `file:///folder`"


def _own_scheme(scheme: str, rest: str) -> str:
    """Advise on what is wrong behind the right scheme."""
    if scheme == "file" and not rest.startswith("/"):
        return f"a folder has three slashes and an absolute path: `file:///{rest or 'folder'}`"
    if not rest.strip("/") or (rest.startswith("/") and scheme != "file"):
        return f"name the {'folder' if scheme == 'file' else 'bucket'} behind `{scheme}://`"
    return "it holds one of `@`, `?`, `#` or a space"


def _no_scheme(text: str) -> str:
    """Advise on what has no `://`."""
    if text.startswith(("/", "./", "../")) or text.startswith("file:"):
        folder = "/" + text.removeprefix("file:").lstrip("./")
        return f"for a folder write `file://{folder}`, or use a tier of `type: disk`"
    bucket = re.sub(r"^(s3|gs|az):/*", "", text)
    kind = text[:2] if bucket != text else "s3"
    return f"with the kind of store: `{kind}://{bucket or 'bucket/folder'}`"


def for_endpoint(text: str) -> str:
    """Advise on a value that is no address of a store."""
    host = text.strip().partition("://")[2]
    if "@" in host or "?" in host:
        return _CREDENTIALS
    return "it begins with `http://` or `https://`; the bucket goes into `url`"
