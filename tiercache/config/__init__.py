"""The daemon's settings.

    setting_kinds     how a value is read, checked and written
        ↓
    settings          each setting: its field and default, key, kind and help
        ↓
    daemon_config     command line > environment > file > default, as one frozen object
    settings_schema   the same table as JSON Schema

A new setting is one field of `settings.Settings`; flags, the file and `tiercache config` follow from it. The schema of
the Helm chart is made by python -m tiercache.config.settings_schema daemon/deploy/helm/tiercache/values.schema.json
"""
