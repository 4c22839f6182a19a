"""What the daemon and its clients agree on, byte for byte. daemon/PROTOCOL.md is the specification.

    messages     requests and replies on the control socket, packed as msgpack
    wire         packets and file descriptors on the session socket
    keys         prefix hashes: the names of blocks
    namespaces   what gives the bytes of a block their form
    checksums    what proves the bytes of a block
    hints        what a client knows of the further use of blocks
    curve        keys for connections between hosts

Both sides import this folder. It imports neither of them.
"""
