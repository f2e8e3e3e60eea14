//! A channel to Firestore that counts requests, injects faults into some, and changes others.
#![allow(dead_code, reason = "not every test uses all of it")]

mod times;

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use syncguard::LockId;
use syncguard::firestore::tonic::body::Body;
use syncguard::firestore::tonic::codegen::{Bytes, Service, http};
use syncguard::firestore::tonic::transport::{Channel, Endpoint};
use syncguard::firestore::tonic::{Code, Status};
use test_support::FirestoreEmulator;

/// A fault to inject into a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RequestFault {
    /// The request fails with this code and never arrives.
    Refused(Code),
    /// The request arrives, but fails with this code.
    Lost(Code),
    /// Like `Lost`, but delayed until a lock with a minimal TTL has expired.
    Late(Code),
    /// Like `Lost`, and the next read is refused.
    LostAndLast(Code),
    /// The response is delayed by this time.
    Slow(Duration),
    /// The stream that the request opens ends once its targets are current.
    CutWhenCurrent,
}

/// The method, the fault, and how many times to inject it.
type Plan = (&'static str, RequestFault, u32);

/// A channel that counts requests and injects faults.
#[derive(Clone)]
pub(crate) struct Channels {
    inner: Channel,
    seen: Arc<Mutex<HashMap<String, u32>>>,
    plans: Arc<Mutex<Vec<Plan>>>,
    /// How many seconds the server's clock seems to be ahead.
    ahead: Arc<AtomicU64>,
    /// The method before which this machine is paused, and for how many seconds.
    pausing: Arc<Mutex<Option<(&'static str, u64)>>>,
    /// Queries for the first id are sent with the second.
    swapped: Arc<Mutex<Option<[LockId; 2]>>>,
}

impl Channels {
    pub(crate) fn new(emulator: &FirestoreEmulator) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://{}", emulator.host()));
        let inner = endpoint.expect("an address").connect_lazy();
        Self {
            inner,
            seen: Arc::default(),
            plans: Arc::default(),
            ahead: Arc::default(),
            pausing: Arc::default(),
            swapped: Arc::default(),
        }
    }

    /// Simulates a pause of this machine: the server's time advances, the local clocks do not.
    pub(crate) fn pause_for(&self, secs: u64) {
        self.ahead.fetch_add(secs, Ordering::SeqCst);
    }

    /// Simulates the same pause after the next such request is sent and before it arrives.
    pub(crate) fn pause_before_next(&self, method: &'static str, secs: u64) {
        *self.pausing.lock().expect("no panic inside") = Some((method, secs));
    }

    /// Makes queries for the locks of one id return those of another.
    pub(crate) fn swap(&self, asked: LockId, answered: LockId) {
        *self.swapped.lock().expect("no panic inside") = Some([asked, answered]);
    }

    pub(crate) fn have(&self, what: &'static str, fault: RequestFault, times: u32) {
        self.plans.lock().expect("no panic inside").push((what, fault, times));
    }

    pub(crate) fn behave(&self) {
        self.plans.lock().expect("no panic inside").clear();
    }

    /// Takes the number of requests per method since the last call.
    pub(crate) fn seen(&self) -> Vec<(String, u32)> {
        let seen = std::mem::take(&mut *self.seen.lock().expect("no panic inside"));
        let mut seen: Vec<_> = seen.into_iter().collect();
        seen.sort();
        seen
    }

    fn fault_for(&self, method: &str) -> Option<RequestFault> {
        let mut plans = self.plans.lock().expect("no panic inside");
        let mut due = plans.iter_mut().filter(|(what, _, times)| *what == method && *times > 0);
        let (_, fault, times) = due.next()?;
        *times -= 1;
        Some(*fault)
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
        let pausing = self.pausing.lock().expect("no panic inside").take_if(|due| due.0 == method);
        if let Some((_, secs)) = pausing {
            self.pause_for(secs);
        }
        let fault = self.fault_for(&method);
        if let Some(RequestFault::Refused(code)) = fault {
            return Box::pin(async move { Err(Status::new(code, "canary")) });
        }
        if let Some(RequestFault::LostAndLast(_)) = fault {
            self.have("BatchGetDocuments", RequestFault::Refused(Code::Unavailable), 1);
        }
        let swapped = *self.swapped.lock().expect("no panic inside");
        let request = match swapped {
            Some(ids) if method == "RunQuery" => request.map(|body| with_swapped(body, ids)),
            _ => request,
        };
        let (answer, ahead) = (self.inner.call(request), Arc::clone(&self.ahead));
        Box::pin(async move {
            let answer = answer.await.map_err(|cause| Status::from_error(cause.into()))?;
            let answer = match times::field_of(&method) {
                Some(field) => answer.map(|body| with_moved_times(body, field, ahead)),
                None => answer,
            };
            match fault {
                Some(RequestFault::Slow(by)) => {
                    tokio::time::sleep(by).await;
                    Ok(answer)
                }
                Some(RequestFault::CutWhenCurrent) => {
                    /// The encoded type `CURRENT` in a change of a target.
                    const CURRENT: [u8; 2] = [0x08, 3];
                    let (parts, mut body) = answer.into_parts();
                    let mut read = Vec::new();
                    while !read.windows(2).any(|bytes| *bytes == CURRENT) {
                        let Some(Ok(frame)) = body.frame().await else { break };
                        read.extend(frame.into_data().unwrap_or_default());
                    }
                    let body = Body::new(Full::new(Bytes::from(read)));
                    Ok(http::Response::from_parts(parts, body))
                }
                Some(RequestFault::Lost(code) | RequestFault::LostAndLast(code)) => {
                    Err(Status::new(code, "canary"))
                }
                Some(RequestFault::Late(code)) => {
                    tokio::time::sleep(Duration::from_millis(1200)).await;
                    Err(Status::new(code, "canary"))
                }
                _ => Ok(answer),
            }
        })
    }
}

fn with_moved_times(body: Body, field: u64, ahead: Arc<AtomicU64>) -> Body {
    Body::new(body.map_frame(move |frame| {
        let by_secs = ahead.load(Ordering::SeqCst);
        frame.map_data(|data: Bytes| times::moved(&data, field, by_secs))
    }))
}

/// Replaces an id in place, which works because all ids have the same length.
fn with_swapped(body: Body, [asked, answered]: [LockId; 2]) -> Body {
    Body::new(body.map_frame(move |frame| {
        frame.map_data(|data: Bytes| {
            let (mut data, asked) = (data.to_vec(), asked.expose().as_bytes());
            let place = data.windows(asked.len()).position(|found| found == asked);
            if let Some(place) = place {
                let answered = answered.expose().as_bytes();
                data[place..place + asked.len()].copy_from_slice(answered);
            }
            Bytes::from(data)
        })
    }))
}
