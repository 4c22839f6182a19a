"""Object stores (`s3://bucket/prefix`, `gs://`, `az://`), by obstore. Requests cost there: values are packs of blocks.

    PREFIX/values/NAME    a value; a lifecycle rule of the bucket on this prefix removes old ones
    PREFIX/notes/NAME     a note; no rule may remove these

settings    the URL
requests    a thread with an event loop that makes the requests, side by side and with deadlines
connection  the store's calls, and what obstore raises, in words
store       puts these together
"""
