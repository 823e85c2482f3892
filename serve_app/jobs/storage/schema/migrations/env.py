"""Environment of the migrations, run by Alembic on the connection that `database.upgrade` gives it."""

from alembic import context

from serve_app.jobs.storage.schema.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
