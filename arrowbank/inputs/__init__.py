"""Records from anywhere, and what becomes of those that cannot be read.

sources.py  what a place holds: files of a folder, a pattern, a saved dataset, a split, an address (remote.py); their hashes; their blocks
formats.py  the formats by suffix: each turns a file into blocks of JSON lines, or into Arrow record batches (tables.py)
lines.py    streams of lines, compressed or not, with a limit to what a line may take
records.py  the blocks as Python values, one record after the other: what capture, trunk banks and fillers read
extract.py  the blocks as texts and their keys: what the scan reads, in its worker processes

To add a format, write a function that turns a stream of bytes into blocks of JSON lines (or an open file into record batches), and add an
entry to FORMATS in formats.py. Every stage reads it then.

Nothing is imported here: the scan's worker processes read lines with extract.py and must stay as small as msgspec.
"""
