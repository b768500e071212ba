"""Tasks and data sets: each module stands alone and imports neither a model nor a framework."""
