"""Exchanges bytes between the ranks of a group; every wait is bounded. Imports no other room."""
