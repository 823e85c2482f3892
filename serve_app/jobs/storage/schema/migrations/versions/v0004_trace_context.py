"""Columns for the trace context of the request that submitted a batch; null in batches that existed before."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Add the columns."""
    op.add_column("batches", sa.Column("traceparent", sa.Text()))
    op.add_column("batches", sa.Column("tracestate", sa.Text()))


def downgrade() -> None:
    """Drop the columns."""
    op.drop_column("batches", "tracestate")
    op.drop_column("batches", "traceparent")
