"""Models on this machine: the default one, converted GGUF files, downloads of the hub, and their caches; without torch.

May import `replicas.child_processes`, `replicas.errors`, `replicas.text`.
"""
