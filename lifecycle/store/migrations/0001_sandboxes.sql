-- Times are nanoseconds since 1970, UTC; spec and what follows it are JSON, but for
-- the two texts.
CREATE TABLE sandboxes (
    session_id   TEXT PRIMARY KEY,
    tenant       TEXT NOT NULL,
    key          TEXT NOT NULL,
    container_id TEXT NOT NULL,
    created_at   INTEGER NOT NULL,
    expires_at   INTEGER NOT NULL,
    deadline     INTEGER NOT NULL,
    last_used_at INTEGER NOT NULL,
    spec         BLOB NOT NULL,
    env          BLOB NOT NULL,
    agent_id     TEXT NOT NULL,
    volume_path  TEXT NOT NULL,
    metadata     BLOB NOT NULL,
    overridden   BLOB NOT NULL,
    enforcement  BLOB NOT NULL
) WITHOUT ROWID;
