"""Tables of stored responses with their deltas, of conversations with their items, and of their sums by tenant."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"

_NUMBER = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_HELD = sa.text("owner IS NOT NULL")
_QUEUED = sa.text("status = 'queued'")
_UNFINISHED = sa.text("status IN ('queued', 'in_progress')")


def upgrade() -> None:
    """Create the tables."""
    _create_conversations()
    op.create_table(
        "responses",
        sa.Column("number", _NUMBER, primary_key=True),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("previous_id", sa.String(64)),
        sa.Column("conversation_id", sa.String(64)),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("is_background", sa.Integer(), nullable=False),
        sa.Column("owner", sa.String(64)),
        sa.Column("created_unix_s", sa.Double(), nullable=False),
        sa.Column("expires_unix_s", sa.Double(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("input", sa.Text(), nullable=False),
        sa.Column("response", sa.Text(), nullable=False),
        sa.Column("output", sa.Text(), nullable=False),
        sa.Column("run", sa.Text()),
        sa.Column("prompt", sa.LargeBinary()),
        sa.UniqueConstraint("id", name="responses_id"),
    )
    op.create_index("responses_by_tenant", "responses", ["tenant", "created_unix_s", "id"])
    op.create_index("responses_by_expiry", "responses", ["expires_unix_s"])
    op.create_index("responses_by_owner", "responses", ["owner"], sqlite_where=_HELD, postgresql_where=_HELD)
    for name, columns, where in (
        ("responses_to_run", ["model", "number"], _QUEUED), ("responses_unfinished", ["tenant"], _UNFINISHED),
    ):  # fmt: skip
        op.create_index(name, "responses", columns, sqlite_where=where, postgresql_where=where)
    op.create_table(
        "response_deltas",
        sa.Column("response", _NUMBER, sa.ForeignKey("responses.number", ondelete="CASCADE"), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("finish", sa.String(16)),
        sa.PrimaryKeyConstraint("response", "position"),
        sqlite_with_rowid=False,
    )


def _create_conversations() -> None:
    op.create_table(
        "stored",
        sa.Column("tenant", sa.Text(), primary_key=True),
        sa.Column("num_responses", sa.BigInteger(), nullable=False),
        sa.Column("num_conversations", sa.BigInteger(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "conversations",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("metadata", sa.Text(), nullable=False),
        sa.Column("created_unix_s", sa.Double(), nullable=False),
        sa.Column("num_items", sa.Integer(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
    )
    op.create_index("conversations_by_tenant", "conversations", ["tenant", "created_unix_s", "id"])
    op.create_table(
        "conversation_items",
        sa.Column(
            "conversation_id", sa.String(64), sa.ForeignKey("conversations.id", ondelete="CASCADE"), nullable=False
        ),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("item", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("conversation_id", "position"),
        sa.UniqueConstraint("conversation_id", "id", name="conversation_items_id"),
    )


def downgrade() -> None:
    """Drop the tables."""
    for table in ("response_deltas", "responses", "conversation_items", "conversations", "stored"):
        op.drop_table(table)
