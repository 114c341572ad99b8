"""Stores: how kept tokens are held in memory."""
