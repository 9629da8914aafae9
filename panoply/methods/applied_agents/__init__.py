"""Agents in dialogue, programs and control."""
