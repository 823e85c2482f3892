"""The HTTP application over a scripted replica and jobs in memory."""
