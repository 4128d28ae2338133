"""Banks that lie elsewhere: on the Hugging Face Hub, on S3, on whatever fsspec reaches.

addresses   what is written: org/name, hf://datasets/org/name@revision, s3://bucket/prefix
stores      what every place can do: list its files, read one
hub         a dataset repository, through its own client
objects     a folder under any fsspec address
web         a folder behind plain HTTP, which may list nothing
fetch       a bank from a place into a folder: checked, resumable, state.json last
cache       the folder in which `open_bank("hf://…")` keeps what it has fetched

Nothing here is imported before an address is opened.
"""
