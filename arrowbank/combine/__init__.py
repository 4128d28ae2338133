"""Banks out of banks: `merge` and `select`. No model runs; whole shards are taken over as they are, by hard link."""
