"""Scoring, records, and every table and figure of the document-table study."""
