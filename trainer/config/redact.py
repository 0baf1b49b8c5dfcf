"""Redaction of secrets in all output of a run: files, lines, tracebacks.

Secrets by value: what environment variables hold whose names end in TOKEN, KEY, SECRET, PASSWORD or
CREDENTIALS, and the user parts of URLs that variables hold; also quoted and in base64. A value that is short,
a path, a number, or a word of the configuration is none. Secrets by form: user parts of URLs, signatures in
queries, private keys, tokens with the prefix of a well-known service. Another secret isn't recognized.
"""

import base64
import hashlib
import json
import os
import re
import secrets
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from trainer.config.registry import named

REDACTED = "***"

_SHORTEST = 8  # letters of a value
_ENDS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIALS")
_NAME = re.compile(
    r".*(?:token|secret|password|credentials|(?<![a-z])(?:api|access|private|secret|account)[_-]?key)",
    re.IGNORECASE | re.DOTALL,
)
_PATH = re.compile(r"(?:~|\.{1,2})?(?:/[a-z0-9_.@\-]+)+/?|[a-z0-9_.\-]+(?:/[a-z0-9_.@\-]+)+\.[a-z0-9]+")
_FIGURES = "accuracy perplexity precision"
_PLAIN_WORD = re.compile(r"[A-Za-z]+")

# The length of a scheme is bounded, and so is that of a password: no text may take quadratic time. A URL that
# was taken for a path has lost a slash.
_SCHEME = r"(?<![a-zA-Z0-9+.\-])[a-zA-Z][a-zA-Z0-9+.\-]{1,30}://?"
_USER = re.compile(rf"""{_SCHEME}([^\s/?#"']{{1,1000}})@""")
_QUERY = (
    r"(?:x-(?:amz|goog)-(?:signature|credential|security-token)|awsaccesskeyid|signature|sig|key|api[_-]?key"
    r"|(?:access_|id_|refresh_)?token|secret|password)"
)
# Prefixes of services' tokens, from their documentation and from detect-secrets and gitleaks.
_TOKENS = (
    r"(?<![A-Za-z0-9_\-])(?:"
    r"(?:hf|gsk|r8|npm)_[A-Za-z0-9]{30,}|gh[opsur]_[A-Za-z0-9]{30,}|github_pat_\w{22,}|glpat-[\w\-]{20,}"
    r"|sk-(?:proj|ant|svcacct|admin|or)-[\w\-]{20,}|sk-(?=[a-zA-Z]*\d)(?=[a-z0-9]*[A-Z])[A-Za-z0-9]{32,}"
    r"|(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"
    r"|eyJ[\w\-]{8,}\.eyJ[\w\-]{8,}\.[\w\-]{8,}|xox[a-z]-[\w\-]{10,}|xapp-[\w\-]{20,}|AIza[\w\-]{35}"
    r"|pypi-AgE[\w\-]{20,}|dop_v1_[a-f0-9]{40,}|SG\.[\w\-]{16,}\.[\w\-]{16,}|ya29\.[\w\-]{20,}"
    r"|hvs\.[\w\-]{20,}|dckr_pat_[\w\-]{20,}|nvapi-[\w\-]{40,}|local-[0-9a-f]{40})"
)
_FORMS = [
    (re.compile(pattern, re.DOTALL), with_what)
    for pattern, with_what in (
        (
            r"-----BEGIN ([A-Z ]*PRIVATE KEY(?: BLOCK)?)-----(?!\*{3}).*?(?:-----END \1-----|\Z)",
            rf"-----BEGIN \1-----{REDACTED}",
        ),
        # A password may hold / and @; host:8080/a@b is none.
        (rf"""({_SCHEME})[^\s/@:"']*:(?!\d+(?:[/?#\s"']|$))[^\s"]{{0,4000}}@""", rf"\1{REDACTED}@"),
        (rf"""({_SCHEME})[^\s/?#"']{{1,1000}}@""", rf"\1{REDACTED}@"),
        (rf"""([?&;](?i:{_QUERY})=)[^&;#\s"'\\]+""", rf"\1{REDACTED}"),
        (_TOKENS, REDACTED),
    )
]
# Each form has one of these.
_SIGNS = (
    *("@", "=", "-----", "_", "sk-", "AKIA", "ASIA", "eyJ", "xox", "xapp", "AIza", "pypi-", "SG."),
    *("ya29.", "hvs.", "nvapi-", "local-", "glpat-"),
)


def is_secret(name: str) -> bool:
    """True if a name, as of a variable or an attribute, says that its value is secret."""
    return _NAME.fullmatch(name) is not None


def redact_text(text: str) -> str:
    """Returns a text with its recognizable secrets replaced."""
    return _redacted(text, _values())


def redact(value: Any) -> Any:
    """Redacts the texts of mappings and sequences of JSON, at any depth."""
    return _within(value, _values())


def _within(value: Any, known: "re.Pattern[str] | None") -> Any:
    if isinstance(value, str):
        return _redacted(value, known)
    if value is None or isinstance(value, (int, float)):  # asked first: there are many, and it is quick
        return value
    if isinstance(value, Mapping):
        return {key: _within(item, known) for key, item in value.items()}
    return [_within(item, known) for item in value] if isinstance(value, Sequence) else value


def _redacted(text: str, known: "re.Pattern[str] | None") -> str:
    if any(sign in text for sign in _SIGNS):
        for pattern, with_what in _FORMS:
            text = pattern.sub(with_what, text)
    return text if known is None else known.sub(REDACTED, text)


# --- values ---


def _values() -> "re.Pattern[str] | None":
    """Returns a pattern of the values that are secret now; None if there is none."""
    held, urls = list[str](), list[str]()
    for name, value in os.environ.items():
        if name.upper().endswith(_ENDS):
            held.append(value)
        if "@" in value and ":/" in value:
            urls.append(value)
    return _pattern(tuple(held), tuple(urls)) if held or urls else None


@lru_cache(maxsize=8)
def _pattern(held: tuple[str, ...], urls: tuple[str, ...]) -> "re.Pattern[str] | None":
    users = [user for url in urls for user in _USER.findall(url)]
    passwords = [unquote(user.partition(":")[2] or user) for user in users]
    found = {form for value in (*held, *passwords) if _is_one(value) for form in _forms(value)}
    if not found:
        return None
    return re.compile("|".join(re.escape(one) for one in sorted(found, key=len, reverse=True)))


def _is_one(value: str) -> bool:
    value = value.strip()
    if len(value) < _SHORTEST or REDACTED in value or _is_path(value):
        return False
    try:
        float(value)
    except ValueError:
        return not (_PLAIN_WORD.fullmatch(value) and value.lower() in _words())
    return False


def _is_path(value: str) -> bool:
    if _PATH.fullmatch(value):
        return True
    try:
        return os.sep in value and Path(value).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


@cache
def _words() -> frozenset[str]:
    """Returns the words of the configuration (names, values and descriptions of its keys), and of figures."""
    keys = named("trainer.config.section:describe")(named("trainer.config.recipe:Recipe"))
    texts = (f"{key.name} {key.type} {key.default} {key.description}" for key in keys)
    return frozenset(word.lower() for text in (*texts, _FIGURES) for word in re.findall(r"[A-Za-z]+", text))


def _forms(value: str) -> Iterator[str]:
    """Yields the ways in which a value is written: as it is, quoted, and within base64."""
    value = value.strip()
    yield from (value, json.dumps(value)[1:-1], repr(value)[1:-1], shlex.quote(value), quote(value))
    yield quote(value, safe="")
    data = value.encode("utf-8", "surrogatepass")
    for before in range(3):  # letters of the value's base64 that don't depend on what stands around it
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            text = encode(b"\0" * before + data).decode().rstrip("=")
            first, last = (0, 2, 3)[before], (before + len(data)) * 8 // 6
            if last - first >= _SHORTEST:
                yield text[first:last]


# --- values that are compared, though they aren't kept ---


def salted(value: Any, salt: str | None = None) -> str:
    """Returns "SALT:HASH" of a value that is redacted, by which another one can be compared with it."""
    salt = salt or secrets.token_hex(8)
    return f"{salt}:{hashlib.sha256(f'{salt}{json.dumps(value, default=str)}'.encode()).hexdigest()}"


def is_same(stored: Any, now: Any, known: str | None = None) -> bool:
    """True if a stored value is that of now, as far as a redacted one can tell.

    Args:
        stored: The value as it was stored.
        now: The value itself.
        known: `salted` of the stored value before it was redacted; None if it wasn't, or isn't known.
    """
    if stored == now or redact(stored) == redact(now):  # also where a token was renewed
        return True
    return known is not None and salted(now, known.partition(":")[0]) == known


def is_masked(stored: str, now: str) -> bool:
    """True if a text is the stored one but for what was redacted there."""
    if REDACTED not in stored:
        return stored == now
    return re.fullmatch(".*".join(map(re.escape, stored.split(REDACTED))), now, re.DOTALL) is not None
