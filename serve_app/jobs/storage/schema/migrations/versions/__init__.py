"""One migration per version, oldest first. A published one is never changed.

May import nothing else of the project.
"""
