"""The configured directories while the daemon runs: opened, watched, given up, opened again.

keeper         one directory (Keeper), and all of them together (Keepers)
runners        the parts of an open directory: in the daemon with threads, or in a process of its own (`worker/`)
worker_choice  which of the two
"""
