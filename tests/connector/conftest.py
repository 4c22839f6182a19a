"""Fixtures of the connector's tests."""

from connector_helpers import daemon as daemon
from connector_helpers import open_connector as open_connector
