"""Tables of usage by day, tenant, model and band, and of the processes that report it."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "usage",
        sa.Column("day", sa.String(10), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("band", sa.Integer(), nullable=False),
        sa.Column("num_requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("computed_tokens", sa.BigInteger(), nullable=False),
        sa.Column("wasted_tokens", sa.BigInteger(), nullable=False),
        sa.Column("device_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("day", "tenant", "model", "band"),
    )
    op.create_index("usage_by_tenant", "usage", ["tenant", "day"])
    op.create_table(
        "usage_reporters",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("reported_unix_s", sa.Double(), nullable=False),
    )
    op.create_index("usage_reporters_by_time", "usage_reporters", ["reported_unix_s"])


def downgrade() -> None:
    """Drop the tables."""
    op.drop_table("usage_reporters")
    op.drop_table("usage")
