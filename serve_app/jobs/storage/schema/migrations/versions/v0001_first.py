"""The first version: files, batches, their lines, owners, idempotency keys and webhook deliveries."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create all tables."""
    op.create_table(
        "batches",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("band", sa.Integer(), nullable=False),
        sa.Column("band_ceiling", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("ending", sa.String(length=16), nullable=True),
        sa.Column("owner", sa.String(length=64), nullable=True),
        sa.Column("input_file_id", sa.String(length=64), nullable=True),
        sa.Column("output_file_id", sa.String(length=64), nullable=True),
        sa.Column("error_file_id", sa.String(length=64), nullable=True),
        sa.Column("errors", sa.Text(), nullable=True),
        sa.Column("metadata", sa.Text(), nullable=True),
        sa.Column("callback_url", sa.Text(), nullable=True),
        sa.Column("request_id", sa.Text(), nullable=True),
        sa.Column("output_expires_after_s", sa.Double(), nullable=True),
        sa.Column("created_unix_s", sa.Double(), nullable=False),
        sa.Column("expires_unix_s", sa.Double(), nullable=True),
        sa.Column("in_progress_unix_s", sa.Double(), nullable=True),
        sa.Column("finalizing_unix_s", sa.Double(), nullable=True),
        sa.Column("completed_unix_s", sa.Double(), nullable=True),
        sa.Column("failed_unix_s", sa.Double(), nullable=True),
        sa.Column("expired_unix_s", sa.Double(), nullable=True),
        sa.Column("cancelling_unix_s", sa.Double(), nullable=True),
        sa.Column("cancelled_unix_s", sa.Double(), nullable=True),
        sa.Column("num_lines", sa.Integer(), nullable=False),
        sa.Column("num_queued", sa.Integer(), nullable=False),
        sa.Column("num_completed", sa.Integer(), nullable=False),
        sa.Column("num_failed", sa.Integer(), nullable=False),
        sa.Column("waiting_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_output_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("batches_by_input", "batches", ["input_file_id"], unique=False)
    op.create_index("batches_by_status", "batches", ["status", "tenant"], unique=False)
    op.create_index("batches_by_tenant", "batches", ["tenant", "kind", "created_unix_s", "id"], unique=False)
    op.create_table(
        "doomed_files", sa.Column("id", sa.String(length=64), nullable=False), sa.PrimaryKeyConstraint("id")
    )
    op.create_table(
        "files",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_unix_s", sa.Double(), nullable=False),
        sa.Column("expires_unix_s", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("files_by_expiry", "files", ["expires_unix_s"], unique=False)
    op.create_index("files_by_tenant", "files", ["tenant", "created_unix_s", "id"], unique=False)
    op.create_table(
        "owners",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("heartbeat_unix_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "deliveries",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("batch_id", sa.String(length=64), nullable=False),
        sa.Column("event", sa.String(length=32), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("num_attempts", sa.Integer(), nullable=False),
        sa.Column("created_unix_s", sa.Double(), nullable=False),
        sa.Column("next_attempt_unix_s", sa.Double(), nullable=True),
        sa.Column("delivered_unix_s", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("deliveries_by_batch", "deliveries", ["batch_id"], unique=False)
    op.create_index("deliveries_by_next_attempt", "deliveries", ["next_attempt_unix_s"], unique=False)
    op.create_table(
        "idempotency_keys",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=True),
        sa.Column("batch_id", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("tenant", "key"),
    )
    op.create_index("idempotency_keys_by_batch", "idempotency_keys", ["batch_id"], unique=False)
    op.create_table(
        "lines",
        sa.Column("batch_id", sa.String(length=64), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("custom_id", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=True),
        sa.Column("expected_tokens", sa.Integer(), nullable=False),
        sa.Column("length_rank", sa.Integer(), nullable=False),
        sa.Column("prefix_key", sa.String(length=16), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("owner", sa.String(length=64), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("status_code", sa.Integer(), nullable=True),
        sa.Column("response", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("batch_id", "position"),
        sa.UniqueConstraint("batch_id", "custom_id", name="lines_custom_id"),
    )
    op.create_index(
        "lines_by_owner",
        "lines",
        ["owner"],
        unique=False,
        sqlite_where=sa.text("owner IS NOT NULL"),
        postgresql_where=sa.text("owner IS NOT NULL"),
    )
    op.create_index(
        "lines_to_lease", "lines", ["batch_id", "status", "length_rank", "prefix_key", "position"], unique=False
    )


def downgrade() -> None:
    """Drop all tables."""
    op.drop_index("lines_to_lease", table_name="lines")
    op.drop_index(
        "lines_by_owner",
        table_name="lines",
        sqlite_where=sa.text("owner IS NOT NULL"),
        postgresql_where=sa.text("owner IS NOT NULL"),
    )
    op.drop_table("lines")
    op.drop_index("idempotency_keys_by_batch", table_name="idempotency_keys")
    op.drop_table("idempotency_keys")
    op.drop_index("deliveries_by_next_attempt", table_name="deliveries")
    op.drop_index("deliveries_by_batch", table_name="deliveries")
    op.drop_table("deliveries")
    op.drop_table("owners")
    op.drop_index("files_by_tenant", table_name="files")
    op.drop_index("files_by_expiry", table_name="files")
    op.drop_table("files")
    op.drop_table("doomed_files")
    op.drop_index("batches_by_tenant", table_name="batches")
    op.drop_index("batches_by_status", table_name="batches")
    op.drop_index("batches_by_input", table_name="batches")
    op.drop_table("batches")
