"""A real daemon, and connectors to it."""

from __future__ import annotations

from connector_helpers import daemon as daemon
from connector_helpers import open_connector as open_connector
