"""Banks handed on: pushed to the Hugging Face Hub or any fsspec address with a card that shows what they are, and pulled again.

pushing     the order in which files go, and what is compared afterwards
hub_place, object_place   the two kinds of places as things to write to
card        the dataset card: types, provenance, checks, how to load it; samples and plots fill it
pulling     a bank into a folder
"""
