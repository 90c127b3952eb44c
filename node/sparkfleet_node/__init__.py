"""The node agent of sparkfleet.serving: what runs on a Spark when no controller is there.

Standard library only, Python 3.9. Delivered as one zipapp (``tools/build-node``) under a versioned path.
"""

#: Replaced in the zipapp by the collection's version and the digest of what was packed.
VERSION = "source"
DIGEST = "unpacked"
