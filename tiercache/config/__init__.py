"""The daemon's settings.

    setting_kinds     how a value is read, checked and written
        ↓
    settings          the table: each setting's key, kind and help
        ↓
    daemon_config     command line > environment > file > default, as one frozen object
    settings_schema   the same table as JSON Schema

A new setting is one row in `settings`; flags, the file, the Helm schema and `tiercache config` follow from it.
"""

from typing import TYPE_CHECKING

from tiercache.ground.former_names import former_module

if not TYPE_CHECKING:  # `tiercache.config` was a module in 0.1
    __getattr__ = former_module("tiercache.config.daemon_config")
