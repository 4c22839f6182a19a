"""Which reply each request is answered with."""

from __future__ import annotations

from collections.abc import Mapping

from tiercache.protocol import messages
from tiercache.protocol.messages import Reply, Request

ANSWERS: Mapping[type[Request], type[Reply]] = {
    messages.Ping: messages.Done,
    messages.RegisterNamespace: messages.Namespace,
    messages.Match: messages.Matched,
    messages.Resolve: messages.Frames,
    messages.Hold: messages.Done,
    messages.Release: messages.Released,
    messages.Renew: messages.Renewed,
    messages.Reserve: messages.Reserved,
    messages.Commit: messages.Committed,
    messages.Abort: messages.Done,
    messages.Read: messages.Payload,
    messages.Write: messages.Done,
    messages.Pin: messages.Pinned,
    messages.Unpin: messages.Pinned,
    messages.Prefetch: messages.Matched,
    messages.Flush: messages.Flushed,
    messages.Report: messages.Done,
    messages.Stats: messages.StatsReply,
    messages.Check: messages.CheckReply,
    messages.Bye: messages.Done,
    messages.Extents: messages.ExtentList,
    messages.BadExtent: messages.Done,
    messages.ReserveExtents: messages.ReservedExtents,
    messages.CommitExtents: messages.Committed,
    messages.Peek: messages.Peeked,
    messages.Models: messages.ModelList,
    messages.Inspect: messages.Inspected,
    messages.Pins: messages.PinList,
    messages.Specs: messages.SpecList,
    messages.Hint: messages.Hinted,
    messages.Settings: messages.SettingList,
    messages.ChangeSetting: messages.Changed,
}
"""The type of each request's reply, when it is not an `Error`."""
