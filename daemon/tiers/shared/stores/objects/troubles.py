"""What obstore raises, as a store's problem in words.

obstore has one exception for most failures: the rest is in its text. Answers of servers are quoted by their code alone,
since their text may name keys.
"""

from __future__ import annotations

import re

from tiercache.daemon.tiers.shared.stores.objects.settings import CREDENTIALS, ObjectSettings
from tiercache.daemon.tiers.shared.stores.store import StoreError, StoreProblem

_STATUS = re.compile(r"status code: ([1-5][0-9][0-9])")
_CODE = re.compile(r"<Code>([A-Za-z.]{1,64})</Code>|\"reason\": *\"([A-Za-z]{1,64})\"")
_SKEW = frozenset({"RequestTimeTooSkewed", "RequestExpired", "AccessDenied.RequestTimeTooSkewed"})
_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound"})
_FULL = frozenset({"QuotaExceeded", "InsufficientCapacity", "XMinioStorageFull", "InsufficientStorage", "NoSpaceLeft"})
_BUSY = frozenset({429, 500, 502, 503, 504})
_TIME_OUT = re.compile(r"operation timed out|TimedOut|deadline has elapsed")
_ATTEMPT = re.compile(r"^Generic \w+ error: (?:Error performing \w+ \S+ in \S+, after .*? - )?")
"""What obstore writes before the cause: the URL of one object, and how long it took."""
_DEEPEST = re.compile(r"InvalidCertificate\(\s*(\w+)|(?:message|error): \"([^\"\n]{1,200})\"")
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
    """Whether there is no such object, in a bucket that exists as far as is known."""
    return (isinstance(error, FileNotFoundError) or status_of(error) == 404) and code_of(error) not in _NO_BUCKET


def is_too_long(error: Exception) -> bool:
    """Whether the server refuses this object for its size."""
    return status_of(error) == 413 or code_of(error) in _TOO_LONG


def is_whole(error: Exception) -> bool:
    """Whether the server has answered a request for a range with status 200."""
    return "non-partial response" in str(error)


def object_store_error(settings: ObjectSettings, error: Exception) -> StoreError:
    """A failed request as one line."""
    status, code = status_of(error), code_of(error)
    said = " ".join(filter(None, [f"HTTP {status}" if status else "", code]))
    problem, remedy = _judge(settings, error, status, code)
    return StoreError(problem, f"{settings.address}: {said or _cause(error)}: {remedy}")


def _judge(settings: ObjectSettings, error: Exception, status: int, code: str) -> tuple[StoreProblem, str]:
    if code in _SKEW:
        return StoreProblem.DENIED, "the clock of this host or of the server is wrong: set it (chrony, NTP)"
    if code in _NO_BUCKET:
        return StoreProblem.PROTOCOL, f"there is no bucket {settings.bucket}: make it"
    if code in _FULL or status == 507:
        return StoreProblem.FULL, "make room, or have a lifecycle rule of the bucket remove old values"
    if status in (401, 403):
        its = "see that these credentials may read, write and delete in the bucket"
        return StoreProblem.DENIED, f"{CREDENTIALS[settings.scheme]}; {its}, and that the clock of this host is right"
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
    """What went wrong, as far down as obstore says, else its first line: without URLs of objects and durations, so that
    one cause is one text for as long as it lasts.
    """
    first, _, source = str(error).partition("\n")
    if found := _DEEPEST.findall(source):
        bad_certificate, message = found[-1]
        return message or f"invalid peer certificate: {bad_certificate}"
    return _ATTEMPT.sub("", first)[:200] or type(error).__name__
