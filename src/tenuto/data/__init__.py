"""Tasks and data sets, and what turns them into batches (pairs.py); the tasks themselves import no framework."""
