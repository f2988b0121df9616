"""Runs as one page of HTML: numbers from their folders, the page, and a server that renews it."""
