"""What the logs of sessions tell: histories, figures, tables, an HTML page, a trace."""
