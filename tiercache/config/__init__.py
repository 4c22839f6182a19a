"""The daemon's settings.

    setting_kinds     how a value is read, checked and written
        ↓
    settings          the table: each setting's key, kind and help
        ↓
    daemon_config     command line > environment > file > default, as one frozen object
    settings_schema   the same table as JSON Schema

A new setting is one row in `settings`; flags, the file, the Helm schema and `tiercache config` follow from it.
"""
