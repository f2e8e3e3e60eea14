//! The requests to Firestore, each with credentials and a deadline.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use google_cloud_auth::credentials::{Builder, CacheableResource, Credentials};
use googleapis_tonic_google_firestore_v1::google::firestore::v1 as api;
use tokio::sync::watch;
use tonic::codegen::http;
use tonic::metadata::{Ascii, MetadataMap, MetadataValue};
use tonic::transport::{ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Status, Streaming};

use super::clock_check::{ClockCheck, Moment};
use super::config::{FirestoreConfig, Transport, boxed};
use super::error;
use super::names::Names;
use super::record::{self, Version};
use crate::common::clock::Clock;
use crate::common::crypto;
use crate::common::error::{Error, Result};
use crate::common::fence::Fence;
use crate::common::key::Key;
use crate::common::lock_id::LockId;
use crate::common::time::Timestamp;
use api::batch_get_documents_response::Result as Found;
use api::firestore_client::FirestoreClient;
use api::precondition::ConditionType;
use api::structured_query::field_filter::Operator;
use api::structured_query::filter::FilterType;
use api::structured_query::{CollectionSelector, FieldFilter, FieldReference, Filter};
use api::write::Operation;

/// Sends requests to one database.
pub(super) struct Requests {
    channel: watch::Sender<OpenChannel>,
    /// Opens another channel. `None` with the caller's channel, which cannot be replaced.
    opener: Option<Opener>,
    credentials: Option<Credentials>,
    /// Whether the credentials have worked before.
    has_credentials: AtomicBool,
    names: Names,
    /// Further headers of every request.
    headers: [(&'static str, MetadataValue<Ascii>); 2],
    clock: Arc<dyn Clock>,
    clock_check: ClockCheck,
    timeout: Duration,
}

/// The channel that requests are sent on.
#[derive(Clone)]
struct OpenChannel {
    client: FirestoreClient<Transport>,
    /// The number of channels before this one.
    number: u64,
}

/// Opens channels.
struct Opener {
    emulator: Option<String>,
    connect_timeout: Duration,
}

/// The outcome of a commit.
pub(super) enum Commit {
    /// The commit took effect.
    Done(Committed),
    /// A precondition failed, or another client was writing.
    Conflict(Conflict),
}

/// A commit that took effect.
pub(super) struct Committed {
    /// The new versions of the documents.
    versions: Vec<Option<Version>>,
    /// The time of the commit, by the server's clock.
    pub(super) at: Option<Timestamp>,
}

impl Committed {
    /// Returns the new version of the document that was written last.
    pub(super) fn last_version(&self) -> Option<Version> {
        self.versions.last().copied().flatten()
    }
}

/// Why a commit was refused.
pub(super) struct Conflict {
    /// The error to report if no document has changed after all.
    pub(super) error: Error,
    /// Whether another write was in progress, so that the documents may be unchanged.
    pub(super) is_race: bool,
}

impl Requests {
    pub(super) fn new(config: FirestoreConfig, names: Names) -> Result<Self> {
        if config.emulator.is_none() {
            // `google-cloud-auth`, which fetches the tokens, takes its cryptography only from here.
            crypto::install();
        }
        // Requests to an emulator are not encrypted, so no credentials are sent to it.
        let credentials = match (config.credentials, &config.emulator) {
            (_, Some(_)) => None,
            (Some(credentials), None) => Some(credentials),
            (None, None) => Some(find_credentials()?),
        };
        let opener =
            Opener { emulator: config.emulator, connect_timeout: config.network.connect_timeout };
        let (transport, opener) = match config.transport {
            Some(transport) => (transport, None),
            None => (opener.open()?, Some(opener)),
        };
        let channel = OpenChannel { client: FirestoreClient::new(transport), number: 0 };
        let header = |text: String| {
            text.parse().map_err(|_cause| {
                Error::invalid("project and database names must be printable ASCII")
            })
        };
        Ok(Self {
            channel: watch::Sender::new(channel),
            opener,
            credentials,
            has_credentials: AtomicBool::new(false),
            headers: [
                ("google-cloud-resource-prefix", header(names.database())?),
                ("x-goog-request-params", header(names.routing())?),
            ],
            names,
            clock: config.clock,
            clock_check: ClockCheck::new(config.clock_limits),
            timeout: config.network.response_timeout,
        })
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns the channel in use.
    fn open_channel(&self) -> OpenChannel {
        self.channel.borrow().clone()
    }

    /// Returns a receiver that is notified when another channel replaces the one in use.
    pub(super) fn replacements(&self) -> watch::Receiver<impl Sized + use<>> {
        self.channel.subscribe()
    }

    /// Replaces the channel with this number after a request timed out on it. The keep-alive would
    /// notice a dead path too, but only after the locks are lost.
    pub(super) fn replace_channel(&self, number: u64) {
        let Some(opener) = &self.opener else { return };
        self.channel.send_if_modified(|channel| {
            // Another request that timed out on the same channel has already replaced it.
            if channel.number != number {
                return false;
            }
            let Ok(transport) = opener.open() else { return false };
            *channel = OpenChannel { client: FirestoreClient::new(transport), number: number + 1 };
            true
        });
    }

    /// Returns the number of the channel in use.
    pub(super) fn channel_number(&self) -> u64 {
        self.channel.borrow().number
    }

    pub(super) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Reads documents with strong consistency, in the order of `names`.
    pub(super) async fn read<const N: usize>(
        &self,
        names: [&str; N],
    ) -> Result<[Option<api::Document>; N]> {
        let request = api::BatchGetDocumentsRequest {
            database: self.names.database(),
            documents: names.iter().map(|&name| name.to_owned()).collect(),
            ..Default::default()
        };
        let mut documents = [const { None }; N];
        let mut answered = 0;
        let OpenChannel { mut client, number } = self.open_channel();
        let reading = async {
            let request = self.request(request).await?;
            let sent = self.moment();
            let mut answers = client.batch_get_documents(request).await?.into_inner();
            while let Some(answer) = answers.message().await? {
                if answered == 0 {
                    self.note_time(answer.read_time, sent);
                }
                match answer.result {
                    Some(Found::Found(document)) => {
                        // A document that was not requested must not count as a missing one.
                        let place = names.iter().position(|name| *name == document.name);
                        let place = place
                            .ok_or_else(|| RequestError::Error(error::unexpected_response()))?;
                        documents[place] = Some(document);
                        answered += 1;
                    }
                    Some(Found::Missing(_)) => answered += 1,
                    None => {}
                }
            }
            Ok(())
        };
        self.within(number, reading).await.map_err(Error::without_effect)?;
        if answered < N {
            return Err(error::unexpected_response().without_effect());
        }
        Ok(documents)
    }

    /// Reads a document to check that the server responds and to compare the clocks.
    pub(super) async fn touch(&self) -> Result<()> {
        let [lock, _] = self.names.documents(&Key::new("syncguard")?)?;
        self.read([&lock]).await.map(|[_]| ())
    }

    /// Fails if the clock is off, so that nothing is granted by it. The last comparison may be old,
    /// so this compares once more before it fails.
    pub(super) async fn approve_clock(&self) -> Result<()> {
        if self.clock_check.approve(self.moment()).is_ok() {
            return Ok(());
        }
        self.touch().await?;
        self.clock_check.approve(self.moment())
    }

    /// Fails if the clock is off according to the comparisons so far. Sends no request.
    pub(super) fn known_clock(&self) -> Result<()> {
        self.clock_check.approve(self.moment())
    }

    pub(super) fn is_clock_good(&self) -> bool {
        self.known_clock().is_ok()
    }

    /// Returns the earliest time that the server's clock can show, or `None` without a clock check.
    pub(super) fn earliest_server_time(&self) -> Option<Timestamp> {
        self.clock_check.earliest_server_time(self.moment())
    }

    /// Returns how far the clock may be off at most, if that is above the warning limit.
    pub(super) fn clock_error(&self) -> Option<Duration> {
        let (worst, is_worth_telling) = self.clock_check.worst(self.moment())?;
        is_worth_telling.then_some(worst)
    }

    /// Queries all locks with an id, live or expired. The query has no limit, because duplicates
    /// are an accident that must be noticed.
    pub(super) async fn find(&self, lock_id: &LockId) -> Result<Vec<api::Document>> {
        let [locks, _] = self.names.collections();
        let value = record::string(lock_id.expose());
        self.query(locks, record::LOCK_ID, Operator::Equal, value, None).await
    }

    /// Queries fence counters below a fence, up to `limit` of them.
    pub(super) async fn counters_below(
        &self,
        fence: Fence,
        limit: i32,
    ) -> Result<Vec<api::Document>> {
        let [_, fences] = self.names.collections();
        let value = record::string(&fence.to_string());
        self.query(fences, record::FENCE, Operator::LessThan, value, Some(limit)).await
    }

    /// Queries the documents of a collection by one field.
    async fn query(
        &self,
        collection: &str,
        field: &str,
        operator: Operator,
        value: api::Value,
        limit: Option<i32>,
    ) -> Result<Vec<api::Document>> {
        let matches = FieldFilter {
            field: Some(FieldReference { field_path: field.to_owned() }),
            op: operator.into(),
            value: Some(value),
        };
        let query = api::StructuredQuery {
            from: vec![CollectionSelector {
                collection_id: collection.to_owned(),
                all_descendants: false,
            }],
            r#where: Some(Filter { filter_type: Some(FilterType::FieldFilter(matches)) }),
            limit,
            ..Default::default()
        };
        let request = api::RunQueryRequest {
            parent: self.names.root(),
            query_type: Some(api::run_query_request::QueryType::StructuredQuery(query)),
            ..Default::default()
        };
        let mut documents = Vec::new();
        let OpenChannel { mut client, number } = self.open_channel();
        let asking = async {
            let request = self.request(request).await?;
            let sent = self.moment();
            let mut answers = client.run_query(request).await?.into_inner();
            let mut is_first = true;
            while let Some(answer) = answers.message().await? {
                if std::mem::take(&mut is_first) {
                    self.note_time(answer.read_time, sent);
                }
                documents.extend(answer.document);
            }
            Ok(())
        };
        self.within(number, asking).await.map_err(Error::without_effect)?;
        Ok(documents)
    }

    /// Returns a page of the collection of locks, and the token of the next page.
    pub(super) async fn list(&self, page_token: &str) -> Result<(Vec<api::Document>, String)> {
        const PAGE: i32 = 200;
        let request = api::ListDocumentsRequest {
            parent: self.names.root(),
            collection_id: self.names.locks().to_owned(),
            page_size: PAGE,
            page_token: page_token.to_owned(),
            ..Default::default()
        };
        let OpenChannel { mut client, number } = self.open_channel();
        let listing = async {
            let answer = client.list_documents(self.request(request).await?).await?;
            let answer = answer.into_inner();
            Ok((answer.documents, answer.next_page_token))
        };
        self.within(number, listing).await.map_err(Error::without_effect)
    }

    /// Applies all writes, or none if a precondition fails.
    pub(super) async fn commit(&self, writes: Vec<api::Write>) -> Result<Commit> {
        let request =
            api::CommitRequest { database: self.names.database(), writes, ..Default::default() };
        let OpenChannel { mut client, number } = self.open_channel();
        let committing = async {
            let request = self.request(request).await?;
            let sent = self.moment();
            match client.commit(request).await {
                Ok(answer) => {
                    let answer = answer.into_inner();
                    let at = self.note_time(answer.commit_time, sent);
                    let results = answer.write_results.into_iter();
                    let versions = results.map(|result| result.update_time).collect();
                    Ok(Commit::Done(Committed { versions, at }))
                }
                Err(status) if error::is_conflict(&status) => {
                    let is_race = status.code() == Code::Aborted;
                    Ok(Commit::Conflict(Conflict { error: error::map(&status), is_race }))
                }
                Err(status) => Err(status.into()),
            }
        };
        self.within(number, committing).await
    }

    /// Opens a stream that reports changes of documents.
    pub(super) async fn listen(
        &self,
        commands: impl futures_util::Stream<Item = api::ListenRequest> + Send + 'static,
    ) -> Result<Streaming<api::ListenResponse>> {
        // Only opening the stream has a deadline.
        let OpenChannel { mut client, number } = self.open_channel();
        let opening = async {
            let mut request = self.request(()).await?;
            request.metadata_mut().remove("grpc-timeout");
            let (metadata, extensions, ()) = request.into_parts();
            let request = Request::from_parts(metadata, extensions, commands);
            Ok(client.listen(request).await?.into_inner())
        };
        self.within(number, opening).await
    }

    /// Wraps a change of the watched documents in a request for the database.
    pub(super) fn listen_request(
        &self,
        change: api::listen_request::TargetChange,
    ) -> api::ListenRequest {
        api::ListenRequest {
            database: self.names.database(),
            labels: HashMap::new(),
            target_change: Some(change),
        }
    }

    async fn request<T>(&self, message: T) -> Result<Request<T>, RequestError> {
        let mut metadata = if let Some(credentials) = &self.credentials {
            MetadataMap::from_headers(self.headers_of(credentials).await?)
        } else {
            // With this token, an emulator does not apply its security rules.
            let mut metadata = MetadataMap::new();
            metadata.insert("authorization", MetadataValue::from_static("Bearer owner"));
            metadata
        };
        for (name, value) in &self.headers {
            metadata.insert(*name, value.clone());
        }
        let mut request = Request::from_parts(metadata, tonic::Extensions::new(), message);
        // Later than our own timeout, which then decides.
        request.set_timeout(self.timeout + Duration::from_secs(1));
        Ok(request)
    }

    /// Returns the authorization headers. They are cached until they expire.
    async fn headers_of(&self, credentials: &Credentials) -> Result<http::HeaderMap, RequestError> {
        let error = match credentials.headers(http::Extensions::new()).await {
            Ok(CacheableResource::New { data, .. }) => {
                self.has_credentials.store(true, Ordering::Relaxed);
                return Ok(data);
            }
            Ok(CacheableResource::NotModified) => error::unexpected_response().without_effect(),
            // The cause is dropped, because its text may contain the credentials. Credentials that
            // have worked before are expected to work again.
            Err(cause) if cause.is_transient() && self.has_credentials.load(Ordering::Relaxed) => {
                error::credentials_unavailable()
            }
            Err(_cause) => error::no_credentials(),
        };
        Err(RequestError::Error(error))
    }

    /// Waits for a response on the channel with this number, and replaces the channel on a timeout.
    async fn within<T>(
        &self,
        number: u64,
        asking: impl Future<Output = Result<T, RequestError>>,
    ) -> Result<T> {
        match tokio::time::timeout(self.timeout, asking).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(RequestError::Status(status))) => Err(error::map(&status)),
            Ok(Err(RequestError::Error(error))) => Err(error),
            Err(_elapsed) => {
                self.replace_channel(number);
                Err(error::timeout())
            }
        }
    }

    fn moment(&self) -> Moment {
        Moment { wall: self.clock.now(), steady: Instant::now() }
    }

    /// Compares the clocks and returns the server's time.
    fn note_time(&self, server: Option<prost_types::Timestamp>, sent: Moment) -> Option<Timestamp> {
        let received = self.moment();
        let server = server.and_then(|time| {
            let seconds = u64::try_from(time.seconds).ok()?;
            let millis = u64::try_from(time.nanos).ok()? / 1_000_000;
            Some(Timestamp::from_millis(seconds.checked_mul(1000)?.checked_add(millis)?))
        });
        if let Some(server) = server {
            self.clock_check.note(server, sent, received);
        }
        server
    }
}

/// Why a request failed.
enum RequestError {
    Status(Box<Status>),
    Error(Error),
}

impl From<Status> for RequestError {
    fn from(status: Status) -> Self {
        Self::Status(Box::new(status))
    }
}

impl Opener {
    fn open(&self) -> Result<Transport> {
        const PING_INTERVAL: Duration = Duration::from_secs(30);
        const PING_TIMEOUT: Duration = Duration::from_secs(10);
        let address = match &self.emulator {
            Some(host) => format!("http://{host}"),
            None => "https://firestore.googleapis.com".to_owned(),
        };
        let mut endpoint = Endpoint::from_shared(address).map_err(|_cause| {
            Error::invalid("invalid emulator address; expected host:port, such as 127.0.0.1:8080")
        })?;
        if self.emulator.is_none() {
            let tls = ClientTlsConfig::new().with_native_roots();
            endpoint = endpoint.tls_config(tls).map_err(|_cause| {
                Error::invalid(
                    "cannot use TLS for Firestore: this machine has no root certificates; install \
                     them",
                )
            })?;
        }
        let channel = endpoint
            .connect_timeout(self.connect_timeout)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            .connect_lazy();
        Ok(boxed(channel))
    }
}

/// Finds Application Default Credentials.
fn find_credentials() -> Result<Credentials> {
    const SCOPE: &str = "https://www.googleapis.com/auth/datastore";
    Builder::default().with_scopes([SCOPE]).build().map_err(|_cause| error::no_credentials())
}

/// Returns a write that replaces a document if it still has this version, or creates it if
/// `version` is `None` and it still does not exist.
pub(super) fn set(
    name: &str,
    fields: HashMap<String, api::Value>,
    version: Option<Version>,
) -> api::Write {
    let document = api::Document { name: name.to_owned(), fields, ..Default::default() };
    let condition = match version {
        Some(version) => ConditionType::UpdateTime(version),
        None => ConditionType::Exists(false),
    };
    write(Operation::Update(document), condition)
}

/// Returns a write that replaces some fields of a document if it still has this version.
pub(super) fn update(
    name: &str,
    fields: HashMap<String, api::Value>,
    version: Version,
) -> api::Write {
    let field_paths = fields.keys().cloned().collect();
    let mask = Some(api::DocumentMask { field_paths });
    api::Write { update_mask: mask, ..set(name, fields, Some(version)) }
}

/// Returns a write that deletes a document if it still has this version.
pub(super) fn delete(name: &str, version: Version) -> api::Write {
    write(Operation::Delete(name.to_owned()), ConditionType::UpdateTime(version))
}

fn write(operation: Operation, condition: ConditionType) -> api::Write {
    api::Write {
        operation: Some(operation),
        current_document: Some(api::Precondition { condition_type: Some(condition) }),
        ..Default::default()
    }
}
