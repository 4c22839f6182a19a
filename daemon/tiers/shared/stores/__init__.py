"""Stores that hosts share. `store` says what the tier asks of each; a module each implements it for one kind.

store    the interface, and how a store's failures are told
"""
