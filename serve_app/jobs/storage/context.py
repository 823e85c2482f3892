"""Context that all parts of one jobs process share."""

from __future__ import annotations

from dataclasses import dataclass, field

from replicas.clock import Clock
from serve_app.jobs.api.settings import JobsSettings
from serve_app.jobs.files.store import FileStore
from serve_app.jobs.storage.database import Database


@dataclass(frozen=True, slots=True)
class JobsContext:
    """Database, file store, limits and clock of one jobs process."""

    database: Database
    files: FileStore
    settings: JobsSettings
    clock: Clock = field(default_factory=Clock)
