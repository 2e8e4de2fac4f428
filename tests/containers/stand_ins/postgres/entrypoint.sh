#!/bin/bash
set -e
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    initdb -U "$POSTGRES_USER" --pwfile=<(printf '%s\n' "$POSTGRES_PASSWORD") -A scram-sha-256 --auth-local=trust >/dev/null
    echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
    pg_ctl -D "$PGDATA" -o "-c listen_addresses=" -w start >/dev/null
    psql -q -U "$POSTGRES_USER" -d postgres -c "create database $POSTGRES_DB"
    pg_ctl -D "$PGDATA" -m fast -w stop >/dev/null
fi
exec "$@" -c listen_addresses='*'
