//! The pages and their data over HTTP.

use std::convert::Infallible;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Query, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures_util::stream;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

use super::access::Access;
use super::observer::Observer;
use crate::exit::Failure;

/// The most pages that may be open.
const MOST_PAGES: usize = 32;

/// The longest request body: a key, its confirmation and a hash.
const BODY_LIMIT: usize = 16 * 1024;

/// Nothing from elsewhere, nothing inline.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
                      connect-src 'self'; img-src 'self' data:; base-uri 'none'; \
                      form-action 'none'; frame-ancestors 'none'";

struct Server {
    access: Access,
    observer: Arc<Observer>,
    pages: Arc<Semaphore>,
}

/// Returns the routes of the page.
pub(super) fn router(access: Access, observer: Arc<Observer>) -> Router {
    let pages = Arc::new(Semaphore::new(MOST_PAGES));
    let server = Arc::new(Server { access, observer, pages });
    let file = |kind: &'static str, text: &'static str| {
        get(move || async move { ([(header::CONTENT_TYPE, kind)], text) })
    };
    Router::new()
        .route("/", get(index))
        .route("/app.js", file("text/javascript; charset=utf-8", include_str!("page/app.js")))
        .route("/style.css", file("text/css; charset=utf-8", include_str!("page/style.css")))
        .route("/events", get(events))
        .route("/locks", get(locks))
        .route("/break", post(break_lock))
        .route("/metrics", get(metrics))
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .layer(middleware::from_fn_with_state(Arc::clone(&server), admit))
        .with_state(server)
}

/// Lets a request pass, or refuses it; adds the headers that every response has.
async fn admit(State(server): State<Arc<Server>>, request: Request, next: Next) -> Response {
    let mut response = match server.access.check(request.uri(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(StatusCode::UNAUTHORIZED) => {
            let text = "401: the token is missing or wrong; open the URL that `syncguard ui` \
                        printed\n";
            (StatusCode::UNAUTHORIZED, text).into_response()
        }
        Err(status) => (status, "403: this request comes from another page\n").into_response(),
    };
    for (name, value) in [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::CACHE_CONTROL, "no-store"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

async fn index(State(server): State<Arc<Server>>) -> Response {
    let page = include_str!("page/index.html");
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8".to_owned()),
        (header::SET_COOKIE, server.access.cookie()),
    ];
    (headers, page).into_response()
}

/// Sends every change as a server-sent event.
async fn events(State(server): State<Arc<Server>>) -> Response {
    let Ok(permit) = Arc::clone(&server.pages).try_acquire_owned() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "503: too many open pages\n").into_response();
    };
    let changes = server.observer.subscribe();
    let events = stream::unfold((changes, permit), |(mut changes, permit)| async move {
        changes.changed().await.ok()?;
        let state = Arc::clone(&changes.borrow_and_update());
        Some((Ok::<_, Infallible>(Event::default().data(&*state)), (changes, permit)))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(Duration::from_secs(15))).into_response()
}

#[derive(Deserialize)]
struct PageQuery {
    after: Option<String>,
    #[serde(default)]
    filter: String,
}

async fn locks(
    State(server): State<Arc<Server>>,
    Query(query): Query<PageQuery>,
) -> Result<Response, Failure> {
    Ok(Json(server.observer.page(query.after, &query.filter).await?).into_response())
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct BreakRequest {
    key: String,
    lock_id_hash: String,
    /// The key once more, as it is displayed, typed by a person.
    confirmation: String,
}

#[derive(Serialize)]
struct Broken {
    broken: bool,
}

async fn break_lock(
    State(server): State<Arc<Server>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, Failure> {
    if !server.observer.may_break() {
        let text = "403: start `syncguard ui` with --allow-break\n";
        return Ok((StatusCode::FORBIDDEN, text).into_response());
    }
    // Every browser sends it with a POST, so that another page cannot make this request.
    if !headers.contains_key(header::ORIGIN) {
        return Ok((StatusCode::FORBIDDEN, "403: no Origin header\n").into_response());
    }
    let Ok(request) = serde_json::from_slice::<BreakRequest>(&body) else {
        return Ok((StatusCode::BAD_REQUEST, "400: not a request of this page\n").into_response());
    };
    if request.confirmation != crate::output::printable(&request.key) {
        let text = "400: the typed key is not the key of the lock\n";
        return Ok((StatusCode::BAD_REQUEST, text).into_response());
    }
    let broken = server.observer.break_lock(&request.key, &request.lock_id_hash).await?;
    Ok(Json(Broken { broken }).into_response())
}

/// What Prometheus scrapes: the locks of the store, not of this process.
async fn metrics(State(server): State<Arc<Server>>) -> Response {
    let summary = server.observer.summary();
    let mut text = String::new();
    let mut gauge = |name: &str, help: &str, value: f64| {
        writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}")
            .unwrap_or_default();
    };
    gauge("syncguard_store_up", "Whether the store answers.", f64::from(u8::from(summary.is_up)));
    if summary.is_up {
        #[expect(clippy::cast_precision_loss, reason = "there are at most some thousands")]
        gauge("syncguard_store_held_locks", "Locks that are held.", summary.held as f64);
        gauge(
            "syncguard_store_held_locks_partial",
            "Whether there are more locks than are counted.",
            f64::from(u8::from(summary.is_partial)),
        );
        gauge(
            "syncguard_store_oldest_hold_seconds",
            "How long the lock that was acquired first is held.",
            summary.oldest.unwrap_or_default().as_secs_f64(),
        );
        gauge(
            "syncguard_store_waiters",
            "Processes that wait for a lock, where the store counts them.",
            f64::from(summary.waiters),
        );
    }
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

/// A failure of the store.
impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = StatusCode::BAD_GATEWAY;
        (status, Body::from(format!("502: {}\n", self.message))).into_response()
    }
}
