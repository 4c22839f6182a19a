"""The protocol between the daemon and its clients, byte for byte. daemon/PROTOCOL.md is the specification.

    messages     requests and replies on the control socket, packed as msgpack
    wire         packets and file descriptors on the session socket
    keys         prefix hashes: the names of blocks
    frames       how a frame is named
    namespaces   what determines the form of a block's bytes
    checksums    checksums that prove the bytes of a block
    hints        what a client says about the further use of blocks
    curve        keys for connections between hosts

Both sides import this folder. It imports neither of them.
"""
