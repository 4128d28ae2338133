"""Records from anywhere, and what becomes of those that cannot be read.

Nothing is imported here: the scan's worker processes read lines with what is below and must stay as small as msgspec.
"""
