//! Fenced writes to your own documents: a write that comes too late is refused.

use std::collections::HashMap;

use super::config::FirestoreConfig;
use super::names::Names;
use super::record::{self, Version};
use super::requests::{self, Commit, Conflict, Requests};
use super::{FirestoreBackend, NAME, ROUNDS, api, named, pause};
use crate::common::error::{Error, ErrorCode, Result};
use crate::common::fence::Fence;
use crate::common::lock_id::LockId;
use crate::common::storage_key::KeySpace;
use crate::contract::fenced_lock::FencedLock;

/// The fields of a document with the largest fence of a resource. `fence` is only for counters, so
/// that a query for old counters does not find these.
const SEEN: &str = "seen";
const LOCK: &str = "lock";
const ATTEMPT: &str = "attempt";

/// A collection with the largest fence seen for each key, so that the late write of a paused holder
/// is refused in the same commit.
///
/// Before your writes, the document of the key is read. The commit replaces it on the condition
/// that it is still the same, so that of two holders only the later one can write last.
///
/// ```no_run
/// use std::collections::HashMap;
/// use syncguard::firestore::{FencedCollection, api};
/// use syncguard::{FirestoreBackend, LockGuard};
///
/// # async fn write(backend: &FirestoreBackend, guard: LockGuard<FirestoreBackend>) -> syncguard::Result<()> {
/// let fenced = FencedCollection::new("fenced")?;
/// let paid = api::Value { value_type: Some(api::value::ValueType::BooleanValue(true)) };
/// let document = api::Document {
///     name: "projects/shop/databases/(default)/documents/invoices/42".to_owned(),
///     fields: HashMap::from([("paid".to_owned(), paid)]),
///     ..Default::default()
/// };
/// let write = api::Write {
///     operation: Some(api::write::Operation::Update(document)),
///     ..Default::default()
/// };
/// fenced.commit(backend, &guard, vec![write]).await?; // fails if a later holder has written
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct FencedCollection {
    collection: String,
}

impl FencedCollection {
    /// Creates a value for the collection of this name, at the root of the backend's database.
    pub fn new(collection: &str) -> Result<Self> {
        // The same rules as for the collections of a backend.
        let other = if collection == "a" { "b" } else { "a" };
        Names::new("p", FirestoreConfig::DEFAULT_DATABASE, [collection, other])?;
        Ok(Self { collection: collection.to_owned() })
    }

    /// Checks that no later holder has written, remembers the fence, and applies your writes, all
    /// in one commit in the backend's database. If a later holder has written, it fails with
    /// [`Aborted`](crate::ErrorCode::Aborted), [`is_stale_fence`](Error::is_stale_fence) is true,
    /// and nothing is written.
    ///
    /// Your writes may have preconditions of their own. If one fails, the error is
    /// [`InvalidArgument`](crate::ErrorCode::InvalidArgument), and nothing is written.
    ///
    /// # Cancel safety
    ///
    /// If you drop the future before it completes, the commit may or may not take effect.
    pub async fn commit(
        &self,
        backend: &FirestoreBackend,
        lock: &(impl FencedLock + Sync),
        writes: Vec<api::Write>,
    ) -> Result<()> {
        let id = KeySpace::hashed(lock.key().as_str());
        let document = format!("{}/{}/{id}", backend.shared.names.root(), self.collection);
        let requests = &backend.shared.requests;
        let committed = commit(requests, &document, lock.fence(), &id, &writes).await;
        committed.map_err(|error| named(error.with_key(lock.key()), "fenced write"))
    }
}

/// Checks a fence against a document, remembers it, and applies writes in the same commit. `lock`
/// is the hash of the lock's key, or empty.
pub(super) async fn commit(
    requests: &Requests,
    document: &str,
    fence: Fence,
    lock: &str,
    writes: &[api::Write],
) -> Result<()> {
    let mut is_unknown = false;
    let committed = try_commit(requests, document, fence, lock, writes, &mut is_unknown).await;
    committed.map_err(|error| if is_unknown { error.after_effect() } else { error })
}

/// Sets `is_unknown` while a commit with a conflict may have had an effect.
async fn try_commit(
    requests: &Requests,
    document: &str,
    fence: Fence,
    lock: &str,
    writes: &[api::Write],
    is_unknown: &mut bool,
) -> Result<()> {
    // Recognizes a commit that took effect although it was answered with a conflict.
    let attempt = LockId::random()?;
    let mut tried: Option<(Option<Version>, Conflict)> = None;
    for round in 0..ROUNDS {
        pause(round).await;
        let [found] = requests.read([document]).await?;
        let text = |name| found.as_ref().and_then(|found| record::text_field(found, name));
        if text(ATTEMPT) == Some(attempt.expose()) {
            return Ok(());
        }
        let version = found.as_ref().and_then(|found| found.update_time);
        if let Some((before, conflict)) = tried.take()
            && before == version
        {
            // The document of the fence is unchanged, so the commit had no effect.
            *is_unknown = false;
            if !conflict.is_race {
                let error = Error::invalid("a precondition of the writes failed");
                return Err(error.with_source(conflict.error));
            }
        }
        let (largest, other) = seen(found.as_ref())?;
        if !lock.is_empty() && !other.is_empty() && lock != other {
            return Err(Error::other_lock());
        }
        if fence < largest {
            return Err(Error::stale_fence());
        }
        let lock = if lock.is_empty() { &other } else { lock };
        let mark = HashMap::from([
            (SEEN.to_owned(), record::string(&fence.to_string())),
            (LOCK.to_owned(), record::string(lock)),
            (ATTEMPT.to_owned(), record::string(attempt.expose())),
        ]);
        let mut all = vec![requests::set(document, mark, version)];
        all.extend_from_slice(writes);
        match requests.commit(all).await? {
            Commit::Done(_) => return Ok(()),
            Commit::Conflict(conflict) => {
                *is_unknown = true;
                tried = Some((version, conflict));
            }
        }
    }
    Err(Error::new(
        ErrorCode::ServiceUnavailable,
        "other writers kept changing the documents; try again",
    ))
}

/// Returns the largest fence and the lock in a document. A missing document has seen no fence.
fn seen(document: Option<&api::Document>) -> Result<(Fence, String)> {
    let Some(document) = document else { return Ok((Fence::new(0)?, String::new())) };
    let text = |name| record::text_field(document, name);
    let fence = text(SEEN).and_then(|fence| fence.parse().ok());
    match (fence, text(LOCK)) {
        (Some(fence), Some(lock)) => Ok((fence, lock.to_owned())),
        _ => Err(Error::new(
            ErrorCode::Internal,
            "the document of the largest fence contains other data; nothing was written",
        )
        .with_operation(NAME, "fenced write")
        .without_effect()),
    }
}
