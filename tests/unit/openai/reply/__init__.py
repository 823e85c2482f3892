"""Replies, whole and streamed."""
