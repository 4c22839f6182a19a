"""A folder that hosts share (`file:///mnt/shared/kv`): a file for each value, on any POSIX file system.

    FOLDER/tiercache-1/values/3fa/NAME    a value: exactly its bytes; the folder is a hash of the name
    FOLDER/tiercache-1/notes/NAME         a note
    FOLDER/tiercache-1/tmp/HOST-PID-...   what is being written; a rename makes it a value
    FOLDER/tiercache-1/aside/...          what stood in the place of a value and is not a file
    FOLDER/tiercache-1/janitor            which host cleans up; its modification time is its last sign of life

settings    the URL
tree        the folders, opened without following links, and errors in words
connection  the store's calls, one file (Files: read, write, rename), and FolderStore, which puts these together for
            the helper process in which they run
janitor     removes what is old or too much; JanitorLease has only one host do that at a time

A file's modification time is when it was written, less what its lifetime is shorter than `ttl`. So the files with the
oldest times are those to remove first.
"""
