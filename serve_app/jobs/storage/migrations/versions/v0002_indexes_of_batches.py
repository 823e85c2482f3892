"""Indexes of the few batches that somebody owns or whose lines are to be deleted, among the many that are kept."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_COLUMNS = ("owner", "ending")


def upgrade() -> None:
    """Make the indexes."""
    for column in _COLUMNS:
        is_set = sa.text(f"{column} IS NOT NULL")
        op.create_index(f"batches_by_{column}", "batches", [column], sqlite_where=is_set, postgresql_where=is_set)


def downgrade() -> None:
    """Drop them."""
    for column in _COLUMNS:
        op.drop_index(f"batches_by_{column}", table_name="batches")
