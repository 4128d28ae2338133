"""From sources to unique texts (`scan`), and from texts to tokens (`tokenize`).

Nothing is imported here: the scan's worker processes import `arrowbank.corpus.worker` and must stay as small as msgspec.
"""
