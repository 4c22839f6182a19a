"""What obstore raises, as a store's problem in words.

obstore has one exception for most failures: the rest is in its text, the cause at the end of what it calls its debug
source. Answers of servers are quoted by their code alone, since their text may name keys. No text has a duration or a
name of an object in it: a reason that lasts stays the same.
"""

from __future__ import annotations

import re

from tiercache.daemon.tiers.shared.stores.store import StoreError, StoreProblem

from .settings import CREDENTIALS, ObjectSettings

_STATUS = re.compile(r"status code: ([1-5][0-9][0-9])")
_CODE = re.compile(r"<Code>([A-Za-z.]{1,64})</Code>|\"reason\": *\"([A-Za-z]{1,64})\"")
_SKEW = frozenset({"RequestTimeTooSkewed", "RequestExpired", "AccessDenied.RequestTimeTooSkewed"})
_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound"})
_FULL = frozenset({"QuotaExceeded", "InsufficientCapacity", "XMinioStorageFull", "InsufficientStorage", "NoSpaceLeft"})
_BUSY = frozenset({429, 500, 502, 503, 504})
_TIME_OUT = re.compile(r"operation timed out|TimedOut|deadline has elapsed")
_ATTEMPT = re.compile(r"^Generic \w+ error: (?:Error performing \w+ \S+ in \S+, after .*? - )?")
"""What obstore writes before the cause: the URL of one object, and how long it took."""
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_QUOTED = re.compile(r'(?:message|error): "((?:[^"\\]|\\.)*)"')
_PRESENTED = re.compile(r"presented: \[([^\]]*)\]")
_NAME = re.compile(r'[A-Za-z0-9*][A-Za-z0-9*.:-]*(?=\\?"\))|(?<=\()[0-9a-f.:]+(?=\))')
_NOT_TLS = re.compile(r"InvalidMessage\(|InvalidContentType|CorruptMessage")
_TRUST = "name its CA in the URL (?ca=/etc/ssl/our-ca.pem), or in SSL_CERT_FILE"
_CERTIFICATES = {
    "UnknownIssuer": ("its certificate is of a CA that this host does not trust", _TRUST),
    "CaUsedAsEndEntity": ("its certificate is that of a CA", "give the server a certificate that a CA has signed"),
    "Expired": ("its certificate has expired", "renew it, or set the clock of this host"),
    "ExpiredContext": ("its certificate has expired", "renew it, or set the clock of this host"),
    "NotValidYet": ("its certificate is not valid yet", "set the clock of this host"),
    "NotValidYetContext": ("its certificate is not valid yet", "set the clock of this host"),
}
"""What is wrong with a server's certificate, by rustls's word, and what to do."""
_NAMES = frozenset({"NotValidForName", "NotValidForNameContext"})
_TOO_LONG = frozenset({"EntityTooLarge", "RequestBodyTooLarge"})


def status_of(error: Exception) -> int:
    """The HTTP status that the server has answered with; 0 if it has not."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else 0


def code_of(error: Exception) -> str:
    """The server's own word for the failure, if it has one."""
    found = _CODE.search(str(error))
    return (found[1] or found[2]) if found else ""


def is_missing(error: Exception) -> bool:
    """True if there is no such object, in a bucket that exists as far as is known."""
    return (isinstance(error, FileNotFoundError) or status_of(error) == 404) and code_of(error) not in _NO_BUCKET


def is_too_long(error: Exception) -> bool:
    """True if the server refuses this object for its size."""
    return status_of(error) == 413 or code_of(error) in _TOO_LONG


def is_whole(error: Exception) -> bool:
    """True if the server has answered a request for a range with status 200."""
    return "non-partial response" in str(error)


def object_store_error(settings: ObjectSettings, error: Exception) -> StoreError:
    """A failed request as one line."""
    status, code = status_of(error), code_of(error)
    said = " ".join(filter(None, [f"HTTP {status}" if status else "", code]))
    if not status and (found := _broken_tls(error)) is not None:
        return StoreError(StoreProblem.UNREACHABLE, f"{settings.address}: {found[0]}: {found[1]}")
    problem, remedy = _judge(settings, error, status, code)
    return StoreError(problem, f"{settings.address}: {said or _cause(error)}: {remedy}")


def _broken_tls(error: Exception) -> tuple[str, str] | None:
    """What is wrong with the server's certificate, or with its TLS, and what to do."""
    text = str(error)
    found = _CERTIFICATE.search(text)
    if found is not None and found[1] in _NAMES:
        presented = _PRESENTED.search(text)
        names = ", ".join(_NAME.findall(presented[1])) if presented is not None else ""
        return f"its certificate is for {names or 'another name'}", "write that name into the URL's endpoint"
    if found is not None:
        return _CERTIFICATES.get(found[1], (f"its certificate is not good ({found[1]})", _TRUST))
    if _NOT_TLS.search(text):
        return "the server does not speak TLS there", "write http:// in the URL's endpoint, or the port of https"
    return None


def _judge(settings: ObjectSettings, error: Exception, status: int, code: str) -> tuple[StoreProblem, str]:
    if code in _SKEW:
        return StoreProblem.DENIED, "the clock of this host or of the server is wrong: set it (chrony, NTP)"
    if code in _NO_BUCKET:
        return StoreProblem.PROTOCOL, f"there is no bucket {settings.bucket}: make it"
    if code in _FULL or status == 507:
        return StoreProblem.FULL, "make room, or have a lifecycle rule of the bucket remove old values"
    if status in (401, 403):
        remedy = "see that these credentials may read, write and delete in the bucket"
        return (
            StoreProblem.DENIED,
            f"{CREDENTIALS[settings.scheme]}; {remedy}, and that the clock of this host is right",
        )
    if status in _BUSY:
        return StoreProblem.BUSY, "the server asks to come back later"
    if status in (301, 307, 308) or code == "AuthorizationHeaderMalformed":
        return StoreProblem.PROTOCOL, "the bucket is elsewhere: write its region in the URL (?region=...)"
    if status:
        return StoreProblem.PROTOCOL, "see whether the URL's endpoint is an object store of this kind"
    if _TIME_OUT.search(str(error)):
        return StoreProblem.TIMEOUT, "the server did not answer in time"
    if isinstance(error, (OSError, ConnectionError)) or "HTTP error" in str(error):
        return StoreProblem.UNREACHABLE, "see that the server runs, and the URL's endpoint"
    if "redential" in str(error) or "metadata" in str(error) or "latest/api/token" in str(error):
        return StoreProblem.DENIED, CREDENTIALS[settings.scheme]
    return StoreProblem.PROTOCOL, "see whether the URL's endpoint is an object store of this kind"


def _cause(error: Exception) -> str:
    """The innermost text of an error that no server has answered with, such as `Connection refused`.

    It has no URL of an object and no duration, so that one cause is one text for as long as it lasts.
    """
    first, _, _ = str(error).partition("\n")
    quoted = _QUOTED.findall(str(error))
    return str(quoted[-1] if quoted else _ATTEMPT.sub("", first))[:200] or type(error).__name__
