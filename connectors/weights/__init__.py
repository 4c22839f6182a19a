"""Names models and detects changes of them; shared by the connectors of all engines.

files    the name of weights by the content of their files, or by the commit of a hub
sample   a few elements of every tensor
"""
