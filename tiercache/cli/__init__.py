"""The `tiercache` command."""
