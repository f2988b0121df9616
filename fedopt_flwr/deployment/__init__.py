"""Processes that federate: certificates, the server, the clients of one machine, the launcher."""
