//! The requests that the operations are made of, each with credentials and a deadline.

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
    /// How to open another channel. A caller's own cannot be replaced.
    opener: Option<Opener>,
    credentials: Option<Credentials>,
    /// They have worked before.
    has_credentials: AtomicBool,
    names: Names,
    /// What the server wants to know of every request besides.
    headers: [(&'static str, MetadataValue<Ascii>); 2],
    clock: Arc<dyn Clock>,
    clock_check: ClockCheck,
    patience: Duration,
}

/// The channel that requests are sent on.
#[derive(Clone)]
struct OpenChannel {
    client: FirestoreClient<Transport>,
    /// How many came before it.
    number: u64,
}

/// What a channel is opened with.
struct Opener {
    emulator: Option<String>,
    connect_timeout: Duration,
}

/// The answer to a write.
pub(super) enum Commit {
    /// It happened.
    Done(Committed),
    /// A document was not what the write demanded, or somebody else was writing; nothing happened.
    Conflict(Conflict),
}

/// A write that happened.
pub(super) struct Committed {
    /// The new versions of the documents.
    versions: Vec<Option<Version>>,
    /// When, by the server's clock.
    pub(super) at: Option<Timestamp>,
}

impl Committed {
    /// The new version of the document that was written last.
    pub(super) fn last_version(&self) -> Option<Version> {
        self.versions.last().copied().flatten()
    }
}

/// Why a write was refused.
pub(super) struct Conflict {
    /// It is if no document has changed.
    pub(super) error: Error,
    /// Another write was under way: nothing need have changed.
    pub(super) is_race: bool,
}

impl Requests {
    pub(super) fn new(config: FirestoreConfig, names: Names) -> Result<Self> {
        if config.emulator.is_none() {
            // The crate that gets tokens has no other way to be told which cryptography to use.
            crypto::install();
        }
        // Nobody encrypts what is sent to an emulator, so it gets nothing that is worth anything.
        let credentials = match (config.credentials, &config.emulator) {
            (_, Some(_)) => None,
            (Some(credentials), None) => Some(credentials),
            (None, None) => Some(find_credentials()?),
        };
        let opener = Opener { emulator: config.emulator, connect_timeout: config.connect_timeout };
        let (transport, opener) = match config.transport {
            Some(transport) => (transport, None),
            None => (opener.open()?, Some(opener)),
        };
        let channel = OpenChannel { client: FirestoreClient::new(transport), number: 0 };
        let header = |text: String| {
            text.parse().map_err(|_cause| {
                Error::invalid("the names of project and database must be printable ASCII")
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
            patience: config.response_timeout,
        })
    }

    pub(super) fn patience(&self) -> Duration {
        self.patience
    }

    /// The channel in use.
    fn open_channel(&self) -> OpenChannel {
        self.channel.borrow().clone()
    }

    /// Hears when another channel takes the place of the one in use.
    pub(super) fn replacements(&self) -> watch::Receiver<impl Sized + use<>> {
        self.channel.subscribe()
    }

    /// Opens another channel: nothing was answered on this one, and a path that is dead is noticed by
    /// its keep-alive only when the locks are lost.
    pub(super) fn replace_channel(&self, number: u64) {
        let Some(opener) = &self.opener else { return };
        self.channel.send_if_modified(|channel| {
            // Of several requests that waited on the same channel one is enough.
            if channel.number != number {
                return false;
            }
            let Ok(transport) = opener.open() else { return false };
            *channel = OpenChannel { client: FirestoreClient::new(transport), number: number + 1 };
            true
        });
    }

    /// The number of the channel in use.
    pub(super) fn channel_number(&self) -> u64 {
        self.channel.borrow().number
    }

    pub(super) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Reads documents, in the order of their names; strongly consistent.
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
                        // One that was not asked for must not be taken for one that is missing.
                        let place = names.iter().position(|name| *name == document.name);
                        let place =
                            place.ok_or_else(|| Failure::Ours(error::unexpected_response()))?;
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

    /// Reads something, for what comes with every answer: that there is one, and the server's time.
    pub(super) async fn touch(&self) -> Result<()> {
        let [lock, _] = self.names.documents(&Key::new("syncguard")?)?;
        self.read([&lock]).await.map(|[_]| ())
    }

    /// Refuses to grant by a clock that is off. What is known of it may be old, so it is asked again
    /// before that.
    pub(super) async fn approve_clock(&self) -> Result<()> {
        if self.clock_check.approve(self.moment()).is_ok() {
            return Ok(());
        }
        self.touch().await?;
        self.clock_check.approve(self.moment())
    }

    /// The same by what is known already, without asking.
    pub(super) fn known_clock(&self) -> Result<()> {
        self.clock_check.approve(self.moment())
    }

    pub(super) fn is_clock_good(&self) -> bool {
        self.known_clock().is_ok()
    }

    /// The server's time, the earliest that it can be; `None` where clocks are not compared.
    pub(super) fn earliest_server_time(&self) -> Option<Timestamp> {
        self.clock_check.earliest_server_time(self.moment())
    }

    /// By how much the clock may be off at most, if that is worth telling.
    pub(super) fn clock_error(&self) -> Option<Duration> {
        let (worst, is_worth_telling) = self.clock_check.worst(self.moment())?;
        is_worth_telling.then_some(worst)
    }

    /// All locks under an id, dead or alive. There is no limit: more than one is an accident, and
    /// must be seen.
    pub(super) async fn find(&self, lock_id: &LockId) -> Result<Vec<api::Document>> {
        let is_this = FieldFilter {
            field: Some(FieldReference { field_path: record::LOCK_ID.to_owned() }),
            op: Operator::Equal.into(),
            value: Some(record::string(lock_id.expose())),
        };
        let query = api::StructuredQuery {
            from: vec![CollectionSelector {
                collection_id: self.names.locks().to_owned(),
                all_descendants: false,
            }],
            r#where: Some(Filter { filter_type: Some(FilterType::FieldFilter(is_this)) }),
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

    /// A page of the collection of locks, and where the next begins.
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

    /// Makes all writes, or none if a document is not what one of them demands.
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

    /// Opens a stream on which changes of documents are told.
    pub(super) async fn listen(
        &self,
        orders: impl futures_util::Stream<Item = api::ListenRequest> + Send + 'static,
    ) -> Result<Streaming<api::ListenResponse>> {
        // A stream lasts, so it has no deadline; only its beginning has one.
        let OpenChannel { mut client, number } = self.open_channel();
        let opening = async {
            let mut request = self.request(()).await?;
            request.metadata_mut().remove("grpc-timeout");
            let (metadata, extensions, ()) = request.into_parts();
            let request = Request::from_parts(metadata, extensions, orders);
            Ok(client.listen(request).await?.into_inner())
        };
        self.within(number, opening).await
    }

    /// What a message to the collections' database says of itself.
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

    async fn request<T>(&self, message: T) -> Result<Request<T>, Failure> {
        let mut metadata = if let Some(credentials) = &self.credentials {
            MetadataMap::from_headers(self.headers_of(credentials).await?)
        } else {
            // By this an emulator knows whom its security rules are not for.
            let mut metadata = MetadataMap::new();
            metadata.insert("authorization", MetadataValue::from_static("Bearer owner"));
            metadata
        };
        for (name, value) in &self.headers {
            metadata.insert(*name, value.clone());
        }
        let mut request = Request::from_parts(metadata, tonic::Extensions::new(), message);
        // We give up first, and know that it was the time.
        request.set_timeout(self.patience + Duration::from_secs(1));
        Ok(request)
    }

    /// What proves who we are; it is cached until it expires.
    async fn headers_of(&self, credentials: &Credentials) -> Result<http::HeaderMap, Failure> {
        let error = match credentials.headers(http::Extensions::new()).await {
            Ok(CacheableResource::New { data, .. }) => {
                self.has_credentials.store(true, Ordering::Relaxed);
                return Ok(data);
            }
            Ok(CacheableResource::NotModified) => error::unexpected_response().without_effect(),
            // Its words may hold what it read. What has worked will work again.
            Err(cause) if cause.is_transient() && self.has_credentials.load(Ordering::Relaxed) => {
                error::credentials_unavailable()
            }
            Err(_cause) => error::no_credentials(),
        };
        Err(Failure::Ours(error))
    }

    /// Waits for the answer to a request, on the channel of this number.
    async fn within<T>(
        &self,
        number: u64,
        asking: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T> {
        match tokio::time::timeout(self.patience, asking).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(Failure::Status(status))) => Err(error::map(&status)),
            Ok(Err(Failure::Ours(error))) => Err(error),
            Err(_elapsed) => {
                self.replace_channel(number);
                Err(error::timeout())
            }
        }
    }

    fn moment(&self) -> Moment {
        Moment { wall: self.clock.now(), steady: Instant::now() }
    }

    /// Compares the clocks; gives the server's time.
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

/// Why a request has no answer.
enum Failure {
    Status(Box<Status>),
    Ours(Error),
}

impl From<Status> for Failure {
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
            Error::invalid("the emulator's address is not one; it looks like 127.0.0.1:8080")
        })?;
        if self.emulator.is_none() {
            let tls = ClientTlsConfig::new().with_native_roots();
            endpoint = endpoint.tls_config(tls).map_err(|_cause| {
                Error::invalid("no TLS for firestore: this machine has no root certificates")
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

/// The credentials that every Google client finds.
fn find_credentials() -> Result<Credentials> {
    const SCOPE: &str = "https://www.googleapis.com/auth/datastore";
    Builder::default().with_scopes([SCOPE]).build().map_err(|_cause| error::no_credentials())
}

/// A write that replaces a document, which must still be what it was; a new one, if it was none.
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

/// A write that replaces some fields of a document, which must still be what it was.
pub(super) fn update(
    name: &str,
    fields: HashMap<String, api::Value>,
    version: Version,
) -> api::Write {
    let field_paths = fields.keys().cloned().collect();
    let mask = Some(api::DocumentMask { field_paths });
    api::Write { update_mask: mask, ..set(name, fields, Some(version)) }
}

/// A write that deletes a document, which must still be what it was.
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
