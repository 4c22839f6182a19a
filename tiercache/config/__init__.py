"""The daemon's settings.

    setting_kinds     how a value is read, checked and written
        ↓
    settings          the table: each setting's key, kind and help
        ↓
    daemon_config     command line > environment > file > default, as one frozen object
    settings_schema   the same table as JSON Schema

A new setting is a row in `settings` and a field with its default in `DaemonConfig`; flags, the file, the environment
and `tiercache config` follow from these. Write the chart's schema again:

    python -m tiercache.config.settings_schema daemon/deploy/helm/tiercache/values.schema.json
"""
