"""Column for the prompt tokens of a batch that were found in a KV cache; 0 in batches that existed before."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the column."""
    op.add_column("batches", sa.Column("num_cached_tokens", sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("batches", "num_cached_tokens")
