//! A channel to Firestore that counts requests and has trouble with some.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use syncguard::firestore::tonic::body::Body;
use syncguard::firestore::tonic::codegen::{Service, http};
use syncguard::firestore::tonic::transport::{Channel, Endpoint};
use syncguard::firestore::tonic::{Code, Status};
use test_support::FirestoreEmulator;

/// What happens to a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Trouble {
    /// It is answered by this, and never arrives.
    Refused(Code),
    /// It arrives, and is answered by this all the same.
    Lost(Code),
    /// The same, when a lock that was taken for a moment is dead.
    Late(Code),
    /// The same, and the next read is refused.
    LostAndLast(Code),
}

/// Which request has trouble, what kind, and how often.
type Plan = (&'static str, Trouble, u32);

/// A channel that counts requests and has trouble with some.
#[derive(Clone)]
pub(crate) struct Channels {
    inner: Channel,
    seen: Arc<Mutex<HashMap<String, u32>>>,
    plans: Arc<Mutex<Vec<Plan>>>,
}

impl Channels {
    pub(crate) fn new(emulator: &FirestoreEmulator) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://{}", emulator.host()));
        let inner = endpoint.expect("an address").connect_lazy();
        Self { inner, seen: Arc::default(), plans: Arc::default() }
    }

    pub(crate) fn have(&self, what: &'static str, trouble: Trouble, times: u32) {
        self.plans.lock().expect("no panic inside").push((what, trouble, times));
    }

    pub(crate) fn behave(&self) {
        self.plans.lock().expect("no panic inside").clear();
    }

    /// The requests since the last question.
    pub(crate) fn seen(&self) -> Vec<(String, u32)> {
        let seen = std::mem::take(&mut *self.seen.lock().expect("no panic inside"));
        let mut seen: Vec<_> = seen.into_iter().collect();
        seen.sort();
        seen
    }

    fn trouble_with(&self, method: &str) -> Option<Trouble> {
        let mut plans = self.plans.lock().expect("no panic inside");
        let mut due = plans.iter_mut().filter(|(what, _, times)| *what == method && *times > 0);
        let (_, trouble, times) = due.next()?;
        *times -= 1;
        Some(*trouble)
    }
}

impl Service<http::Request<Body>> for Channels {
    type Response = http::Response<Body>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Status>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Status>> {
        self.inner.poll_ready(context).map_err(|cause| Status::from_error(cause.into()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
        *self.seen.lock().expect("no panic inside").entry(method.clone()).or_default() += 1;
        let trouble = self.trouble_with(&method);
        if let Some(Trouble::Refused(code)) = trouble {
            return Box::pin(async move { Err(Status::new(code, "canary")) });
        }
        if let Some(Trouble::LostAndLast(_)) = trouble {
            self.have("BatchGetDocuments", Trouble::Refused(Code::Unavailable), 1);
        }
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await.map_err(|cause| Status::from_error(cause.into()))?;
            match trouble {
                Some(Trouble::Lost(code) | Trouble::LostAndLast(code)) => {
                    Err(Status::new(code, "canary"))
                }
                Some(Trouble::Late(code)) => {
                    tokio::time::sleep(Duration::from_millis(1200)).await;
                    Err(Status::new(code, "canary"))
                }
                _ => Ok(answer),
            }
        })
    }
}
