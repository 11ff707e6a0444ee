-- Restart policies of containers that the engine must not start by itself. Times are
-- nanoseconds since 1970, UTC, and backoff is nanoseconds; 0 is none.
CREATE TABLE restarts (
    container_id TEXT PRIMARY KEY NOT NULL,
    policy       TEXT NOT NULL,
    max_retries  INTEGER NOT NULL,
    count        INTEGER NOT NULL,
    stopped      INTEGER NOT NULL,
    exit_at      INTEGER NOT NULL,
    backoff      INTEGER NOT NULL,
    next_at      INTEGER NOT NULL
) WITHOUT ROWID;
