"""The protocol's messages: msgpack arrays, one typed struct each.

A struct is encoded as an array whose first element is its tag. Every request then carries four
fields: `request_id` (echoed), `session` (the token from `Welcome`), `generation` (the daemon's
life, from `Welcome`) and `deadline_us` (on the *sender's* monotonic clock; the daemon knows the
offset from `Hello.clock_us`, so it can tell how long a message lay in a queue). Every reply
carries `request_id` and `generation`.

Evolution: fields are only ever appended, with defaults; a receiver ignores elements it does not
know and fills in those that are missing. A change that this cannot express raises PROTOCOL.

Keys travel packed, 16 bytes each, in one bytes field. Frames travel packed as one u64le each:
region id in the top 16 bits, byte offset inside the region in the low 48.

`daemon/PROTOCOL.md` describes all of this from the bytes.

    greeting   the session socket          limits    version, sizes, enumerations
    requests   what clients ask            replies   what they are answered
    admin      what operators ask          names     how engines name their blocks          packing   packed fields
    kinds      all of them

A request says in its base class what answers it: `class Ping(Request[Done])`. What else a new request needs is in
daemon/requests/__init__.py.

A new field is the last one of its struct, with a default, and has a row in `daemon/PROTOCOL.md`, which a test compares.
Who makes the message sets it: requests are made in `tiercache/client` and `tiercache/connector`, replies where
`daemon/requests` names the struct (`Matched` in `reads` and `admin`), and the daemons of tests (`memory_daemon.py`,
`fake_daemon.py`) answer too.
"""

from __future__ import annotations

from .admin import *
from .greeting import *
from .kinds import *
from .limits import *
from .names import *
from .packing import *
from .replies import *
from .requests import *
