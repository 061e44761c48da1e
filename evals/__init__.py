"""The harness: compose a model, a dataset and a cache; evaluate through it; record; show."""
