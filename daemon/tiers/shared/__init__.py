"""The shared tier: blocks in a store that several hosts use, such as Valkey, an object store or a shared folder.

stores/    the kinds of stores
"""
