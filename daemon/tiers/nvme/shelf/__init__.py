"""One open directory as the event loop has it: what is in it, and where.

shelf          its index, its catalog and its queue: blocks are added, found, read, dropped
slots          places for blocks in segments: given out, evicted, made (NewSegments), and those that the index has
               left, until they are free (LeftSlots); the number of a slot and its place in the files
recovery       rows of an earlier life, read in slices while the shelf is in use
registry       namespaces that the catalog knows
parts          what a shelf asks of its directory, catalog and queue, in the daemon or in a process of its own
"""
