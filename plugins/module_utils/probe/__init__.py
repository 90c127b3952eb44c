"""Small readers of one node. `gather.gather` is the way in; each parser is a function of a text."""
