"""Stand-in for the native `dsv41` engine: its command lines, files, wire and refusals, without a GPU.

Standard library only, and nothing from the collection: this is the second, independent reader of every format
that the collection plans and writes.
"""
