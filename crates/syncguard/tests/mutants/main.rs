//! The quick tests that need no server, in one program: `cargo-mutants` builds them for thousands
//! of mutants, and one program is built several times faster than many. `cargo test` runs each of
//! them by itself instead.

#[path = "../blocking.rs"]
mod blocking;
#[path = "../canary.rs"]
mod canary;
#[path = "../cancellable.rs"]
mod cancellable;
#[path = "../cleanup.rs"]
mod cleanup;
#[path = "../errors.rs"]
mod errors;
#[path = "../explain_key.rs"]
mod explain_key;
#[path = "../guards.rs"]
mod guards;
#[path = "../lock_helper.rs"]
mod lock_helper;
#[path = "../metrics.rs"]
mod metrics;
#[path = "../primitives.rs"]
mod primitives;
#[path = "../properties.rs"]
mod properties;
#[path = "../renewal.rs"]
mod renewal;
#[path = "../requests.rs"]
mod requests;
#[path = "../serde.rs"]
mod serde;
#[path = "../telemetry.rs"]
mod telemetry;
#[path = "../timeouts.rs"]
mod timeouts;
#[path = "../vectors.rs"]
mod vectors;
#[path = "../vectors_config.rs"]
mod vectors_config;
#[path = "../vectors_errors.rs"]
mod vectors_errors;
#[path = "../waiting.rs"]
mod waiting;
