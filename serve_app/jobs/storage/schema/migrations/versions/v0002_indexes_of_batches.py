"""Partial indexes on the `owner` and `ending` of batches, for the few batches that have one."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_COLUMNS = ("owner", "ending")


def upgrade() -> None:
    """Create the indexes."""
    for column in _COLUMNS:
        is_set = sa.text(f"{column} IS NOT NULL")
        op.create_index(f"batches_by_{column}", "batches", [column], sqlite_where=is_set, postgresql_where=is_set)


def downgrade() -> None:
    """Drop the indexes."""
    for column in _COLUMNS:
        op.drop_index(f"batches_by_{column}", table_name="batches")
