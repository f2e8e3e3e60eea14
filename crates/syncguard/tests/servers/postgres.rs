//! PostgreSQL servers, backends and clients for tests.

use std::time::Duration;

use syncguard::PostgresBackend;
use syncguard::postgres::PostgresConfig;
use syncguard::postgres::tokio_postgres::{self, Client, NoTls};
use test_support::{PostgresOptions, PostgresServer};

pub(crate) fn start() -> Option<PostgresServer> {
    PostgresServer::start(&PostgresOptions::default().with(["fsync = off"]))
}

pub(crate) fn config(url: &str) -> PostgresConfig {
    PostgresConfig::from_url(url).expect("a URL").response_timeout(Duration::from_secs(2))
}

pub(crate) async fn connect(url: &str) -> PostgresBackend {
    connect_with(config(url)).await
}

pub(crate) async fn connect_with(config: PostgresConfig) -> PostgresBackend {
    let backend = PostgresBackend::connect(config).await.expect("connects");
    backend.setup_schema().await.expect("works");
    backend
}

/// Returns a client for statements of the test itself.
pub(crate) async fn raw(server: &PostgresServer) -> Client {
    let (client, connection) =
        tokio_postgres::connect(&server.url(), NoTls).await.expect("connects");
    tokio::spawn(connection);
    client
}
