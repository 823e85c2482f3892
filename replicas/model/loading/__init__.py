"""Loading of checkpoints into models that are ready to run, with their tokenizers.

Read `loader.py` first. May import `replicas.engine`, `replicas.errors`, `replicas.model.attention`,
`replicas.model.checkpoint`, `replicas.model.hardware`, `replicas.model.layers`, `replicas.model.parallel`,
`replicas.model.pooling`, `replicas.protocol`, `replicas.settings`, `replicas.text`.
"""
