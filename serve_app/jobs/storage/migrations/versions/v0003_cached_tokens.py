"""How many of a batch's prompt tokens were found in a KV cache; of batches that are there already nobody knows."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add the column."""
    op.add_column("batches", sa.Column("num_cached_tokens", sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("batches", "num_cached_tokens")
