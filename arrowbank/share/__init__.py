"""Banks handed on: pushed to the Hugging Face Hub or any fsspec address with a card that shows what they are, and pulled again."""
