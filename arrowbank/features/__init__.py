"""Feature banks: from sources to unique texts, to tokens, to one vector a text; and what is done with them.

Nothing is imported here: the scan's worker processes import `arrowbank.features.scan_worker` and must stay as small as msgspec.
"""
