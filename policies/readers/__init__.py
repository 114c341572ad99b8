"""Readers: sparse attention, in which a decoded query reads some of the stored tokens."""
