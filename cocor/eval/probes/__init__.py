"""Probes of a frozen encoder."""
