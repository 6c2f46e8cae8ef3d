"""The papers: settings, methods, tables and figures."""
