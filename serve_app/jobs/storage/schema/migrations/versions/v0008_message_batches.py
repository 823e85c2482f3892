"""Number of a batch's lines that its end left undone, and items of conversations by their id."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add the column and the index."""
    op.add_column("batches", sa.Column("num_undone", sa.Integer(), nullable=False, server_default="0"))
    op.create_index("conversation_items_by_id", "conversation_items", ["tenant", "id"])


def downgrade() -> None:
    """Drop the index and the column."""
    op.drop_index("conversation_items_by_id", "conversation_items")
    op.drop_column("batches", "num_undone")
