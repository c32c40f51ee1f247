"""Reads the logs of sessions: histories, figures, tables, an HTML page."""
