"""Model and dataset cards filled from files, and what goes to the Hub."""
