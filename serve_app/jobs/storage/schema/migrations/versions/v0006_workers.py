"""Columns for several workers on one database: the model and speed of each, and the owners of webhook deliveries."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_OWNED = sa.text("owner IS NOT NULL")


def upgrade() -> None:
    """Add the columns and the index."""
    op.add_column("owners", sa.Column("model", sa.Text()))
    op.add_column("owners", sa.Column("speed", sa.Text()))
    op.add_column("deliveries", sa.Column("owner", sa.String(length=64)))
    op.create_index("deliveries_by_owner", "deliveries", ["owner"], sqlite_where=_OWNED, postgresql_where=_OWNED)


def downgrade() -> None:
    """Drop the columns and the index."""
    op.drop_index("deliveries_by_owner", table_name="deliveries")
    op.drop_column("deliveries", "owner")
    op.drop_column("owners", "speed")
    op.drop_column("owners", "model")
