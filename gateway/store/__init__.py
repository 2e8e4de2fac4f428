"""Responses and conversations that outlive their connection, by tenant, sealed, and for a limited time."""
